"""The columns of one input: of its rows, of outer objects, and by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._collection import of_one_collection
from sonic_coffea.layouts._columns import Columns
from sonic_coffea.layouts._fields import Feature, Source
from sonic_coffea.layouts._gathering import Gathering
from sonic_coffea.layouts._groups import grouped
from sonic_coffea.layouts._numbers import Composed, order_of_elements
from sonic_coffea.layouts._range import check_range

if TYPE_CHECKING:
    import numpy as np


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
    sorts = sort_by is not None
    gathering = Gathering(source, named, jagged=jagged, sorts=sorts, missing=missing)
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
