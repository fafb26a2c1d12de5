"""Columns that one kernel packs, and the places in a tensor that it fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sonic_coffea.layouts_old import _kernels
from sonic_coffea.layouts_old._fields import FUNCTIONS, Column, Feature, limits
from sonic_coffea.layouts_old._machine_code import Call, address
from sonic_coffea.layouts_old._rows import Int64, Tensor, offsets_of

_SIDE_BY_SIDE = 64
"""Elements that a kernel packs as a row, where rows do not matter."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Columns of one type that are read through the same index, with their kernel's arguments."""

    slots: Int64
    columns: tuple[Column, ...]
    addresses: Int64
    transform: tuple[Tensor, ...] | None
    missing: Tensor | None = None

    @property
    def by_row(self) -> bool:
        """Whether all elements of a row have the same number."""
        return self.columns[0].by_row

    @property
    def row_index(self) -> Int64 | None:
        """Where the number of each row is, if all of its elements have it."""
        return self.columns[0].index if self.by_row else None


class Stamp(NamedTuple):
    """Lines of a tensor that have a number for all elements of a row, and another behind them.

    Attributes
    ----------
    slots : array of int64
        The lines.
    numbers : sequence of float, or array, shape ``[R, slots]``
        Numbers for all rows alike, or for each row.
    behind : sequence of float
        What is behind the elements.
    repeated : int
        How many of the lines, the last ones, are padded as fields are.
    """

    slots: Int64
    numbers: Any
    behind: Any
    repeated: int = 0

    def beside(self, other: Stamp | None, dtype: np.dtype[Any]) -> Stamp:
        """Return a stamp with the lines of another before its own."""
        if other is None:
            return self
        numbers = np.atleast_2d(np.asarray(other.numbers, dtype))
        numbers = np.broadcast_to(numbers, (len(self.numbers), numbers.shape[1]))
        return Stamp(
            np.concatenate((other.slots, self.slots)),
            np.concatenate((numbers, self.numbers), axis=1),
            (*other.behind, *self.behind),
            other.repeated + self.repeated,
        )


_NONE = np.zeros(0, np.int64)
NOTHING = Group(_NONE, (Column(Feature("nothing"), np.zeros(0, np.float32), None),), _NONE, None)
"""No columns, beside which a stamp is all that is filled in."""


class Place(NamedTuple):
    """Where a kernel finds the rows of a tensor, its lines and their elements.

    Attributes
    ----------
    dtype : dtype
        Type of the tensor.
    rows : tuple of int
        Its address, how many rows follow each other at an inner stride before the outer one goes
        on, the outer stride, and the inner one; strides are in elements of the tensor.
    line : int
        How far apart lines are.
    length, step : int
        Elements of a line, and how far apart these are.
    """

    dtype: np.dtype[Any]
    rows: tuple[int, int, int, int]
    line: int
    length: int
    step: int

    @classmethod
    def of(cls, out: Tensor) -> Place:
        """Return the place of ``out[n, F, L]``, or of ``out[n, P, F, L]``."""
        outer, *inner, line, step = (stride // out.itemsize for stride in out.strides)
        rows = address(out), out.shape[1] if inner else 1, outer, *(inner or (0,))
        return cls(out.dtype, rows, line, out.shape[-1], step)

    def filling(
        self,
        group: Group,
        starts: Int64,
        stops: Int64,
        fills: Tensor,
        *,
        wrap: bool = False,
        stamp: Stamp | None = None,
    ) -> Call:
        """Return what fills the lines of a group, and the lines of a stamp behind them.

        It returns the place of the first row that cannot be sent, or -1.
        """
        slots = group.slots
        constants, apart, repeated, scratch = None, 0, 0, None
        if stamp is not None:
            slots = np.concatenate((slots, stamp.slots))
            fills = np.concatenate((fills, np.asarray(stamp.behind).astype(self.dtype)))
            constants = np.ascontiguousarray(stamp.numbers, self.dtype)
            apart = constants.strides[0] if constants.ndim == 2 else 0
            repeated = stamp.repeated
        first = -1
        if self.step != 1:
            scratch = np.empty(len(slots) * self.length, self.dtype)
            lowest = int(slots.min())
            if self.line == 1 and int(slots.max()) - lowest + 1 == len(slots):
                first = lowest
        place = *self.rows, self.length, self.step, first, _address(scratch)
        call = _kernels.padded.call(
            0,
            len(starts),
            place,
            slots * self.line,
            group.addresses,
            *_read_by(group, self.dtype),
            starts,
            stops,
            fills,
            wrap,
            _address(constants),
            apart,
            repeated,
        )
        return call.holding(constants, scratch, group)


def side_by_side(out: Tensor, group: Group, first: int) -> int:
    """Fill ``out[n, F]`` with elements that follow each other, from the first one on.

    Returns a place at, or not far before, the first that cannot be sent; or -1.
    """
    step, line = (stride // out.itemsize for stride in out.strides)
    fills = np.zeros(len(group.slots), out.dtype)
    done = 0
    for length in (_SIDE_BY_SIDE, len(out) % _SIDE_BY_SIDE):
        count = (len(out) - done) // length if length else 0
        if count:
            rows = address(out[done:]), 1, length * step, 0
            starts = np.arange(first + done, first + done + count * length, length)
            place = Place(out.dtype, rows, line, length, step)
            bad = place.filling(group, starts, starts + length, fills)()
            if bad >= 0:
                return done + bad * length
            done += count * length
    return -1


def _address(values: Tensor | None) -> int:
    return 0 if values is None else address(values)


def run(kernel: Any, out: Tensor, group: Group, *where: Any) -> int:
    """Fill the slots of a group; return the place of the first that cannot be sent, or -1."""
    read = _read_by(group, out.dtype)
    bad: int = kernel(out, group.slots, group.addresses, *read, *where)
    return bad


def _read_by(
    group: Group, dtype: np.dtype[Any]
) -> tuple[int, str, Int64 | None, tuple[Tensor, ...] | None, Tensor | None]:
    """Return what a kernel reads: how many numbers, their type, their index, and what is done."""
    values, index = group.columns[0].values, group.columns[0].index
    index = None if group.by_row else index
    missing = None if group.missing is None else group.missing.astype(dtype)
    size = len(values) if index is None else len(index)
    return size, values.dtype.char, index, group.transform, missing


def grouped(columns: Sequence[Column], missing: Sequence[float] | None = None) -> tuple[Group, ...]:
    """Put columns together that one kernel can pack."""
    slots: dict[Any, list[int]] = {}
    for slot, column in enumerate(columns):
        of = (id(column.index), column.gaps, column.by_row)
        key = (column.values.dtype, len(column.values), *of, column.feature.plain)
        slots.setdefault(key, []).append(slot)
    return tuple(_group(here, [columns[s] for s in here], missing) for here in slots.values())


def _group(slots: list[int], columns: list[Column], missing: Sequence[float] | None) -> Group:
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
        np.asarray([address(c.values) for c in columns], np.int64),
        None if columns[0].feature.plain else _transform(columns),
        np.asarray([missing[s] for s in slots]) if gaps and missing is not None else None,
    )


def _transform(columns: list[Column]) -> tuple[Tensor, ...]:
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
