"""The numbers of some rows: gathered, transformed and checked by numpy, and padded by one loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import numpy as np

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._expressions import (
    Path,
    Term,
    exact,
    expression_of,
    path_of,
    text_of,
)
from sonic_coffea.layouts._features import Feature, all_finite
from sonic_coffea.layouts._source import Source, innermost, of_field
from sonic_coffea.layouts._structure import (
    STRING,
    Int64,
    Level,
    Levels,
    RowSelection,
    Structure,
    Tensor,
    align,
    merged,
    numbered,
    offsets_of,
    ranges,
    read,
    through,
    without_options,
)

BLOCK_BYTES = 1 << 22
"""Elements of so many bytes are made at a time, so that what is done to them stays in the cache."""


Column = tuple[Tensor, Int64 | None, bool]
"""Numbers of a field; the place of each element's in them, where -1 has none; or of each row's."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The fields that one input reads, and where its rows' elements lie in them.

    Attributes
    ----------
    rows : Structure
        The rows.
    offsets : array of int64 or None
        Where the elements of each row begin, and the end; None if each row is one element.
    features : tuple of Feature
        The channels.
    terms : dict
        The numbers that features read.
    missing : tuple or None
        What stands for a missing number in each channel; there is none without it.
    key : Feature or None
        What the elements of a row are sorted by.
    ascending : bool
        Whether they are sorted upwards.
    """

    rows: Structure
    offsets: Int64 | None = None
    features: tuple[Feature, ...] = ()
    terms: dict[Any, Column] = field(default_factory=dict)
    missing: tuple[Any, ...] | None = None
    key: Feature | None = None
    ascending: bool = False

    def counts(self, rows: RowSelection) -> Int64:
        """Return how many elements each of some rows has."""
        if self.offsets is None:
            return np.ones(len(self.numbers(rows)), np.int64)
        return self.offsets[1:][rows] - self.offsets[:-1][rows]

    def numbers(self, rows: RowSelection) -> Int64:
        """Return the numbers of some rows."""
        return np.arange(*rows.indices(len(self.rows))) if isinstance(rows, slice) else rows

    def order(self, rows: RowSelection) -> Int64 | None:
        """Return the index in its row of each element of some rows, as sorted; None if unsorted."""
        if self.key is None or self.offsets is None:
            return None
        elements = Elements(self, rows, gathers=False)
        return elements.sorted_by(self.key)

    def blocks(
        self, rows: RowSelection, bytes_each: int, longest: int | None = None
    ) -> Iterator[tuple[slice, Elements]]:
        """Yield ranges of some rows, and the rows' elements, which fit into the cache."""
        counts = self.counts(rows)
        size = math.ceil(int(counts.sum()) * bytes_each / BLOCK_BYTES)
        step = max(1, math.ceil(len(counts) / max(size, 1)))
        first = rows.indices(len(self.rows))[0] if isinstance(rows, slice) else 0
        for start in range(0, len(counts), step):
            stop = min(start + step, len(counts))
            here = slice(start, stop)
            some = slice(first + start, first + stop) if isinstance(rows, slice) else rows[here]
            yield here, Elements(self, some, longest)


class Elements:
    """The elements of some rows, one row after the other.

    Attributes
    ----------
    starts, counts : array of int64
        Where the elements of each row begin in the values, and how many there are.

    Parameters
    ----------
    columns : Columns
        What they are read from.
    rows : slice or array of int64
        The rows.
    longest : int, optional
        How many elements of a row are sent at most; others may be numbers that cannot be sent.
    gathers : bool
        Whether the elements are sorted, and those that are not sent left out, if that is cheaper.
    """

    def __init__(
        self,
        columns: Columns,
        rows: RowSelection,
        longest: int | None = None,
        *,
        gathers: bool = True,
    ) -> None:
        self.columns, self.rows, self._longest = columns, rows, longest
        self.counts = columns.counts(rows)
        self.at: RowSelection = rows
        self._indexes: dict[tuple[int, bool], tuple[Int64, Tensor | None]] = {}
        if columns.offsets is not None:
            firsts = columns.offsets[:-1][rows]
            total = int(self.counts.sum())
            order = columns.order(rows) if gathers else None
            kept = self.counts if longest is None else np.minimum(self.counts, longest)
            if order is not None:
                self.at = np.repeat(firsts, self.counts) + order
                if longest is not None:
                    self.at = self.at[_within(self.counts) < np.repeat(kept, self.counts)]
                self.counts = kept
            elif not isinstance(rows, slice) or (gathers and 2 * int(kept.sum()) < total):
                self.counts = kept if gathers else self.counts
                self.at = ranges(firsts, self.counts)
            else:
                first = int(firsts[0]) if len(firsts) else 0
                self.at = slice(first, first + total)
        self.starts = np.cumsum(self.counts) - self.counts
        self.size = int(self.counts.sum())

    def take(self, column: Column) -> tuple[Tensor, Tensor | None]:
        """Return the number of each element, and which are missing, if some are."""
        absent = None
        data, places, by_row = column
        where = self.rows if by_row else self.at
        if places is None:
            values = data[where]
        else:
            key = id(places), by_row
            if key not in self._indexes:
                index = places[where]
                missing = index < 0
                self._indexes[key] = index, missing if missing.any() else None
            index, absent = self._indexes[key]
            if absent is None:
                values = data[index]
            else:
                values = np.zeros(len(index), data.dtype)
                values[~absent] = data[index[~absent]]
        if by_row:
            values = np.repeat(values, self.counts)
            absent = None if absent is None else np.repeat(absent, self.counts)
        return values, absent if absent is not None and absent.any() else None

    def raw(self, feature: Feature) -> tuple[Tensor, Tensor | None]:
        """Return the numbers of a feature before they are transformed, and which are missing."""
        if feature.expression is None:
            return self.take(self.columns.terms[_term_of(feature)])
        terms, compute = expression_of(feature.expression)
        values, gaps = {}, None
        for term in terms:
            taken, absent = self.take(self.columns.terms[term])
            values[term] = exact(taken)
            if absent is not None:
                gaps = absent if gaps is None else gaps | absent
        result = np.asarray(compute(values))
        if result.dtype.kind not in "fiub" or result.shape not in ((), (self.size,)):
            raise InputError(
                f"expression {feature.expression!r} gives {result.dtype} {list(result.shape)}; "
                f"expected one number for each of {self.size} elements"
            )
        return np.broadcast_to(result, self.size), gaps

    def values(self, dtype: np.dtype[Any], out: Tensor | None = None) -> Tensor:
        """Return ``[F, n]``, as it is sent: transformed, checked, and in the type of the tensor.

        With `out`, they are written there.

        Raises
        ------
        InputError
            Naming field and event of a number that cannot be sent.
        """
        columns = self.columns
        if out is None:
            out = np.empty((len(columns.features), self.size), dtype)
        with np.errstate(all="ignore"):
            for feature, sent, stands in zip(
                columns.features, out, columns.missing or repeat(None), strict=False
            ):
                raw, absent = self.raw(feature)
                if absent is not None:  # until they are replaced, by others that are there
                    raw = np.where(absent, raw[np.argmin(absent)], raw)
                if dtype == STRING:
                    sent[:] = raw
                else:
                    self._convert(feature, raw, sent, absent)
                if absent is not None:
                    sent[absent] = stands
        return out

    def fills(self, fills: Sequence[Any], dtype: np.dtype[Any]) -> Tensor:
        """Return what pads each channel, if numbers are padded before they are transformed."""
        padded = np.empty(len(fills), dtype)
        with np.errstate(all="ignore"):
            for place, (feature, fill) in enumerate(zip(self.columns.features, fills, strict=True)):
                raw = np.asarray([fill])
                if feature.expression is not None:
                    terms, compute = expression_of(feature.expression)
                    raw = np.reshape(compute(dict.fromkeys(terms, raw)), 1)
                else:
                    raw = raw.astype(self.columns.terms[_term_of(feature)][0].dtype)
                padded[place] = feature.transformed(raw)[0]
        return padded

    def _convert(self, feature: Feature, raw: Tensor, out: Tensor, absent: Tensor | None) -> None:
        values = raw
        if feature.categories and None not in dict(feature.categories):
            known = [key for key, _ in feature.categories]
            strange = ~np.isin(raw, known) & np.isfinite(raw)
            if (place := self._first(strange, absent)) is not None:
                raise self._error(
                    place,
                    f"field {feature.text!r} is {raw[place]:g} in event {{event}}, which is none "
                    f"of its categories {', '.join(map(str, known))}; add it, or None: … for all "
                    "others",
                )
        is_finite = False
        if not feature.plain:
            real = np.result_type(raw.dtype, np.float32)
            work = out if out.dtype == real else np.empty(len(raw), real)
            values = feature.computed(raw, work)
            limits = feature.lower, feature.upper
            if feature.nonfinite is None and limits != (None, None):
                if not all_finite(values):  # limits would hide it
                    self._refuse(feature, raw, out.dtype, absent)
                is_finite = None not in limits and work is out
            values = feature.standardised(values, work)
        is_real = out.dtype.kind not in "iub"
        if not is_real and _misfits(feature, values, out.dtype).any():
            self._refuse(feature, raw, out.dtype, absent)
        if values is not out:
            np.copyto(out, values, casting="unsafe")
        if is_real and not is_finite and not all_finite(out):
            self._refuse(feature, raw, out.dtype, absent)

    def _refuse(
        self, feature: Feature, raw: Tensor, target: np.dtype[Any], absent: Tensor | None
    ) -> None:
        """Raise the error of the first number that is sent and cannot be, if there is one.

        It computes again what the numbers become, one step after the other.
        """
        before = raw
        if not feature.plain:
            before = feature.computed(
                raw, np.empty(len(raw), np.result_type(raw.dtype, np.float32))
            )
        finite = np.isfinite(before)
        if feature.nonfinite is None and (place := self._first(~finite, absent)) is not None:
            function = feature.function or (feature.power and f"power {feature.power}")
            after = f" after {function}" if function else ""
            raise self._error(
                place,
                f"field {feature.text!r} is NaN or infinite{after} in event {{event}}; correct "
                f"the input, or say what replaces it with Feature({feature.text!r}, nonfinite=…)",
            )
        values = raw if feature.plain else feature.transformed(raw)
        wrong = _misfits(feature, values, target)
        if target.kind not in "iub" and not np.isfinite(feature.nonfinite or 0.0):
            wrong &= finite
        if (place := self._first(wrong, absent)) is not None:
            after = "" if feature.plain else " after its transformation"
            raise self._error(
                place,
                f"field {feature.text!r} is {values[place]}{after} in event {{event}}, which "
                f"{target.name} cannot hold; declare a wider dtype for the layout",
            )

    def _first(self, wrong: Tensor, absent: Tensor | None = None) -> int | None:
        """Return the first element that is wrong, and sent."""
        if absent is not None:
            wrong = wrong & ~absent
        if self._longest is not None and wrong.any():
            wrong = wrong & (_within(self.counts) < self._longest)
        return int(np.argmax(wrong)) if wrong.any() else None

    def _error(self, element: int, message: str) -> InputError:
        row = int(np.searchsorted(np.cumsum(self.counts), element, side="right"))
        number = int(self.columns.numbers(self.rows)[row])
        event = self.columns.rows.event_of(number)
        return InputError(message.replace("{event}", str(event)), rows=(number, number + 1))

    def sorted_by(self, key: Feature) -> Int64:
        """Return the index in its row of each element, by a key, stable and downwards."""
        import awkward as ak
        from awkward.contents import ListOffsetArray, NumpyArray
        from awkward.index import Index64

        raw, absent = self.raw(key)
        what = f"field {key.text!r}, by which constituents are sorted,"
        with np.errstate(all="ignore"):
            keys = raw if key.plain else key.transformed(raw)
        if absent is not None:
            raise self._error(int(np.argmax(absent)), f"{what} has None in event {{event}}")
        if not all_finite(keys) and (place := self._first(~np.isfinite(keys))) is not None:
            raise self._error(place, f"{what} is NaN or infinite in event {{event}}")
        if keys.dtype.kind == "f" and keys.dtype not in (np.float32, np.float64):
            keys = keys.astype(np.float64)
        keys = np.ascontiguousarray(keys.astype(keys.dtype.newbyteorder("="), copy=False))
        lists = ListOffsetArray(Index64(offsets_of(self.counts)), NumpyArray(keys))
        order = ak.argsort(ak.Array(lists), axis=1, ascending=self.columns.ascending, stable=True)
        content = order.layout.to_ListOffsetArray64(start_at_zero=True).content
        return np.asarray(read(content), np.int64)


def _within(counts: Int64) -> Int64:
    """Return the index in its row of each element."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _misfits(feature: Feature, sent: Tensor, target: np.dtype[Any]) -> Tensor:
    """Return which numbers are not those of the tensor: infinite in it, or no such integers."""
    if target.kind == "b":
        return np.asarray(~np.isfinite(sent))
    if target.kind not in "iu":
        return np.asarray(~np.isfinite(sent.astype(target)))
    if feature.plain and np.can_cast(sent.dtype, target):
        return np.zeros(1, np.bool_)
    limits = np.iinfo(target)
    # As a float, the largest of 64 bits is one more than that.
    above = sent >= limits.max + 1.0 if sent.dtype.kind == "f" else sent > limits.max
    wrong = (sent < limits.min) | above
    if sent.dtype.kind == "f":
        wrong |= np.isnan(sent)
        if feature.plain:
            # A fraction that a transformation leaves is dropped; one in the file is a mistake.
            wrong |= np.trunc(sent) != sent
    return np.asarray(wrong)


def _term_of(feature: Feature) -> Any:
    return feature.terms[0] if feature.index is None else (feature.name, feature.index)


def bind_columns(
    source: Source,
    features: Sequence[Feature],
    *,
    jagged: bool,
    missing: Sequence[Any] | None = None,
    key: Feature | None = None,
    ascending: bool = False,
    strings: bool = False,
) -> Columns:
    """Find the fields of one input, whose rows, or elements of rows, must be the same.

    A field with the most axes is the rows' own. One with fewer is repeated, as numpy would: each
    row, or element, reads the number of the object that it is in.

    Parameters
    ----------
    source : Source
        The arrays.
    features : sequence of Feature
        The channels of the tensor.
    jagged : bool
        Whether the innermost list belongs to the row.
    missing : sequence, optional
        What stands for a missing number in each channel; without it, there must be none.
    key : Feature, optional
        What the elements of a row are sorted by.
    ascending : bool
        Whether they are sorted upwards.
    strings : bool
        Whether the fields have strings.

    Raises
    ------
    InputError
        If rows, or lists, of the fields differ, or numbers are missing.
    """
    named = [*features, *([key] if key else [])]
    terms = dict.fromkeys(term for feature in named for term in feature.terms)
    found = {(path, how): source.place(path, reduction=how) for path, how in terms}
    unknown = [place.depth for place in found.values() if place.is_unknown]
    known = [place.depth for place in found.values() if not place.is_unknown]
    top = max(known or [*unknown, int(jagged)])
    places = {t: _deepened(place, top) if place.is_unknown else place for t, place in found.items()}
    own = {term: place for term, place in places.items() if place.depth == top}
    first, place = next(iter(own.items()))
    if jagged:
        with of_field(first[0]):
            innermost(place)
    if len(own) < len(places):
        _check_arrays(own, places, least=int(jagged))
    levels = _same_levels(own, jagged=jagged, united=not jagged and missing is not None)
    rows = Structure(place.events, levels[:-1] if jagged else levels)
    offsets = levels[-1].data if jagged else None
    stands = None if missing is None else tuple(missing)
    columns = Columns(rows, offsets, tuple(features), {}, stands, key, ascending)
    aligned: dict[tuple[Levels, bool], Int64 | None] = {}
    of_strings = {f.terms[0] for f in features if f.index is None} if strings else set()
    for term, place in places.items():
        by_row = jagged and place.depth < top
        lies = rows.levels if by_row or not jagged else levels
        where = place.levels, by_row
        if where not in aligned:
            aligned[where] = _aligned(rows, lies, place, (first[0], term[0]))
        index = aligned[where]
        _check_gaps(columns, index, place, term, by_row=by_row)
        column = _numbers(source, place, index, term[0], strings=term in of_strings)
        columns.terms[term] = (*column, by_row)
    if key is not None and all(columns.terms[term][2] for term in key.terms):
        raise InputError(
            f"field {key.text!r}, by which constituents are sorted, is a number of the whole row"
        )
    for feature in features:
        if feature.index is not None:
            place = source.place(path_of(feature.name))
            index = _references(source, columns, feature, place)
            column = _numbers(source, place, index, path_of(feature.name), strings=strings)
            columns.terms[_term_of(feature)] = (*column, False)
    return columns


def bind_lists(source: Source, path: Path) -> Columns:
    """Find the lists of a column, whose elements may be anything, and are not read.

    Raises
    ------
    InputError
        If there are no lists.
    """
    place = source.place(path, lists=True)
    with of_field(path):
        levels, offsets, _ = innermost(place)
    return Columns(Structure(place.events, levels), offsets)


def _numbers(
    source: Source, place: Structure, index: Int64 | None, path: Path, *, strings: bool
) -> tuple[Tensor, Int64 | None]:
    """Return the numbers of a field, and where those of an index into it lie in them."""
    with of_field(path):
        data, at = source.numbers(place, strings=strings)
    if isinstance(at, slice):
        return data[at], index
    return data, at if index is None else through(at, index)


def _aligned(
    rows: Structure, levels: Levels, place: Structure, paths: tuple[Path, Path]
) -> Int64 | None:
    """Return where each row, or element, has its number among those of a field."""
    try:
        return align(levels, place.levels, rows.events, place.events)
    except ValueError:
        first, other = (f"field {text_of(path)!r}" for path in paths)
        if place.depth == rows.depth:
            rows.check_same(place, (first, other))
        raise InputError(
            f"{first} and {other} do not have the same objects; choose both from the same events"
        ) from None


def _check_gaps(
    columns: Columns, index: Int64 | None, place: Structure, term: Term, *, by_row: bool
) -> None:
    """Refuse missing numbers, if nothing stands for them."""
    if index is None or columns.missing is not None or not np.any(index < 0):
        return
    row, name = int(np.argmax(index < 0)), text_of(term[0])
    is_element = columns.offsets is not None and not by_row
    if columns.offsets is not None and is_element:
        row = int(np.searchsorted(columns.offsets, row, side="right")) - 1
    event, gap = columns.rows.event_of(row), place.levels[-1].gap
    if gap not in ("", "None", "plain"):
        raise InputError(
            f"field {name!r}: event {event} has no {gap}; say what stands for it, such as "
            "missing=0.0"
        )
    among = " among the constituents of a row" if is_element else ""
    raise InputError(
        f"field {name!r} has None{among} in event {event}; remove it with ak.drop_none, fill it "
        "with ak.fill_none, or say what stands for it: missing=…"
    )


def _references(source: Source, columns: Columns, feature: Feature, place: Structure) -> Int64:
    """Return where what an index refers to is in the lists of the same event; -1 for nothing."""
    rows, levels, name = columns.rows, place.levels, str(feature.index)
    if place.depth != 1 or not levels[0].is_list or place.events != rows.events:
        raise InputError(
            f"field {feature.text!r}, to which {name!r} refers: expected a list in each of "
            f"{rows.events} events"
        )
    elements = Elements(columns, slice(0, len(rows)), gathers=False)
    number, absent = elements.take(columns.terms[feature.terms[0]])
    if number.dtype.kind not in "iu":
        raise InputError(f"field {name!r} is an index; expected integers")
    number = number.astype(np.int64)
    refers = number >= 0 if absent is None else (number >= 0) & ~absent
    event = np.repeat(rows.event_numbers(), elements.counts)
    starts, counts = levels[0].data[:-1][event], levels[0].counts[event]
    found, is_wrong = number, number >= counts
    path = path_of(feature.name)
    in_file = source.file_positions(path[:-1], path_of(name)) if len(path) > 1 else None
    if in_file is not None:
        found, is_wrong = in_file.places(event, number)
        counts = in_file.sizes[event]
    wrong = np.flatnonzero(refers & is_wrong)
    if len(wrong):
        bad = int(event[wrong[0]])
        raise InputError(
            f"field {name!r} is {number[wrong[0]]} in event {bad}, which has {counts[wrong[0]]} "
            f"of {feature.text!r}; an index counts within its event, and not over all events, as "
            "coffea's …IdxG do",
            events=(bad, bad + 1),
        )
    index = np.where(refers & (found >= 0), starts + found, -1)
    option = merged(levels[1:])
    if option is not None:
        index = through(option, index)
    if columns.missing is None and np.any(index < 0):
        bad = int(event[np.argmax(index < 0)])
        raise InputError(
            f"field {name!r} refers to no {feature.text!r} in event {bad}; say what stands for "
            "it, such as missing=0.0"
        )
    return index


def _same_levels(own: dict[Term, Structure], *, jagged: bool, united: bool) -> Levels:
    """Return the levels of fields that have the rows, or their elements, refusing others.

    An option below them is of missing numbers, and not of missing rows, if it is one of elements,
    or of numbers of objects.
    """
    (first, _), place = next(iter(own.items()))
    keep = () if jagged else ("",) if united else ("", "plain")
    each = {t: without_options(p.levels, keep=keep) for t, p in own.items()}
    levels = mine = next(iter(each.values()))
    if united:
        levels = _united([p.levels for p in own.values()])
        mine = without_options(levels)
    for (path, how), theirs in each.items():
        other = own[path, how]
        if other.levels is place.levels and other.events == place.events:
            continue
        names = f"field {text_of(first)!r}", f"field {text_of(path)!r}"
        lists = without_options(theirs) if united else theirs
        above, others = (x[:-1] if jagged else x for x in (mine, lists))
        Structure(place.events, above).check_same(Structure(other.events, others), names)
        if jagged and not mine[-1].equals(lists[-1]):
            counts, wrong = mine[-1].counts, lists[-1].counts
            row = int(np.flatnonzero(counts != wrong)[0])
            event = Structure(place.events, above).event_of(row)
            raise InputError(
                f"{names[0]} and {names[1]} have lists of different lengths ({counts[row]} and "
                f"{wrong[row]}) in event {event}; the fields of one input must come from the same "
                "collection"
            )
    return levels


def _deepened(place: Structure, depth: int) -> Structure:
    """Return nothing of an unknown type as nothing in lists."""
    nothing = Level(np.zeros(1, np.int64))
    return replace(place, levels=(*place.levels, *(nothing,) * (depth - place.depth)))


def _check_arrays(own: dict[Term, Structure], places: dict[Term, Structure], *, least: int) -> None:
    """Refuse an array of fixed length beside single numbers of the same objects.

    A field of less than the `least` lists can only be a number of the whole row.
    """
    for (path, _), place in own.items():
        lists = without_options(place.levels)
        size = lists[-1].size if lists else None
        shallow = [
            other
            for (other, _), beside in places.items()
            if other[:-1] == path[:-1] and least <= beside.depth < place.depth
        ]
        if size is not None and shallow:
            name = text_of(path)
            raise InputError(
                f"field {name!r} has an array of fixed length, {size}, where field "
                f"{text_of(shallow[0])!r} has one number; name its numbers one by one, such as "
                f"'{name}[:{size}]', or take ak.from_regular of it if these are the objects that "
                "are meant"
            )


def _united(each: Sequence[Levels]) -> Levels:
    """Return the rows that any of several columns has; None is left where none has it."""
    lists, known = without_options(each[0]), []
    for levels in each:
        options = levels[len(without_options(levels)) :]
        own = merged([level for level in options if not level.gap])
        if own is not None:
            known.append(own >= 0)
        elif not any(level.gap == "plain" for level in options):
            return lists
    return (*lists, numbered(np.logical_or.reduce(known))) if known else lists
