"""Lists and options above numbers, taken apart once; results are put back into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Any

import awkward as ak
import numpy as np
from awkward import contents
from awkward.contents import Content
from awkward.index import Index8, Index64
from numpy.typing import NDArray

from sonic_coffea.errors import InputError, shortened
from sonic_coffea.layouts._expressions import Path, text_of

Tensor = NDArray[Any]
Int64 = NDArray[np.int64]
RowSelection = slice | Int64
"""Rows of a call: a range of them, or their numbers."""

STRINGS = frozenset({"string", "bytestring"})

STRING = np.dtype(object)
"""The type of tensors of strings: each is of type bytes."""


@dataclass(slots=True, eq=False)  # frozen ones take longer, and each call has several
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
        What None means in an option: the object is None (``""``), a picked one is not there
        (``"Jet[0]"``), its number is None (``"None"``), or there may be no objects at all
        (``"plain"``), as in a column of numbers.
    """

    data: Int64
    is_list: bool = True
    size: int | None = None
    gap: str = ""

    def __len__(self) -> int:
        """Return how many there are below the level."""
        return int(self.data[-1] if self.is_list else np.max(self.data, initial=-1) + 1)

    @property
    def is_pick(self) -> bool:
        """Whether it is an option of objects that were picked, such as ``Jet[0]``."""
        return "[" in self.gap

    @property
    def counts(self) -> Int64:
        """The length of each list."""
        return np.diff(self.data)

    def equals(self, other: Level) -> bool:
        """Return whether two levels have the same lists, or miss the same."""
        if self.data is other.data:
            return True
        return self.is_list == other.is_list and np.array_equal(self.data, other.data)


Levels = tuple[Level, ...]


NOTHING = contents.EmptyArray()


@dataclass(slots=True, eq=False)
class Structure:
    """The lists and options above rows or numbers, from the outside in, and what is below them.

    Attributes
    ----------
    events : int
        The length of the outermost axis.
    levels : tuple of Level
        The lists and options.
    node : awkward content
        What holds the numbers, records or strings below them.
    at : slice or array of int64
        Where these are in the node: a range, or the place of each.
    """

    events: int
    levels: Levels
    node: Content = NOTHING
    at: slice | Int64 = field(default_factory=lambda: slice(0, 0))

    def __len__(self) -> int:
        return len(self.levels[-1]) if self.levels else self.events

    @property
    def depth(self) -> int:
        """How many lists there are."""
        return sum(level.is_list for level in self.levels)

    def unflatten(self, content: Content, attrs: Mapping[str, Any] | None = None) -> ak.Array:
        """Return `content`, one element for each row, in the structure."""
        for level in reversed(self.levels):
            if not level.is_list:
                content = contents.IndexedOptionArray.simplified(Index64(level.data), content)
            elif level.size is not None:
                content = contents.RegularArray(
                    content, level.size, zeros_length=len(level.data) - 1
                )
            else:
                content = contents.ListOffsetArray(Index64(level.data), content)
        return ak.Array(content, attrs=attrs)

    def without(self, content: Content, masked: Sequence[RowSelection]) -> Content:
        """Return `content` with None at the rows that are masked."""
        if not masked:
            return content
        present = np.ones(len(self), np.int8)
        for rows in masked:
            present[rows] = 0
        return contents.ByteMaskedArray(Index8(present), content, valid_when=True)

    def event_of(self, row: int) -> int:
        """Return the event that a row belongs to."""
        return int(self.event_numbers()[row])

    def event_numbers(self) -> Int64:
        """Return the number of the event that each row belongs to."""
        return _below(self.levels, np.arange(self.events))

    def check_same(self, other: Structure, fields: tuple[Path | str, Path | str]) -> None:
        """Raise unless another field, part or input has the same rows.

        Raises
        ------
        InputError
            Naming the first event that differs.
        """
        mine, theirs = _essential(self.levels), _essential(other.levels)
        correct = "choose both from the same collection, with the same cuts"
        if self.events == other.events:
            if len(mine) == len(theirs) and all(map(Level.equals, mine, theirs)):
                return
            event, is_none = self._first_difference(mine, theirs)
            detail = f"the first difference is in event {event}"
            if is_none:
                detail += ", where one is None"
                correct = "leave out what lacks one, as in model(ak.mask(events, has_both))"
        else:
            detail = f"{self.events} and {other.events} events"
        names = (f if isinstance(f, str) else f"field {text_of(f)!r}" for f in fields)
        raise InputError(
            f"{' and '.join(names)} do not have the same objects ({detail}); {correct}"
        )

    def _first_difference(self, mine: Levels, theirs: Levels) -> tuple[int, bool]:
        """Return the first event in which some levels differ, and whether one is None there."""
        for number, (one, other) in enumerate(zip_longest(mine, theirs)):
            above = Structure(self.events, mine[:number])
            if one is None or other is None or one.is_list != other.is_list:
                option = next((x for x in (one, other) if x is not None and not x.is_list), None)
                if option is None:
                    return 0, False
                return above.event_of(int(np.argmax(option.data < 0))), True
            if not one.equals(other):
                place = int(np.argmax(one.data != other.data)) - one.is_list
                return above.event_of(place), not one.is_list
        return 0, False

    def align(self, other: Structure, fields: tuple[Path | str, Path | str]) -> Int64 | None:
        """Return the number of the element of another field for each row.

        Elements of outer objects are repeated. -1 stands for a missing one; None for all numbers in
        their order.

        Raises
        ------
        InputError
            If the other field has other lists.
        """
        if self.levels is other.levels and self.events == other.events:
            return None
        ours, theirs = list(_essential(self.levels)), list(_essential(other.levels))
        count = self.events
        while ours and theirs and ours[0].equals(theirs[0]):
            count = len(ours.pop(0))
            theirs.pop(0)
        if self.events != other.events or any(level.is_list for level in theirs):
            self.check_same(other, fields)
        index = merged(theirs)
        if not ours:
            return index
        return _below(tuple(ours), np.arange(count) if index is None else index)


def _essential(levels: Levels) -> Levels:
    """Return levels without options that miss nothing, and options inside options as one."""
    essential: list[Level] = []
    for level in levels:
        if level.is_list:
            essential.append(level)
        elif np.any(level.data < 0):
            is_inside = essential and not essential[-1].is_list
            places = through(level.data, essential.pop().data) if is_inside else level.data
            essential.append(Level(places, is_list=False))
    return tuple(essential)


def _below(levels: Levels, numbers: Int64) -> Int64:
    """Return, for each element below some levels, the number of what it is in."""
    for level in levels:
        numbers = np.repeat(numbers, level.counts) if level.is_list else numbers[level.data >= 0]
    return numbers


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


def column_at(data: Tensor, at: slice | Int64, index: Int64 | None) -> tuple[Tensor, Int64 | None]:
    """Return numbers, and the place in them of each of an index into those that lie at `at`."""
    if isinstance(at, slice):
        return data[at], index
    return data, at if index is None else through(at, index)


def numbered(present: Tensor, *, gap: str = "") -> Level:
    """Return an option whose present places are numbered."""
    return Level(np.where(present, np.cumsum(present) - 1, -1), is_list=False, gap=gap)


def without_options(levels: Levels, *, keep: Sequence[str] = ()) -> Levels:
    """Return levels without the options below the lists, but for some kinds of gaps."""
    while levels and not levels[-1].is_list and levels[-1].gap not in keep:
        levels = levels[:-1]
    return levels


def filled(levels: Levels) -> Levels:
    """Return levels with empty lists for objects that were picked, such as Jet[0], and are not."""
    above = without_options(levels[:-1])
    options = levels[len(above) : -1]
    if not any(option.is_pick for option in options):
        return levels
    counts = levels[-1].counts
    is_there = np.ones(len(counts), np.bool_)
    for option in reversed(options):  # a list that is None stays so
        counts = np.append(counts, 0)[option.data]
        is_there = np.append(is_there, option.is_pick)[option.data]
    kept = () if all(option.is_pick for option in options) else (numbered(is_there, gap="plain"),)
    return *above, *kept, Level(offsets_of(counts[is_there]))


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


@cache
def real_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which numpy computes with numbers of a type and real ones."""
    return np.result_type(dtype, np.float32)


def widened(tensor: Tensor) -> Tensor:
    """Return numbers in a type that awkward has, and can reduce: of 16 bits, in float32."""
    half = tensor.dtype.kind not in "biuO" and tensor.dtype.itemsize < 4
    return tensor.astype(np.float32) if half else tensor


def whole(node: Content) -> Structure:
    """Return all elements of an array, taken apart."""
    return down(node.length, (), node, slice(0, node.length))


def down(events: int, levels: Levels, node: Content, at: slice | Int64) -> Structure:
    """Go down through lists and options to numbers, records or strings; only lists are read."""
    while not _is_leaf(node):
        if node.is_numpy:
            node = node.to_RegularArray()
        elif node.is_union:
            has_none = node.contents[0].is_option  # then all of them are
            index, node = _of_union(node[at])
            if has_none:
                levels = (*levels, numbered(index >= 0))
            at = slice(0, node.length)
            if node.is_union:
                break
        elif node.is_option or node.is_indexed:
            index = _index_of(node, at)
            present = index[index >= 0] if node.is_option else index
            if node.is_option:
                levels = (*levels, numbered(index >= 0))
            if node.is_indexed or len(present) < len(index):
                at = present
            node = node.content
        else:
            offsets, at = _lists_of(node, at)
            levels = (*levels, Level(offsets, size=node.size if node.is_regular else None))
            node = node.content
    return Structure(events, levels, node, at)


def _is_leaf(node: Content) -> bool:
    if node.is_numpy:
        return not node.inner_shape
    return node.is_record or node.is_unknown or node.parameter("__array__") in STRINGS


def _lists_of(node: Content, at: slice | Int64) -> tuple[Int64, slice | Int64]:
    """Return the offsets of some lists, and where their elements lie; buffers are read once."""
    if isinstance(at, slice) and at.start < at.stop and hasattr(node, "offsets"):
        offsets = np.asarray(read(node.offsets)[at.start : at.stop + 1], np.int64)
        return offsets - offsets[0], slice(int(offsets[0]), int(offsets[-1]))
    starts, stops = (np.asarray(read(x)[at], np.int64) for x in (node.starts, node.stops))
    counts = stops - starts
    if len(starts) and np.array_equal(starts[1:], stops[:-1]):
        return offsets_of(counts), slice(int(starts[0]), int(stops[-1]))
    return offsets_of(counts), ranges(starts, counts)


def _index_of(node: Content, at: slice | Int64) -> Int64:
    """Return where elements of an option, or an index, lie in its content; -1 for None."""
    if node.is_indexed:
        return np.asarray(read(node.index)[at], np.int64)
    places = np.arange(at.start, at.stop) if isinstance(at, slice) else at
    if not hasattr(node, "mask"):  # nothing can be missing
        return places
    masked = node.to_ByteMaskedArray() if hasattr(node, "lsb_order") else node
    present = read(masked.mask)[at].astype(np.bool_) == masked.valid_when
    return np.where(present, places, -1)


def _of_union(union: Content) -> tuple[Int64, Content]:
    """Return a union as one kind of lists or numbers, if it is not one of records.

    The first array is negative where elements are None, which are left out.

    Raises
    ------
    InputError
        If lists and numbers are mixed, or integers that no type holds together.
    """
    tags, kinds = np.asarray(read(union.tags)), []
    index = np.array(read(union.index)[: len(tags)], np.int64)
    for tag, content in enumerate(union.contents):
        here, kind = tags == tag, content
        if kind.is_option or kind.is_indexed:
            index[here], kind = _index_of(kind, index[here]), kind.content
        chosen = kind[index[here & (index >= 0)]]  # merging copies all there is
        kinds.append(chosen.to_RegularArray() if chosen.is_numpy else chosen)
    tags = tags[index >= 0]
    one = _in_order(tags, kinds)
    are_lists = [kind.is_list and kind.parameter("__array__") not in STRINGS for kind in kinds]
    types = [getattr(leaf(node), "dtype", STRING).kind for node in (one, *kinds)]
    if any(are_lists) != all(are_lists) or (types[0] == "f" and set(types[1:]) <= {*"iub"}):
        raise InputError(f"mixes types ({shortened(union.form.type)}); expected one")
    if one.is_union and all(are_lists):  # of records that differ
        counts = np.asarray(ak.num(ak.Array(one), axis=1))
        inner = [kind.to_ListOffsetArray64(start_at_zero=True).content for kind in kinds]
        content = _in_order(np.repeat(tags, counts), inner)
        one = contents.ListOffsetArray(Index64(offsets_of(counts)), content)
        if all(kind.is_regular for kind in union.contents):
            one = one.to_RegularArray()
    return index, one


def _in_order(tags: Tensor, kinds: Sequence[Content]) -> Content:
    """Return the next element of its kind for each tag."""
    index = np.zeros(len(tags), np.int64)
    for tag in range(len(kinds)):
        index[tags == tag] = np.arange(np.count_nonzero(tags == tag))
    return contents.UnionArray.simplified(Index8(tags), Index64(index), kinds, mergebool=True)


def leaf(node: Content) -> Content:
    """Return what is below lists, options and indexes."""
    is_list = node.is_list and node.parameter("__array__") not in STRINGS
    return leaf(node.content) if is_list or node.is_option or node.is_indexed else node
