"""Columns bound to a layout's channels, packed by one kernel for each group of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old import _kernels
from sonic_coffea.layouts_old._groups import NOTHING, Group, Place, Stamp, run, side_by_side
from sonic_coffea.layouts_old._range import misfit
from sonic_coffea.layouts_old._scatter import Scatter

if TYPE_CHECKING:
    from awkward.contents import Content

    from sonic_coffea.layouts_old._fields import Column
    from sonic_coffea.layouts_old._machine_code import Call
    from sonic_coffea.layouts_old._rows import Int64, RowSelection, Split, Tensor
    from sonic_coffea.layouts_old._texts import Texts

_BLOCK = 2048
_CAN_BE_SENT = "a kernel refused a number that can be sent"


class Filling(NamedTuple):
    """A kernel that fills rows of a tensor, and what raises the error of the row it returns."""

    call: Call
    check: Callable[[int], None]


def fill_rows(fillings: Sequence[Filling], out: Tensor) -> None:
    """Fill ``out[n, ...]``, row after row."""
    calls = [filling.call for filling in fillings]
    count = len(out) * (out.shape[1] if out.ndim == 4 else 1)
    results = _kernels.in_turn(calls, count, out.nbytes // max(1, count))
    for filling, bad in zip(fillings, results, strict=True):
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
    ) -> None:
        """Fill ``out[n, F, L]``, with `fills` behind, or with the row's own elements again.

        Of ``out[n, P, F, L]``, each of `P` has a row of its own.
        """
        fill_rows(self.fillings(out, fills, rows, wrap=wrap), out)

    def fillings(
        self,
        out: Tensor,
        fills: Sequence[float],
        rows: RowSelection,
        *,
        wrap: bool = False,
        stamp: Stamp | None = None,
    ) -> list[Filling]:
        """Return what `pad` does; a `stamp` fills other lines."""
        starts, stops = self.split.starts[rows], self.split.stops[rows]
        place, gathered = Place.of(out), list[Group]()
        for group in self.groups:
            if group.by_row:
                stamp = self._stamp(group, out, fills, rows).beside(stamp, out.dtype)
            else:
                gathered.append(group)
        each = []
        for group in gathered or [NOTHING]:
            pads = np.asarray(fills).astype(out.dtype)[group.slots]
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
        gathered = np.empty((len(filled), len(group.slots)), out.dtype)
        own = replace(group, slots=np.arange(len(group.slots)))
        index = index[rows]
        bad = run(_kernels.rows, gathered, own, index[filled])
        self._check(group, out, rows, int(filled[bad]) if bad >= 0 else bad)
        numbers = gathered
        if len(filled) != len(index):
            numbers = np.zeros((len(index), len(group.slots)), out.dtype)
            numbers[filled] = gathered
        behind = [fills[s] for s in group.slots]
        return Stamp(group.slots, numbers, behind, repeated=len(behind))

    def _check(self, group: Group, out: Tensor, rows: RowSelection, bad: int) -> None:
        """Raise the error of the row at a place; a negative place means that no row is wrong."""
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

    def present(self, rows: RowSelection, length: int) -> Tensor:
        """Return whether there is an element at each of `length` places, ``[n, L]``."""
        present: Tensor = np.arange(length) < self.split.counts_of(rows)[:, np.newaxis]
        return present

    def indices(self, rows: RowSelection, slots: Int64, length: int) -> Int64:
        """Return the indices in the rows' lists, unsorted, of the elements at some of the places.

        For ``slots[n, W]`` of `length` places, the indices are ``[n, W, K]``: one for each
        collection, and -1 where the element is of another collection, or padding.
        """
        counts = np.minimum(self.split.counts_of(rows), length)[:, np.newaxis]
        is_present = (slots >= 0) & (slots < counts)
        if self.order is not None and len(self.order):
            starts = self.split.starts[rows][:, np.newaxis]
            slots = self.order[np.where(is_present, starts + slots, 0)] - starts
        return np.where(is_present, slots, -1)[..., np.newaxis]

    def mark(self, out: Tensor, rows: RowSelection) -> None:
        """Fill ``out[n, 1, L]`` with 1 where a row has an element, and 0 elsewhere."""
        _kernels.mask(out, self.split.starts[rows], self.split.stops[rows])

    def scatter(self, width: int, dtype: np.dtype[Any], *, axes: int = 1) -> Scatter:
        """Return what takes in `width` values for each element, or for each pair of a row."""
        return Scatter(self.split, self.order, width, dtype, axes=axes)

    def scattered(self, tensor: Tensor, names: Sequence[str]) -> Content:
        """Return the values of all elements as lists of records."""
        scatter = self.scatter(len(self), tensor.dtype)
        scatter.place(slice(0, len(self.split.rows)), tensor)
        return scatter.content(list(names))

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
