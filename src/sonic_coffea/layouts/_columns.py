"""Columns bound to a layout's slots: grouped by type, and packed by one kernel a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import NumpyArray
from numpy.typing import NDArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._fields import FUNCTIONS, Feature, Source
from sonic_coffea.layouts._rows import Int64, Split, read, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awkward.contents import Content

Tensor = NDArray[Any]
Wanted = slice | Int64
"""Rows of a call: a range of them, or their numbers."""


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

    def pad(self, out: Tensor, fills: Sequence[float], wanted: Wanted) -> None:
        """Fill ``out[n, F, L]``."""
        from sonic_coffea.layouts import _kernels

        starts, stops = self.split.starts[wanted], self.split.stops[wanted]
        for group in self.groups:
            kernel = _kernels.padded if group.transform is None else _kernels.padded_affine
            pads = np.asarray([fills[s] for s in group.slots]).astype(out.dtype)
            where = (starts, stops, pads, *(group.transform or ()))
            self._run(kernel, out, group, where, wanted)

    def list(self, out: Tensor, ids: Int64, wanted: Wanted) -> None:
        """Fill ``out[n, F]`` with the elements at `ids`."""
        from sonic_coffea.layouts import _kernels

        for group in self.groups:
            kernel = _kernels.rows if group.transform is None else _kernels.rows_affine
            self._run(kernel, out, group, (ids, *(group.transform or ())), wanted)

    def _run(
        self, kernel: Any, out: Tensor, group: _Group, where: tuple[Any, ...], wanted: Wanted
    ) -> None:
        values = group.values
        index = group.columns[0].index
        size = len(values) if index is None else len(index)
        first = (out, group.slots, group.addresses, size, values[:0], index)
        if kernel(*first, *where) >= 0:
            raise self._misfit(group, wanted)

    def _misfit(self, group: _Group, wanted: Wanted) -> InputError:
        """Find the number that could not be sent, and say where it is."""
        numbers = np.arange(len(self.split.rows))[wanted]
        for row in numbers:
            here = slice(self.split.starts[row], self.split.stops[row])
            for column in group.columns:
                where = here if column.index is None else column.index[here]
                values = column.values[where]
                if column.feature.function is not None:
                    with np.errstate(all="ignore"):
                        values = getattr(np, column.feature.function)(values)
                if not np.all(np.isfinite(values)):
                    return self._at(column.feature, int(row))
        return InputError("a number that cannot be sent was not found again")

    def _at(self, feature: Feature, row: int) -> InputError:
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
    used: list[Split] = []
    splits: dict[int, Split | None] = {}
    columns = []
    for feature in [*features, *([Feature(sort_by)] if sort_by else [])]:
        what = f"field {feature.name!r}"
        records, name = source.collection(feature.name)
        if id(records) not in splits:
            deep = records is not None and records.purelist_depth >= (2 if jagged else 1)
            splits[id(records)] = split(records, jagged=jagged, what=what) if deep else None
        one = splits[id(records)]
        leaf = None if one is None else _field(one.leaf, name)
        if one is None or leaf is None:
            one = split(source.column(feature.name), jagged=jagged, what=what)
            leaf = one.leaf
        used.append(one)
        _agree(used[0], one, f"field {features[0].name!r}", what)
        columns.append(_numbers(leaf, feature, what))
    first = used[0]
    order = None
    if sort_by:
        order = _sorted(first, columns.pop())
        columns = [replace(c, index=order if c.index is None else c.index[order]) for c in columns]
    if target.kind in "iu":
        for column in columns:
            _check_integers(column, first, target)
    return Columns(first, tuple(columns), _grouped(columns), order)


def _agree(first: Split, other: Split, first_name: str, other_name: str) -> None:
    """Refuse two columns whose objects, or elements of objects, are not the same.

    Raises
    ------
    InputError
        Naming the first event in which they differ.
    """
    if first is other:
        return
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


def _numbers(leaf: Content, feature: Feature, what: str) -> Column:
    """Return the one-dimensional numbers of a leaf, and the index to read them through."""
    index: Int64 | None = None
    while not leaf.is_numpy:
        if leaf.is_unknown:
            return Column(feature, np.zeros(leaf.length, np.float64), index)
        if leaf.is_option:
            leaf = _without_option(leaf, what)
        elif leaf.is_indexed:
            here = np.asarray(read(leaf.index), np.int64)
            index = here if index is None else here[index]
            leaf = leaf.content
        elif leaf.is_union:
            leaf = _one_type(leaf, what)
        else:
            raise _not_numbers(leaf, what)
    data = read(leaf)
    return Column(feature, _readable(data, what), index)


def _readable(data: NDArray[Any], what: str) -> NDArray[Any]:
    """Return numbers as kernels read them: contiguous, native, of a type that they know."""
    if data.dtype.kind not in "fiub":
        raise InputError(f"{what} has dtype {data.dtype}; expected a number or a bool")
    if data.dtype == bool:
        data = data.view(np.uint8)
    elif data.dtype == np.float16:
        data = data.astype(np.float32)
    elif not data.dtype.isnative:
        data = data.astype(data.dtype.newbyteorder("="))
    return np.ascontiguousarray(data)


def _without_option(leaf: Content, what: str) -> Content:
    if np.any(leaf.mask_as_bool(valid_when=False)):
        raise InputError(
            f"{what} has None among the constituents of a row; remove them with "
            "ak.drop_none or fill them with ak.fill_none"
        )
    return leaf.project()


def _not_numbers(leaf: Content, what: str) -> InputError:
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
    merged = np.empty(union.length, np.result_type(*kinds))
    for tag, content in enumerate(union.contents):
        mine = tags == tag
        merged[mine] = content.data[index[: len(tags)][mine]]
    return NumpyArray(merged)


def _grouped(columns: Sequence[Column]) -> tuple[_Group, ...]:
    slots: dict[Any, list[int]] = {}
    for slot, column in enumerate(columns):
        key = (column.values.dtype, len(column.values), id(column.index), column.feature.plain)
        slots.setdefault(key, []).append(slot)
    return tuple(_group(here, [columns[s] for s in here]) for here in slots.values())


def _group(slots: list[int], columns: list[Column]) -> _Group:
    if not columns[0].feature.plain and columns[0].values.dtype.kind != "f":
        real = np.result_type(columns[0].values.dtype, np.float32)
        columns = [replace(c, values=c.values.astype(real)) for c in columns]
    return _Group(
        np.asarray(slots, np.int64),
        tuple(columns),
        np.asarray([c.values.__array_interface__["data"][0] for c in columns], np.int64),
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


def _check_integers(column: Column, rows: Split, target: np.dtype[Any]) -> None:
    """Refuse numbers that an integer tensor cannot hold."""
    feature, limits = column.feature, np.iinfo(target)
    if len(column.values) == 0 or (feature.plain and np.can_cast(column.values.dtype, target)):
        return
    sent = column.values if feature.plain else _transformed(column)
    wrong = (sent < limits.min) | (sent > limits.max)
    if feature.plain:
        # A fraction that a transformation leaves is cut off; one in the file is a mistake.
        with np.errstate(invalid="ignore"):
            wrong |= sent.astype(target).astype(sent.dtype) != sent
    if not wrong.any():
        return
    for row, (start, stop) in enumerate(zip(rows.starts, rows.stops, strict=True)):
        where = slice(start, stop) if column.index is None else column.index[start:stop]
        if wrong[where].any():
            value = sent[where][wrong[where]][0]
            after = "" if feature.plain else " after its transformation"
            event = rows.rows.events_of(row, row + 1)[0]
            raise InputError(
                f"field {feature.name!r} is {value}{after} in event {event}, which {target.name} "
                "cannot hold; declare a wider dtype for the layout"
            )


def _transformed(column: Column) -> NDArray[Any]:
    """Return what a kernel makes of the numbers of a column."""
    feature = column.feature
    real = np.result_type(column.values.dtype, np.float32)
    values = column.values.astype(real)
    with np.errstate(all="ignore"):
        if feature.function is not None:
            values = getattr(np, feature.function)(values)
        if feature.nonfinite is not None:
            values = np.where(np.isfinite(values), values, real.type(feature.nonfinite))
        values = (values - real.type(feature.shift)) * real.type(feature.scale)
    lower = -np.inf if feature.lower is None else feature.lower
    upper = np.inf if feature.upper is None else feature.upper
    clipped: NDArray[Any] = np.clip(values, lower, upper)
    return clipped
