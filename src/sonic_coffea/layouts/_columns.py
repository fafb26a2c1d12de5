"""Columns bound to a layout's channels, packed by one kernel for each group of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from awkward.contents import ByteMaskedArray, NumpyArray
from awkward.index import Index8
from numpy.typing import NDArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts import _kernels
from sonic_coffea.layouts._fields import Column, Feature, Source
from sonic_coffea.layouts._groups import NOTHING, Group, Place, Stamp, run, side_by_side
from sonic_coffea.layouts._range import misfit
from sonic_coffea.layouts._rows import (
    Int64,
    RowSelection,
    Split,
    read,
    split,
    unwrapped,
)
from sonic_coffea.layouts._scatter import Scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from awkward.contents import Content

    from sonic_coffea.layouts._texts import Texts

Tensor = NDArray[Any]

_BLOCK = 2048
_CAN_BE_SENT = "a kernel refused a number that can be sent"

_AS_THEY_ARE = frozenset(map(np.dtype, "bBhHiIlLqQfd"))
"""Types that kernels read."""


class Filling(NamedTuple):
    """A kernel that fills rows of a tensor, and what checks which row it found first."""

    call: _kernels.Call
    check: Callable[[int], None]


def fill_rows(fillings: Sequence[Filling], out: Tensor) -> None:
    """Fill ``out[n, ...]``, row after row."""
    calls = [filling.call for filling in fillings]
    count = len(out) * (out.shape[1] if out.ndim == 4 else 1)
    found = _kernels.in_turn(calls, count, out.nbytes // max(1, count))
    for filling, bad in zip(fillings, found, strict=True):
        filling.check(bad)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns of one input, where its rows lie in them, and how their elements are sorted."""

    split: Split
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    order: Int64 | None = None
    texts: Texts | None = None
    """The strings whose numbers the columns have."""

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def names(self) -> list[str]:
        """The names of the channels."""
        return [column.feature.channel for column in self.columns]

    def pad(
        self,
        out: Tensor,
        fills: Sequence[float],
        rows: RowSelection,
        *,
        wrap: bool = False,
        stamp: Stamp | None = None,
    ) -> None:
        """Fill ``out[n, F, L]``, with `fills` behind, or with the row's own elements again.

        Of ``out[n, P, F, L]``, each of `P` has a row of its own. A `stamp` fills other lines.
        """
        fill_rows(self.fillings(out, fills, rows, wrap=wrap, stamp=stamp), out)

    def fillings(
        self,
        out: Tensor,
        fills: Sequence[float],
        rows: RowSelection,
        *,
        wrap: bool = False,
        stamp: Stamp | None = None,
    ) -> list[Filling]:
        """Return what `pad` does."""
        starts, stops = self.split.starts[rows], self.split.stops[rows]
        place, gathered = Place.of(out), list[Group]()
        for group in self.groups:
            if group.by_row:
                stamp = self._stamp(group, out, fills, rows).beside(stamp, out.dtype)
            else:
                gathered.append(group)
        each = []
        for group in gathered or [NOTHING]:
            pads = np.asarray([fills[s] for s in group.slots]).astype(out.dtype)
            call = place.filling(group, starts, stops, pads, wrap=wrap, stamp=stamp)
            each.append(Filling(call, partial(self._check, group, out, rows)))
            stamp = None
        return each

    def _stamp(
        self, group: Group, out: Tensor, fills: Sequence[float], rows: RowSelection
    ) -> Stamp:
        """Return the numbers that all elements of a row have, of rows that have elements."""
        index = group.row_index
        assert index is not None  # noqa: S101
        filled = np.flatnonzero(self.split.counts_of(rows))
        found = np.empty((len(filled), len(group.slots)), out.dtype)
        own = replace(group, slots=np.arange(len(group.slots)))
        index = index[rows]
        bad = run(_kernels.rows, found, own, index[filled])
        self._check(group, out, rows, int(filled[bad]) if bad >= 0 else bad)
        numbers = found
        if len(filled) != len(index):
            numbers = np.zeros((len(index), len(group.slots)), out.dtype)
            numbers[filled] = found
        behind = [fills[s] for s in group.slots]
        return Stamp(group.slots, numbers, behind, repeated=len(behind))

    def _check(self, group: Group, out: Tensor, rows: RowSelection, bad: int) -> None:
        """Raise the error of the row at a place, unless that is negative."""
        if bad >= 0:
            start, stop = (int(ends[rows][bad]) for ends in (self.split.starts, self.split.stops))
            elements = np.arange(start, min(stop, start + out.shape[-1]))
            error = self.misfit(group.columns, out, self.number(rows, bad), elements)
            raise error or InputError(_CAN_BE_SENT)

    def list(self, out: Tensor, elements: Int64 | None, rows: RowSelection) -> None:
        """Fill ``out[n, F]`` with the elements of the rows: all, or where these lie."""
        starts, stops = self.split.starts[rows], self.split.stops[rows]
        follow = len(starts) and np.array_equal(starts[1:], stops[:-1])
        repeated = any(group.row_index is not None for group in self.groups)
        if elements is None and (repeated or not follow):
            elements = self.split.positions(rows)
        # Groups of the same arrays, such as the leading objects of a list, find them in the cache.
        step = _BLOCK if len(self.groups) > 1 else max(len(out), 1)
        for start, group in product(range(0, len(out), step), self.groups):
            here = slice(start, min(start + step, len(out)))
            if elements is None:
                bad = side_by_side(out[here], group, int(starts[0]) + start)
            else:
                ids, index = elements, group.row_index
                if index is not None:
                    ids = np.repeat(index[rows], self.split.counts_of(rows))
                bad = run(_kernels.rows, out[here], group, ids[here])
            if bad >= 0:
                self.refuse(group.columns, out, elements, rows, start + bad)

    def refuse(
        self,
        columns: Sequence[Column],
        out: Tensor,
        elements: Int64 | None,
        rows: RowSelection,
        first: int,
    ) -> NoReturn:
        """Raise the error of the first element, from a place in the tensor on."""
        ends = np.cumsum(self.split.counts_of(rows))
        elements = self.split.positions(rows) if elements is None else elements
        for place in range(first, len(elements)):
            row = self.number(rows, int(np.searchsorted(ends, place, side="right")))
            error = self.misfit(columns, out, row, elements[place : place + 1])
            if error is not None:
                raise error
        raise InputError(_CAN_BE_SENT)

    @property
    def collections(self) -> tuple[str, ...]:
        """The names of the collections that the elements are of; none if they are of one."""
        return ()

    def present(self, rows: RowSelection, length: int) -> NDArray[np.bool_]:
        """Return whether there is an element at each of `length` places, ``[n, L]``."""
        present: NDArray[np.bool_] = np.arange(length) < self.split.counts_of(rows)[:, np.newaxis]
        return present

    def indices(self, rows: RowSelection, slots: Int64, length: int) -> Int64:
        """Return the indices in the rows' lists, unsorted, of the elements at some of the places.

        Those at ``slots[n, W]`` of `length` places are ``[n, W, K]``: one for each of the
        collections, and -1 where the element is of another, or there is none.
        """
        counts = np.minimum(self.split.counts_of(rows), length)[:, np.newaxis]
        there = (slots >= 0) & (slots < counts)
        if self.order is not None and len(self.order):
            starts = self.split.starts[rows][:, np.newaxis]
            slots = self.order[np.where(there, starts + slots, 0)] - starts
        return np.where(there, slots, -1)[..., np.newaxis]

    def mark(self, out: Tensor, rows: RowSelection) -> None:
        """Fill ``out[n, 1, L]`` with 1 where a row has an element, and 0 elsewhere."""
        _kernels.mask(out, self.split.starts[rows], self.split.stops[rows])

    def scatter(self, width: int, dtype: np.dtype[Any], *, axes: int = 1) -> Scatter:
        """Return what takes in `width` values for each element, or for each pair of a row."""
        return Scatter(self, width, dtype, axes=axes)

    def number(self, rows: RowSelection, place: int) -> int:
        """Return the number of the row at a place of some rows."""
        return int(np.arange(len(self.split.rows))[rows][place])

    def misfit(
        self, columns: Sequence[Column], out: Tensor, row: int, elements: Int64
    ) -> InputError | None:
        """Return the error for the first of some elements that cannot be sent."""
        for column in columns:
            where = column.where(elements, np.full(len(elements), row))
            error = misfit(column, where, self.split.rows, row, out.dtype)
            if error is not None:
                return error
        return None


def of_one_collection(
    source: Source, named: Sequence[Feature], *, jagged: bool
) -> tuple[Split, list[Column]] | None:
    """Return the rows and the columns of fields that kernels can read where they are.

    They are numbers of the same records; None if they are not. This is the way of most inputs, and
    takes a tenth of the time of all others.
    """
    names = _names_of_one(named)
    if names is None:
        return None
    records, _ = source.collection(named[0].name)
    if records is None or records.purelist_depth < (2 if jagged else 1):
        return None
    node = records
    while node.is_list:
        node = node.content
    known = node.fields if node.is_record and not node.is_tuple else []
    if any(name not in known for name in names):
        return None
    slots = [known.index(name) for name in names]
    if not all(map(_is_plain, [node.contents[slot] for slot in slots], named)):
        return None
    here = _split(records, named[0], jagged=jagged)
    contents = here.leaf.contents
    columns = [
        Column(feature, read(contents[slot]), None)
        for feature, slot in zip(named, slots, strict=True)
    ]
    # Those of a file show only now how they lie in memory.
    return (here, columns) if all(_is_readable(c.values) for c in columns) else None


def _names_of_one(named: Sequence[Feature]) -> list[str] | None:
    """Return the names of fields in the collection that all are of, or None if it is not one."""
    prefix, names = "", list[str]()
    for feature in named:
        before, _, name = feature.name.rpartition(".")
        if feature.expression is not None or feature.index is not None or "[" in feature.name:
            return None
        if names and before != prefix:
            return None
        prefix = before
        names.append(name)
    return names


def _is_plain(field: Content, feature: Feature) -> bool:
    """Whether a field is of numbers of a type that a kernel reads."""
    if not field.is_numpy or field.inner_shape:
        return False
    return field.dtype in _AS_THEY_ARE and (feature.plain or field.dtype.kind == "f")


def taken_apart(
    source: Source, named: Sequence[Feature], *, jagged: bool, check: bool = True
) -> tuple[list[Split], list[Content]]:
    """Return the rows of each column and what is in them, checked to be the same rows."""
    used: list[Split] = []
    leaves: list[Content] = []
    splits: dict[int, Split | None] = {}
    for feature in named:
        records, name = source.collection(feature.name)
        if id(records) not in splits:
            deep = records is not None and records.purelist_depth >= (2 if jagged else 1)
            splits[id(records)] = _split(records, feature, jagged=jagged) if deep else None
        here = splits[id(records)]
        leaf = None if here is None else _field(here.leaf, name)
        if here is None or leaf is None:
            here = _split(source.column(feature.name), feature, jagged=jagged)
            leaf = here.leaf
        if check and used and here is not used[0]:
            _check_same(used[0], here, (f"field {named[0].name!r}", f"field {feature.name!r}"))
        used.append(here)
        leaves.append(leaf)
    return used, leaves


def _split(layout: Any, feature: Feature, *, jagged: bool) -> Split:
    return split(layout, jagged=jagged, what=f"field {feature.name!r}")


def _check_same(first: Split, other: Split, names: tuple[str, str]) -> None:
    """Refuse two columns whose objects, or elements of objects, are not the same."""
    first.rows.check_same(other.rows, names)
    different = np.flatnonzero(first.counts != other.counts)
    if len(different):
        row = int(different[0])
        raise InputError(
            f"{names[0]} and {names[1]} have lists of different lengths ({first.counts[row]} and "
            f"{other.counts[row]}) in event {first.rows.event_of(row)}; the fields of one input "
            "must come from the same collection"
        )


def positions_of(splits: Sequence[Split]) -> list[Int64 | None]:
    """Return where the elements lie in each column, computed once where that is the same."""
    known: list[tuple[Int64, Int64]] = []
    positions: list[Int64 | None] = []
    for here in splits:
        same = (p for s, p in known if s is here.starts or np.array_equal(s, here.starts))
        index = next(same, None)
        if index is None:
            index = here.positions()
            known.append((here.starts, index))
        positions.append(index)
    return positions


def _field(leaf: Content, name: str) -> Content | None:
    """Return a field of the records in a leaf, or None if it has to be looked for otherwise."""
    if leaf.is_record:
        if not leaf.has_field(name):
            return None
        field = leaf.contents[leaf.field_to_index(name)]
    elif leaf.is_indexed and name in leaf.fields:
        field = leaf[name]
    else:
        return None
    return field if field.purelist_depth == 1 and not field.is_record else None


class Composed(dict[tuple[int, int], tuple[Any, ...]]):
    """Indexes that are read through others: the same for the same, so that columns share them."""

    def __call__(self, outer: Int64 | None, index: Int64 | None) -> Int64 | None:
        """Return `outer`, read through `index`; -1 where that is."""
        if outer is None or index is None:
            return index if outer is None else outer
        key = id(outer), id(index)
        if key not in self:  # with what it is of, so that no other takes its address
            self[key] = read_through(outer, index), outer, index
        composed: Int64 = self[key][0]
        return composed


def read_through(values: NDArray[Any], index: Int64, absent: Any = -1) -> NDArray[Any]:
    """Return values by an index, and what stands for those of which the index is -1."""
    there = index >= 0
    if there.all():
        return values[index]
    taken = np.full(len(index), absent, values.dtype)
    taken[there] = values[index[there]]
    return taken


def is_converted(leaf: Content, feature: Feature) -> bool:
    """Whether a kernel cannot read the numbers as they are."""
    while leaf.is_indexed and not leaf.is_option:
        leaf = leaf.content
    if leaf.is_unknown:
        return False
    if not leaf.is_numpy or (leaf.dtype.kind != "f" and not feature.plain):
        return True
    return not _is_readable(read(leaf))


def numbers_of(
    leaf: Content,
    feature: Feature,
    index: Int64 | None,
    composed: Composed,
    *,
    gaps: bool = False,
    missing: bool = False,
    stands: float | None = None,
) -> Column:
    """Return the one-dimensional numbers of a leaf, and the index to read them through.

    `index` is that of the elements of rows, if others are not to be looked at. With `gaps`, it is
    -1 for some; with `missing`, numbers may be None, and `stands` may be put in their places.
    """
    converted = is_converted(leaf, feature)
    while leaf.is_indexed and not leaf.is_option:
        index = composed(np.asarray(read(leaf.index), np.int64), index)
        leaf = leaf.content
    if leaf.is_unknown:
        return Column(feature, np.zeros(leaf.length, np.float64), index, gaps)
    if not converted:
        return Column(feature, read(leaf), index, gaps)
    what = f"field {feature.name!r}"
    if index is not None:
        there = index >= 0
        leaf, index = leaf[index[there]], _counted(there) if gaps else None
    if stands is not None and feature.plain:
        filled = _filled(leaf, what, stands)
        if filled is not None:
            return Column(feature, filled, index, gaps)
    leaf, present = _plain(leaf, what, missing=missing)
    if present is not None:
        index, gaps = composed(present, index), True
    return Column(feature, readable(read(leaf), what), index, gaps)


def _plain(leaf: Content, what: str, *, missing: bool) -> tuple[NumpyArray, Int64 | None]:
    """Return numbers without what is around them, and where each is, if some are missing."""
    index: Int64 | None = None
    while not leaf.is_numpy:
        if leaf.is_option:
            present = np.asarray(leaf.to_IndexedOptionArray64().index.data)
            if np.any(present < 0):
                if not missing:
                    raise InputError(
                        f"{what} has None among the constituents of a row; remove them with "
                        "ak.drop_none, fill them with ak.fill_none, or say what stands for them: "
                        "missing=…"
                    )
                index = present if index is None else read_through(present, index)
                leaf = leaf.to_IndexedOptionArray64().content
            else:
                leaf = leaf.project()
        elif leaf.is_indexed:
            leaf = leaf.project()
        elif leaf.is_union:
            leaf = _one_type(leaf, what)
        elif leaf.is_unknown:
            leaf = NumpyArray(np.zeros(leaf.length))
        else:
            raise not_numbers(leaf, what)
    return leaf, index


def _filled(leaf: Content, what: str, stands: float) -> NDArray[Any] | None:
    """Return numbers with what stands for None, so that they are numbers as any others.

    None if that is left to kernels, which do not take a NaN that stands for something for a wrong
    number.
    """
    if not leaf.is_option or not leaf.content.is_numpy or leaf.content.inner_shape:
        return None
    values = readable(read(leaf.content), what)
    if not np.isfinite(stands) or not _holds(values.dtype, stands):
        return None
    if leaf.is_indexed:
        index = read(leaf.index)
        there = index >= 0
        values = (
            values.take(index, mode="clip") if len(values) else np.zeros(len(index), values.dtype)
        )
    else:
        there = np.asarray(leaf.mask_as_bool(valid_when=True))
        values = values[: len(there)]
    return np.where(there, values, values.dtype.type(stands))


def _holds(dtype: np.dtype[Any], number: float) -> bool:
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return float(dtype.type(number)) == number
    info = np.iinfo(dtype)
    return number.is_integer() and info.min <= number <= info.max


def _counted(there: NDArray[np.bool_]) -> Int64:
    """Return the number of each that is there among those that are, -1 for the others."""
    return np.where(there, np.cumsum(there) - 1, -1)


def readable(data: NDArray[Any], what: str) -> NDArray[Any]:
    """Return numbers as kernels read them: contiguous, native, of a type that they know."""
    if _is_readable(data):
        return data
    if data.dtype.kind not in "fiub":
        raise InputError(f"{what} has dtype {data.dtype}; expected a number or a bool")
    if data.dtype == bool:
        data = data.view(np.uint8)
    elif data.dtype == np.float16:
        data = data.astype(np.float32)
    elif data.dtype.itemsize > 8:
        data = data.astype(np.float64)
    elif not data.dtype.isnative:
        data = data.astype(data.dtype.newbyteorder("="))
    return np.ascontiguousarray(data)


def _is_readable(data: NDArray[Any]) -> bool:
    return data.dtype in _AS_THEY_ARE and data.flags.c_contiguous


def not_numbers(leaf: Content, what: str) -> InputError:
    """Return the error for what is something else."""
    if leaf.is_record:
        fields = ", ".join(leaf.fields)
        return InputError(f"{what} is a record with fields {fields}; expected one of these fields")
    if leaf.parameter("__array__") in {"string", "bytestring"}:
        return InputError(f"{what} holds strings; expected numbers")
    return InputError(f"{what} has type {leaf.form.type}; expected numbers")


def _one_type(union: Content, what: str) -> Content:
    """Return numbers of several types as numbers of one; None where they are None."""
    tags = read(union.tags)
    index = np.asarray(read(union.index)[: len(tags)], np.int64)
    places, numbers = [], []
    for tag, kind in enumerate(union.contents):
        mine = np.flatnonzero(tags == tag)
        content, at = unwrapped(kind, index[mine])
        if not isinstance(content, NumpyArray):
            raise InputError(f"{what} mixes types ({union.form.type}); expected one numeric type")
        places.append(mine[at >= 0])
        numbers.append(read(content)[at[at >= 0]])
    common = np.result_type(*numbers)
    # numpy's type for uint64 beside int64 is a float.
    whole = common.kind == "f" and all(n.dtype.kind in "iub" for n in numbers)
    merged = np.zeros(len(tags), np.int64 if whole else common)
    there = np.zeros(len(tags), np.bool_)
    for mine, some in zip(places, numbers, strict=True):
        merged[mine], there[mine] = some, True
        if merged.dtype.kind == "i" and np.any(some > np.iinfo(np.int64).max):
            raise InputError(f"{what} mixes types ({union.form.type}), too large for int64")
    if there.all():
        return NumpyArray(merged)
    return ByteMaskedArray(Index8(there.view(np.int8)), NumpyArray(merged), valid_when=True)


def order_of_elements(split_: Split, key: Column, *, ascending: bool) -> Int64:
    """Return the order of the elements of dense rows, each sorted by itself."""
    order = np.arange(int(split_.stops[-1]) if len(split_.stops) else 0)
    where = split_.starts, split_.stops
    if key.gaps:
        raise InputError(f"field {key.feature.name!r}, by which constituents are sorted, has None")
    bad = _kernels.sort(order, key.values, key.index, *where, ascending)
    if bad >= 0:
        raise InputError(
            f"field {key.feature.name!r}, by which constituents are sorted, is NaN or infinite in "
            f"event {split_.rows.event_of(bad)}"
        )
    return order
