"""A jagged axis: padded to a length, to the next of several, or not at all; and its mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, InputError, nearest
from sonic_coffea.layouts._elements import Columns, Elements, bind_lists
from sonic_coffea.layouts._expressions import column_of, path_of
from sonic_coffea.layouts._features import declare, one_of, own_types, refuse
from sonic_coffea.layouts._layout import (
    Batch,
    Bound,
    Constants,
    DType,
    FieldsLayout,
    Layout,
    Shape,
    constants_of,
    length_of,
    lengths_of,
    order_of,
    ordered,
    target_of,
    with_axes,
)
from sonic_coffea.layouts._padding import pad
from sonic_coffea.layouts._structure import (
    STRING,
    Int64,
    RowSelection,
    Structure,
    Tensor,
    offsets_of,
    ranges,
)

if TYPE_CHECKING:
    from awkward.contents import Content

    from sonic_coffea.layouts._source import Source


@dataclass(frozen=True, slots=True, eq=False)
class Padded(FieldsLayout):
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
    sort_by : str or Feature, optional
        Field, or expression, by which a row's constituents are sorted, descending, before they are
        truncated.
    sort_ascending : bool
        Whether `sort_by` sorts in ascending order.
    pad_mode : {"constant", "wrap"}
        ``"wrap"`` repeats the row's own constituents, from the first one; a row without
        constituents is padded with `fill`.
    missing : float or str, or sequence of them, optional
        Replacement for numbers that are None, and for indices that refer to no object: one value
        for all fields, or one for each. By default, they raise an `InputError`.
    pad : {"after", "before"}
        Whether rows are padded after their numbers are transformed, or before, so that `fill` is
        transformed, too.
    outer : int, optional
        Lists kept of each row, if a row has lists of constituents, such as the leading jets of an
        event: ``[N, F, J, L]``, or ``[N, J, L, F]`` in the order ``"LF"``. Rows with fewer lists
        are padded. It has no inverse.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pf": {"pt": [1.0, 2.0, 3.0]}}], [{"pf": {"pt": [4.0]}}]])
    >>> Padded("pf.pt", 2, sort_by="pf.pt").pack(jets).tolist()
    [[[3.0, 2.0]], [[4.0, 0.0]]]
    >>> Padded("pf.pt", 3, outer=2).pack(jets).tolist()
    [[[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]], [[[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]]
    """

    jagged = True
    holds_strings = True

    fields: Any
    length: Any
    fill: Any = None
    axis_order: str = "FL"
    dtype: Any = "float32"
    _: KW_ONLY
    sort_by: Any = None
    sort_ascending: bool = False
    pad_mode: str = "constant"
    missing: Constants = None
    pad: str = "after"
    outer: int | None = None

    def __post_init__(self) -> None:
        if type(self) is Padded:
            declare(self, length=length_of(self.length, self))
        if self.outer is not None:
            declare(self, outer=length_of(self.outer, self))
        name = type(self).__name__
        self._declare()
        count = len(self.features)
        order_of(self.axis_order, self, count)
        one_of(("constant", "wrap"), self.pad_mode, f"{name}: expected pad_mode")
        one_of(("after", "before"), self.pad, f"{name}: expected pad")
        fill = self.fill
        if fill is None:
            fill = "" if self.dtype == STRING else 0.0
        declare(self, fill=constants_of("fill", fill, self, count))

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        if self.outer is not None:
            return (self.outer,)
        return self.length if isinstance(self.length, tuple) else (self.length,)

    def row_shape(self, bucket: int) -> tuple[int, ...]:
        if self.outer is None:
            return ordered(self.axis_order, len(self.features), self.padded_length(bucket))
        shape = len(self.features), self.outer, self.length
        return shape if self.axis_order == "FL" else (*shape[1:], *shape[: "F" in self.axis_order])

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        del others
        columns = self.bound_columns(source)
        if self.outer is None:
            return Bound(self, columns)
        lists = outer_lists(
            columns, f"field {self.features[0].text!r}", "outer= needs lists of lists"
        )
        return Bound(self, lists, other=columns)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        fills: Any = self.fill
        if self.pad == "before":
            fills = Elements(bound.other or bound.columns, slice(0, 0)).fills(fills, self.dtype)
        wrap = self.pad_mode == "wrap"
        if self.outer is not None:
            pad_lists(with_axes(out, self.axis_order), bound, batch.rows, fills, wrap=wrap)
            return
        by_field = with_axes(out, self.axis_order)
        longest = by_field.shape[2]
        for here, elements in bound.columns.blocks(batch.rows, self.row_width, longest):
            values = elements.values(out.dtype)
            pad(by_field[here], values, elements.starts, elements.counts, fills, wrap=wrap)

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        if self.outer is not None:
            raise ConfigError("Padded with outer= has no inverse")
        return self.scattered(with_axes(tensor, self.axis_order).transpose(0, 2, 1), bound)


class Bucketed(Padded):
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
    fill, axis_order, dtype, sort_by, sort_ascending, pad_mode, missing, pad
        As in `Padded`.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": [4.0]}])
    >>> Bucketed("pt", lengths=(2, 4, 8)).pack(jets).shape
    (2, 1, 4)
    """

    __slots__ = ()

    def __init__(
        self,
        fields: Any,
        lengths: Sequence[int] = (16, 32, 64, 128),
        fill: Constants = None,
        axis_order: str = "FL",
        dtype: Any = "float32",
        **options: Any,
    ) -> None:
        Padded.__init__(self, fields, lengths_of(lengths, self), fill, axis_order, dtype, **options)


def outer_lists(columns: Columns, what: str, needs: str) -> Columns:
    """Return the rows whose elements are the lists of some columns."""
    levels = columns.rows.levels
    if not levels or not levels[-1].is_list:
        raise InputError(f"{what} has {'None' if levels else 'one jagged axis'} where {needs}")
    return Columns(Structure(columns.rows.events, levels[:-1]), levels[-1].data)


def pad_lists(
    out: Tensor, bound: Bound, rows: RowSelection, fills: Any, *, wrap: bool = False
) -> None:
    """Fill ``out[N, F, J, L]`` with the elements of the first lists of rows."""
    outer, inner = bound.columns, bound.other
    assert inner is not None and outer.offsets is not None  # noqa: S101, PT018
    number, channels, most, length = out.shape
    counts = np.minimum(outer.counts(rows), most)
    elements = Elements(inner, ranges(outer.offsets[:-1][rows], counts), length)
    present = np.arange(most) < counts[:, np.newaxis]
    ends = np.zeros((2, *present.shape), np.int64)
    ends[0][present], ends[1][present] = elements.starts, elements.counts
    try:
        values = elements.values(out.dtype)
    except InputError as error:  # its rows are lists
        raise type(error)(error.message) from None
    padded = np.empty((number * most, channels, length), out.dtype)
    pad(padded, values, ends[0].reshape(-1), ends[1].reshape(-1), fills, wrap=wrap)
    out[:] = padded.reshape(number, most, channels, length).transpose(0, 2, 1, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Flat(FieldsLayout):
    """A jagged axis without padding: all elements of a request's rows, one after the other.

    ``events * var * number`` becomes ``[sum n, F]``, and another input tells which element belongs
    to which row. It is meant for graphs and sets of any size.

    Parameters
    ----------
    fields : sequence of str or Feature
        The columns of the tensor, in order.
    splits : str or None
        Name of the model's input for the offsets, int64 ``[N + 1]``: row `i` has the elements from
        ``splits[i]`` to ``splits[i + 1]``, exclusive.
    batch : str or None
        Name of the model's input for the row number of each element, int64 ``[sum n]``.
    dtype, sort_by, sort_ascending, missing
        As in `Padded`.
    axis_order : {"LF", "FL", "L"}
        ``[sum n, F]``; ``[F, sum n]``, such as the ends of a graph's edges; or ``[sum n]`` of one
        field.
    refers_to : str, optional
        The model's `Flat` input to which the numbers refer: for the edges of a graph, its nodes. In
        the arrays, the numbers are indices into the row's elements; in the tensor, they are indices
        into the request's elements. Both start at 0.
    merge_rows : bool
        Whether rows may merge in a request, if neither `splits` nor `batch` tells them apart. By
        default, this is an error, unless another input with the same elements tells them apart, or
        each request has one row (``one_request_per`` of `Model`).

    Examples
    --------
    >>> import awkward as ak
    >>> hits = ak.Array([[{"x": 1.0}, {"x": 2.0}], [], [{"x": 3.0}]])
    >>> Flat("x").pack(hits).tolist()
    [[1.0], [2.0], [3.0]]
    """

    stacks = False
    jagged = True
    holds_strings = True

    fields: Any
    splits: str | None = "row_splits"
    _: KW_ONLY
    batch: str | None = None
    dtype: Any = "float32"
    sort_by: Any = None
    sort_ascending: bool = False
    missing: Constants = None
    axis_order: str = "LF"
    refers_to: str | None = None
    merge_rows: bool = False

    def __post_init__(self) -> None:
        self._declare()
        order_of(self.axis_order, self, len(self.features))
        if self.splits is not None and self.splits == self.batch:
            raise ConfigError(
                f"Flat: splits and batch are two inputs, got {self.splits!r} for both"
            )
        if self.refers_to is not None and self.dtype.name not in ("int32", "int64"):
            raise ConfigError(
                f"Flat: numbers that refer to the elements of {self.refers_to!r} are int32 or "
                f"int64, got {self.dtype.name}"
            )

    @property
    def merges(self) -> bool:  # type: ignore[override]
        separated = self.splits is not None or self.batch is not None or self.refers_to is not None
        return not separated and not self.merge_rows

    @property
    def dependency(self) -> str | None:  # type: ignore[override]
        return self.refers_to

    def resolved(self, inputs: Mapping[str, Layout]) -> Flat:
        if self.refers_to is None:
            return self
        flat = {name: layout for name, layout in inputs.items() if isinstance(layout, Flat)}
        if self.refers_to not in flat or flat[self.refers_to] is self:
            others = [name for name, layout in flat.items() if layout is not self]
            raise ConfigError(
                f"Flat: refers_to={self.refers_to!r} is no other Flat input of the model; "
                f"{nearest(self.refers_to, others)}"
            )
        if flat[self.refers_to].sort_by is not None:
            raise ConfigError(
                f"Flat: numbers refer to the elements of {self.refers_to!r} as they are given, and "
                "these are sorted; leave sort_by out, and sort them before"
            )
        return self

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        referred = None
        if self.refers_to is not None and others is not None:
            referred = others[self.refers_to].columns
        return Bound(self, self.bound_columns(source), other=referred)

    def row_shape(self, bucket: int) -> Shape:
        del bucket
        return {"LF": (len(self.features),), "FL": (-1,), "L": ()}[self.axis_order]

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        others = dict.fromkeys(filter(None, (self.splits, self.batch)), (np.dtype(np.int64), ()))
        return {name: (self.dtype, self.row_shape(-1)), **others}

    def tensor_shape(self, bound: Bound, batch: Batch) -> tuple[int, ...]:
        (length,) = self.elements_shape(bound, batch)
        return ordered(self.axis_order, len(self.features), length)

    def elements_shape(self, bound: Bound, batch: Batch) -> tuple[int, ...]:
        return (int(bound.columns.counts(batch.rows).sum()),)

    def row_bytes(self, bound: Bound, batch: Batch) -> Int64:
        per_element = len(self.features) * self.item_bytes(bound) + (8 if self.batch else 0)
        return bound.columns.counts(batch.rows) * per_element + (8 if self.splits else 0)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        by_element, start = self._by_element(out), 0
        for _, elements in bound.columns.blocks(batch.rows, self.row_width):
            by_element[start : start + elements.size] = elements.values(out.dtype).T
            start += elements.size

    def make(
        self, name: str, bound: Bound, batch: Batch, out: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return ``[sum n, F]``, with offsets or row numbers of the request's own."""
        tensors = FieldsLayout.make(self, name, bound, batch, out)
        counts = bound.columns.counts(batch.rows)
        if bound.other is not None:
            self._count_on(self._by_element(tensors[name]), bound, batch, counts)
        if self.splits:
            tensors[self.splits] = offsets_of(counts)
        if self.batch:
            tensors[self.batch] = np.repeat(np.arange(len(counts)), counts)
        return tensors

    def _count_on(self, numbers: Tensor, bound: Bound, batch: Batch, counts: Int64) -> None:
        """Let the numbers of each row count on from the elements of the rows before it."""
        assert bound.other is not None  # noqa: S101
        sizes = bound.other.counts(batch.rows)
        wrong = np.flatnonzero(
            np.any((numbers < 0) | (numbers >= np.repeat(sizes, counts)[:, np.newaxis]), axis=1)
        )
        if len(wrong):
            place = int(np.searchsorted(np.cumsum(counts), wrong[0], side="right"))
            row = int(bound.columns.numbers(batch.rows)[place])
            raise InputError(
                f"field {self.features[0].text!r}, or one beside it, refers to no element of input "
                f"{self.refers_to!r} in event {bound.rows.event_of(row)}: got "
                f"{numbers[wrong[0]].tolist()} of {sizes[place]} elements; numbers count within "
                "the row, from 0 on",
                rows=(row, row + 1),
            )
        numbers += np.repeat(np.cumsum(sizes) - sizes, counts)[:, np.newaxis].astype(numbers.dtype)

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        return self.scattered(self._by_element(tensor), bound)

    def _by_element(self, tensor: Tensor) -> Tensor:
        """Return the view ``[sum n, F]`` of a tensor."""
        if self.axis_order == "L":
            return tensor[:, np.newaxis]
        return tensor if self.axis_order == "LF" else tensor.T


@dataclass(frozen=True, slots=True, eq=False)
class Mask(Layout):
    """1 where there is a constituent, 0 where there is padding: ``[N, 1, L]``, or ``[N, L]``.

    Parameters
    ----------
    length : int, optional
        Length of the mask. By default, it is the length of the input whose elements are counted;
        beside `Bucketed`, it differs between requests.
    of : str, optional
        The field whose elements are counted, instead of an input's. The elements are not read, so
        they may be of any type, such as records.
    beside : str, optional
        The model's input whose elements are counted; by default, the first jagged input. Beside a
        `Row`, each row is one element.
    axis_order : {"FL", "LF", "L"}
        ``[N, 1, L]``, ``[N, L, 1]`` or ``[N, L]``.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak
    >>> Mask(3, of="pt").pack(ak.Array([{"pt": [3.0, 2.0]}])).tolist()
    [[[1.0, 1.0, 0.0]]]
    """

    length: Any = None
    of: Any = None
    _: KW_ONLY
    beside: str | None = None
    axis_order: str = "FL"
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        own_types(self)
        is_path = self.of is None or isinstance(self.of, (str, tuple))
        both = f"expected of={self.of!r} or beside={self.beside!r}, got both"
        refuse(
            "Mask",
            (not is_path, f"expected of to be a string, got {self.of!r}"),
            (self.of is not None and self.beside is not None, both),
        )
        if self.length is not None:
            lengths = lengths_of(self.length, self)
            declare(self, length=lengths if len(lengths) > 1 else lengths[0])
        declare(self, dtype=target_of(self.dtype, self))
        order_of(self.axis_order, self)

    @property
    def columns(self) -> tuple[str, ...]:
        return (column_of(self.of),) if self.of else ()

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.length if isinstance(self.length, tuple) else (self.length,) * bool(self.length)

    @property
    def dependency(self) -> str | None:  # type: ignore[override]
        return self.beside

    def resolved(self, inputs: Mapping[str, Layout]) -> Mask:
        jagged = {name: layout for name, layout in inputs.items() if layout.jagged}
        beside = self.beside
        if self.of is None:
            beside = beside or next(iter(jagged), None)
            if beside is None:
                raise ConfigError("Mask needs of=, as the model has no jagged input")
            able = {n: x for n, x in inputs.items() if not isinstance(x, Mask)}
            if beside not in able:
                raise ConfigError(
                    f"Mask beside {beside!r}, which is no jagged input; {nearest(beside, able)}"
                )
            jagged = {beside: inputs[beside]}
        if self.lengths:
            return replace(self, beside=beside)
        lengths = {layout.lengths for layout in jagged.values() if layout.lengths}
        if beside is not None and not inputs[beside].jagged:
            lengths = {(1,)}
        if len(lengths) != 1:
            names = ", ".join(map(repr, jagged)) or "none"
            tell = f"inputs {names} have several" if lengths else f"no input is padded, of {names}"
            raise ConfigError(f"Mask needs a length, as {tell}")
        return replace(self, length=lengths.pop(), beside=beside)

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        if self.of is not None:
            columns = bind_lists(source, path_of(self.of))
        elif self.beside is not None and others is not None:
            other = others[self.beside]
            return Bound(self, other.columns, other.parts)
        else:
            raise ConfigError(
                "Mask does not know what to count; give of=, the name of a jagged field, "
                "or use it beside a Padded input"
            )
        # In a model, the inputs tell the length; by itself, the longest row does.
        longest = int(columns.counts(slice(0, len(columns.rows))).max(initial=1))
        return Bound(self if self.lengths else replace(self, length=longest), columns)

    def row_shape(self, bucket: int) -> tuple[int, ...]:
        return ordered(self.axis_order, 1, self.padded_length(bucket) or -1)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        present = with_axes(out, self.axis_order)[:, 0]
        for _, part, places in bound.axis(present.shape[1]):
            counts, here = part.columns.counts(batch.rows)[:, np.newaxis], present[:, places]
            here[:] = np.arange(here.shape[1]) < counts
