"""All inputs of a model, bound to the arrays of a call; and which rows share requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from sonic_coffea.errors import ConfigError, FieldError, InputError, require
from sonic_coffea.layouts._layout import Batch, Bound, Layout, Shape
from sonic_coffea.layouts._options import DType
from sonic_coffea.layouts._source import Source, is_under, within, without_fields
from sonic_coffea.layouts._structure import Int64, RowSelection, Structure, Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Places `start` to `stop` of a call, whose rows may share requests.

    Attributes
    ----------
    row_bytes : int or array of int64
        Bytes of each row in a request: all the same, or of each.
    bucket : int
        The step of their lengths to which `Bucketed` inputs are padded; 0 if there are none.
    cuts : array of int64 or None
        Where each request begins, from `start` on, and the end, if that is given: the rows between
        two of them are one request.
    """

    start: int
    stop: int
    row_bytes: int | Int64
    bucket: int = 0
    cuts: Int64 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The inputs of a call: the same rows in each, ready to be packed.

    Attributes
    ----------
    rows : Structure
        The rows, and the structure above them.
    segments : tuple of Segment
        Ranges of places; the rows of one may share a request.
    order : array of int64 or None
        The row at each place, of all or some; None where rows keep their order.
    one_request_per : {"row", "event"} or None
        What has a request of its own, if rows do not share requests.
    without_axis : frozenset of str
        Inputs that are sent without the axis of the rows, which then is of length 1.
    verify : callable or None
        Takes the numbers of the rows and the tensors of each request, and raises to stop it.
    """

    bound: dict[str, Bound]
    rows: Structure
    segments: tuple[Segment, ...]
    order: Int64 | None
    one_request_per: str | None = None
    without_axis: frozenset[str] = frozenset()
    verify: Callable[[Int64, Mapping[str, Tensor]], None] | None = None

    def __len__(self) -> int:
        return len(self.rows) if self.order is None else len(self.order)

    def only(self, rows: Int64) -> Inputs:
        """Return the same with some of the rows."""
        order, segments = _segments(self.bound, self.rows, rows, self.one_request_per)
        return replace(self, order=order, segments=segments)

    def selection(self, start: int, stop: int) -> RowSelection:
        """Return the rows at places `start` to `stop`."""
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def numbers(self, start: int, stop: int) -> Int64:
        """Return the numbers of the rows at places `start` to `stop`."""
        return np.arange(start, stop) if self.order is None else self.order[start:stop]

    def pack(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the tensors of the rows at places `start` to `stop`, by input."""
        bucket = next(s.bucket for s in self.segments if s.start <= start < s.stop)
        tensors = self._packed(Batch(self.selection(start, stop), bucket))
        if self.verify is not None:
            self.verify(self.numbers(start, stop), tensors)
        return tensors

    def pack_all(self) -> dict[str, Tensor]:
        """Return the tensors of all rows in their order, padded to the bucket of the longest."""
        requests = sum(len(s.cuts) - 1 for s in self.segments if s.cuts is not None)
        if requests > 1:
            raise InputError(
                f"these rows are {requests} requests, one for each {self.one_request_per}; pack "
                f"one {self.one_request_per} at a time"
            )
        rows = slice(0, len(self.rows))
        return self._packed(Batch(rows, self.bucket_of(rows)))

    def _packed(self, batch: Batch) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, bound in self.bound.items():
            for tensor_name, tensor in bound.layout.make(name, bound, batch).items():
                # Inputs of the same elements may share their offsets.
                known = tensors.setdefault(tensor_name, tensor)
                if known is not tensor and not np.array_equal(known, tensor):
                    raise InputError(
                        f"input {name!r} and another one name {tensor_name!r} for their offsets "
                        "or row numbers, and have other elements; give each a name of its own"
                    )
        for name in self.without_axis:
            if len(tensors[name]) != 1:
                raise InputError(
                    f"input {name!r}: the model takes it without an axis for rows, and a request "
                    f"has {len(tensors[name])} of them; expected one_request_per='row'"
                )
            tensors[name] = tensors[name][0]
        return tensors

    def bucket_of(self, rows: RowSelection) -> int:
        """Return the bucket of rows that share a request; 0 if the model has none."""
        return max((bound.bucket_of(rows) for bound in self.bound.values()), default=0)

    def events_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and one-past-last event of the rows at places `start` to `stop`."""
        events = self.rows.event_numbers()[self.selection(start, stop)]
        return (int(events.min()), int(events.max()) + 1) if len(events) else (0, 0)

    def count_elements(self) -> tuple[int, ...]:
        """Return how many elements are sent, truncated, and padding, along the consumed axes."""
        rows = self.selection(0, len(self))
        buckets = np.zeros(len(self), np.int64)
        for segment in self.segments:
            buckets[segment.start : segment.stop] = segment.bucket
        each = [bound.layout.count_elements(bound, rows, buckets) for bound in self.bound.values()]
        return tuple(map(sum, zip(*each, strict=True)))


def declared(layouts: Mapping[str, Layout]) -> dict[str, tuple[DType, Shape]]:
    """Return the tensors that a model's inputs make: type and shape of a row."""
    each = (layout.tensors(name) for name, layout in resolved(layouts).items())
    return {name: spec for tensors in each for name, spec in tensors.items()}


def bind_inputs(
    layouts: Mapping[str, Layout], arrays: Any, *, one_request_per: str | None = None
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
    """
    inputs = resolved(layouts)
    sources = _sources(inputs, arrays)
    bound: dict[str, Bound] = {}
    for name in _in_order(inputs):
        with within(f"input {name!r}"):
            bound[name] = inputs[name].bind(sources[name], bound)
    bound = {name: bound[name] for name in layouts}
    first, rows = next((name, each.rows) for name, each in bound.items())
    for name, each in bound.items():
        try:
            rows.check_same(each.rows, (f"input {first!r}", f"input {name!r}"))
        except InputError as error:
            if each.rows.depth == rows.depth:
                raise
            remark = "lists of lists of a row are sent by sonic.Padded(..., outer=J), [N, F, J, L]"
            raise error.because(remark) from None
    if one_request_per is None and any(layout.merges for layout in inputs.values()):
        _check_offsets(bound, rows)
    every = np.arange(len(rows))
    order, segments = _segments(bound, rows, every, one_request_per)
    return Inputs(bound, rows, segments, None if order is every else order, one_request_per)


def _in_order(layouts: Mapping[str, Layout]) -> list[str]:
    """Return the inputs, each after the one that it depends on."""
    order: list[str] = []
    while left := [name for name in layouts if name not in order]:
        ready = [name for name in left if layouts[name].dependency not in left]
        if not ready:
            raise ConfigError(f"each of these inputs refers to another of them: {', '.join(left)}")
        order += ready
    return order


def check_separable(layouts: Mapping[str, Layout], one_request_per: str | None) -> None:
    """Refuse inputs that put the rows of a request together, if no other tells them apart.

    What tells them apart has a name of its own.
    """
    for name, layout in layouts.items():
        others = [getattr(layout, what, None) for what in ("splits", "batch")]
        for taken in [other for other in others if other in layouts]:
            raise ConfigError(
                f"input {name!r}: {taken!r}, the name of its offsets or row numbers, is an input's"
            )
    merging = [name for name, layout in layouts.items() if layout.merges]
    if one_request_per is None and merging and not any(map(_has_row_counts, layouts.values())):
        raise ConfigError(
            f"input {merging[0]!r} puts the elements of all rows of a request together, and "
            "nothing tells them apart: name the model's input of offsets (splits=) or of row "
            "numbers (batch=); for a network that takes one graph a request, declare "
            "Model(one_request_per='row') or 'event'"
        )


def _check_offsets(bound: Mapping[str, Bound], rows: Structure) -> None:
    """Refuse inputs that leave offsets to another input, but have other counts than that has."""
    counts = {name: each.columns.counts(slice(0, len(rows))) for name, each in bound.items()}
    own_counts = [counts[name] for name, each in bound.items() if _has_row_counts(each.layout)]
    for name, each in bound.items():
        if each.layout.merges and not any(np.array_equal(t, counts[name]) for t in own_counts):
            row = int(np.flatnonzero(own_counts[0] != counts[name])[0])
            raise InputError(
                f"input {name!r} has no splits or batch of its own, and other elements than the "
                f"inputs that have (the first difference is in event {rows.event_of(row)}); name "
                "splits= or batch=, or declare Model(one_request_per='row')"
            )


def _has_row_counts(layout: Layout) -> bool:
    return not layout.stacks and not layout.merges and layout.dependency is None


def resolved(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts with what they take over from each other."""
    each = {}
    for name, layout in layouts.items():
        with within(f"input {name!r}"):
            each[name] = layout.resolved(layouts)
    return each


def _segments(
    bound: Mapping[str, Bound], rows: Structure, numbers: Int64, one_request_per: str | None
) -> tuple[Int64, tuple[Segment, ...]]:
    """Say in which order rows go, which of them may share a request, and what they weigh."""
    buckets, units, begins = np.zeros(len(numbers), np.int64), None, [0][: len(numbers)]
    for each in bound.values():
        if len(each.layout.lengths) > 1:
            buckets = np.maximum(buckets, each.buckets_of(numbers))
    if one_request_per is not None:  # the rows of a request share the largest bucket
        units = numbers if one_request_per == "row" else rows.event_numbers()[numbers]
        _, unit = np.unique(units, return_inverse=True)
        largest = np.zeros(len(numbers), np.int64)
        np.maximum.at(largest, unit, buckets)
        buckets = largest[unit]
    if buckets.any():
        sorting = np.argsort(buckets, kind="stable")
        numbers, buckets = numbers[sorting], buckets[sorting]
        units = None if units is None else units[sorting]
        begins = np.flatnonzero(np.diff(buckets, prepend=-1)).tolist()
    segments = []
    for start, stop in pairwise([*begins, len(numbers)]):
        cuts = None
        if units is not None:
            cuts = np.flatnonzero(np.diff(units[start:stop], prepend=-1, append=-1))
        batch = Batch(numbers[start:stop], int(buckets[start]))
        row_bytes = sum(each.layout.row_bytes(each, batch) for each in bound.values())
        segments.append(Segment(start, stop, row_bytes, batch.bucket, cuts))
    return numbers, tuple(segments)


def _sources(layouts: Mapping[str, Layout], arrays: Any) -> dict[str, Source]:
    """Return what each input reads from."""
    named = set(arrays) & set(layouts) if isinstance(arrays, dict) else ()
    read = (column for layout in layouts.values() for column in layout.columns)
    are_columns = not named or (
        all(without_fields(arrays[name]) for name in named)
        and all(any(is_under(column, name) for name in arrays) for column in read)
    )
    if not are_columns:
        require(arrays, layouts, "the model has no input", FieldError)
        needed = [name for name, layout in layouts.items() if layout.columns]
        require(needed, arrays, "no array for the model's input", FieldError)
        return {name: Source(arrays.get(name)) for name in layouts}
    # One array of records, or a dict of columns, that all inputs share.
    return dict.fromkeys(layouts, Source(arrays))
