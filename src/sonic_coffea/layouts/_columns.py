"""Columns bound to a layout's slots: grouped by type, and packed by one kernel a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import NumpyArray
from numpy.typing import NDArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._fields import FUNCTIONS, Feature, Source
from sonic_coffea.layouts._range import cannot_hold, check_range, too_large
from sonic_coffea.layouts._rows import Int64, Split, read, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awkward.contents import Content

Tensor = NDArray[Any]
RowSelection = slice | Int64
"""Rows of a call: a range of them, or their numbers."""


_AS_THEY_ARE = frozenset(map(np.dtype, "bBhHiIlLqQfd"))
"""Types that kernels read."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """The numbers of one field: ``values``, read through ``index`` if there is one."""

    feature: Feature
    values: NDArray[Any]
    index: Int64 | None


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Columns of one type that are read through the same index, with their kernel's arguments."""

    slots: Int64
    columns: tuple[Column, ...]
    addresses: Int64
    transform: tuple[NDArray[Any], ...] | None

    @property
    def values(self) -> NDArray[Any]:
        return self.columns[0].values


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns of one input, and where its rows lie in them."""

    split: Split
    columns: tuple[Column, ...]
    groups: tuple[_Group, ...]
    order: Int64 | None = None

    def pad(self, out: Tensor, fills: Sequence[float], selection: RowSelection) -> None:
        """Fill ``out[n, F, L]``."""
        from sonic_coffea.layouts import _kernels

        starts, stops = self.split.starts[selection], self.split.stops[selection]
        for group in self.groups:
            kernel = _kernels.padded if group.transform is None else _kernels.padded_affine
            pads = np.asarray([fills[s] for s in group.slots]).astype(out.dtype)
            where = (starts, stops, pads, *(group.transform or ()))
            self._run(kernel, out, group, where, selection)

    def list(self, out: Tensor, ids: Int64, selection: RowSelection) -> None:
        """Fill ``out[n, F]`` with the elements at `ids`."""
        from sonic_coffea.layouts import _kernels

        for group in self.groups:
            kernel = _kernels.rows if group.transform is None else _kernels.rows_affine
            self._run(kernel, out, group, (ids, *(group.transform or ())), selection)

    def _run(
        self,
        kernel: Any,
        out: Tensor,
        group: _Group,
        where: tuple[Any, ...],
        selection: RowSelection,
    ) -> None:
        values = group.values
        index = group.columns[0].index
        size = len(values) if index is None else len(index)
        first = (out, group.slots, group.addresses, size, values[:0], index)
        if kernel(*first, *where) >= 0:
            raise self._misfit(group, out, selection)

    def _misfit(self, group: _Group, out: Tensor, selection: RowSelection) -> InputError:
        """Find the number that could not be sent, and say where it is."""
        numbers = np.arange(len(self.split.rows))[selection]
        for row in numbers:
            here = slice(self.split.starts[row], self.split.stops[row])
            for column in group.columns:
                where = here if column.index is None else column.index[here]
                values = column.values[where]
                feature = column.feature
                if feature.function is not None:
                    with np.errstate(all="ignore"):
                        values = getattr(np, feature.function)(values)
                if feature.nonfinite is None and not np.all(np.isfinite(values)):
                    return self._not_finite(feature, int(row))
                wrong = too_large(column, where, out.dtype)
                if wrong.any():
                    rows = self.split.rows
                    return cannot_hold(column, where, wrong, rows, int(row), out.dtype)
        return InputError("a number that cannot be sent was not found again")

    def _not_finite(self, feature: Feature, row: int) -> InputError:
        event = self.split.rows.events_of(row, row + 1)[0]
        after = f" after {feature.function}" if feature.function else ""
        return InputError(
            f"field {feature.name!r} is NaN or infinite{after} in event {event}; correct the "
            f"input, or say what replaces it with Feature({feature.name!r}, nonfinite=…)",
            rows=(row, row + 1),
        )


def bind(
    source: Source,
    features: Sequence[Feature],
    *,
    jagged: bool,
    target: np.dtype[Any],
    sort_by: str | None = None,
) -> Columns:
    """Read the columns of one input.

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
    """
    named = [*features, *([Feature(sort_by)] if sort_by else [])]
    used: list[Split] = []
    leaves: list[Content] = []
    splits: dict[int, Split | None] = {}
    for feature in named:
        records, name = source.collection(feature.name)
        if id(records) not in splits:
            deep = records is not None and records.purelist_depth >= (2 if jagged else 1)
            what = f"field {feature.name!r}"
            splits[id(records)] = split(records, jagged=jagged, what=what) if deep else None
        one = splits[id(records)]
        leaf = None if one is None else _field(one.leaf, name)
        if one is None or leaf is None:
            column = source.column(feature.name)
            one = split(column, jagged=jagged, what=f"field {feature.name!r}")
            leaf = one.leaf
        used.append(one)
        leaves.append(leaf)
        if one is not used[0]:
            _agree(used[0], one, features[0], feature)
    first, positions = _positions(used, leaves, sort=sort_by is not None)
    columns = [
        _numbers(leaf, feature, index)
        for leaf, feature, index in zip(leaves, named, positions, strict=True)
    ]
    order = None
    if sort_by:
        order = _sorted(first, columns.pop())
        columns = [replace(c, index=order if c.index is None else c.index[order]) for c in columns]
    check_range(columns, first, target)
    return Columns(first, tuple(columns), grouped(columns), order)


def _positions(
    used: Sequence[Split], leaves: Sequence[Content], *, sort: bool
) -> tuple[Split, list[Int64 | None]]:
    """Return where the rows lie in all columns alike, and how each column is read for that.

    Columns of one collection have their rows at the same positions, and need nothing. Those of
    several, such as one that was computed of the rows that are left and one that was read from the
    file, are read through the positions of their own, row after row.
    """
    first = used[0]
    alike = all(one is first or np.array_equal(one.starts, first.starts) for one in used)
    if alike and not (sort and _overlap(first)) and not any(map(_has_missing, leaves)):
        return first, [None] * len(used)
    from sonic_coffea.layouts import _kernels

    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(first.counts)))
    known: list[tuple[Int64, Int64]] = []
    positions: list[Int64 | None] = []
    for one in used:
        index = next(
            (i for s, i in known if s is one.starts or np.array_equal(s, one.starts)), None
        )
        if index is None:
            index = np.empty(int(offsets[-1]), np.int64)
            _kernels.positions(index, one.starts, one.stops)
            known.append((one.starts, index))
        positions.append(index)
    return Split(first.rows, first.leaf, offsets[:-1], offsets[1:]), positions


def _overlap(rows: Split) -> bool:
    """Whether some element may be in two rows, at different places of them."""
    return bool(np.any(rows.starts[1:] < rows.stops[:-1]))


def _has_missing(leaf: Content) -> bool:
    """Whether there is a None among the numbers, be it in a row or in what has been cut away."""
    while leaf.is_option or leaf.is_indexed:
        if leaf.is_option and np.any(leaf.mask_as_bool(valid_when=False)):
            return True
        leaf = leaf.content
    return False


def _agree(first: Split, other: Split, of: Feature, with_: Feature) -> None:
    """Refuse two columns whose objects, or elements of objects, are not the same.

    Raises
    ------
    InputError
        Naming the first event in which they differ.
    """
    first_name, other_name = f"field {of.name!r}", f"field {with_.name!r}"
    same_rows = first.rows is other.rows or first.rows.agrees(other.rows)
    if not same_rows:
        if first.rows.events != other.rows.events:
            detail = f"{first.rows.events} and {other.rows.events} events"
        else:
            detail = f"the first difference is in event {first.rows.first_difference(other.rows)}"
        raise InputError(
            f"{first_name} and {other_name} do not have the same objects ({detail}); "
            "choose both from the same collection, with the same cuts"
        )
    different = np.flatnonzero(first.counts != other.counts)
    if len(different):
        row = int(different[0])
        event = first.rows.events_of(row, row + 1)[0]
        raise InputError(
            f"{first_name} and {other_name} have lists of different lengths "
            f"({first.counts[row]} and {other.counts[row]}) in event {event}; "
            "the fields of one input must come from the same collection"
        )


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


def _numbers(leaf: Content, feature: Feature, index: Int64 | None) -> Column:
    """Return the one-dimensional numbers of a leaf, and the index to read them through.

    `index` is that of the elements of rows, if others are not to be looked at.
    """
    what = f"field {feature.name!r}"
    while not leaf.is_numpy:
        if leaf.is_unknown:
            return Column(feature, np.zeros(leaf.length, np.float64), index)
        if leaf.is_option and index is None:
            leaf = leaf.project()  # nothing is missing
        elif leaf.is_option or leaf.is_indexed:
            leaf = leaf.to_IndexedOptionArray64() if leaf.is_option else leaf
            here = np.asarray(read(leaf.index), np.int64)
            index = here if index is None else here[index]
            if leaf.is_option and np.any(index < 0):
                raise InputError(
                    f"{what} has None among the constituents of a row; remove them with "
                    "ak.drop_none or fill them with ak.fill_none"
                )
            leaf = leaf.content
        elif leaf.is_union:
            leaf = _one_type(leaf, what)
        else:
            raise not_numbers(leaf, what)
    data = read(leaf)
    return Column(feature, readable(data, what), index)


def readable(data: NDArray[Any], what: str) -> NDArray[Any]:
    """Return numbers as kernels read them: contiguous, native, of a type that they know."""
    if data.dtype in _AS_THEY_ARE and data.flags.c_contiguous:
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
    merged = np.empty(union.length, _common_type(kinds))
    for tag, content in enumerate(union.contents):
        mine = tags == tag
        numbers = content.data[index[: len(tags)][mine]]
        merged[mine] = numbers
        if merged.dtype.kind == "i" and np.any(numbers > np.iinfo(np.int64).max):
            raise InputError(f"{what} mixes types ({union.form.type}), too large for int64")
    return NumpyArray(merged)


def _common_type(kinds: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the type of numbers of several; numpy's for uint64 beside int64 is a float."""
    whole = all(k.kind in "iub" for k in kinds)
    common = np.result_type(*kinds)
    return np.dtype(np.int64) if whole and common.kind == "f" else common


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


def _sorted(rows: Split, key: Column) -> Int64:
    from sonic_coffea.layouts import _kernels

    # Elements of no row stay where they are.
    order = np.arange(int(rows.stops.max(initial=0)))
    bad = _kernels.descending(order, key.values, key.index, rows.starts, rows.stops)
    if bad >= 0:
        event = rows.rows.events_of(bad, bad + 1)[0]
        raise InputError(
            f"field {key.feature.name!r}, by which constituents are sorted, is NaN or infinite in "
            f"event {event}"
        )
    return order
