"""The columns of one input: of its rows, of outer objects, and by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old._collection import of_one_collection, positions_of, taken_apart
from sonic_coffea.layouts_old._columns import Columns
from sonic_coffea.layouts_old._expressions import expression_of
from sonic_coffea.layouts_old._fields import Column, Feature, Source
from sonic_coffea.layouts_old._groups import grouped
from sonic_coffea.layouts_old._numbers import (
    Composed,
    is_converted,
    numbers_of,
    order_of_elements,
    read_through,
    readable,
)
from sonic_coffea.layouts_old._paths import path_of
from sonic_coffea.layouts_old._range import check_range
from sonic_coffea.layouts_old._rows import Int64, Split, aligned, united

if TYPE_CHECKING:
    from awkward.contents import Content


def bind_columns(
    source: Source,
    features: Sequence[Feature],
    *,
    jagged: bool,
    target: np.dtype[Any] | None,
    sort_by: str | None = None,
    ascending: bool = False,
    missing: Sequence[float] | None = None,
    longest: int | None = None,
) -> Columns:
    """Read the columns of one input.

    Columns of one collection whose rows lie alike are read in place. The others are read through
    the positions of their elements:

    - a column that was computed after a cut, beside one of the file;
    - columns that are sorted or converted, unless all of their elements are used;
    - numbers of other objects: a row's own number beside its elements, one object of a list, or the
      object that an index refers to.

    Parameters
    ----------
    source : Source
        The arrays.
    features : sequence of Feature
        What goes into each slot of the tensor.
    jagged : bool
        Whether the innermost list belongs to the row.
    target : dtype or None
        What the tensor will hold; None if the caller checks what it can hold.
    sort_by : str, optional
        The field by which the elements of a row are sorted.
    ascending : bool
        Whether they are sorted upwards.
    missing : sequence of float, optional
        What stands for a missing number in each slot; without it, there must be none.
    longest : int, optional
        How many elements of a row are sent at most; others may be numbers that cannot be sent.
    """
    named = [*features, *([Feature(sort_by)] if sort_by else [])]
    order = None
    together = None if sort_by else of_one_collection(source, features, jagged=jagged)
    if together is None:
        sorts = sort_by is not None
        gathering = _Gathering(source, named, jagged=jagged, sorts=sorts, missing=missing)
        together = gathering.read()
    first, columns = together
    if sort_by:
        if columns[-1].by_row:
            raise InputError(
                f"field {sort_by!r}, by which constituents are sorted, is a number of the whole row"
            )
        order = order_of_elements(first, columns.pop(), ascending=ascending)
        composed = Composed()
        columns = [c if c.by_row else replace(c, index=composed(c.index, order)) for c in columns]
    if target is not None:
        check_range(columns, first, target, longest)
    return Columns(first, tuple(columns), grouped(columns, missing), order)


class _Gathering:
    """What the columns of one input have to be read through.

    A field with the most axes is the rows' own. One with fewer is repeated, as numpy would: each
    row, or element, reads the number of the object that it is in.
    """

    def __init__(
        self,
        source: Source,
        named: Sequence[Feature],
        *,
        jagged: bool,
        sorts: bool,
        missing: Sequence[float] | None,
    ) -> None:
        self._source, self._named, self._jagged = source, named, jagged
        computed = any(f.expression is not None or f.index is not None for f in named)
        self._needs_dense = sorts or computed
        self._missing, self._stand = missing is not None, missing or ()
        self._paths = {text: path_of(text) for feature in named for text in feature.paths}
        self._numbers_of = partial(numbers_of, composed=Composed(), missing=self._missing)
        self._indexes: dict[Any, Int64] = {}
        self._own: dict[str, tuple[Content, Int64 | None]] = {}

    def read(self) -> tuple[Split, list[Column]]:
        """Return the rows, and the columns, where they are if they lie alike."""
        depths = {text: _axes(self._source, path.column) for text, path in self._paths.items()}
        known = {t: d - (self._paths[t].pick is not None) for t, d in depths.items() if d}
        top = max(known.values(), default=2 if self._jagged else 1)
        self._row_depth = top - 1 if self._jagged else top
        self._depth = {text: known.get(text, top) for text in self._paths}
        own = [t for t, path in self._paths.items() if self._depth[t] == top]
        elements = [t for t in own if self._jagged and self._paths[t].pick is None]
        self._take_apart([t for t in self._paths if t not in elements])
        if self._jagged:
            self._first = self._own_elements(elements)
            self._counts = self._first.counts
            self._number = int(self._first.stops[-1]) if len(self._counts) else 0
            over = [t for t in own if t not in elements]
            if over:
                raise InputError(
                    f"field {over[0]!r} picks an object of each constituent; an index picks one "
                    "of the row"
                )
        else:
            self._first = self._own_rows(own, top)
            self._number = len(self._first.rows)
        each = zip_longest(self._named, self._stand)
        return self._first, [self._column(feature, stands) for feature, stands in each]

    def _own_elements(self, own: list[str]) -> Split:
        """Take rows with elements apart, and say where each own column has these elements."""
        if not own:
            raise InputError(
                f"field {next(iter(self._paths))!r} has one number where a list is needed: an "
                "index picks one object of it; leave the index out, or use Row"
            )
        splits, leaves = taken_apart(self._source, [Feature(t) for t in own], jagged=True)
        first = splits[0]
        self._rows = first.rows
        indexes: list[Int64 | None] = [None] * len(splits)
        if not self._lie_alike(own, splits, leaves):
            indexes = positions_of(splits)
            first = first.compacted
        self._own = dict(zip(own, zip(leaves, indexes, strict=True), strict=True))
        return first

    def _own_rows(self, own: list[str], depth: int) -> Split:
        """Take rows without elements apart; a row is in any of the columns."""
        splits = [self._apart[text][0] for text in own]
        leaves = [self._apart[text][1] for text in own]
        each = list(dict.fromkeys(split.rows for split in splits))
        self._rows = united(each) if self._missing else each[0]
        picks = any(self._paths[text].pick is not None for text in own)
        if not picks and (len(each) == 1 or not self._missing):
            for text, split in zip(own, splits, strict=True):
                self._rows.check_same(split.rows, (f"field {own[0]!r}", f"field {text!r}"))
            if self._lie_alike(own, splits, leaves):
                self._own = {text: (leaf, None) for text, leaf in zip(own, leaves, strict=True)}
                return splits[0]
        self._own = {text: (self._apart[text][1], self._aligned(text, depth)) for text in own}
        every = np.arange(len(self._rows))
        return Split(self._rows, leaves[0], every, every + 1)

    def _lie_alike(
        self, own: Sequence[str], splits: Sequence[Split], leaves: Sequence[Content]
    ) -> bool:
        """Whether columns of the same rows are best read where they are, without an index."""
        first = splits[0]
        if not all(s is first or np.array_equal(s.starts, first.starts) for s in splits):
            return False
        converted = [
            leaf
            for text, leaf in zip(own, leaves, strict=True)
            if any(is_converted(leaf, f) for f in self._readers(text))
        ]
        # What is converted is converted whole.
        if (converted or self._needs_dense) and not first.dense:
            return False
        return all(leaf.length <= first.stops.max(initial=0) for leaf in converted)

    def _readers(self, text: str) -> list[Feature]:
        """Return what reads a field."""
        by_name = [f for f in self._named if f.name == text and f.paths == (text,)]
        return by_name or [Feature(text)]

    def _take_apart(self, others: list[str]) -> None:
        """Take columns apart that have no elements of rows: each one's split, and its leaf."""
        self._apart: dict[str, tuple[Split, Content]] = {}
        for picks in (False, True):
            some = [t for t in others if (self._paths[t].pick is not None) == picks]
            named = [Feature(self._paths[t].column) for t in some]
            apart = taken_apart(self._source, named, jagged=picks, check=False)
            self._apart |= dict(zip(some, zip(*apart, strict=True), strict=True))

    def _aligned(self, text: str, depth: int) -> Int64:
        """Return where the number of each row lies, the same array for what lies alike."""
        split, _ = self._apart[text]
        pick = self._paths[text].pick
        key = id(split), pick
        if key in self._indexes:
            known: Int64 = self._indexes[key]
            return known
        ids = split.rows.ids if pick is None else _picked(split, pick)
        index = aligned(self._rows, split.rows, ids, depth)
        if index is None:
            names = f"field {next(iter(self._own or self._paths))!r}", f"field {text!r}"
            if depth == self._row_depth:
                self._rows.check_same(split.rows, names)
            raise InputError(
                f"{names[0]} and {names[1]} do not have the same objects; choose both from the "
                "same events"
            )
        self._indexes[key] = index
        return index

    def _place(self, text: str) -> tuple[Content, Int64 | None]:
        """Return the leaf of a field, and the index of the numbers of rows, or elements, in it."""
        if text in self._own:
            return self._own[text]
        return self._apart[text][1], self._aligned(text, self._depth[text])

    def _column(self, feature: Feature, stands: float | None) -> Column:
        if feature.expression is not None:
            return self._computed(feature)
        if feature.index is not None:
            return self._referred(feature)
        leaf, index = self._place(feature.name)
        gaps = self._gaps(feature.name, index)
        column = self._numbers_of(leaf, feature, index, gaps=gaps, stands=stands)
        return self._by_row(column) if self._is_by_row(feature.name) else column

    def _is_by_row(self, text: str) -> bool:
        """Whether all elements of a row have the same number."""
        return self._jagged and text not in self._own

    def _by_row(self, column: Column) -> Column:
        index = column.index
        if index is None:  # what was converted is one number a row
            if "rows" not in self._indexes:
                self._indexes["rows"] = np.arange(len(self._rows))
            index = self._indexes["rows"]
        return replace(column, index=index, by_row=True)

    def _gaps(self, text: str, index: Int64 | None) -> bool:
        """Return whether some numbers are missing, refusing them if they must be there."""
        if index is None or not np.any(index < 0):
            return False
        if not self._missing:
            path = self._paths[text]
            place = int(np.argmax(index < 0))
            event = self._event_of(place, of_row=self._is_by_row(text))
            what = "has None" if path.pick is None else f"has no {path.picked}"
            raise InputError(
                f"field {text!r}: event {event} {what}; say what stands for it, such as missing=0.0"
            )
        return True

    def _event_of(self, element: int, *, of_row: bool = False) -> int:
        row = element
        if self._jagged and not of_row:
            row = int(np.searchsorted(self._first.offsets, element, side="right")) - 1
        return self._rows.event_of(row)

    def _read(self, text: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Return the numbers of a field for each element, and which are missing."""
        leaf, index = self._place(text)
        gaps = self._gaps(text, index)
        column = self._numbers_of(leaf, Feature(text), index, gaps=gaps)
        values, absent = column.values, None
        if _holds_bools(leaf):
            values = values.view(np.bool_)
        if column.index is not None:
            absent = column.index < 0 if column.gaps else None
            values = read_through(values, column.index, 0)
        if self._is_by_row(text):
            absent = None if absent is None else np.repeat(absent, self._counts)
            return np.repeat(values, self._counts), absent
        return values[: self._number], absent

    def _computed(self, feature: Feature) -> Column:
        expression = expression_of(feature.expression or "")
        values, gaps = {}, np.zeros(self._number, np.bool_)
        for text in expression.paths:
            values[text], absent = self._read(text)
            if absent is not None:
                gaps |= absent
        result = np.asarray(expression(values))
        if result.ndim == 0:  # a constant
            exact = np.float32 if np.float32(result) == result else np.float64
            zeros = np.zeros(len(self._rows), np.int64)
            return Column(feature, result.reshape(1).astype(exact), zeros, by_row=self._jagged)
        numbers = readable(result, f"expression {expression.text!r}")
        if not gaps.any():
            return Column(feature, numbers, None)
        return Column(feature, numbers, np.where(gaps, -1, np.arange(self._number)), gaps=True)

    def _referred(self, feature: Feature) -> Column:
        """Read what an index refers to in the lists of the same event."""
        key = "referred", feature.index, feature.name.rpartition(".")[0]
        (split,), (leaf,) = taken_apart(self._source, [Feature(feature.name)], jagged=True)
        if key not in self._indexes:
            self._indexes[key] = self._positions(feature, split)
        index: Int64 = self._indexes[key]
        gaps = bool(np.any(index < 0))
        if gaps and not self._missing:
            event = self._event_of(int(np.argmax(index < 0)))
            raise InputError(
                f"field {feature.index!r} refers to no {feature.name!r} in event {event}; say what "
                "stands for it, such as missing=0.0"
            )
        return self._numbers_of(leaf, feature, index, gaps=gaps)

    def _positions(self, feature: Feature, split: Split) -> Int64:
        """Return where what is referred to lies; -1 where nothing is."""
        number, absent = self._read(str(feature.index))
        if number.dtype.kind not in "iu":
            raise InputError(f"field {feature.index!r} is an index; expected integers")
        structure, present = split.rows.opened()
        if not structure.is_numpy or len(present) != self._rows.events:
            raise InputError(
                f"field {feature.name!r}, to which {feature.index!r} refers: expected a list in "
                f"each of {self._rows.events} events"
            )
        events = self._rows.event_numbers()
        if self._jagged:
            events = np.repeat(events, self._counts)
        start = read_through(split.starts, present, 0)[events]
        count = read_through(split.counts, present, 0)[events]
        number = number.astype(np.int64)
        refers = number >= 0
        if absent is not None:
            refers &= ~absent
        wrong = np.flatnonzero(refers & (number >= count))
        if len(wrong):
            event = int(events[wrong[0]])
            raise InputError(
                f"field {feature.index!r} is {number[wrong[0]]} in event {event}, which has "
                f"{count[wrong[0]]} of {feature.name!r}; an index counts within its event, and not "
                "over all events, as coffea's …IdxG do",
                events=(event, event + 1),
            )
        return np.where(refers, start + number, -1)


def _picked(split: Split, pick: int) -> Int64:
    """Return where the picked object of each list lies; -1 where the list is too short."""
    at = split.starts + pick if pick >= 0 else split.stops + pick
    return np.where((at >= split.starts) & (at < split.stops), at, -1)


def _axes(source: Source, path: str) -> int | None:
    """Return how many axes a column has; None if nothing is known, as there is nothing in it."""
    records, name = source.collection(path)
    if records is not None and name in records.fields:
        axes, node = _lists(records)
        if node.is_record:
            inner, _ = _lists(node.contents[node.field_to_index(name)])
            return inner and axes + inner - 1 if axes else None
    return _lists(source.column(path))[0]


def _lists(node: Content) -> tuple[int | None, Content]:
    """Return the axes of a column, and its records or numbers."""
    axes = 1
    while True:
        if node.is_unknown:
            return None, node
        if node.is_numpy:
            return axes + len(node.inner_shape), node
        if node.is_record or node.parameter("__array__") in {"string", "bytestring"}:
            return axes, node
        if node.is_union:
            below = node.purelist_depth
            return axes + below - 1 if below > 0 else None, node
        axes += node.is_list
        node = node.content


def _holds_bools(leaf: Content) -> bool:
    while not (leaf.is_numpy or leaf.is_unknown or leaf.is_union or leaf.is_record):
        leaf = leaf.content
    return bool(leaf.is_numpy and leaf.dtype == np.bool_)
