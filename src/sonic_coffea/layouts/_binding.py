"""The columns of one input: of its rows, of outer objects, and by index."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._collection import of_one_collection, positions_of, taken_apart
from sonic_coffea.layouts._columns import Columns
from sonic_coffea.layouts._fields import Column, Feature, Source
from sonic_coffea.layouts._gathering import Gathering
from sonic_coffea.layouts._groups import grouped
from sonic_coffea.layouts._numbers import (
    Composed,
    is_converted,
    numbers_of,
    order_of_elements,
)
from sonic_coffea.layouts._range import check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sonic_coffea.layouts._rows import Int64, Split


def bind_columns(
    source: Source,
    features: Sequence[Feature],
    *,
    jagged: bool,
    target: np.dtype[Any] | None,
    sort_by: str | None = None,
    ascending: bool = False,
    missing: Sequence[float] | None = None,
    longest: int | None = None,
) -> Columns:
    """Read the columns of one input.

    Columns of one collection whose rows lie alike are read in place. The others are read through
    the positions of their elements:

    - a column that was computed after a cut, beside one of the file;
    - columns that are sorted or converted, unless all of their elements are used;
    - numbers of other objects: a row's own number beside its elements, one object of a list, or the
      object that an index refers to.

    Parameters
    ----------
    source : Source
        The arrays.
    features : sequence of Feature
        What goes into each slot of the tensor.
    jagged : bool
        Whether the innermost list belongs to the row.
    target : dtype or None
        What the tensor will hold; None if the caller checks what it can hold.
    sort_by : str, optional
        The field by which the elements of a row are sorted.
    ascending : bool
        Whether they are sorted upwards.
    missing : sequence of float, optional
        What stands for a missing number in each slot; without it, there must be none.
    longest : int, optional
        How many elements of a row are sent at most; others may be numbers that cannot be sent.
    """
    named = [*features, *([Feature(sort_by)] if sort_by else [])]
    if not sort_by:
        together = of_one_collection(source, features, jagged=jagged)
        if together is not None:
            first, columns = together
            if target is not None:
                check_range(columns, first, target, longest)
            return Columns(first, tuple(columns), grouped(columns, missing))
    gathering = Gathering(source, named, jagged=jagged, missing=missing)
    if gathering.in_place:
        first, columns = _in_place(
            source,
            named,
            jagged=jagged,
            compact=sort_by is not None,
            missing=missing,
        )
    else:
        first, columns = gathering.read()
    order = None
    if sort_by:
        if columns[-1].by_row:
            raise InputError(
                f"field {sort_by!r}, by which constituents are sorted, is a number of the whole row"
            )
        order = order_of_elements(first, columns.pop(), ascending=ascending)
        composed = Composed()
        columns = [c if c.by_row else replace(c, index=composed(c.index, order)) for c in columns]
    if target is not None:
        check_range(columns, first, target, longest)
    return Columns(first, tuple(columns), grouped(columns, missing), order)


def _in_place(
    source: Source,
    named: Sequence[Feature],
    *,
    jagged: bool,
    compact: bool,
    missing: Sequence[float] | None,
) -> tuple[Split, list[Column]]:
    """Read columns of the same rows, and of the same elements, where they are if that is best."""
    splits, leaves = taken_apart(source, named, jagged=jagged)
    first = splits[0]
    converted = [is_converted(leaf, f) for leaf, f in zip(leaves, named, strict=True)]
    alike = all(one is first or np.array_equal(one.starts, first.starts) for one in splits)
    indexes: list[Int64 | None] = [None] * len(splits)
    if (
        not alike
        or ((compact or any(converted)) and not first.dense)
        or any(
            is_converted and leaf.length > first.stops.max(initial=0)
            for leaf, is_converted in zip(leaves, converted, strict=True)
        )
    ):
        indexes = positions_of(splits)
        first = first.compacted
    composed = Composed()
    each = zip_longest(leaves, named, indexes, missing or ())
    return first, [
        numbers_of(leaf, feature, index, composed, missing=missing is not None, stands=stands)
        for leaf, feature, index, stands in each
    ]
