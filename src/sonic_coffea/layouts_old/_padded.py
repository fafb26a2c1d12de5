"""A jagged axis padded to a length, or to the next of several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts_old._declarations import DType, declare, length_of, lengths_of, order_of
from sonic_coffea.layouts_old._layout import Constants, Fields, FieldsLayout, ordered, with_axes
from sonic_coffea.layouts_old._texts import TEXT

if TYPE_CHECKING:
    from awkward.contents import Content
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts_old._columns import Columns
    from sonic_coffea.layouts_old._fields import Feature
    from sonic_coffea.layouts_old._rows import RowSelection, Tensor

PAD_MODES = ("constant", "wrap")


@dataclass(frozen=True, slots=True, init=False)
class PaddedLayout(FieldsLayout):
    """A jagged axis padded to the next of some lengths."""

    jagged = True
    holds_strings = True

    features: tuple[Feature, ...]
    fill: tuple[Any, ...]
    axis_order: str
    dtype: DType
    sort_by: str | None
    sort_ascending: bool
    pad_mode: str
    missing: tuple[Any, ...] | None

    def _declare_padding(self, fill: Constants, axis_order: str, pad_mode: str) -> None:
        """Check what is declared of the padding, after the fields and the type."""
        name, count = type(self).__name__, len(self.features)
        declare(self, axis_order=order_of(axis_order, self, count), pad_mode=pad_mode)
        if pad_mode not in PAD_MODES:
            raise ConfigError(f"{name}: no pad_mode {pad_mode!r}; {nearest(pad_mode, PAD_MODES)}")
        if fill is None:
            fill = "" if self.dtype == TEXT else 0.0
        declare(self, fill=self._one_for_each("fill", fill, count))

    def row_shape(self, level: int) -> tuple[int, ...]:
        return ordered(self.axis_order, len(self.features), self.padded_length(level))

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        by_field = with_axes(out, self.axis_order)
        fill = self.fill if columns.texts is None else columns.texts.numbers_of(self.fill).tolist()
        columns.pad(by_field, fill, rows, wrap=self.pad_mode == "wrap")

    def doubt(self, columns: Columns) -> str | None:
        if not columns.split.square:
            return None
        return (
            f"all lists of field {self.features[0].name!r} are as long as the list that they are "
            "in, so they are pairs i x j; for a tensor of pairs, [N, C, L, L], use sonic.Pairwise. "
            "If a row for each i is meant, give the model another input that has these rows, such "
            "as a Row, or pack ak.flatten of the array"
        )

    def content(self, tensor: Tensor, columns: Columns) -> Content:
        return columns.scattered(
            with_axes(tensor, self.axis_order).transpose(0, 2, 1), columns.names
        )


@dataclass(frozen=True, slots=True, init=False)
class Padded(PaddedLayout):
    """A jagged axis padded, or truncated, to `length`.

    ``events * jets * var * number`` becomes ``[N, F, L]``.

    Parameters
    ----------
    fields : sequence of str or Feature
        The channels of the tensor, in order.
    length : int
        Constituents kept of each row, the first ones; shorter rows are padded.
    fill : float or str, or sequence of them, optional
        The padding: one value for all fields, or one for each. By default, 0 or the empty string.
    axis_order : {"FL", "LF", "L"}
        ``"FL"``, for weaver's models: ``[N, F, L]``. ``"LF"``: ``[N, L, F]``. ``"L"``: ``[N, L]``
        of one field.
    dtype : dtype
        Type of the tensor, float32 by default; ``"string"`` for strings.
    sort_by : str, optional
        Field by which a row's constituents are sorted, descending, before they are truncated.
    sort_ascending : bool
        Whether `sort_by` sorts in ascending order.
    pad_mode : {"constant", "wrap"}
        ``"wrap"`` repeats the row's own constituents, from the first one; a row without
        constituents is padded with `fill`.
    missing : float or str, or sequence of them, optional
        Replacement for numbers that are None, and for indices that refer to no object: one value
        for all fields, or one for each. By default, they raise an `InputError`.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pf": {"pt": [1.0, 2.0, 3.0]}}], [{"pf": {"pt": [4.0]}}]])
    >>> Padded("pf.pt", 2, sort_by="pf.pt").pack(jets).tolist()
    [[[3.0, 2.0]], [[4.0, 0.0]]]
    """

    length: int

    def __init__(
        self,
        fields: Fields,
        length: int,
        fill: Constants = None,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
        *,
        sort_by: str | None = None,
        sort_ascending: bool = False,
        pad_mode: str = "constant",
        missing: Constants = None,
    ) -> None:
        declare(self, length=length_of(length, self), sort_ascending=sort_ascending)
        self._declare(fields, dtype, sort_by=sort_by, missing=missing)
        self._declare_padding(fill, axis_order, pad_mode)

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.length,)


@dataclass(frozen=True, slots=True, init=False)
class Bucketed(PaddedLayout):
    """A jagged axis padded to the next of several lengths.

    ``events * jets * var * number`` becomes ``[n, F, L]``. Rows of the same padded length share a
    request, so `L` differs between requests.

    A model may have several such inputs, each with its own lengths. An input needs the first,
    second or later of its lengths for a row; the latest that any input needs counts for all inputs.
    With lengths (12, 24, 48) for candidates and (1, 4) for vertices, a jet of 20 candidates and 3
    vertices is padded to 24 and 4, and a jet of 40 candidates and no vertex to 48 and 4. Other rows
    of the request make no difference.

    Parameters
    ----------
    fields : sequence of str or Feature
        The channels of the tensor, in order.
    lengths : sequence of int
        Lengths to which rows are padded; longer rows are truncated to the last length.
    fill, axis_order, dtype, sort_by, sort_ascending, pad_mode, missing
        As in `Padded`.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": [4.0]}])
    >>> Bucketed("pt", lengths=(2, 4, 8)).pack(jets).shape
    (2, 1, 4)
    """

    lengths: tuple[int, ...]

    def __init__(
        self,
        fields: Fields,
        lengths: Sequence[int] = (16, 32, 64, 128),
        fill: Constants = None,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
        *,
        sort_by: str | None = None,
        sort_ascending: bool = False,
        pad_mode: str = "constant",
        missing: Constants = None,
    ) -> None:
        declare(self, lengths=lengths_of(lengths, self), sort_ascending=sort_ascending)
        self._declare(fields, dtype, sort_by=sort_by, missing=missing)
        self._declare_padding(fill, axis_order, pad_mode)
