"""The leading objects of lists, side by side in a row, packed like padded rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from sonic_coffea.layouts import _kernels
from sonic_coffea.layouts._collection import of_one_collection
from sonic_coffea.layouts._columns import Columns, Tensor
from sonic_coffea.layouts._fields import Column, Feature, Source
from sonic_coffea.layouts._groups import Group, Place, grouped
from sonic_coffea.layouts._paths import path_of

if TYPE_CHECKING:
    from sonic_coffea.layouts._rows import Int64, RowSelection, Split


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
        row, one = (stride // out.itemsize for stride in out.strides)
        rows = _kernels.address(out), 1, row, 0
        strides = self.field_step * one, self.objects, self.object_step * one
        return Place(out.dtype, rows, *strides)


@dataclass(frozen=True, slots=True, eq=False)
class _Lists:
    """Lists whose first objects go into rows, one list for each row; `fills` behind short ones."""

    split: Split
    steps: _Steps
    group: Group
    fills: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LeadingColumns(Columns):
    """Columns that are all of the first objects of the same lists."""

    lists: _Lists | None = None

    def list(self, out: Tensor, elements: Int64 | None, rows: RowSelection) -> None:
        del elements
        lists = self.lists
        assert lists is not None  # noqa: S101
        where = lists.split.starts[rows], lists.split.stops[rows]
        pads = np.asarray(lists.fills).astype(out.dtype)
        bad = lists.steps.place_in(out).fill(lists.group, *where, pads)
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
    first = _Lists(lists, steps, groups[0], fills)
    return LeadingColumns(rows, tuple(each), (), lists=first)


@lru_cache(maxsize=256)
def _plan(
    features: tuple[Feature, ...], missing: tuple[float, ...] | None
) -> tuple[_Steps, tuple[Feature, ...], tuple[float, ...]] | None:
    """Return where objects go, the field of all of them for each of the first, and what pads."""
    steps = _steps(features)
    if steps is None:
        return None
    firsts = [steps.field_step * k for k in range(steps.fields)]
    for slot, feature in enumerate(features):
        field, place = steps.place(slot)
        first = firsts[field]
        if feature != replace(features[first], name=feature.name):
            return None
        if feature.name != features[first].name.replace("[0]", f"[{place}]"):
            return None
        # Of an object's own, which is left to the kernel that looks each number up.
        if missing is not None and not _same(missing[slot], missing[first]):
            return None
    named = tuple(replace(features[k], name=path_of(features[k].name).column) for k in firsts)
    return (
        steps,
        named,
        (0.0,) * len(firsts) if missing is None else tuple(missing[k] for k in firsts),
    )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


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
