"""The numbers of some rows: gathered, transformed and checked by numpy, and padded by one loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import awkward as ak
import numpy as np
from awkward.contents import ListOffsetArray, NumpyArray
from awkward.index import Index64

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._expressions import Path, Term, exact, expression_of, path_of, text_of
from sonic_coffea.layouts._features import Feature, all_finite, transform
from sonic_coffea.layouts._source import Source, innermost, of_field, within
from sonic_coffea.layouts._structure import (
    Int64,
    Place,
    RowSelection,
    Structure,
    Tensor,
    column_at,
    is_pick,
    offsets_of,
    ranges,
    read,
    real_of,
    through,
    widened,
)

_WHOLE = 2.0**53
"""From here on, float64, in which numbers are transformed, rounds integers."""

# How the names of indices end in ATLAS's links and EDM4hep's relations, and the field beside them
# that says into which collection they lead; with 0, nowhere.
_KEYS = {"m_persIndex": "m_persKey", "index": "collectionID"}

BLOCK_BYTES = 1 << 21
"""Bytes of the elements that are made at a time, so that each step finds them in the cache."""


Column = tuple[Tensor, Int64 | None, bool, str]
"""A field's numbers, the place of each element's number in them, and whether places are of rows.

Without places, the numbers are in order. A place is -1 where there is no number, and the last text
is the message for one that is sent.
"""


@dataclass(slots=True, eq=False)
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
        Replacement of a missing number in each channel; None refuses missing numbers.
    transforms_missing : bool
        Whether the replacement is transformed as the other numbers are.
    key : Feature or None
        What the elements of a row are sorted by, downwards.
    """

    rows: Structure
    offsets: Int64 | None = None
    features: tuple[Feature, ...] = ()
    terms: dict[Term, Column] = field(default_factory=dict)
    missing: tuple[Any, ...] | None = None
    transforms_missing: bool = False
    key: Feature | None = None

    def counts(self, rows: RowSelection) -> Int64:
        """Return how many elements each of some rows has."""
        if self.offsets is None:
            return np.ones(len(self.numbers(rows)), np.int64)
        return self.offsets[1:][rows] - self.offsets[:-1][rows]

    def present(self, rows: RowSelection, length: int) -> Tensor:
        """Return ``[n, L]``: which positions of a padded axis have an element, and no padding."""
        return np.arange(length) < self.counts(rows)[:, np.newaxis]

    def numbers(self, rows: RowSelection) -> Int64:
        """Return the numbers of some rows."""
        return np.arange(*rows.indices(len(self.rows))) if isinstance(rows, slice) else rows

    def chosen(self, rows: RowSelection, firsts: Int64, kept: Int64) -> Int64:
        """Return ``first + index`` of the elements kept of each row, by their index in its list.

        They are the first ones in the order of the key, which is stable.
        """
        key = self.key
        if key is None:
            return ranges(firsts, kept)
        elements = Elements(replace(self, key=None, missing=()), rows)
        keys, absent = elements.raw(key)
        with np.errstate(all="ignore"):
            keys = widened(key.transformed(keys))
        wrong = ~np.isfinite(keys) if absent is None else absent | ~np.isfinite(keys)
        what = f"field {key.text!r}, by which constituents are sorted, is None, NaN or infinite"
        elements.refuse(wrong, f"{what} in event {{event}}", keys)
        numbers = NumpyArray(np.ascontiguousarray(keys, keys.dtype.newbyteorder("=")))
        lists = ak.Array(ListOffsetArray(Index64(offsets_of(elements.counts)), numbers))
        order = ak.argsort(lists, axis=1, ascending=False, stable=True).layout
        index = read(order.to_ListOffsetArray64(start_at_zero=True).content)
        return np.repeat(firsts, kept) + index[ranges(offsets_of(elements.counts)[:-1], kept)]

    def blocks(
        self, rows: RowSelection, bytes_each: int, longest: int | None = None
    ) -> Iterator[tuple[slice, Elements]]:
        """Yield ranges of some rows, and the rows' elements, which fit into the cache."""
        counts = self.counts(rows)
        step = max(1, len(counts) * BLOCK_BYTES // max(1, int(counts.sum()) * bytes_each))
        first = rows.indices(len(self.rows))[0] if isinstance(rows, slice) else 0
        for start in range(0, len(counts), step):
            stop = min(start + step, len(counts))
            here = slice(start, stop)
            some = slice(first + start, first + stop) if isinstance(rows, slice) else rows[here]
            yield here, Elements(self, some, longest)


class Elements:
    """The elements of some rows, one row after the other.

    Parameters
    ----------
    columns : Columns
        What they are read from.
    rows : slice or array of int64
        The rows.
    longest : int, optional
        How many elements of a row are sent at most; others may be numbers that cannot be sent.

    Attributes
    ----------
    at : slice or array of int64
        Where the elements lie among those of all rows.
    counts : array of int64
        How many elements each row has.
    size : int
        How many elements there are.
    starts : array of int64
        Where the elements of each row begin in the values, if rows have lists of them.
    """

    def __init__(self, columns: Columns, rows: RowSelection, longest: int | None = None) -> None:
        self.columns, self.rows, self._longest = columns, rows, longest
        self.counts = columns.counts(rows)
        self.at: RowSelection = rows
        self.size = len(self.counts)
        self._indexes: dict[tuple[int, bool], tuple[Int64, Tensor | None]] = {}
        if columns.offsets is None:
            return
        firsts = columns.offsets[:-1][rows]
        kept = self.counts if longest is None else np.minimum(self.counts, longest)
        if columns.key is None and isinstance(rows, slice) and len(firsts) > 0:
            first, stop = int(firsts[0]), int(firsts[-1] + self.counts[-1])
            if 2 * kept.sum() >= stop - first:  # most are sent
                self.at, self.size, self.starts = slice(first, stop), stop - first, firsts - first
                return
        self.at, self.starts = columns.chosen(rows, firsts, kept), offsets_of(kept)[:-1]
        self.counts, self.size = kept, len(self.at)

    def take(self, column: Column) -> tuple[Tensor, Tensor | None]:
        """Return the number of each element, and which are missing, if some are."""
        data, places, by_row, _ = column
        where, absent = self.rows if by_row else self.at, None
        if places is None:
            values = data[where]
        else:
            if (id(places), by_row) not in self._indexes:  # fields of a collection share them
                index = places[where]
                self._indexes[id(places), by_row] = index, index < 0 if (index < 0).any() else None
            index, absent = self._indexes[id(places), by_row]
            if absent is None:
                values = data[index]
            else:
                values = np.zeros(len(index), data.dtype)
                values[~absent] = data[index[~absent]]
        if by_row:
            values = np.repeat(values, self.counts)
            absent = None if absent is None else np.repeat(absent, self.counts)
        return values, absent

    def raw(self, feature: Feature) -> tuple[Tensor, Tensor | None]:
        """Return the numbers of a feature before they are transformed, and which are missing.

        Without a replacement, missing numbers are refused where they are sent.
        """
        gaps, values = None, {}
        for term in [feature.term] if feature.expression is None else feature.terms:
            column = self.columns.terms[term]
            values[term], absent = self.take(column)
            if absent is not None:
                gaps = absent if gaps is None else gaps | absent
                if self.columns.missing is None:
                    self.refuse(absent, column[-1], absent)
        if feature.expression is None:
            return values[feature.term], gaps
        for term, taken in values.items():
            with of_field(term[0]):
                values[term] = exact(widened(taken))
        result = np.asarray(expression_of(feature.expression)[1](values))
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
        features, missing = self.columns.features, self.columns.missing
        if out is None:
            out = np.empty((len(features), self.size), dtype)
        with np.errstate(all="ignore"):
            filled = [self._filled(channel) for channel in range(len(features))]
            raws = [raw for raw, _ in filled]
            for _, alike in groupby(range(len(raws)), lambda c: (features[c].kind, raws[c].dtype)):
                channels = [*alike]
                here = slice(channels[0], channels[-1] + 1)
                if not _write(features[here], raws[here], out[here]):
                    for channel in channels:
                        self._refuse_unsent(channel, dtype)
        if missing is not None:
            for channel, (_, absent) in enumerate(filled):
                if absent is not None:
                    out[channel, absent] = missing[channel]
        return out

    def _filled(self, channel: int) -> tuple[Tensor, Tensor | None]:
        """Return the numbers of a channel as `raw` does, with `missing` if it is transformed."""
        feature, missing = self.columns.features[channel], self.columns.missing
        raw, absent = self.raw(feature)
        is_filled = self.columns.transforms_missing and not feature.plain
        if absent is None or missing is None or not is_filled:
            return raw, absent
        fill = np.float64(missing[channel])
        is_held = fill.astype(raw.dtype) == fill  # as real numbers, large integers are rounded
        raw = raw.astype(raw.dtype if is_held else real_of(raw.dtype))
        raw[absent] = fill
        return raw, None

    def _refuse_unsent(self, channel: int, target: np.dtype[Any]) -> None:
        """Raise the error of the first number that is sent and cannot be, if there is one.

        It computes again what the numbers become, one step after the other.
        """
        feature = self.columns.features[channel]
        raw, absent = self._filled(channel)
        before = feature.computed(raw, np.empty(len(raw), feature.real(raw.dtype)))
        finite, values = np.isfinite(before), feature.transformed(raw)
        what, after = f"field {feature.text!r} is", " after its transformation"
        known = [key for key, _ in feature.categories or ()]
        if known and None not in known:
            others = ~np.isin(raw, known) & np.isfinite(raw) & ~finite
            none = f"which is none of its categories {', '.join(map(str, known))}"
            message = f"{what} {{value}} in event {{event}}, {none}; add it, or None: … for others"
            self.refuse(others, message, raw, absent)
        if feature.nonfinite is None:
            function = feature.function or (feature.power and f"power {feature.power}")
            of = f" after {function}" if function else ""
            correct = f"correct the input, or say what replaces it with Feature({feature.text!r}"
            message = f"{what} NaN or infinite{of} in event {{event}}; {correct}, nonfinite=…)"
            self.refuse(~finite, message, before, absent)
        wrong = _invalid(feature, values, target)
        if target.kind not in "iub" and not np.isfinite(feature.nonfinite or 0.0):
            wrong &= finite
        cannot = f"which {target.name} cannot hold; declare a wider dtype for the layout"
        if not feature.plain and target.kind in "iu":
            transform = "transform it before, as in expression='round(100 * pt)'"
            cannot = f"which {target.name} cannot hold, or float64 rounds; {transform}"
        message = f"{what} {{value}}{'' if feature.plain else after} in event {{event}}, {cannot}"
        self.refuse(wrong, message, values, absent)

    def refuse(
        self, wrong: Tensor, message: str, values: Any, absent: Tensor | None = None
    ) -> None:
        """Raise a message of the first element that is wrong, and sent."""
        if absent is not None:
            wrong = wrong & ~absent
        if self._longest is not None:
            wrong = wrong & (ranges(0 * self.counts, self.counts) < self._longest)
        for element in np.flatnonzero(wrong)[:1].tolist():
            row = int(np.searchsorted(np.cumsum(self.counts), element, side="right"))
            number = int(self.columns.numbers(self.rows)[row])
            message = message.replace("{event}", str(self.columns.rows.event_of(number)))
            message = message.replace("{value}", str(values[element]))
            raise InputError(message, rows=(number, number + 1))


def padding(columns: Columns, fills: Any, dtype: np.dtype[Any], rows: RowSelection) -> Tensor:
    """Return ``[n, F]``: what pads some rows, if numbers are padded before they are transformed.

    An element of padding has the fill in the place of each number of an element, and the row's own
    numbers.
    """
    each = np.empty((len(columns.numbers(rows)), len(fills)), dtype)
    first = np.zeros(len(columns.rows), np.int64)
    for channel, (feature, fill) in enumerate(zip(columns.features, fills, strict=True)):
        terms: dict[Term, Column] = {}
        for term, column in columns.terms.items():
            constant = np.asarray([fill], real_of(column[0].dtype))
            terms[term] = column if column[2] else (constant, first, False, "")
        missing = None if columns.missing is None else columns.missing[channel : channel + 1]
        own = replace(columns, features=(feature,), terms=terms, missing=missing)
        alone = replace(own, offsets=None, key=None)
        with within(f"fill {fill}, padded before the transformation"):
            (each[:, channel],) = Elements(alone, rows).values(dtype)
    return each


def _write(features: Sequence[Feature], raws: Sequence[Tensor], out: Tensor) -> bool:
    """Write numbers of channels of one kind; return False if one may be that cannot be sent."""
    values: Any = raws
    is_valid = True
    if not features[0].plain:
        real = features[0].real(raws[0].dtype)
        is_held = out.dtype == real and out.strides[1] == out.itemsize
        values = out if is_held else np.empty(out.shape, real)
        is_valid = transform(features, raws, values)
    if out.dtype.kind in "iub":
        each = zip(features, values, strict=True)
        is_valid = is_valid and not any(_invalid(f, sent, out.dtype).any() for f, sent in each)
    if values is not out:
        for row, sent in zip(out, values, strict=True):
            row[:] = sent
        is_valid = is_valid and all_finite(out)
    return is_valid


def _invalid(feature: Feature, sent: Tensor, target: np.dtype[Any]) -> Tensor:
    """Return which numbers are not those of the tensor: infinite in it, or no such integers."""
    if target.kind == "b":
        return np.asarray((sent != 0) & (sent != 1))
    if target.kind not in "iu":
        return np.asarray(~np.isfinite(sent.astype(target)))
    if feature.plain and np.can_cast(sent.dtype, target):
        return np.zeros(1, np.bool_)
    limits = np.iinfo(target)
    if sent.dtype.kind != "f":
        return np.asarray((sent < limits.min) | (sent > limits.max))
    # As a float, the largest of 64 bits is one more than that.
    fits = (sent >= limits.min) & (sent < limits.max + 1.0)
    exact = np.trunc(sent) == sent  # 100 * 0.29 is 28.999…, which would become 28
    if not feature.plain:
        exact &= np.abs(sent) < _WHOLE
    return np.asarray(~(fits & exact))


def bind_columns(
    source: Source,
    features: Sequence[Feature],
    *,
    jagged: bool,
    missing: Sequence[Any] | None = None,
    key: Feature | None = None,
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
        Replacement of a missing number in each channel; by default, missing numbers are refused.
    key : Feature, optional
        What the elements of a row are sorted by.
    strings : bool
        Whether the fields have strings.

    Raises
    ------
    InputError
        If rows, or lists, of the fields differ, or numbers are missing.
    """
    named = [*features, *([key] if key else [])]
    texts = {f.terms[0] for f in features if f.index is None} if strings else set()
    terms = dict.fromkeys(
        term for feature in named for term in (*feature.terms, *_key_of(feature, source))
    )
    read = {term: source.numbers(*term, strings=term in texts) for term in terms}
    alike: dict[Any, list[Term]] = {}
    for term, (x, _, _) in read.items():  # what is asked of a field holds for those beside it
        alike.setdefault((term[0][:-1], x.rows, x.node.is_unknown), []).append(term)
    places = {same[0]: read[same[0]][0] for same in alike.values()}
    known = [place.rows.depth for place in places.values() if not place.node.is_unknown]
    top = max(known or [int(jagged), *(place.rows.depth for place in places.values())])
    places = {t: _in_lists(x, top) if x.node.is_unknown else x for t, x in places.items()}
    own = {term: place for term, place in places.items() if place.rows.depth == top}
    # Metadata are of all events, also of those that are None.
    own = {term: place for term, place in own.items() if term[1] != "metadata"} or own
    first = next(iter(own))
    if jagged:
        own = {t: with_lists(x, t[0], is_filled=missing is not None) for t, x in own.items()}
        places |= own
    if len(own) < len(places):
        _check_arrays(own, places, least=int(jagged))
    elements = _same_rows(own, jagged=jagged, is_filled=missing is not None)
    rows = elements.chain[-1 - jagged]
    offsets = elements.offsets if jagged else None
    fills = None if missing is None else tuple(missing)
    columns = Columns(rows, offsets, tuple(features), missing=fills, key=key)
    for term, *others in alike.values():
        other = places[term].rows
        by_row = jagged and other.depth < top
        index = (rows if by_row else elements).align(other, (first[0], term[0]))
        has_gaps = index is not None and np.any(index < 0)
        gap = _gap(other.gaps[-1], term[0]) if has_gaps else ""
        for each in (term, *others):
            _, data, at = read[each]
            columns.terms[each] = (*column_at(data, at, index), by_row, gap)
    if key is not None and all(columns.terms[term][2] for term in key.terms):
        raise InputError(
            f"field {key.text!r}, by which constituents are sorted, is a number of the whole row"
        )
    for feature in named:
        if feature.index is not None:
            are_texts = strings and feature is not key
            columns.terms[feature.term] = _referred(source, columns, feature, strings=are_texts)
    return columns


def _in_lists(place: Place, depth: int) -> Place:
    """Return nothing of an unknown type as nothing in lists."""
    rows = place.rows
    while rows.depth < depth:
        rows = Structure(np.zeros(1, np.int64), rows)
    return place._replace(rows=rows)


def with_lists(place: Place, path: Path, *, is_filled: bool = True) -> Place:
    """Return a field with empty lists in objects that were picked, such as Jet[0], and are not.

    Raises
    ------
    InputError
        If it has no lists, or there are such objects and `is_filled` is false.
    """
    if place.rows.outer is None:
        with of_field(path):
            innermost(place)  # raises
    objects, lists = place.rows.chain[-2:]
    picks = [-1 - number for number, gap in enumerate(objects.gaps) if is_pick(gap)]
    if not picks:
        return place
    is_picked = np.logical_or.reduce([objects.codes == pick for pick in picks])
    if is_picked.any() and not is_filled:
        first = int(np.argmax(is_picked))
        message = _gap(objects.gaps[-1 - objects.codes[first]], path)
        raise InputError(message.replace("{event}", str(objects.all_places.event_of(first))))
    is_there = is_picked | (objects.codes >= 0)  # a list that is None stays so
    counts = np.append(lists.counts, 0)[objects.index][is_there]
    outer = objects.all_places
    if len(picks) < len(objects.gaps):
        outer = outer.only(is_there)
    rows = replace(lists, offsets=offsets_of(counts), outer=outer, size=None)
    return place._replace(rows=rows)


def _gap(gap: str, path: Path) -> str:
    """Return what to say of a number that is missing in an event."""
    what = f"no {gap}" if is_pick(gap) else "None"
    return (
        f"field {text_of(path)!r} has {what} in event {{event}}; remove it with ak.drop_none, "
        "fill it with ak.fill_none, or say what stands for it, such as missing=0.0"
    )


def _key_of(feature: Feature, source: Source) -> tuple[Term, ...]:
    """Return the field that says into which collection an index leads, if there is one."""
    if feature.index is None:
        return ()
    *records, name = path_of(feature.index)
    for end, key in _KEYS.items():
        beside = (*records, f"{str(name).removesuffix(end)}{key}")
        if str(name).endswith(end) and source.has(beside):
            return ((beside, ""),)
    return ()


def _referred(source: Source, columns: Columns, feature: Feature, *, strings: bool) -> Column:
    """Return the numbers that an index refers to, in the lists of the same event."""
    path, name, rows = path_of(feature.name), str(feature.index), columns.rows
    place, data, at = source.numbers(path, strings=strings)
    column = columns.terms[feature.terms[0]]
    offsets = None if column[2] else columns.offsets  # an index of the row leads to its own number
    elements = Elements(replace(columns, offsets=offsets, key=None), slice(0, len(rows)))
    positions, absent = elements.take(column)
    *outer, lists = place.rows.chain
    is_listed = len(outer) == 1 and not outer[0].gaps and lists.events == rows.events
    if positions.dtype.kind == "f":  # as of coffea's relations in EDM4hep
        with np.errstate(invalid="ignore"):
            whole = positions.astype(np.int64)
        positions = whole if np.array_equal(whole, positions) else positions
    if positions.dtype.kind not in "iu" or not is_listed:
        raise InputError(
            f"field {name!r} is an index to {feature.text!r}: expected whole numbers, and a list "
            f"in each of {rows.events} events, none of them None; mask= leaves events out"
        )
    positions = positions.astype(np.int64)
    if absent is not None:
        positions[absent] = -1
    for term in _key_of(feature, source):
        keys = elements.take(columns.terms[term])[0]
        positions[keys == 0] = -1
        if len(known := np.unique(keys[positions >= 0])) > 1:
            key, link = term[0][-1], path_of(name)[-1]
            raise InputError(
                f"the links of {name!r} lead to several collections, by {text_of(term[0])!r}: "
                f"{', '.join(map(str, known[:4]))}; make an index of those to one of them, with -1 "
                f"for the others: ak.where(link.{key} == key, link.{link}, -1)"
            )
    event = np.repeat(rows.event_numbers(), elements.counts)
    sizes = lists.counts[event]
    places, wrong = positions, positions >= sizes
    in_file = source.file_positions(path, path_of(name))
    if in_file is not None:
        places, wrong = in_file.places(event, positions)
        sizes = in_file.sizes[event]
    for element in np.flatnonzero(wrong & (positions >= 0))[:1].tolist():
        bad = int(event[element])
        raise InputError(
            f"field {name!r} is {positions[element]} in event {bad}, which has {sizes[element]} of "
            f"{feature.text!r}; an index counts within its event, and not over all events, as "
            "coffea's …IdxG do",
            events=(bad, bad + 1),
        )
    refers = (positions >= 0) & (places >= 0)
    index = np.where(refers, lists.offsets[:-1][event] + places, -1)
    if lists.gaps:
        index = through(lists.codes, index)
    gap = (
        f"field {name!r} refers to no {feature.text!r} in event {{event}}; say what stands for it, "
        "such as missing=0.0"
    )
    return (*column_at(data, at, index), column[2], gap)


def _same_rows(own: dict[Term, Place], *, jagged: bool, is_filled: bool) -> Structure:
    """Return the rows that any of some fields has, or their elements, refusing other lists.

    A row that only some fields have is missing in the others. None in a column that is no field of
    objects is a missing number, if that is filled. An option below the elements of a row is of
    missing numbers, and not of missing elements.
    """
    (first, _), place = next(iter(own.items()))
    places = place.rows.all_places
    for (path, _), other in own.items():
        if other.rows.offsets is not places.offsets:
            places.check_same(other.rows.all_places, (first, path))
    known, kinds = [], ("",) if is_filled else ("", "plain")
    for rows in [] if jagged else [other.rows for other in own.values()]:
        outer = max((n for n, gap in enumerate(rows.gaps, 1) if gap in kinds), default=0)
        if outer:
            known.append((rows.codes >= 0) | (rows.codes < -outer))
        elif "plain" not in rows.gaps:
            return places
    return places.only(np.logical_or.reduce(known)) if known else places


def _check_arrays(own: dict[Term, Place], places: dict[Term, Place], *, least: int) -> None:
    """Refuse an array of fixed length beside single numbers of the same objects.

    A field of less than the `least` lists can only be a number of the whole row.
    """
    for (path, _), place in own.items():
        size, depth = place.rows.size, place.rows.depth
        for (other, _), beside in places.items():
            is_number = other[:-1] == path[:-1] and least <= beside.rows.depth < depth
            if is_number and size is not None:
                name = text_of(path)
                raise InputError(
                    f"field {name!r} has an array of fixed length, {size}, where field "
                    f"{text_of(other)!r} has one number; name its numbers one by one, such as "
                    f"'{name}[:{size}]', or take ak.from_regular of it if these are the objects "
                    "that are meant"
                )
