"""Awkward's nodes taken apart: the structure above the rows, and the numbers or records below."""

from __future__ import annotations

from typing import Any

import numpy as np
from awkward.contents import (
    Content,
    IndexedArray,
    IndexedOptionArray,
    ListArray,
    ListOffsetArray,
    NumpyArray,
    RegularArray,
    UnionArray,
)
from awkward.index import Index8, Index64

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old._rows import Int64, Rows, Split, Tensor


def split(layout: Content, *, jagged: bool, what: str, below: int = 0) -> Split:
    """Take numbers or records apart into rows and what is in them; only the structure is read.

    The innermost list belongs to the row if it is `jagged` (`Padded`), and so do the axes of fixed
    length that are `below` (`Dense`). Messages call the column `what`.
    """
    outer, leaf = _outer(layout, 2 if jagged else 1 + below, what)
    rows = _pack(outer)
    if not jagged:
        return Split(rows, leaf, rows.ids, rows.ids + 1)
    if leaf.is_unknown:
        nothing = np.zeros(len(rows), np.int64)
        return Split(rows, leaf, nothing, nothing)
    if isinstance(leaf, ListOffsetArray):
        leaf = _trimmed(leaf)
        offsets = np.asarray(read(leaf.offsets), np.int64)
        starts, stops = offsets[:-1], offsets[1:]
    else:
        starts = np.asarray(read(leaf.starts), np.int64)
        # There may be more of them than there are lists.
        stops = np.asarray(read(leaf.stops), np.int64)[: len(starts)]
    if not rows.contiguous:
        starts, stops = starts[rows.ids], stops[rows.ids]
    return Split(rows, leaf.content, starts, stops)


def _trimmed(lists: ListOffsetArray) -> ListOffsetArray:
    """Return lists without the contents before the first and after the last."""
    offsets = read(lists.offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    if first == 0 and last == lists.content.length:
        return lists
    shifted = offsets - first if first else offsets
    return ListOffsetArray(Index64(np.asarray(shifted, np.int64)), lists.content[first:last])


def read(buffer: Any) -> Tensor:
    """Return the numbers of an awkward buffer, reading them from the file if need be."""
    data = buffer.data
    if isinstance(data, np.ndarray):
        return data
    return np.asarray(data.materialize() if hasattr(data, "materialize") else data)


def _outer(node: Content, leaf_depth: int, what: str) -> tuple[Content, Content]:
    """Return the structure above the leaves, numbering them, and the leaves themselves."""
    node = _of_one_kind(node, what)
    if node.is_option:
        node = node.to_IndexedOptionArray64()
        content, leaf = _outer(node.content, leaf_depth, what)
        return IndexedOptionArray(node.index, content), leaf
    if node.is_indexed and (node.purelist_depth > 1 or _has_option(node)):
        content, leaf = _outer(node.content, leaf_depth, what)
        return IndexedArray.simplified(node.index, content), leaf
    if node.is_unknown or node.purelist_depth == leaf_depth:
        return NumpyArray(np.arange(node.length, dtype=np.int64)), node
    # Above lists beside numbers, awkward counts from -1.
    mixed = node.is_list and node.purelist_depth <= 0
    if node.purelist_depth < leaf_depth and not mixed:
        raise InputError(
            f"{what} has one number where a list is needed (its type is {node.form.type}); a "
            "jagged axis is expected, such as the constituents of a jet; for one number per "
            "object use Row"
        )
    if isinstance(node, ListOffsetArray):
        node = _trimmed(node)
    content, leaf = _outer(node.content, leaf_depth, what)
    if isinstance(node, RegularArray):
        return RegularArray(content, node.size, zeros_length=node.length), leaf
    if isinstance(node, ListOffsetArray):
        return ListOffsetArray(node.offsets, content), leaf
    return ListArray(node.starts, node.stops, content), leaf


def _of_one_kind(node: Content, what: str) -> Content:
    """Return numbers in lists, and a union of lists as lists; refuse strings."""
    if node.parameter("__array__") in {"string", "bytestring", "char", "byte"}:
        raise InputError(f"{what} holds strings; expected numbers")
    if isinstance(node, NumpyArray) and len(node.inner_shape) > 0:
        return node.to_RegularArray()
    if node.is_union and node.purelist_depth != 1:
        return _lists_of_union(node, what)
    return node


def unwrapped(node: Content, at: Int64) -> tuple[Content, Int64]:
    """Return what is below indexes and options, and where some elements lie there; -1 is None."""
    while node.is_indexed or node.is_option:
        node = node.to_IndexedOptionArray64() if node.is_option else node
        index = np.asarray(read(node.index), np.int64)
        at = np.where(at < 0, -1, index[at]) if len(index) else at
        node = node.content
    return node, at


def _lists_of_union(union: Content, what: str) -> Content:
    """Return a union of lists as lists of a union, so that there is one structure.

    awkward's own merging makes float64 of int64 beside uint64.
    """
    tags, index = read(union.tags), np.asarray(read(union.index), np.int64)
    positions = np.empty(len(tags), np.int64)
    starts, stops, leaves = [], [], []
    lists = elements = 0
    for tag, kind in enumerate(union.contents):
        mine = tags == tag
        content, at = unwrapped(kind, index[: len(tags)][mine])
        if content.is_numpy and content.inner_shape:
            content = content.to_RegularArray()
        if not content.is_list or content.parameter("__array__") in {"string", "bytestring"}:
            raise InputError(f"{what} mixes types ({union.form.type}); expected one")
        content = content.to_ListOffsetArray64()
        offsets = read(content.offsets)
        positions[mine] = np.where(at < 0, -1, at + lists)
        starts.append(offsets[:-1] + elements)
        stops.append(offsets[1:] + elements)
        leaves.append(content.content)
        lists, elements = lists + content.length, elements + content.content.length
    lengths = [leaf.length for leaf in leaves]
    make = UnionArray if all(leaf.is_numpy for leaf in leaves) else UnionArray.simplified
    content = make(
        Index8(np.repeat(np.arange(len(leaves), dtype=np.int8), lengths)),
        Index64(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])),
        leaves,
    )
    whole = ListArray(*(Index64(np.concatenate(ends)) for ends in (starts, stops)), content)
    optional = any(kind.is_option for kind in union.contents)
    wrapped = IndexedOptionArray if optional else IndexedArray
    return wrapped.simplified(Index64(positions), whole)


def _has_option(node: Content) -> bool:
    while node.is_indexed and not node.is_option:
        node = node.content
    return bool(node.is_option)


def _pack(outer: Content) -> Rows:
    contiguous = _is_packed(outer)
    skeleton = leaf = outer if contiguous else outer.to_packed()
    while not isinstance(leaf, NumpyArray):
        leaf = leaf.content
    return Rows(skeleton, np.ascontiguousarray(leaf.data), contiguous=contiguous)


def _is_packed(node: Content) -> bool:
    """Whether lists follow each other without gaps, as they do when they are read from a file."""
    while isinstance(node, ListOffsetArray):
        offsets = read(node.offsets)
        if offsets[0] != 0 or offsets[-1] != node.content.length:
            return False
        node = node.content
    return isinstance(node, NumpyArray)
