"""All inputs of a model bound to the arrays of a call: the same rows in each, ready to be cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, FieldError, InputError, nearest
from sonic_coffea.layouts._bound import Bound, BoundFlat, BoundMask, BoundPadded, Tensor
from sonic_coffea.layouts._fields import Source
from sonic_coffea.layouts._segments import Segment
from sonic_coffea.layouts._specs import Bucketed, DType, Flat, Layout, Mask, Padded, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sonic_coffea.layouts._columns import RowSelection
    from sonic_coffea.layouts._rows import Int64, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The inputs of a call.

    Attributes
    ----------
    rows : Rows
        The rows, and the structure above them.
    segments : tuple of Segment
        Ranges of places; the rows of one may share a request.
    order : array of int64 or None
        The row at each place, of all or some; None where rows keep their order.
    """

    bound: dict[str, Bound]
    rows: Rows
    segments: tuple[Segment, ...]
    order: Int64 | None

    def __len__(self) -> int:
        return len(self.rows) if self.order is None else len(self.order)

    def only(self, rows: Int64) -> Inputs:
        """Return the same with some of the rows."""
        order, segments = _segments(self.bound, rows)
        return replace(self, order=order, segments=segments)

    def selection(self, start: int, stop: int) -> RowSelection:
        """Return the rows at places `start` to `stop`."""
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def load(self) -> None:
        """Load what packing needs: the first time in a process, it would be taken for packing."""
        from sonic_coffea.layouts import _kernels

        _kernels.load()

    def pack(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the tensors of the rows at places `start` to `stop`, by input."""
        length = next(s.length for s in self.segments if s.start <= start < s.stop)
        selection = self.selection(start, stop)
        tensors: dict[str, Tensor] = {}
        for name, bound in self.bound.items():
            tensors.update(bound.pack(name, selection, _length_of(bound, length)))
        return tensors

    def padded_length(self, name: str, selection: RowSelection) -> int:
        """Return what rows that share a request are padded to, in the input of this name."""
        bucket = 0
        if _has_buckets(self.bound):
            lengths, places = _places(self.bound, np.arange(len(self.rows))[selection][:1])
            bucket = lengths[int(places[0])]
        return _length_of(self.bound[name], bucket)

    def events_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and one-past-last event of the rows at places `start` to `stop`."""
        if self.order is None or start == stop:
            return self.rows.events_of(start, stop)
        rows = self.order[start:stop]
        return self.rows.events_of(int(rows.min()), int(rows.max()) + 1)

    def filling(self) -> tuple[int, int, int]:
        """Return how many elements are sent, cut off, and made up, along the consumed axes."""
        kept = cut = padding = 0
        rows = slice(None) if self.order is None else self.order
        for bound in self.bound.values():
            if isinstance(bound, BoundFlat):
                kept += int(bound.columns.split.counts[rows].sum())
            elif isinstance(bound, BoundPadded):
                counts = bound.columns.split.counts[rows]
                here = int(np.minimum(counts, bound.lengths[-1]).sum())
                lengths = np.asarray(bound.lengths)
                place = np.minimum(np.searchsorted(lengths, counts), len(lengths) - 1)
                kept += here
                cut += int(counts.sum()) - here
                padding += int(lengths[place].sum()) - here
        return kept, cut, padding


def declared(layouts: Mapping[str, Layout]) -> dict[str, tuple[DType, Shape]]:
    """Return the tensors that a model's inputs make: type and shape of a row."""
    tensors: dict[str, tuple[DType, Shape]] = {}
    for name, layout in layouts.items():
        tensors.update(layout.tensors(name))
    return tensors


def bind_inputs(layouts: Mapping[str, Layout], arrays: Any) -> Inputs:
    """Bind the inputs of a model to arrays.

    Parameters
    ----------
    layouts : mapping
        Input names and their layouts.
    arrays : awkward array or dict
        One array of records that every input reads from, or a dict with an array for each input.
        A `Mask` of another input may be left out of the dict.
    """
    sources = arrays_by_input(layouts, arrays)
    masks = masked(layouts)
    bound: dict[str, Bound] = {}
    for name, layout in layouts.items():
        if name in masks:
            continue
        try:
            bound[name] = layout.bind(sources[name])
        except InputError as error:
            raise error.within(f"input {name!r}") from None
    bound.update({name: one.bind_beside(bound[of]) for name, (one, of) in masks.items()})
    bound = {name: bound[name] for name in layouts}
    rows = _common_rows(bound)
    order, segments = _segments(bound, np.arange(len(rows)))
    return Inputs(bound, rows, segments, order if _has_buckets(bound) else None)


def _common_rows(bound: Mapping[str, Bound]) -> Rows:
    (first, one), *others = bound.items()
    for name, other in others:
        if other.rows is not one.rows and not one.rows.agrees(other.rows):
            if one.rows.events != other.rows.events:
                detail = f"{one.rows.events} and {other.rows.events} events"
            else:
                detail = f"the first difference is in event {one.rows.first_difference(other.rows)}"
            raise InputError(
                f"input {first!r} and input {name!r} do not have the same objects ({detail}); "
                "choose both from the same collection, with the same cuts"
            )
    return one.rows


def _segments(bound: Mapping[str, Bound], rows: Int64) -> tuple[Int64, tuple[Segment, ...]]:
    """Say in which order rows go, which of them may share a request, and what they weigh."""
    if not _has_buckets(bound):
        return rows, (Segment(0, len(rows), _row_bytes(bound, 0, rows)),) if len(rows) else ()
    lengths, place = _places(bound, rows)
    sorting = np.argsort(place, kind="stable")
    order = rows[sorting]
    edges = np.searchsorted(place[sorting], np.arange(len(lengths) + 1))
    segments = tuple(
        Segment(int(a), int(b), _row_bytes(bound, length, order[a:b]), length)
        for a, b, length in zip(edges[:-1], edges[1:], lengths, strict=True)
        if a < b
    )
    return order, segments


def _places(bound: Mapping[str, Bound], rows: Int64) -> tuple[tuple[int, ...], Int64]:
    """Return the lengths of the buckets, and which of them each row is in."""
    buckets = [b for b in bound.values() if isinstance(b, BoundPadded) and len(b.lengths) > 1]
    lengths = buckets[0].lengths
    if any(b.lengths != lengths for b in buckets):
        raise ConfigError("the Bucketed inputs of a model must have the same lengths")
    most = buckets[0].columns.split.counts[rows]
    for other in buckets[1:]:
        most = np.maximum(most, other.columns.split.counts[rows])
    return lengths, np.minimum(np.searchsorted(lengths, most), len(lengths) - 1)


def _has_buckets(bound: Mapping[str, Bound]) -> bool:
    return any(isinstance(b, BoundPadded) and len(b.lengths) > 1 for b in bound.values())


def _row_bytes(bound: Mapping[str, Bound], length: int, rows: Int64) -> int | Int64:
    total: int | Int64 = 0
    for one in bound.values():
        total = total + one.row_bytes(_length_of(one, length))
    return total if isinstance(total, int) else total[rows]


def _length_of(one: Bound, length: int) -> int:
    """Return what the rows of an input are padded to in a request of bucket `length`."""
    if isinstance(one, BoundPadded) and len(one.lengths) == 1:
        return one.lengths[0]
    if isinstance(one, BoundMask) and one.length is not None:
        return one.length
    return length or one.longest


def masked(layouts: Mapping[str, Layout]) -> dict[str, tuple[Mask, str]]:
    """Return the masks that belong to another input, and that input's name.

    Raises
    ------
    ConfigError
        If there is no such input.
    """
    jagged = [n for n, one in layouts.items() if isinstance(one, (Padded, Bucketed, Flat))]
    found = {}
    for name, one in layouts.items():
        if isinstance(one, Mask) and one.of is None:
            if not jagged:
                raise ConfigError(
                    f"input {name!r}: Mask needs of=, as the model has no jagged input"
                )
            if one.beside is not None and one.beside not in jagged:
                raise ConfigError(
                    f"input {name!r}: Mask beside {one.beside!r}, which is no jagged input; "
                    f"{nearest(one.beside, jagged)}"
                )
            found[name] = (one, one.beside or jagged[0])
    return found


def arrays_by_input(layouts: Mapping[str, Layout], arrays: Any) -> dict[str, Source]:
    if isinstance(arrays, dict) and set(arrays) & set(layouts):
        unknown = [name for name in arrays if name not in layouts]
        if unknown:
            raise FieldError(
                f"the model has no input {unknown[0]!r}; {nearest(unknown[0], layouts)}"
            )
        free = masked(layouts)
        missing = [name for name in layouts if name not in arrays and name not in free]
        if missing:
            raise FieldError(
                f"no array for the model's input {missing[0]!r}; {nearest(missing[0], arrays)}"
            )
        return {name: Source(array) for name, array in arrays.items()}
    # One array of records, or a dict of columns, that all inputs share.
    return dict.fromkeys(layouts, Source(arrays))
