"""A jagged axis padded to a length, or to the next of a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sonic_coffea.errors import ConfigError
from sonic_coffea.layouts._layout import DType, Fields, FieldsLayout, Tensor, declare, length_of
from sonic_coffea.layouts._scatter import scattered

if TYPE_CHECKING:
    from awkward.contents import Content
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._columns import Columns
    from sonic_coffea.layouts._fields import Feature
    from sonic_coffea.layouts._rows import RowSelection


def check_fill(value: float, dtype: DType, layout: str) -> None:
    """Refuse what pads, if the tensor cannot hold it."""
    with np.errstate(all="ignore"):
        held = float(np.asarray(value, np.float64).astype(dtype))
    exact = dtype.kind in "iub"
    if (exact and held != value) or (np.isfinite(value) and not np.isfinite(held)):
        raise ConfigError(f"{layout}: {dtype.name} cannot hold the fill {value!r}")


class PaddedLayout(FieldsLayout):
    """A jagged axis padded to the next of some lengths."""

    __slots__ = ()
    jagged = True
    lengths: tuple[int, ...]
    fill: tuple[float, ...]
    axis_order: str

    def _declare_padding(self, fill: float | Sequence[float], axis_order: str) -> None:
        """Check what is declared of the padding, after the fields and the type."""
        if axis_order not in ("FL", "LF"):
            name = type(self).__name__
            raise ConfigError(f"{name}: expected axis_order 'FL' or 'LF', got {axis_order!r}")
        declare(self, axis_order=axis_order)
        self._declare_fill(fill, len(self.features), "fields")

    def _declare_fill(self, fill: float | Sequence[float], count: int, what: str) -> None:
        """Check what pads each of some channels."""
        name = type(self).__name__
        fills = tuple(fill) if isinstance(fill, Sequence) else (fill,) * count
        if len(fills) != count:
            raise ConfigError(
                f"{name}: expected one fill or one for each of {count} {what}, got {len(fills)}"
            )
        for value in fills:
            check_fill(value, self.dtype, name)
        declare(self, fill=tuple(map(float, fills)))

    def row_shape(self, level: int) -> tuple[int, ...]:
        shape = (len(self.features), self.padded_length(level))
        return shape if self.axis_order == "FL" else shape[::-1]

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        columns.pad(out if self.axis_order == "FL" else out.transpose(0, 2, 1), self.fill, rows)

    def content(self, tensor: Tensor, columns: Columns) -> Content:
        by_element = tensor.transpose(0, 2, 1) if self.axis_order == "FL" else tensor
        return scattered(by_element, columns)


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
    fill : float or sequence of float
        What pads; one value for all fields, or one for each.
    axis_order : {"FL", "LF"}
        ``[N, F, L]``, as weaver's models want it, or ``[N, L, F]``.
    dtype : dtype
        Type of the tensor, float32 by default.
    sort_by : str, optional
        Field by which a row's constituents are sorted, descending, before they are truncated.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pf": {"pt": [1.0, 2.0, 3.0]}}], [{"pf": {"pt": [4.0]}}]])
    >>> Padded("pf.pt", 2, sort_by="pf.pt").pack(jets).tolist()
    [[[3.0, 2.0]], [[4.0, 0.0]]]
    """

    features: tuple[Feature, ...]
    length: int
    fill: tuple[float, ...]
    axis_order: str
    dtype: DType
    sort_by: str | None

    def __init__(
        self,
        fields: Fields,
        length: int,
        fill: float | Sequence[float] = 0.0,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
        *,
        sort_by: str | None = None,
    ) -> None:
        self._declare(fields, dtype, length=length_of(length, self), sort_by=sort_by)
        self._declare_padding(fill, axis_order)

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.length,)


@dataclass(frozen=True, slots=True, init=False)
class Bucketed(PaddedLayout):
    """A jagged axis padded to the next of a few lengths; rows of like length share a request.

    ``events * jets * var * number`` becomes ``[n, F, L]``, with another `L` in each request.

    A model may have several, each with lengths of its own: a row goes with those that need the same
    step of their lengths, the largest that any input needs of it. With lengths (12, 24, 48) of
    candidates and (1, 4) of vertices, a jet of 20 candidates and 3 vertices is padded to 24 and 4,
    one of 40 candidates and no vertex to 48 and 4, whatever else is in the request.

    Parameters
    ----------
    fields : sequence of str or Feature
        The channels of the tensor, in order.
    lengths : sequence of int
        What rows are padded to; longer rows are truncated to the last.
    fill, axis_order, dtype, sort_by
        As of `Padded`.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": [4.0]}])
    >>> Bucketed("pt", lengths=(2, 4, 8)).pack(jets).shape
    (2, 1, 4)
    """

    features: tuple[Feature, ...]
    lengths: tuple[int, ...]
    fill: tuple[float, ...]
    axis_order: str
    dtype: DType
    sort_by: str | None

    def __init__(
        self,
        fields: Fields,
        lengths: Sequence[int] = (16, 32, 64, 128),
        fill: float | Sequence[float] = 0.0,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
        *,
        sort_by: str | None = None,
    ) -> None:
        sizes = tuple(length_of(n, self) for n in lengths)
        if not sizes or list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"Bucketed: expected ascending lengths, got {list(lengths)}")
        self._declare(fields, dtype, lengths=sizes, sort_by=sort_by)
        self._declare_padding(fill, axis_order)
