"""Lists and options above numbers, taken apart once; results are put back into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import awkward as ak
import numpy as np
from awkward.contents import (
    ByteMaskedArray,
    Content,
    IndexedOptionArray,
    ListOffsetArray,
    NumpyArray,
    RegularArray,
    UnionArray,
)
from awkward.index import Index8, Index64
from numpy.typing import NDArray

from sonic_coffea.errors import InputError

Tensor = NDArray[Any]
Int64 = NDArray[np.int64]
RowSelection = slice | Int64
"""Rows of a call: a range of them, or their numbers."""

STRINGS = frozenset({"string", "bytestring"})

STRING = np.dtype(object)
"""The type of tensors of strings: each is of type bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One level of a structure: lists, or an option.

    Attributes
    ----------
    data : array of int64
        Where each list begins, and the end. Or, for an option, the number of what is at each place,
        and -1 for None.
    is_list : bool
        Whether it is a level of lists.
    size : int or None
        The length of all lists, if their type says so.
    gap : str
        For an option that is no object's own: what is missing, such as ``"Jet[0]"`` or ``"None"``;
        ``"plain"`` of a column that is no field of objects.
    """

    data: Int64
    is_list: bool = True
    size: int | None = None
    gap: str = ""

    def __len__(self) -> int:
        """Return how many there are below the level."""
        return int(self.data[-1] if self.is_list else np.max(self.data, initial=-1) + 1)

    @property
    def places(self) -> int:
        """How many lists, or places of an option, there are."""
        return len(self.data) - self.is_list

    @property
    def counts(self) -> Int64:
        """The length of each list."""
        counts: Int64 = np.diff(self.data)
        return counts

    @property
    def is_trivial(self) -> bool:
        """Whether it is an option, and nothing is missing."""
        return not self.is_list and not np.any(self.data < 0)

    def equals(self, other: Level) -> bool:
        """Return whether two levels have the same lists, or miss the same."""
        alike = self.is_list == other.is_list and np.array_equal(self.data, other.data)
        return self.data is other.data or alike


Levels = tuple[Level, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The lists and options above rows or numbers, from the outside in, and what is below them.

    Attributes
    ----------
    events : int
        The length of the outermost axis.
    levels : tuple of Level
        The lists and options.
    node : awkward content or None
        What holds the numbers, records or strings below them.
    at : slice or array of int64
        Where these are in the node: a range, or the place of each.
    """

    events: int
    levels: Levels
    node: Content | None = None
    at: slice | Int64 = field(default_factory=lambda: slice(0, 0))

    def __len__(self) -> int:
        return len(self.levels[-1]) if self.levels else self.events

    @property
    def depth(self) -> int:
        """How many lists there are."""
        return sum(level.is_list for level in self.levels)

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known of what is below, as there is nothing."""
        return self.node is not None and bool(self.node.is_unknown)

    @property
    def is_string(self) -> bool:
        """Whether each element is a string."""
        return self.node is not None and self.node.parameter("__array__") in STRINGS

    @property
    def type(self) -> str:
        """The type of what is below, as awkward shows it."""
        return "unknown" if self.node is None else str(self.node.form.type)

    def unflatten(self, content: Content, attrs: Mapping[str, Any] | None = None) -> ak.Array:
        """Return `content`, one element for each row, in the structure."""
        for level in reversed(self.levels):
            if not level.is_list:
                content = IndexedOptionArray.simplified(Index64(level.data), content)
            elif level.size is not None:
                content = RegularArray(content, level.size, zeros_length=level.places)
            else:
                content = ListOffsetArray(Index64(level.data), content)
        return ak.Array(content, attrs=attrs)

    def without(self, content: Content, masked: Sequence[RowSelection]) -> Content:
        """Return `content` with None at the rows that are masked."""
        if not masked:
            return content
        present = np.ones(len(self), np.int8)
        for rows in masked:
            present[rows] = 0
        return ByteMaskedArray(Index8(present), content, valid_when=True)

    def event_of(self, row: int) -> int:
        """Return the event that a row belongs to, without numbering all rows."""
        for level in reversed(self.levels):
            if level.is_list:
                row = int(np.searchsorted(level.data, row, side="right")) - 1
            else:
                row = int(np.flatnonzero(level.data >= 0)[row])
        return row

    def events_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first event of rows `start` to `stop`, and one past the last."""
        if stop <= start:
            return (0, 0)
        return self.event_of(start), self.event_of(stop - 1) + 1

    def event_numbers(self) -> Int64:
        """Return the number of the event that each row belongs to."""
        return _below(self.levels, np.arange(self.events))

    def check_same(self, other: Structure, names: tuple[str, str]) -> None:
        """Raise unless another field, part or input has the same rows.

        Raises
        ------
        InputError
            Naming the first event that differs.
        """
        mine, theirs = _essential(self.levels), _essential(other.levels)
        if self.events != other.events:
            detail = f"{self.events} and {other.events} events"
        elif len(mine) == len(theirs) and all(map(Level.equals, mine, theirs)):
            return
        else:
            detail = f"the first difference is in event {self._first_difference(mine, theirs)}"
        raise InputError(
            f"{names[0]} and {names[1]} do not have the same objects ({detail}); "
            "choose both from the same collection, with the same cuts"
        )

    def _first_difference(self, mine: Levels, theirs: Levels) -> int:
        """Return the first event in which some levels differ."""
        alike, event = self.events, self.events
        for depth, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a.is_list and b.is_list:
                different = np.diff(a.data[: alike + 1]) != np.diff(b.data[: alike + 1])
            else:  # where there is no option, nothing is missing
                missing = [~np.full(alike, x.is_list) & (x.data[:alike] < 0) for x in (a, b)]
                different = missing[0] != missing[1]
            if different.any():
                alike = int(np.argmax(different))
                event = min(event, Structure(self.events, mine[:depth]).event_of(alike))
            if a.is_list != b.is_list:
                break
            alike = int(a.data[alike] if a.is_list else np.sum(a.data[:alike] >= 0))
        return min(event, self.events - 1)


def _essential(levels: Levels) -> Levels:
    return tuple(level for level in levels if not level.is_trivial)


def _below(levels: Levels, numbers: Int64) -> Int64:
    """Return, for each element below some levels, the number of what it is in."""
    for level in levels:
        numbers = np.repeat(numbers, level.counts) if level.is_list else numbers[level.data >= 0]
    return numbers


def align(main: Levels, other: Levels, events: int, others: int) -> Int64 | None:
    """Return the number of the element below `other` for each one below `main`.

    Elements of outer objects are repeated. -1 stands for a missing one; None for all numbers in
    their order. The outermost axes have `events` and `others` places.

    Raises
    ------
    ValueError
        If `other` has other lists than `main`.
    """
    ours, theirs = list(_essential(main)), list(_essential(other))
    count = events
    while ours and theirs and ours[0].equals(theirs[0]):
        count = len(ours.pop(0))
        theirs.pop(0)
    if events != others or any(level.is_list for level in theirs):
        raise ValueError
    index = merged(theirs)
    if not ours:
        return index
    return _below(tuple(ours), np.arange(count) if index is None else index)


def merged(options: Sequence[Level]) -> Int64 | None:
    """Return the index of options inside options; None if there are none."""
    index = None
    for option in options:
        index = option.data if index is None else through(option.data, index)
    return index


def through(places: Int64, index: Int64) -> Int64:
    """Return the place that each of an index has, and -1 where that has none."""
    if not len(places):
        return np.full(len(index), -1)
    return np.where(index < 0, -1, places[np.maximum(index, 0)])


def numbered(present: Tensor, *, gap: str = "") -> Level:
    """Return an option whose present places are numbered."""
    return Level(np.where(present, np.cumsum(present) - 1, -1), is_list=False, gap=gap)


def without_options(levels: Levels, *, keep: Sequence[str] = ()) -> Levels:
    """Return levels without the options below the lists, but for some kinds of gaps."""
    while levels and not levels[-1].is_list and levels[-1].gap not in keep:
        levels = levels[:-1]
    return levels


def offsets_of(counts: Int64) -> Int64:
    """Return where lists of some lengths begin, one after the other; and the end."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges(starts: Int64, counts: Int64) -> Int64:
    """Return ``start, start + 1, …`` of each list, one list after the other."""
    offsets = offsets_of(counts)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)


def read(buffer: Any) -> Tensor:
    """Return the numbers of an awkward buffer, reading them from the file if need be."""
    data = buffer.data
    if isinstance(data, np.ndarray):
        return data
    return np.asarray(data.materialize() if hasattr(data, "materialize") else data)


def widened(tensor: Tensor) -> Tensor:
    """Return numbers in a type that awkward has, and can reduce: of 16 bits, in float32."""
    half = tensor.dtype.kind not in "biuO" and tensor.dtype.itemsize < 4
    return tensor.astype(np.float32) if half else tensor


def whole(node: Content) -> Structure:
    """Return all elements of an array, taken apart."""
    return down(node.length, (), node, slice(0, node.length))


def down(events: int, levels: Levels, node: Content, at: slice | Int64) -> Structure:
    """Go down through lists and options to numbers, records or strings; only lists are read."""
    while not (node.is_record or node.is_unknown or node.parameter("__array__") in STRINGS):
        if node.is_numpy:
            if not node.inner_shape:
                break
            node = node.to_RegularArray()
        elif node.is_union:
            # Only what is chosen, as merging copies it.
            node = _one_kind(node[at].to_packed())
            at = slice(0, node.length)
            if node.is_union:
                break
        elif node.is_option:
            index = _index_of_option(node, at)
            present = index >= 0
            levels = (*levels, numbered(present))
            if not (present.all() and isinstance(at, slice) and not node.is_indexed):
                at = index[present]
            node = node.content
        elif node.is_indexed:
            node, at = node.content, np.asarray(read(node.index), np.int64)[at]
        else:
            starts, counts = _lists(node, at)
            level = Level(offsets_of(counts), size=node.size if node.is_regular else None)
            levels, node, at = (*levels, level), node.content, _joined(starts, counts)
    return Structure(events, levels, node, at)


def _positions(at: slice | Int64) -> Int64:
    return np.arange(at.start, at.stop) if isinstance(at, slice) else at


def _index_of_option(node: Content, at: slice | Int64) -> Int64:
    """Return where elements of an option lie in its content, and -1 where they are missing."""
    if node.is_indexed:
        return np.asarray(read(node.index), np.int64)[at]
    if not hasattr(node, "mask"):  # nothing can be missing
        return _positions(at)
    masked = node.to_ByteMaskedArray() if hasattr(node, "lsb_order") else node
    present = read(masked.mask)[at].astype(np.bool_) == masked.valid_when
    return np.where(present, _positions(at), -1)


def _lists(node: Content, at: slice | Int64) -> tuple[Int64, Int64]:
    """Return where some lists of a node start, and their lengths."""
    if node.is_regular:
        starts = _positions(at) * node.size
        return starts, np.full(len(starts), node.size)
    if isinstance(node, ListOffsetArray):
        offsets = read(node.offsets)
        starts, stops = offsets[:-1][at], offsets[1:][at]
    else:
        starts, stops = read(node.starts)[at], read(node.stops)[at]
    starts = starts.astype(np.int64, copy=False)
    return starts, stops.astype(np.int64, copy=False) - starts


def _joined(starts: Int64, counts: Int64) -> slice | Int64:
    """Return the elements of lists: a range, if each list follows the one before."""
    if not len(starts):
        return slice(0, 0)
    if np.array_equal(starts[1:], starts[:-1] + counts[:-1]):
        return slice(int(starts[0]), int(starts[-1] + counts[-1]))
    return ranges(starts, counts)


def _one_kind(union: Content) -> Content:
    """Return a union of numbers, or of lists, as one kind; of records, it stays a union.

    Raises
    ------
    InputError
        If lists and numbers are mixed, or integers that no type holds together.
    """
    kinds = union.contents
    one = UnionArray.simplified(union.tags, union.index, kinds, mergebool=True)
    are_lists = [_wraps(_leaf(kind, lists=False)) for kind in kinds]
    if one.is_union and all(are_lists):
        # Lists of records that differ have their lists in common.
        one = UnionArray.simplified(union.tags, union.index, [_lists_only(kind) for kind in kinds])
    types = [getattr(_leaf(node), "dtype", STRING).kind for node in (one, *kinds)]
    if (one.is_union and any(are_lists)) or (types[0] == "f" and set(types[1:]) <= {*"iub"}):
        raise InputError(f"mixes types ({union.form.type}); expected one")
    return one


def _wraps(node: Content, *, lists: bool = True) -> bool:
    """Whether a node is an option or an index, or a list, of something else."""
    is_list = node.is_list and node.parameter("__array__") not in STRINGS
    return bool(node.is_option or node.is_indexed or (lists and is_list))


def _leaf(node: Content, *, lists: bool = True) -> Content:
    """Return what is below options and indexes, and below lists."""
    while _wraps(node, lists=lists):
        node = node.content
    return node


def _lists_only(node: Content) -> Content:
    if _wraps(node):
        return node.copy(content=_lists_only(node.content))
    return NumpyArray(np.zeros(node.length, np.bool_))
