"""The leading objects of lists, side by side in a row, packed like padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from sonic_coffea.layouts_old._collection import of_one_collection
from sonic_coffea.layouts_old._columns import Columns
from sonic_coffea.layouts_old._fields import Column, Feature, Source
from sonic_coffea.layouts_old._groups import Place, grouped
from sonic_coffea.layouts_old._machine_code import address
from sonic_coffea.layouts_old._paths import path_of

if TYPE_CHECKING:
    from sonic_coffea.layouts_old._rows import Int64, RowSelection, Split, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """How many fields of how many objects a row has, and how far apart they are."""

    fields: int
    objects: int
    field_step: int
    object_step: int

    def place(self, slot: int) -> tuple[int, int]:
        """Return the field, and the object, at a place of a row."""
        if self.object_step == 1:
            return divmod(slot, self.objects)
        object_, field = divmod(slot, self.fields)
        return field, object_

    def place_in(self, out: Tensor) -> Place:
        """Return where ``[n, fields, objects]`` is in ``out[n, F]``."""
        row, step = (stride // out.itemsize for stride in out.strides)
        rows = address(out), 1, row, 0
        strides = self.field_step * step, self.objects, self.object_step * step
        return Place(out.dtype, rows, *strides)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeadingColumns(Columns):
    """Columns that are all of the first objects of the same lists, one list for each row."""

    lists: Split
    steps: _Steps
    fills: tuple[float, ...]
    """What is behind short lists."""

    def list(self, out: Tensor, elements: Int64 | None, rows: RowSelection) -> None:
        del elements
        where = self.lists.starts[rows], self.lists.stops[rows]
        pads = np.asarray(self.fills).astype(out.dtype)
        (group,) = self.groups
        bad = self.steps.place_in(out).filling(group, *where, pads)()
        if bad >= 0:
            self.refuse(self.columns, out, None, rows, bad)


def leading_columns(
    source: Source, features: tuple[Feature, ...], missing: tuple[float, ...] | None
) -> LeadingColumns | None:
    """Return the columns of the first objects of the same lists, as many for all fields.

    None if the features are anything else, or cannot be read where they are.
    """
    plan = _plan(features, missing)
    if plan is None:
        return None
    steps, named, fills = plan
    apart = of_one_collection(source, named, jagged=True)
    if apart is None or not apart[0].rows.contiguous:
        return None
    lists, columns = apart
    groups = grouped(columns)
    if len(groups) != 1 or (missing is None and np.any(lists.counts < steps.objects)):
        return None
    each = []
    for slot, feature in enumerate(features):
        field, place = steps.place(slot)
        pick = lists, place
        each.append(Column(feature, columns[field].values, None, gaps=True, pick=pick))
    every = np.arange(len(lists.rows))
    rows = replace(lists, starts=every, stops=every + 1)
    return LeadingColumns(rows, tuple(each), groups, lists=lists, steps=steps, fills=fills)


@lru_cache(maxsize=256)
def _plan(
    features: tuple[Feature, ...], missing: tuple[float, ...] | None
) -> tuple[_Steps, tuple[Feature, ...], tuple[float, ...]] | None:
    """Return where objects go, the field of all of them for each of the first, and what pads."""
    steps = _steps(features)
    if steps is None:
        return None
    named = [replace(f, name=path_of(f.name).column) for f in features]
    fills = (0.0,) * len(features) if missing is None else missing
    firsts = [steps.field_step * k for k in range(steps.fields)]
    for slot, feature in enumerate(named):
        first = firsts[steps.place(slot)[0]]
        # Objects with a fill of their own are left to the kernel that looks each number up.
        if feature != named[first] or repr(fills[slot]) != repr(fills[first]):
            return None
    return steps, tuple(named[k] for k in firsts), tuple(fills[k] for k in firsts)


def _steps(features: Sequence[Feature]) -> _Steps | None:
    """Return where the fields and the objects are, by the names of the first ones."""
    picks = []
    for feature in features:
        if feature.expression is not None or feature.index is not None:
            return None
        pick = path_of(feature.name).pick
        if pick is None or pick < 0:
            return None
        picks.append(pick)
    count = max(picks) + 1
    fields, rest = divmod(len(picks), count)
    if rest:
        return None
    if picks == [*range(count)] * fields:
        return _Steps(fields, count, count, 1)
    if picks == [pick for pick in range(count) for _ in range(fields)]:
        return _Steps(fields, count, 1, fields)
    return None
