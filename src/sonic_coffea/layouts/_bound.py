"""Layouts bound to the arrays of a call: any rows can be packed, at any time, in any thread."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import awkward as ak
import numpy as np
from awkward.contents import (
    ByteMaskedArray,
    Content,
    ListOffsetArray,
    NumpyArray,
    RecordArray,
)
from awkward.index import Index8, Index64
from numpy.typing import NDArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._columns import (
    Column,
    Columns,
    RowSelection,
    grouped,
    not_numbers,
    readable,
)
from sonic_coffea.layouts._memory import empty
from sonic_coffea.layouts._range import HALF, check_range
from sonic_coffea.layouts._rows import Int64, Rows, Split, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sonic_coffea.layouts._fields import Feature, Source

Tensor = NDArray[Any]
DType = np.dtype[Any]


class Bound(Protocol):
    """One input of a model, with the arrays of a call."""

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """What rows may be padded to; none, if there is no padding."""

    @property
    def longest(self) -> int:
        """What the longest of the rows is padded to."""

    @property
    def elements(self) -> Elements | None:
        """The axis that the rows consume, if there is one."""

    def row_bytes(self, length: int) -> int | Int64:
        """Bytes of a row, all the same, or one by one."""

    def pack(self, name: str, selection: RowSelection, length: int) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """The consumed axis: how many elements each row has, and where they were before sorting."""

    split: Split
    order: Int64 | None

    @property
    def counts(self) -> Int64:
        """Elements of each row."""
        return self.split.counts

    @property
    def offsets(self) -> Int64:
        """Where each row's elements begin, all rows one after the other; and the end."""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.counts)))

    def unpad(self, tensor: Tensor, names: Sequence[str]) -> Content:
        """Return ``[N, L, K]`` as lists of records, with None for what was cut off."""
        scatter = Scatter(self, tensor.shape[2], tensor.dtype)
        scatter.padded(slice(0, len(self.counts)), tensor)
        return scatter.content(list(names))


class Scatter:
    """Values per element, put in their place as they come in.

    Parameters
    ----------
    elements : Elements
        Whose they are.
    width : int
        Values of each.
    dtype : dtype
        Type of the values.
    """

    def __init__(self, elements: Elements, width: int, dtype: DType) -> None:
        self._elements = elements
        self._offsets = elements.offsets
        self._values = np.zeros((int(self._offsets[-1]), width), dtype)
        # Which values there are, once some have been cut off.
        self._kept: NDArray[np.bool_] | None = None

    def padded(self, selection: RowSelection, tensor: Tensor) -> None:
        """Place ``[n, L, K]``; what is padding is left out."""
        from sonic_coffea.layouts import _kernels

        starts = self._elements.split.starts[selection]
        counts = self._elements.counts[selection]
        if self._kept is None and np.any(counts > tensor.shape[1]):
            self._kept = np.ones(len(self._values), np.bool_)
        where = (self._offsets[:-1][selection], counts, starts, self._elements.order)
        _kernels.unpad(_bytes(self._values), self._kept, _bytes(tensor), *where)

    def flat(self, selection: RowSelection, tensor: Tensor) -> None:
        """Place ``[sum n, K]``."""
        counts = self._elements.counts[selection]
        within = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
        if self._elements.order is not None:
            starts = np.repeat(self._elements.split.starts[selection], counts)
            within = self._elements.order[starts + within] - starts
        self._values[np.repeat(self._offsets[:-1][selection], counts) + within] = tensor

    def content(self, names: list[str] | None) -> Content:
        """Return one list a row: records of `names`, or numbers."""
        values: Content
        if names is None:
            values = NumpyArray(self._values[:, 0] if self._values.shape[1] == 1 else self._values)
        else:
            values = RecordArray([NumpyArray(v) for v in self._values.T], names)
        if self._kept is not None:
            values = ByteMaskedArray(Index8(self._kept.view(np.int8)), values, valid_when=True)
        return ListOffsetArray(Index64(self._offsets), values)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a tensor with the bytes of its last axis as that axis."""
    whole = np.ascontiguousarray(tensor)
    size = whole.shape[-1] * whole.itemsize
    return whole.reshape(-1).view(np.uint8).reshape(*whole.shape[:-1], size)


def _empty(n: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
    return empty((n, *shape), np.dtype(np.float32) if dtype in HALF else dtype)


@dataclass(frozen=True, slots=True, eq=False)
class BoundRow:
    """`Row` with its arrays."""

    dtype: DType
    columns: Columns
    lengths: tuple[int, ...] = ()
    longest: int = 0
    elements: Elements | None = None

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""
        return self.columns.split.rows

    def row_bytes(self, length: int) -> int | Int64:
        """Bytes of a row."""
        del length
        return len(self.columns.columns) * self.dtype.itemsize

    def pack(self, name: str, selection: RowSelection, length: int) -> dict[str, Tensor]:
        """Return ``[n, F]``."""
        del length
        ids = self.columns.split.starts[selection]
        out = _empty(len(ids), (len(self.columns.columns),), self.dtype)
        self.columns.list(out, ids, selection)
        return {name: out.astype(self.dtype, copy=False)}


@dataclass(frozen=True, slots=True, eq=False)
class BoundPadded:
    """`Padded` or `Bucketed` with its arrays."""

    dtype: DType
    columns: Columns
    fill: tuple[float, ...]
    axis_order: str
    lengths: tuple[int, ...]

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""
        return self.columns.split.rows

    @property
    def elements(self) -> Elements:
        """The axis that the rows consume."""
        return Elements(self.columns.split, self.columns.order)

    @property
    def longest(self) -> int:
        """What the longest of the rows is padded to."""
        most = int(self.columns.split.counts.max(initial=0))
        return self.lengths[min(int(np.searchsorted(self.lengths, most)), len(self.lengths) - 1)]

    def row_bytes(self, length: int) -> int | Int64:
        """Bytes of a row."""
        return len(self.columns.columns) * length * self.dtype.itemsize

    def pack(self, name: str, selection: RowSelection, length: int) -> dict[str, Tensor]:
        """Return ``[n, F, L]`` or ``[n, L, F]``."""
        n, features = len(self.columns.split.starts[selection]), len(self.columns.columns)
        if self.axis_order == "FL":
            out = _empty(n, (features, length), self.dtype)
            by_field = out
        else:
            out = _empty(n, (length, features), self.dtype)
            by_field = out.transpose(0, 2, 1)
        self.columns.pad(by_field, self.fill, selection)
        return {name: out.astype(self.dtype, copy=False)}


@dataclass(frozen=True, slots=True, eq=False)
class BoundMask:
    """`Mask` with what it counts."""

    dtype: DType
    counted: Columns
    length: int | None
    lengths: tuple[int, ...] = ()
    elements: Elements | None = None

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""
        return self.counted.split.rows

    @property
    def longest(self) -> int:
        """What the longest of the rows is padded to."""
        return self.length or int(self.counted.split.counts.max(initial=1))

    def row_bytes(self, length: int) -> int | Int64:
        """Bytes of a row."""
        return (length or self.longest) * self.dtype.itemsize

    def pack(self, name: str, selection: RowSelection, length: int) -> dict[str, Tensor]:
        """Return ``[n, 1, L]``."""
        from sonic_coffea.layouts import _kernels

        starts, stops = self.counted.split.starts[selection], self.counted.split.stops[selection]
        out = _empty(len(starts), (1, length or self.longest), self.dtype)
        _kernels.mask(out, starts, stops)
        return {name: out.astype(self.dtype, copy=False)}


@dataclass(frozen=True, slots=True, eq=False)
class BoundFlat:
    """`Flat` with its arrays."""

    dtype: DType
    columns: Columns
    splits: str | None
    batch: str | None
    lengths: tuple[int, ...] = ()
    longest: int = 0

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""
        return self.columns.split.rows

    @property
    def elements(self) -> Elements:
        """The axis that the rows consume."""
        return Elements(self.columns.split, self.columns.order)

    def row_bytes(self, length: int) -> int | Int64:
        """Bytes of each row."""
        del length
        per_element = len(self.columns.columns) * self.dtype.itemsize + (8 if self.batch else 0)
        return self.columns.split.counts * per_element + (8 if self.splits else 0)

    def pack(self, name: str, selection: RowSelection, length: int) -> dict[str, Tensor]:
        """Return ``[sum n, F]``, with offsets or row numbers of the request's own."""
        from sonic_coffea.layouts import _kernels

        del length
        starts, stops = self.columns.split.starts[selection], self.columns.split.stops[selection]
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(stops - starts)))
        ids = np.empty(int(offsets[-1]), np.int64)
        _kernels.positions(ids, starts, stops)
        out = _empty(len(ids), (len(self.columns.columns),), self.dtype)
        self.columns.list(out, ids, selection)
        made = {name: out.astype(self.dtype, copy=False)}
        if self.splits:
            made[self.splits] = offsets
        if self.batch:
            made[self.batch] = np.repeat(np.arange(len(starts)), stops - starts)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class BoundDense:
    """`Dense` with its array, flattened: each row is one list of as many numbers."""

    dtype: DType
    columns: Columns
    shape: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    longest: int = 0
    elements: Elements | None = None

    @classmethod
    def of(
        cls, source: Source, feature: Feature, shape: tuple[int, ...] | None, dtype: DType
    ) -> BoundDense:
        """Read the field, and find out the shape of a row if it was not given."""
        what = f"field {feature.name!r}"
        layout = source.column(feature.name).materialize()
        inner = _inner_shape(layout, what)
        if shape is None and not inner:
            raise InputError(
                f"{what} has type {layout.form.type}, without axes of fixed length; "
                "give Dense the shape of a row"
            )
        if shape is None or inner[-len(shape) :] == shape:
            axes = len(inner if shape is None else shape)
        else:
            axes = sum(n > 1 for n in shape)
        apart = split(layout, jagged=False, what=what, below=axes)
        final = inner if shape is None else shape
        size = math.prod(final)
        # What has been cut away may be of other shapes.
        leaf = apart.leaf if apart.rows.contiguous else apart.leaf[apart.rows.ids]
        values = readable(_regular(leaf, size, what, final), what)
        starts = np.arange(len(apart.rows)) * size
        one = Split(apart.rows, NumpyArray(values), starts, starts + size)
        column = Column(feature, values, None)
        check_range([column], one, dtype)
        return cls(dtype, Columns(one, (column,), grouped([column])), final)

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""
        return self.columns.split.rows

    def row_bytes(self, length: int) -> int | Int64:
        """Bytes of a row."""
        del length
        return math.prod(self.shape) * self.dtype.itemsize

    def pack(self, name: str, selection: RowSelection, length: int) -> dict[str, Tensor]:
        """Return ``[n, *shape]``."""
        del length
        n = len(self.columns.split.starts[selection])
        out = _empty(n, (1, math.prod(self.shape)), self.dtype)
        self.columns.pad(out, (0.0,), selection)
        return {name: out.astype(self.dtype, copy=False).reshape(n, *self.shape)}


def _inner_shape(layout: Content, what: str) -> tuple[int, ...]:
    """Return the lengths of the innermost axes that are of fixed length."""
    shape: list[int] = []
    node = layout
    while not node.is_numpy:
        if node.is_unknown:
            return tuple(shape)
        if node.is_record or node.is_union:
            raise not_numbers(node, what)
        if node.is_regular:
            shape.append(int(node.size))
        elif node.is_list or node.is_option:
            shape = []
        node = node.content
    return (*shape, *(int(n) for n in node.inner_shape))


def _regular(leaf: Content, size: int, what: str, shape: Sequence[int]) -> NDArray[Any]:
    try:
        values = np.asarray(ak.to_numpy(leaf, allow_missing=False))
    except ValueError as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"{what} is not of fixed shape {list(shape)}: {problem}") from None
    if len(values) and values[0].size != size:
        raise InputError(
            f"{what} has {list(values.shape[1:])} numbers a row, expected {list(shape)}"
        )
    return values.reshape(-1)
