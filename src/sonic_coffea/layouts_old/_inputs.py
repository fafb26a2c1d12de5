"""All inputs of a model, bound to the arrays of a call; and which rows share requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, FieldError, InputError, nearest
from sonic_coffea.layouts_old._fields import Source
from sonic_coffea.layouts_old._layout import Bound, Layout, Shape
from sonic_coffea.layouts_old._machine_code import load
from sonic_coffea.layouts_old._memory import Lend, lent

if TYPE_CHECKING:
    from sonic_coffea.layouts_old._declarations import DType
    from sonic_coffea.layouts_old._rows import Int64, Rows, RowSelection, Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Places `start` to `stop` of a call, whose rows may share requests.

    Attributes
    ----------
    row_bytes : int or array of int64
        Bytes of each row in a request: all the same, or of each.
    level : int
        The step of their lengths to which `Bucketed` inputs are padded; 0 if there are none.
    cuts : array of int64 or None
        Where each request begins, from `start` on, and the end, if that is given: the rows between
        two of them are one request.
    """

    start: int
    stop: int
    row_bytes: int | Int64
    level: int = 0
    cuts: Int64 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The inputs of a call: the same rows in each, ready to be packed.

    Attributes
    ----------
    rows : Rows
        The rows, and the structure above them.
    segments : tuple of Segment
        Ranges of places; the rows of one may share a request.
    order : array of int64 or None
        The row at each place, of all or some; None where rows keep their order.
    one_request_per : {"row", "event"} or None
        What has a request of its own, if rows do not share requests.
    without_axis : frozenset of str
        Inputs that are sent without the axis of the rows, which then is of length 1.
    """

    bound: dict[str, Bound]
    rows: Rows
    segments: tuple[Segment, ...]
    order: Int64 | None
    one_request_per: str | None = None
    without_axis: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.rows) if self.order is None else len(self.order)

    def only(self, rows: Int64) -> Inputs:
        """Return the same with some of the rows."""
        units = _units(self.rows, rows, self.one_request_per)
        order, segments = _segments(self.bound, rows, units)
        return replace(self, order=order, segments=segments)

    def selection(self, start: int, stop: int) -> RowSelection:
        """Return the rows at places `start` to `stop`."""
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def numbers(self, start: int, stop: int) -> Int64:
        """Return the numbers of the rows at places `start` to `stop`."""
        return np.arange(start, stop) if self.order is None else self.order[start:stop]

    def load(self) -> None:
        """Load what packing needs: the first time in a process, it would be taken for packing."""
        load()

    def pack(self, start: int, stop: int, lend: Lend | None = None) -> dict[str, Tensor]:
        """Return the tensors of the rows at places `start` to `stop`, by input.

        They are packed into the memory that `lend` returns for a shape and a type, if it does.
        """
        level = next(s.level for s in self.segments if s.start <= start < s.stop)
        with lent(lend):
            return self._packed(self.selection(start, stop), level)

    def pack_all(self) -> dict[str, Tensor]:
        """Return the tensors of all rows in their order, padded to the level of the longest."""
        requests = sum(len(s.cuts) - 1 for s in self.segments if s.cuts is not None)
        if requests > 1:
            raise InputError(
                f"these rows are {requests} requests, one for each {self.one_request_per}; pack "
                f"one {self.one_request_per} at a time"
            )
        rows = slice(0, len(self.rows))
        return self._packed(rows, self.level_of(rows))

    def _packed(self, rows: RowSelection, level: int) -> dict[str, Tensor]:
        each = (bound.pack(name, rows, level) for name, bound in self.bound.items())
        tensors = {name: tensor for tensors in each for name, tensor in tensors.items()}
        for name in self.without_axis:
            if len(tensors[name]) != 1:
                raise InputError(
                    f"input {name!r}: the model takes it without an axis for rows, and a request "
                    f"has {len(tensors[name])} of them; expected one_request_per='row'"
                )
            tensors[name] = tensors[name][0]
        return tensors

    def level_of(self, rows: RowSelection) -> int:
        """Return the level of rows that share a request; 0 if the model has none."""
        return max((bound.level_of(rows) for bound in self.bound.values()), default=0)

    def events_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and one-past-last event of the rows at places `start` to `stop`."""
        if self.order is None or start == stop:
            return self.rows.events_of(start, stop)
        rows = self.order[start:stop]
        return self.rows.events_of(int(rows.min()), int(rows.max()) + 1)

    def count_elements(self) -> tuple[int, int, int]:
        """Return how many elements are sent, truncated, and padding, along the consumed axes."""
        rows = self.selection(0, len(self))
        levels = np.zeros(len(self), np.int64)
        for segment in self.segments:
            levels[segment.start : segment.stop] = segment.level
        each = [
            bound.layout.count_elements(bound.columns, rows, levels)
            for bound in self.bound.values()
        ]
        sent, truncated, padding = map(sum, zip(*each, strict=True))
        return sent, truncated, padding


def declared(layouts: Mapping[str, Layout]) -> dict[str, tuple[DType, Shape]]:
    """Return the tensors that a model's inputs make: type and shape of a row."""
    each = (layout.tensors(name) for name, layout in _among(layouts).items())
    return {name: spec for tensors in each for name, spec in tensors.items()}


def bind_inputs(
    layouts: Mapping[str, Layout],
    arrays: Any,
    *,
    one_request_per: str | None = None,
    source_of: Callable[[Any], Source] = Source,
) -> Inputs:
    """Bind the inputs of a model to arrays.

    Parameters
    ----------
    layouts : mapping
        Input names and their layouts.
    arrays : awkward array or dict
        One array of records that every input reads from, or a dict with an array for each input.
        A `Mask` of another input may be left out of the dict.
    one_request_per : {"row", "event"}, optional
        What has a request of its own; by default, rows share requests.
    source_of : callable
        Returns what a layout reads from, for an array.
    """
    counted = _counted_inputs(layouts)
    sources = _sources(layouts, arrays, counted, source_of)
    layouts = _among(layouts)
    bound: dict[str, Bound] = {}
    for name, layout in layouts.items():
        if name not in counted:
            with within(name):
                bound[name] = layout.bind(sources[name])
    for name, other in counted.items():
        bound[name] = Bound(layouts[name], bound[other].columns)
    bound = {name: bound[name] for name in layouts}
    first, rows = next((name, each.rows) for name, each in bound.items())
    for name, each in bound.items():
        try:
            rows.check_same(each.rows, (f"input {first!r}", f"input {name!r}"))
        except InputError as error:
            if each.rows.depth == rows.depth:
                raise
            remark = "for the pairs i x j of a row, [N, C, L, L], there is sonic.Pairwise"
            raise error.because(remark) from None
    bound = {name: each.layout.referring(each, bound) for name, each in bound.items()}
    _check_meant(bound, [name for name in bound if name not in counted])
    if one_request_per is None:
        _check_told_apart(bound, rows)
    everything = np.arange(len(rows))
    units = _units(rows, everything, one_request_per)
    order, segments = _segments(bound, everything, units)
    known = None if _levels(bound) == 1 else order
    return Inputs(bound, rows, segments, known, one_request_per)


def _check_meant(bound: Mapping[str, Bound], names: Sequence[str]) -> None:
    """Refuse rows if each input with these rows doubts that they are meant."""
    doubts = {}
    for name in names:
        doubts[name] = bound[name].layout.doubt(bound[name].columns)
        if doubts[name] is None:
            return
    for name, doubt in doubts.items():
        raise InputError(f"input {name!r}: {doubt}")


def check_told_apart(layouts: Mapping[str, Layout]) -> None:
    """Refuse inputs that put the rows of a request together, if no other tells them apart."""
    merging = [name for name, layout in layouts.items() if layout.merges]
    if merging and not any(map(_tells, layouts.values())):
        raise ConfigError(
            f"input {merging[0]!r} puts the elements of all rows of a request together, and "
            "nothing tells them apart: name the model's input of offsets (splits=) or of row "
            "numbers (batch=); for a network that takes one graph a request, declare "
            "Model(one_request_per='row') or 'event'; if one graph of many rows is meant, "
            "merge_rows=True"
        )


def _check_told_apart(bound: Mapping[str, Bound], rows: Rows) -> None:
    """Refuse rows that have others' offsets, but not their counts."""
    telling = [each.columns.split for each in bound.values() if _tells(each.layout)]
    for name, each in bound.items():
        counts = each.columns.split.counts
        if not each.layout.merges or any(np.array_equal(t.counts, counts) for t in telling):
            continue
        row = int(np.flatnonzero(telling[0].counts != counts)[0]) if telling else 0
        raise InputError(
            f"input {name!r} has no splits or batch of its own, and other elements than the inputs "
            f"that have (the first difference is in event {rows.event_of(row)}); name splits= or "
            "batch=, or declare Model(one_request_per='row')"
        )


def _tells(layout: Layout) -> bool:
    return not layout.stacks and not layout.merges and layout.refers_to is None


def _units(rows: Rows, numbers: Int64, one_request_per: str | None) -> Int64 | None:
    """Return the number of each row's request; None if any rows may share one."""
    if one_request_per is None:
        return None
    return numbers if one_request_per == "row" else rows.event_numbers()[numbers]


def _among(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts with what they take over from each other."""
    among = {}
    for name, layout in layouts.items():
        with within(name):
            among[name] = layout.among(layouts)
    return among


def _levels(bound: Mapping[str, Bound]) -> int:
    return max(each.levels for each in bound.values())


def _segments(
    bound: Mapping[str, Bound], rows: Int64, units: Int64 | None
) -> tuple[Int64, tuple[Segment, ...]]:
    """Say in which order rows go, which of them may share a request, and what they weigh."""
    count = _levels(bound)
    if count == 1:
        if not len(rows):
            return rows, ()
        whole = Segment(0, len(rows), _row_bytes(bound, 0, rows), 0, _cuts(units))
        return rows, (whole,)
    levels = np.max([b.levels_of(rows) for b in bound.values() if b.levels > 1], axis=0)
    if units is not None:
        _, unit = np.unique(units, return_inverse=True)
        most = np.zeros(len(rows), np.int64)
        np.maximum.at(most, unit, levels)
        levels = most[unit]
    sorting = np.argsort(levels, kind="stable")
    order = rows[sorting]
    edges = np.searchsorted(levels[sorting], np.arange(count + 1))
    segments = tuple(
        Segment(
            int(a),
            int(b),
            _row_bytes(bound, level, order[a:b]),
            level,
            None if units is None else _cuts(units[sorting[a:b]]),
        )
        for level, (a, b) in enumerate(pairwise(edges))
        if a < b
    )
    return order, segments


def _cuts(units: Int64 | None) -> Int64 | None:
    """Return where each unit begins, and the end."""
    if units is None:
        return None
    begins = np.flatnonzero(np.diff(units)) + 1
    return np.concatenate(([0], begins, [len(units)])).astype(np.int64)


def _row_bytes(bound: Mapping[str, Bound], level: int, rows: Int64) -> int | Int64:
    return sum(each.layout.row_bytes(each.columns, rows, level) for each in bound.values())


@contextmanager
def within(name: str) -> Iterator[None]:
    """Name the input in the errors of its layout."""
    try:
        yield
    except (ConfigError, InputError) as error:
        raise error.within(f"input {name!r}") from None


def _counted_inputs(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Return the inputs that are bound to another input, and that input's name."""
    jagged = [name for name, layout in layouts.items() if layout.jagged]
    counted = {}
    for name, layout in layouts.items():
        with within(name):
            other = layout.counted_input(jagged)
        if other is not None:
            counted[name] = other
    return counted


def _sources(
    layouts: Mapping[str, Layout],
    arrays: Any,
    counted: Mapping[str, str],
    source_of: Callable[[Any], Source],
) -> dict[str, Source]:
    """Return what each input reads from."""
    if isinstance(arrays, dict) and set(arrays) & set(layouts):
        unknown = [name for name in arrays if name not in layouts]
        if unknown:
            raise FieldError(
                f"the model has no input {unknown[0]!r}; {nearest(unknown[0], layouts)}"
            )
        missing = [name for name in layouts if name not in arrays and name not in counted]
        if missing:
            raise FieldError(
                f"no array for the model's input {missing[0]!r}; {nearest(missing[0], arrays)}"
            )
        return {name: source_of(array) for name, array in arrays.items()}
    # One array of records, or a dict of columns, that all inputs share.
    return dict.fromkeys(layouts, source_of(arrays))
