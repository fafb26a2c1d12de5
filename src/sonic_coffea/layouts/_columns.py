"""Columns bound to a layout's slots: grouped by type, and packed by one kernel a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import NumpyArray
from numpy.typing import NDArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._fields import FUNCTIONS, Column, Feature, Source
from sonic_coffea.layouts._range import check_range, misfit
from sonic_coffea.layouts._rows import Int64, RowSelection, Split, read, split
from sonic_coffea.layouts._scatter import Scatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awkward.contents import Content

Tensor = NDArray[Any]

_AS_THEY_ARE = frozenset(map(np.dtype, "bBhHiIlLqQfd"))
"""Types that kernels read."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Columns of one type that are read through the same index, with their kernel's arguments."""

    slots: Int64
    columns: tuple[Column, ...]
    addresses: Int64
    transform: tuple[NDArray[Any], ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns of one input, where its rows lie in them, and how their elements are sorted."""

    split: Split
    columns: tuple[Column, ...]
    groups: tuple[_Group, ...]
    order: Int64 | None = None

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def names(self) -> list[str]:
        """The names of the fields."""
        return [column.feature.name for column in self.columns]

    def pad(self, out: Tensor, fills: Sequence[float], rows: RowSelection) -> None:
        """Fill ``out[n, F, L]``."""
        from sonic_coffea.layouts import _kernels

        starts, stops = self.split.starts[rows], self.split.stops[rows]
        for group in self.groups:
            pads = np.asarray([fills[s] for s in group.slots]).astype(out.dtype)
            bad = _run(_kernels.padded, out, group, starts, stops, pads)
            if bad >= 0:
                elements = np.arange(starts[bad], min(stops[bad], starts[bad] + out.shape[2]))
                raise self._misfit(group, out, self._number(rows, bad), elements)

    def list(self, out: Tensor, elements: Int64, rows: RowSelection) -> None:
        """Fill ``out[n, F]`` with the elements of the rows."""
        from sonic_coffea.layouts import _kernels

        for group in self.groups:
            bad = _run(_kernels.rows, out, group, elements)
            if bad >= 0:
                ends = np.cumsum(self.split.counts_of(rows))
                row = self._number(rows, int(np.searchsorted(ends, bad, side="right")))
                raise self._misfit(group, out, row, elements[bad : bad + 1])

    def mark(self, out: Tensor, rows: RowSelection) -> None:
        """Fill ``out[n, 1, L]`` with 1 where a row has an element, and 0 elsewhere."""
        from sonic_coffea.layouts import _kernels

        _kernels.mask(out, self.split.starts[rows], self.split.stops[rows])

    def scatter(self, width: int, dtype: np.dtype[Any]) -> Scatter:
        """Return what takes in `width` values for each element."""
        return Scatter(self, width, dtype)

    def _number(self, rows: RowSelection, place: int) -> int:
        return int(np.arange(len(self.split.rows))[rows][place])

    def _misfit(self, group: _Group, out: Tensor, row: int, elements: Int64) -> InputError:
        """Return the error for the first of some elements that cannot be sent."""
        for column in group.columns:
            where = elements if column.index is None else column.index[elements]
            error = misfit(column, where, self.split.rows, row, out.dtype)
            if error is not None:
                return error
        return InputError("a kernel refused a number that can be sent")


def _run(kernel: Any, out: Tensor, group: _Group, *where: NDArray[Any]) -> int:
    """Fill the slots of a group; return the place of the first that cannot be sent, or -1."""
    values, index = group.columns[0].values, group.columns[0].index
    size = len(values) if index is None else len(index)
    first = (out, group.slots, group.addresses, size, values[:0], index, group.transform)
    bad: int = kernel(*first, *where)
    return bad


def bind_columns(
    source: Source,
    features: Sequence[Feature],
    *,
    jagged: bool,
    target: np.dtype[Any],
    sort_by: str | None = None,
    longest: int | None = None,
) -> Columns:
    """Read the columns of one input.

    Columns of one collection, whose rows lie alike, are read where they are. Others, such as one
    that was computed of the rows that are left beside one of the file, are read through the
    positions of their own elements; so are those to be sorted or converted, unless all is used.

    Parameters
    ----------
    source : Source
        The arrays.
    features : sequence of Feature
        What goes into each slot of the tensor.
    jagged : bool
        Whether the innermost list belongs to the row.
    target : dtype
        What the tensor will hold.
    sort_by : str, optional
        The field by which the elements of a row are sorted, descending.
    longest : int, optional
        How many elements of a row are sent at most; others may be numbers that cannot be sent.
    """
    named = [*features, *([Feature(sort_by)] if sort_by else [])]
    splits, leaves = _apart(source, named, jagged=jagged)
    first, order = splits[0], None
    converted = [_is_converted(leaf, f) for leaf, f in zip(leaves, named, strict=True)]
    alike = all(one is first or np.array_equal(one.starts, first.starts) for one in splits)
    indexes: list[Int64 | None] = [None] * len(splits)
    if (
        not alike
        or ((sort_by or any(converted)) and not first.dense)
        or any(
            is_converted and leaf.length > first.stops.max(initial=0)
            for leaf, is_converted in zip(leaves, converted, strict=True)
        )
    ):
        indexes = _positions(splits)
        offsets = first.offsets
        first = Split(first.rows, first.leaf, offsets[:-1], offsets[1:])
    composed = _Composed()
    columns = [
        _numbers(leaf, feature, index, composed, converted=c)
        for leaf, feature, index, c in zip(leaves, named, indexes, converted, strict=True)
    ]
    if sort_by:
        order = _order(first, columns.pop())
        columns = [replace(c, index=composed(c.index, order)) for c in columns]
    check_range(columns, first.cut(longest), target)
    return Columns(first, tuple(columns), grouped(columns), order)


def _apart(
    source: Source, named: Sequence[Feature], *, jagged: bool
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
        if used and here is not used[0]:
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


def _positions(splits: Sequence[Split]) -> list[Int64 | None]:
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


class _Composed(dict[tuple[int, int], tuple[Any, ...]]):
    """Indexes that are read through others: the same for the same, so that columns share them."""

    def __call__(self, outer: Int64 | None, index: Int64 | None) -> Int64 | None:
        if outer is None or index is None:
            return index if outer is None else outer
        key = id(outer), id(index)
        if key not in self:  # with what it is of, so that no other takes its address
            self[key] = outer[index], outer, index
        composed: Int64 = self[key][0]
        return composed


def _is_converted(leaf: Content, feature: Feature) -> bool:
    """Whether a kernel cannot read the numbers as they are."""
    while leaf.is_indexed and not leaf.is_option:
        leaf = leaf.content
    if leaf.is_unknown:
        return False
    if not leaf.is_numpy or (leaf.dtype.kind != "f" and not feature.plain):
        return True
    return not _is_readable(read(leaf))


def _numbers(
    leaf: Content, feature: Feature, index: Int64 | None, composed: _Composed, *, converted: bool
) -> Column:
    """Return the one-dimensional numbers of a leaf, and the index to read them through.

    `index` is that of the elements of rows, if others are not to be looked at.
    """
    while leaf.is_indexed and not leaf.is_option:
        index = composed(np.asarray(read(leaf.index), np.int64), index)
        leaf = leaf.content
    if leaf.is_unknown:
        return Column(feature, np.zeros(leaf.length, np.float64), index)
    if not converted:
        return Column(feature, read(leaf), index)
    what = f"field {feature.name!r}"
    if index is not None:
        leaf, index = leaf[index], None
    while not leaf.is_numpy:
        if leaf.is_option:
            if np.any(leaf.mask_as_bool(valid_when=False)):
                raise InputError(
                    f"{what} has None among the constituents of a row; remove them with "
                    "ak.drop_none or fill them with ak.fill_none"
                )
            leaf = leaf.project()
        elif leaf.is_indexed:
            leaf = leaf.project()
        elif leaf.is_union:
            leaf = _one_type(leaf, what)
        else:
            raise not_numbers(leaf, what)
    return Column(feature, readable(read(leaf), what), index)


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
    kinds = [c.dtype for c in union.contents if isinstance(c, NumpyArray)]
    if len(kinds) != len(union.contents):
        raise InputError(f"{what} mixes types ({union.form.type}); expected one numeric type")
    tags, index = read(union.tags), read(union.index)
    common = np.result_type(*kinds)
    # numpy's type for uint64 beside int64 is a float.
    whole = common.kind == "f" and all(k.kind in "iub" for k in kinds)
    merged = np.empty(union.length, np.int64 if whole else common)
    for tag, content in enumerate(union.contents):
        mine = tags == tag
        numbers = content.data[index[: len(tags)][mine]]
        merged[mine] = numbers
        if merged.dtype.kind == "i" and np.any(numbers > np.iinfo(np.int64).max):
            raise InputError(f"{what} mixes types ({union.form.type}), too large for int64")
    return NumpyArray(merged)


def grouped(columns: Sequence[Column]) -> tuple[_Group, ...]:
    """Put columns together that one kernel can pack."""
    slots: dict[Any, list[int]] = {}
    for slot, column in enumerate(columns):
        key = (column.values.dtype, len(column.values), id(column.index), column.feature.plain)
        slots.setdefault(key, []).append(slot)
    return tuple(_group(here, [columns[s] for s in here]) for here in slots.values())


def _group(slots: list[int], columns: list[Column]) -> _Group:
    from sonic_coffea.layouts import _kernels

    if not columns[0].feature.plain and columns[0].values.dtype.kind != "f":
        real = np.result_type(columns[0].values.dtype, np.float32)
        columns = [replace(c, values=c.values.astype(real)) for c in columns]
    return _Group(
        np.asarray(slots, np.int64),
        tuple(columns),
        np.asarray([_kernels.address(c.values) for c in columns], np.int64),
        None if columns[0].feature.plain else _transform(columns),
    )


def _transform(columns: list[Column]) -> tuple[NDArray[Any], ...]:
    real = columns[0].values.dtype
    features = [c.feature for c in columns]
    numbers = (
        [f.shift for f in features],
        [f.scale for f in features],
        [-np.inf if f.lower is None else f.lower for f in features],
        [np.inf if f.upper is None else f.upper for f in features],
    )
    return (
        *(np.asarray(n, real) for n in numbers),
        np.asarray([f.nonfinite is not None for f in features]),
        np.asarray([f.nonfinite or 0.0 for f in features], real),
        np.asarray(
            [0 if f.function is None else 1 + FUNCTIONS.index(f.function) for f in features]
        ),
    )


def _order(split_: Split, key: Column) -> Int64:
    """Return the order of the elements of dense rows, each sorted by itself, descending."""
    from sonic_coffea.layouts import _kernels

    order = np.arange(int(split_.stops[-1]) if len(split_.stops) else 0)
    bad = _kernels.descending(order, key.values, key.index, split_.starts, split_.stops)
    if bad >= 0:
        raise InputError(
            f"field {key.feature.name!r}, by which constituents are sorted, is NaN or infinite in "
            f"event {split_.rows.event_of(bad)}"
        )
    return order
