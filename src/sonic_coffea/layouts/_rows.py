"""The structure above the rows of a tensor: taken apart once, put back exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import awkward as ak
import numpy as np
from awkward.contents import (
    Content,
    IndexedArray,
    IndexedOptionArray,
    ListArray,
    ListOffsetArray,
    NumpyArray,
    RegularArray,
)
from awkward.index import Index64
from numpy.typing import NDArray

from sonic_coffea.errors import InputError

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of one call, and the lists and options that hold them.

    Attributes
    ----------
    skeleton : awkward content
        The structure above the rows, packed, with the row number at every place that holds a row.
    ids : array of int64, shape ``[N]``
        Where each row lies in the buffers of the column it was taken from.
    """

    skeleton: Content
    ids: Int64
    contiguous: bool = field(default=False)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def events(self) -> int:
        """Length of the outermost axis."""
        return int(self.skeleton.length)

    def unflatten(self, content: Content) -> ak.Array:
        """Return `content`, one element per row, in the structure that the rows came from."""
        return ak.Array(_with_leaf(self.skeleton, content))

    def agrees(self, other: Rows) -> bool:
        """Whether both have the same lists and the same missing objects."""
        return _same(self.skeleton, other.skeleton)

    def events_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and one-past-last event that rows `start` to `stop` belong to."""
        if stop <= start:
            return (0, 0)
        numbers = _event_numbers(self.skeleton)
        return int(numbers[start]), int(numbers[stop - 1]) + 1

    def first_difference(self, other: Rows) -> int:
        """Return the first event in which the two structures differ."""
        shared = min(self.events, other.events)
        low, high = 0, shared
        while low < high:
            middle = (low + high) // 2
            if _same(
                self.skeleton[: middle + 1].to_packed(), other.skeleton[: middle + 1].to_packed()
            ):
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A column taken apart: the rows above, the buffers below.

    ``values`` is one-dimensional; row `i` is ``values[starts[i]:stops[i]]``, through `index` if
    there is one.
    """

    rows: Rows
    values: NDArray[Any]
    index: Int64 | None
    starts: Int64
    stops: Int64


def split(layout: Content, *, jagged: bool, what: str, cache: dict[Any, Rows]) -> Split:
    """Take a column apart into rows and buffers.

    Parameters
    ----------
    layout : awkward content
        Numbers at any depth, materialised.
    jagged : bool
        Whether the innermost list belongs to the row (`Padded`) or not (`Row`).
    what : str
        The column's name, for messages.
    cache : dict
        Columns that share their lists share one `Rows`; kept for the length of one call.
    """
    key: list[Any] = [jagged]
    outer, leaf = _outer(layout, 2 if jagged else 1, what, key)
    rows = cache.get(tuple(key))
    if rows is None:
        rows = _pack(outer)
        cache[tuple(key)] = rows
    if not jagged:
        values, index = _numbers(leaf, what)
        return Split(rows, values, index, rows.ids, rows.ids + 1)
    if leaf.is_unknown:
        nothing = np.zeros(leaf.length, np.int64)
        return Split(rows, np.zeros(0, np.float64), None, nothing, nothing)
    starts = np.asarray(leaf.starts.data, np.int64)
    stops = np.asarray(leaf.stops.data, np.int64)
    values, index = _numbers(leaf.content, what)
    if not rows.contiguous:
        starts, stops = starts[rows.ids], stops[rows.ids]
    return Split(rows, values, index, starts, stops)


def _pointer(index: Any) -> tuple[int, int]:
    data = index.data
    return int(data.__array_interface__["data"][0]), len(data)


def _outer(node: Content, leaf_depth: int, what: str, key: list[Any]) -> tuple[Content, Content]:
    """Return the structure above the leaves, numbering them, and the leaves themselves."""
    _refuse(node, what)
    if isinstance(node, NumpyArray) and node.data.ndim > 1:
        node = node.to_RegularArray()
    if node.is_option:
        node = node.to_IndexedOptionArray64()
        key.append(("option", *_pointer(node.index)))
        content, leaf = _outer(node.content, leaf_depth, what, key)
        return IndexedOptionArray(node.index, content), leaf
    if node.is_indexed and (node.purelist_depth > 1 or _has_option(node)):
        key.append(("indexed", *_pointer(node.index)))
        content, leaf = _outer(node.content, leaf_depth, what, key)
        return IndexedArray.simplified(node.index, content), leaf
    if node.is_unknown or node.purelist_depth == leaf_depth:
        key.append(("leaf", node.length))
        return _numbered(node), node
    if node.purelist_depth < leaf_depth:
        raise InputError(
            f"{what} has one number where a list is needed (its type is {node.form.type}); "
            "a Padded layout takes a jagged axis, such as the constituents of a jet; "
            "for one number per object use Row"
        )
    content, leaf = _outer(node.content, leaf_depth, what, key)
    if isinstance(node, RegularArray):
        key.append(("regular", node.size, node.length))
        return RegularArray(content, node.size, zeros_length=node.length), leaf
    if isinstance(node, ListOffsetArray):
        key.append(("lists", *_pointer(node.offsets)))
        return ListOffsetArray(node.offsets, content), leaf
    key.append(("lists", *_pointer(node.starts), *_pointer(node.stops)))
    return ListArray(node.starts, node.stops, content), leaf


def _refuse(node: Content, what: str) -> None:
    if node.parameter("__array__") in {"string", "bytestring", "char", "byte"}:
        raise InputError(f"{what} holds strings; expected numbers")
    if node.is_record:
        fields = ", ".join(node.fields)
        raise InputError(f"{what} is a record with fields {fields}; expected one of these fields")
    if node.is_union:
        raise InputError(f"{what} mixes types ({node.form.type}); expected one numeric type")


def _numbered(leaf: Content) -> NumpyArray:
    return NumpyArray(np.arange(leaf.length, dtype=np.int64))


def _has_option(node: Content) -> bool:
    while node.is_indexed and not node.is_option:
        node = node.content
    return bool(node.is_option)


def _pack(outer: Content) -> Rows:
    skeleton = outer.to_packed()
    leaf = skeleton
    while not isinstance(leaf, NumpyArray):
        leaf = leaf.content
    ids = np.ascontiguousarray(leaf.data)
    n = len(ids)
    plain = NumpyArray(np.arange(n, dtype=np.int64))
    source = outer
    while not isinstance(source, NumpyArray):
        source = source.content
    contiguous = n == source.length and bool(np.array_equal(ids, plain.data))
    return Rows(_with_leaf(skeleton, plain), ids, contiguous)


def _numbers(leaf: Content, what: str) -> tuple[NDArray[Any], Int64 | None]:
    """Return the one-dimensional numbers of a leaf, and the index to read them through."""
    index: Int64 | None = None
    while True:
        if leaf.is_unknown:
            return np.zeros(leaf.length, np.float64), index
        if leaf.parameter("__array__") is not None:
            raise InputError(f"{what} holds {leaf.parameter('__array__')}s; expected numbers")
        if leaf.is_option:
            if bool(np.any(leaf.mask_as_bool(valid_when=False))):
                raise InputError(
                    f"{what} has None among the constituents of a row; remove them with "
                    "ak.drop_none or fill them with ak.fill_none"
                )
            leaf = leaf.project()
        elif leaf.is_indexed:
            here = np.asarray(leaf.index.data, np.int64)
            index = here if index is None else here[index]
            leaf = leaf.content
        elif isinstance(leaf, NumpyArray):
            break
        else:
            raise InputError(f"{what} has type {leaf.form.type}; expected numbers")
    data = np.asarray(leaf.data)
    if data.dtype.kind not in "fiub":
        raise InputError(f"{what} has dtype {data.dtype}; expected a number or a bool")
    if not data.dtype.isnative:
        data = data.astype(data.dtype.newbyteorder("="))
    return np.ascontiguousarray(data), index


def _with_leaf(node: Content, content: Content) -> Content:
    """Return the packed structure with its innermost numbers replaced."""
    if isinstance(node, NumpyArray):
        return content
    inner = _with_leaf(node.content, content)
    if isinstance(node, ListOffsetArray):
        return ListOffsetArray(node.offsets, inner)
    if isinstance(node, RegularArray):
        return RegularArray(inner, node.size, zeros_length=node.length)
    return IndexedOptionArray.simplified(node.index, inner)


def _same(a: Content, b: Content) -> bool:
    while True:
        if a is b:
            return True
        if a.length != b.length:
            return False
        if isinstance(a, NumpyArray) or isinstance(b, NumpyArray):
            return isinstance(a, NumpyArray) and isinstance(b, NumpyArray)
        if a.is_option != b.is_option:
            return False
        if a.is_option:
            if not np.array_equal(a.index.data, b.index.data):
                return False
        elif not np.array_equal(a.offsets.data, b.offsets.data):
            return False
        a, b = a.content, b.content


def _event_numbers(skeleton: Content) -> Int64:
    """Return the number of the event that each row belongs to."""
    numbers = np.arange(skeleton.length, dtype=np.int64)
    node = skeleton
    while not isinstance(node, NumpyArray):
        if node.is_option:
            numbers = numbers[np.asarray(node.index.data) >= 0]
        else:
            numbers = np.repeat(numbers, np.diff(node.offsets.data))
        node = node.content
    return numbers


def unpad(kept: Content, counts: Int64, length: int) -> Content:
    """Return one list per row with the row's own count, from what is left of it after the cut.

    Parameters
    ----------
    kept : awkward content
        The elements that were kept, of all rows, one after the other.
    counts : array of int64, shape ``[N]``
        The rows' lengths before the cut.
    length : int
        At most so many of each row were kept; the rest is None.
    """
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    if not np.any(counts > length):
        return ListOffsetArray(Index64(offsets), kept)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    index = np.full(offsets[-1], -1, np.int64)
    index[position < length] = np.arange(kept.length)
    return ListOffsetArray(Index64(offsets), IndexedOptionArray.simplified(Index64(index), kept))
