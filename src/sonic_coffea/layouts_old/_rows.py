"""The rows of a tensor, and the structure above them, into which scores are put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
)
from awkward.index import Index8, Index64
from numpy.typing import NDArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old import _kernels

Tensor = NDArray[Any]
Int64 = NDArray[np.int64]
RowSelection = slice | Int64
"""Rows of a call: a range of them, or their numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of one call, and the lists and options that hold them.

    Attributes
    ----------
    skeleton : awkward content
        The structure above the rows, packed: one leaf for each row.
    ids : array of int64, shape ``[N]``
        Where each row lies in the buffers of the column it was taken from.
    """

    skeleton: Content
    ids: Int64
    contiguous: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def events(self) -> int:
        """Length of the outermost axis."""
        return int(self.skeleton.length)

    @property
    def levels(self) -> list[Content]:
        """The lists and options above a row, from the outside in."""
        return _levels_of(self.skeleton)

    @property
    def depth(self) -> int:
        """How many lists are above a row."""
        return sum(not node.is_option for node in self.levels)

    def unflatten(self, content: Content, attrs: Mapping[str, Any] | None = None) -> ak.Array:
        """Return `content`, one element per row, in the structure that the rows came from."""
        return ak.Array(_within(self.levels, content), attrs=attrs)

    def without(self, content: Content, masked: Sequence[RowSelection]) -> Content:
        """Return `content` with None at the rows that are masked."""
        if not masked:
            return content
        present = np.ones(len(self), np.int8)
        for rows in masked:
            present[rows] = 0
        return ByteMaskedArray(Index8(present), content, valid_when=True)

    def events_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and one-past-last event that rows `start` to `stop` belong to."""
        if stop <= start:
            return (0, 0)
        return self.event_of(start), self.event_of(stop - 1) + 1

    def event_of(self, row: int) -> int:
        """Return the number of the event that a row belongs to, without numbering all rows.

        Thousands of requests of a call may fail, and each failure names its events.
        """
        for node in reversed(self.levels):
            if node.is_option:
                row = int(np.flatnonzero(np.asarray(node.index.data) >= 0)[row])
            else:
                row = int(np.searchsorted(node.offsets.data, row, side="right")) - 1
        return row

    def event_numbers(self) -> Int64:
        """Return the number of the event that each row belongs to."""
        return self.above(1)[1]

    def above(self, depth: int) -> tuple[Content, Int64]:
        """Return the structure of the first `depth` axes, and where in it each row is."""
        levels = self.levels
        lists = [i for i, node in enumerate(levels) if not node.is_option]
        upper = 0 if depth == 1 else lists[depth - 2] + 1
        structure = self.outermost(upper)
        places = np.arange(levels[upper].length if upper < len(levels) else len(self))
        for node in levels[upper:]:
            if node.is_option:
                places = places[np.asarray(node.index.data) >= 0]
            else:
                places = np.repeat(places, np.diff(node.offsets.data))
        return structure, places

    def outermost(self, number: int) -> Content:
        """Return the structure of the first lists and options, with its leaves numbered."""
        levels = self.levels
        length = levels[number].length if number < len(levels) else len(self)
        return _within(levels[:number], NumpyArray(np.arange(length)))

    def opened(self) -> tuple[Content, Int64]:
        """Return the structure without the rows' own option, and the row at each of its places.

        The latter is -1 where there is None.
        """
        levels = self.levels
        if not levels or not levels[-1].is_option:
            return self.skeleton, np.arange(len(self))
        return self.outermost(len(levels) - 1), np.asarray(levels[-1].index.data)

    def check_same(self, other: Rows, names: tuple[str, str]) -> None:
        """Raise unless another column, or input, has the same rows."""
        if other is self or _same(self.skeleton, other.skeleton):
            return
        if self.events != other.events:
            detail = f"{self.events} and {other.events} events"
        else:
            detail = f"the first difference is in event {self._first_difference(other)}"
        raise InputError(
            f"{names[0]} and {names[1]} do not have the same objects ({detail}); "
            "choose both from the same collection, with the same cuts"
        )

    def _first_difference(self, other: Rows) -> int:
        low, high = 0, self.events
        while low < high:
            middle = (low + high) // 2
            if _same(*(r.skeleton[: middle + 1].to_packed() for r in (self, other))):
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A collection taken apart: the rows above, the numbers or records below.

    Row `i` is elements ``starts[i]`` to ``stops[i]`` of `leaf`; exactly one, if it is not jagged.
    """

    rows: Rows
    leaf: Content
    starts: Int64
    stops: Int64

    @property
    def counts(self) -> Int64:
        """Elements of each row, computed for all of them."""
        return self.stops - self.starts

    @property
    def offsets(self) -> Int64:
        """Where each row's elements begin, all rows one after the other; and the end."""
        return offsets_of(self.counts)

    @property
    def dense(self) -> bool:
        """Whether each row begins where the one before ends, and the first at 0."""
        first = self.starts[:1]
        return not first.any() and np.array_equal(self.starts[1:], self.stops[:-1])

    @property
    def compacted(self) -> Split:
        """The same, with the elements of each row behind those of the row before."""
        offsets = self.offsets
        return replace(self, starts=offsets[:-1], stops=offsets[1:])

    @property
    def square(self) -> bool:
        """Whether each list is as long as the list that it is in: pairs i x j of elements.

        A few lists, as in a chunk of few events, may be so by chance; that is not enough.
        """
        levels = self.rows.levels
        if not levels or levels[-1].is_option:
            return False
        offsets = np.asarray(levels[-1].offsets.data)
        # The counts of real constituents mostly differ in the first row already.
        if len(offsets) > 1 and offsets[1] and self.stops[0] - self.starts[0] != offsets[1]:
            return False
        counts = self.counts
        for end in (min(len(offsets) - 1, 16), len(offsets) - 1):
            sizes = np.diff(offsets[: end + 1])
            if not np.array_equal(counts[: offsets[end]], np.repeat(sizes, sizes)):
                return False
        return bool(sizes[sizes >= 2].sum() >= 10)

    def counts_of(self, rows: RowSelection) -> Int64:
        """Return the elements of each of some rows."""
        return self.stops[rows] - self.starts[rows]

    def positions(self, rows: RowSelection = slice(None)) -> Int64:
        """Return where the elements of some rows lie, one row after the other."""
        starts, stops = self.starts[rows], self.stops[rows]
        positions = np.empty(int((stops - starts).sum()), np.int64)
        _kernels.positions(positions, starts, stops)
        return positions


def offsets_of(counts: Int64) -> Int64:
    """Return where lists of some lengths begin, one after the other; and the end."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def numbered(present: Tensor) -> Int64:
    """Return the number of each present place, and -1 for the others."""
    return np.where(present, np.cumsum(present) - 1, -1)


def _levels_of(skeleton: Content) -> list[Content]:
    levels = []
    while not skeleton.is_numpy:
        levels.append(skeleton)
        skeleton = skeleton.content
    return levels


def _within(levels: Sequence[Content], content: Content) -> Content:
    """Return a content in lists and options such as these."""
    for node in reversed(levels):
        if isinstance(node, ListOffsetArray):
            content = ListOffsetArray(node.offsets, content)
        elif isinstance(node, RegularArray):
            content = RegularArray(content, node.size, zeros_length=node.length)
        else:
            content = IndexedOptionArray.simplified(node.index, content)
    return content


def aligned(main: Rows, other: Rows, ids: Int64, depth: int) -> Int64 | None:
    """Return the place in a column of what lies above each row of `main`; -1 where there is None.

    The column has `other` in the first `depth` axes, each at the place that `ids` tell. None if
    `main` has other axes.
    """
    structure, places = main.above(depth)
    theirs, present = other.opened()
    if not _same(structure, theirs):
        return None
    lookup = np.full(len(present), -1, np.int64)
    lookup[present >= 0] = ids[present[present >= 0]]
    return lookup[places]


def united(each: Sequence[Rows]) -> Rows:
    """Return the rows that any of several columns has; None is left where none has it.

    Columns that have not the same lists are left to `aligned`.
    """
    if len(each) == 1:
        return each[0]
    structure, present = each[0].opened()
    for other in each[1:]:
        theirs, more = other.opened()
        if _same(structure, theirs):
            present = np.maximum(present, more)
    is_present = present >= 0
    number = int(np.count_nonzero(is_present))
    leaf: Content = NumpyArray(np.arange(number))
    if number < len(present):
        leaf = IndexedOptionArray(Index64(numbered(is_present)), leaf)
    return Rows(_within(_levels_of(structure), leaf), np.arange(number))


def _same(a: Content, b: Content) -> bool:
    while True:
        a, b = _present(a), _present(b)
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


def _present(node: Content) -> Content:
    """Return what is below options under which nothing is missing."""
    while node.is_option and not np.any(node.index.data < 0):
        node = node.content
    return node
