"""Columns bound to a layout's slots: grouped by type, and packed by one kernel a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from awkward.contents import ByteMaskedArray, NumpyArray
from awkward.index import Index8
from numpy.typing import NDArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._fields import FUNCTIONS, Column, Feature, Source, limits
from sonic_coffea.layouts._range import misfit
from sonic_coffea.layouts._rows import (
    Int64,
    RowSelection,
    Split,
    blocks,
    offsets_of,
    read,
    split,
    unwrapped,
)
from sonic_coffea.layouts._scatter import Scatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awkward.contents import Content

    from sonic_coffea.layouts._texts import Texts

Tensor = NDArray[Any]

_BLOCK = 2048

_AS_THEY_ARE = frozenset(map(np.dtype, "bBhHiIlLqQfd"))
"""Types that kernels read."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Columns of one type that are read through the same index, with their kernel's arguments."""

    slots: Int64
    columns: tuple[Column, ...]
    addresses: Int64
    transform: tuple[NDArray[Any], ...] | None
    missing: NDArray[np.float64] | None = None

    @property
    def by_row(self) -> bool:
        """Whether all elements of a row have the same number."""
        return self.columns[0].by_row


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns of one input, where its rows lie in them, and how their elements are sorted."""

    several: ClassVar[bool] = False
    """Whether elements are of several collections."""

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
        self, out: Tensor, fills: Sequence[float], rows: RowSelection, *, wrap: bool = False
    ) -> None:
        """Fill ``out[n, F, L]``, with `fills` behind, or with the row's own elements again."""
        if len(self.groups) == 1:
            self._pad(out, fills, rows, wrap=wrap)
            return
        for here, some in blocks(rows, out.shape, out.itemsize):
            self._pad(out[here], fills, some, wrap=wrap)

    def _pad(self, out: Tensor, fills: Sequence[float], rows: RowSelection, *, wrap: bool) -> None:
        from sonic_coffea.layouts import _kernels

        starts, stops = self.split.starts[rows], self.split.stops[rows]
        for group in self.groups:
            pads = np.asarray([fills[s] for s in group.slots]).astype(out.dtype)
            if group.by_row and group.columns[0].index is not None:
                filled = np.flatnonzero(stops > starts)
                numbers = np.empty((len(filled), out.shape[1]), out.dtype)
                bad = run(_kernels.rows, numbers, group, group.columns[0].index[rows][filled])
                bad = int(filled[bad]) if bad >= 0 else bad
                _kernels.repeated(out, group.slots, numbers, starts, stops, pads, wrap)
            else:
                bad = run(_kernels.padded, out, group, starts, stops, pads, wrap)
            if bad >= 0:
                elements = np.arange(starts[bad], min(stops[bad], starts[bad] + out.shape[2]))
                raise self.misfit(group.columns, out, self.number(rows, bad), elements)

    def list(self, out: Tensor, elements: Int64, rows: RowSelection) -> None:
        """Fill ``out[n, F]`` with the elements of the rows."""
        from sonic_coffea.layouts import _kernels

        each = []
        for group in self.groups:
            ids = elements
            if group.by_row and group.columns[0].index is not None:
                ids = np.repeat(group.columns[0].index[rows], self.split.counts_of(rows))
            each.append((group, ids))
        # Groups of the same arrays, such as the leading objects of a list, find them in the cache.
        step = _BLOCK if len(each) > 1 else max(len(out), 1)
        for start, (group, ids) in product(range(0, len(out), step), each):
            here = slice(start, start + step)
            bad = run(_kernels.rows, out[here], group, ids[here])
            if bad >= 0:
                bad += start
                ends = np.cumsum(self.split.counts_of(rows))
                row = self.number(rows, int(np.searchsorted(ends, bad, side="right")))
                raise self.misfit(group.columns, out, row, elements[bad : bad + 1])

    def stamp(
        self,
        out: Tensor,
        numbers: Sequence[float],
        fills: Sequence[float],
        slots: Int64,
        rows: RowSelection,
    ) -> None:
        """Fill ``out[n, slots, L]`` with a number for each element, and with `fills` behind."""
        from sonic_coffea.layouts import _kernels

        each = (np.asarray(values).astype(out.dtype) for values in (numbers, fills))
        where = self.split.starts[rows], self.split.stops[rows]
        _kernels.constants(out, slots, *each, *where)

    def mark(self, out: Tensor, rows: RowSelection) -> None:
        """Fill ``out[n, 1, L]`` with 1 where a row has an element, and 0 elsewhere."""
        from sonic_coffea.layouts import _kernels

        _kernels.mask(out, self.split.starts[rows], self.split.stops[rows])

    def scatter(self, width: int, dtype: np.dtype[Any], *, axes: int = 1) -> Scatter:
        """Return what takes in `width` values for each element, or for each pair of a row."""
        return Scatter(self, width, dtype, axes=axes)

    def number(self, rows: RowSelection, place: int) -> int:
        """Return the number of the row at a place of some rows."""
        return int(np.arange(len(self.split.rows))[rows][place])

    def misfit(
        self, columns: Sequence[Column], out: Tensor, row: int, elements: Int64
    ) -> InputError:
        """Return the error for the first of some elements that cannot be sent."""
        for column in columns:
            where = column.where(elements, np.full(len(elements), row))
            error = misfit(column, where, self.split.rows, row, out.dtype)
            if error is not None:
                return error
        return InputError("a kernel refused a number that can be sent")


def run(kernel: Any, out: Tensor, group: Group, *where: Any) -> int:
    """Fill the slots of a group; return the place of the first that cannot be sent, or -1."""
    values, index = group.columns[0].values, group.columns[0].index
    index = None if group.by_row else index
    size = len(values) if index is None else len(index)
    missing = None if group.missing is None else group.missing.astype(out.dtype)
    first = (out, group.slots, group.addresses, size, values[:0], index, group.transform)
    bad: int = kernel(*first, missing, *where)
    return bad


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


def grouped(columns: Sequence[Column], missing: Sequence[float] | None = None) -> tuple[Group, ...]:
    """Put columns together that one kernel can pack."""
    slots: dict[Any, list[int]] = {}
    for slot, column in enumerate(columns):
        of = (id(column.index), column.gaps, column.by_row)
        key = (column.values.dtype, len(column.values), *of, column.feature.plain)
        slots.setdefault(key, []).append(slot)
    return tuple(_group(here, [columns[s] for s in here], missing) for here in slots.values())


def _group(slots: list[int], columns: list[Column], missing: Sequence[float] | None) -> Group:
    from sonic_coffea.layouts import _kernels

    if not columns[0].feature.plain and columns[0].values.dtype.kind != "f":
        real = np.result_type(columns[0].values.dtype, np.float32)
        # The channels of a one-hot field have one array.
        each = {id(c.values): c.values for c in columns}
        each = {key: values.astype(real) for key, values in each.items()}
        columns = [replace(c, values=each[id(c.values)]) for c in columns]
    gaps = columns[0].gaps and missing is not None
    return Group(
        np.asarray(slots, np.int64),
        tuple(columns),
        np.asarray([_kernels.address(c.values) for c in columns], np.int64),
        None if columns[0].feature.plain else _transform(columns),
        np.asarray([missing[s] for s in slots]) if gaps and missing is not None else None,
    )


def _transform(columns: list[Column]) -> tuple[NDArray[Any], ...]:
    """Return what a kernel needs to transform: numbers ``[9, F]``, flags, categories."""
    features = [c.feature for c in columns]
    numbers = np.asarray(
        [
            (
                f.shift,
                f.scale,
                *limits((f.lower, f.upper)),
                *limits(f.within or (None, None)),
                f.nonfinite or 0.0,
                _argument(f),
                dict(f.pairs).get(None, np.nan),
            )
            for f in features
        ],
        columns[0].values.dtype,
    )
    known = [[pair for pair in f.pairs if pair[0] is not None] for f in features]
    table = [pair for pairs in known for pair in pairs]
    return (
        np.ascontiguousarray(numbers.T),
        np.asarray([f.nonfinite is not None for f in features]),
        np.asarray([_code(f) for f in features]),
        np.ascontiguousarray(np.asarray(table, numbers.dtype).reshape(-1, 2).T),
        offsets_of(np.asarray([len(pairs) for pairs in known], np.int64)),
    )


def _argument(feature: Feature) -> float:
    """Return what a kernel's function takes besides the number."""
    if feature.only is not None:
        return feature.only
    return 1.0 if feature.power is None else feature.power


def _code(feature: Feature) -> int:
    """Return the number that a kernel has for a function; 0 if nothing but shift and scale is."""
    if feature.power is not None:
        return -1
    if feature.only is not None and feature == Feature(feature.name, categories=feature.pairs):
        return -3
    if feature.function is not None:
        return 1 + list(FUNCTIONS).index(feature.function)
    return -2 if feature.computed else 0


def order_of_elements(split_: Split, key: Column, *, ascending: bool) -> Int64:
    """Return the order of the elements of dense rows, each sorted by itself."""
    from sonic_coffea.layouts import _kernels

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
