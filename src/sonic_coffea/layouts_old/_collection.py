"""Collections taken apart: which rows the fields of an input have, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old._fields import Column, Feature, Source
from sonic_coffea.layouts_old._nodes import read, split
from sonic_coffea.layouts_old._numbers import is_readable

if TYPE_CHECKING:
    from awkward.contents import Content

    from sonic_coffea.layouts_old._rows import Int64, Split


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
    # How columns of a file lie in memory shows once they are read.
    return (here, columns) if all(is_readable(c.values) for c in columns) else None


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
    """Whether a field is of numbers that a kernel may read as they are."""
    if not field.is_numpy or field.inner_shape:
        return False
    return feature.plain or field.dtype.kind == "f"


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
