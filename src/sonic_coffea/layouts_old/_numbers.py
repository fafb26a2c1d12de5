"""Numbers of awkward arrays as kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
from awkward.contents import ByteMaskedArray, Content, NumpyArray
from awkward.index import Index8

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old import _kernels
from sonic_coffea.layouts_old._fields import Column, Feature
from sonic_coffea.layouts_old._nodes import read, unwrapped
from sonic_coffea.layouts_old._rows import Int64, Split, Tensor, numbered

AS_THEY_ARE = frozenset(map(np.dtype, "bBhHiIlLqQfd"))
"""Types that kernels read."""


class Composed(dict[tuple[int, int], tuple[Any, ...]]):
    """Indexes that are read through others: the same for the same, so that columns share them."""

    def __call__(self, outer: Int64 | None, index: Int64 | None) -> Int64 | None:
        """Return `outer`, read through `index`; -1 where that is."""
        if outer is None or index is None:
            return index if outer is None else outer
        key = id(outer), id(index)
        if key not in self:  # with what it is of, so that no other takes its address
            self[key] = read_through(outer, index), outer, index
        composed: Int64 = self[key][0]
        return composed


def read_through(values: Tensor, index: Int64, absent: Any = -1) -> Tensor:
    """Return values by an index, and `absent` where the index is -1."""
    is_present = index >= 0
    if is_present.all():
        return values[index]
    taken = np.full(len(index), absent, values.dtype)
    taken[is_present] = values[index[is_present]]
    return taken


def is_converted(leaf: Content, feature: Feature) -> bool:
    """Whether a kernel cannot read the numbers as they are."""
    while leaf.is_indexed and not leaf.is_option:
        leaf = leaf.content
    if leaf.is_unknown:
        return False
    if not leaf.is_numpy or (leaf.dtype.kind != "f" and not feature.plain):
        return True
    return not is_readable(read(leaf))


def numbers_of(
    leaf: Content,
    feature: Feature,
    index: Int64 | None,
    composed: Composed,
    *,
    gaps: bool = False,
    missing: bool = False,
    stands: float | None = None,
) -> Column:
    """Return the one-dimensional numbers of a leaf, and the index to read them through.

    An `index` lists the elements of the rows, if the leaf has others. With `gaps`, it is -1 for
    some; with `missing`, numbers may be None, and `stands` may be put in their places.
    """
    converted = is_converted(leaf, feature)
    while leaf.is_indexed and not leaf.is_option:
        index = composed(np.asarray(read(leaf.index), np.int64), index)
        leaf = leaf.content
    if leaf.is_unknown:
        return Column(feature, np.zeros(leaf.length, np.float64), index, gaps)
    if not converted:
        return Column(feature, read(leaf), index, gaps)
    what = f"field {feature.name!r}"
    if index is not None:
        is_present = index >= 0
        leaf, index = leaf[index[is_present]], numbered(is_present) if gaps else None
    if stands is not None and feature.plain:
        filled = _filled(leaf, what, stands)
        if filled is not None:
            return Column(feature, filled, index, gaps)
    leaf, present = _plain(leaf, what, missing=missing)
    if present is not None:
        index, gaps = composed(present, index), True
    return Column(feature, readable(read(leaf), what), index, gaps)


def _plain(leaf: Content, what: str, *, missing: bool) -> tuple[NumpyArray, Int64 | None]:
    """Return numbers without what is around them, and where each is, if some are missing."""
    index: Int64 | None = None
    while not leaf.is_numpy:
        if leaf.is_option:
            present = np.asarray(leaf.to_IndexedOptionArray64().index.data)
            if np.any(present < 0):
                if not missing:
                    raise InputError(
                        f"{what} has None among the constituents of a row; remove them with "
                        "ak.drop_none, fill them with ak.fill_none, or say what stands for them: "
                        "missing=…"
                    )
                index = present if index is None else read_through(present, index)
                leaf = leaf.to_IndexedOptionArray64().content
            else:
                leaf = leaf.project()
        elif leaf.is_indexed:
            leaf = leaf.project()
        elif leaf.is_union:
            leaf = _one_type(leaf, what)
        elif leaf.is_unknown:
            leaf = NumpyArray(np.zeros(leaf.length))
        else:
            raise not_numbers(leaf, what)
    return leaf, index


def _filled(leaf: Content, what: str, stands: float) -> Tensor | None:
    """Return numbers with what stands for None, so that they are numbers as any others.

    None if that is left to kernels, which do not take a NaN that stands for something for a wrong
    number.
    """
    if not leaf.is_option or not leaf.content.is_numpy or leaf.content.inner_shape:
        return None
    values = readable(read(leaf.content), what)
    if not np.isfinite(stands) or not _holds(values.dtype, stands):
        return None
    if leaf.is_indexed:
        index = read(leaf.index)
        is_present = index >= 0
        values = (
            values.take(index, mode="clip") if len(values) else np.zeros(len(index), values.dtype)
        )
    else:
        is_present = np.asarray(leaf.mask_as_bool(valid_when=True))
        values = values[: len(is_present)]
    return np.where(is_present, values, values.dtype.type(stands))


def _holds(dtype: np.dtype[Any], number: float) -> bool:
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return float(dtype.type(number)) == number
    info = np.iinfo(dtype)
    return number.is_integer() and info.min <= number <= info.max


def readable(data: Tensor, what: str) -> Tensor:
    """Return numbers as kernels read them: contiguous, native, of a type that they know."""
    if is_readable(data):
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


def is_readable(data: Tensor) -> bool:
    """Whether kernels read numbers where they are."""
    return data.dtype in AS_THEY_ARE and data.flags.c_contiguous


def not_numbers(leaf: Content, what: str) -> InputError:
    """Return the error for what is something else."""
    if leaf.is_record:
        fields = ", ".join(leaf.fields)
        return InputError(f"{what} is a record with fields {fields}; expected one of these fields")
    if leaf.parameter("__array__") in {"string", "bytestring"}:
        return InputError(f"{what} holds strings; expected numbers")
    return InputError(f"{what} has type {leaf.form.type}; expected numbers")


def _one_type(union: Content, what: str) -> Content:
    """Return numbers of several types as numbers of one; None where they are None."""
    tags = read(union.tags)
    index = np.asarray(read(union.index)[: len(tags)], np.int64)
    places, numbers = [], []
    for tag, kind in enumerate(union.contents):
        mine = np.flatnonzero(tags == tag)
        content, at = unwrapped(kind, index[mine])
        if not isinstance(content, NumpyArray):
            raise InputError(f"{what} mixes types ({union.form.type}); expected one numeric type")
        places.append(mine[at >= 0])
        numbers.append(read(content)[at[at >= 0]])
    common = np.result_type(*numbers)
    # numpy's type for uint64 beside int64 is a float.
    whole = common.kind == "f" and all(n.dtype.kind in "iub" for n in numbers)
    merged = np.zeros(len(tags), np.int64 if whole else common)
    is_present = np.zeros(len(tags), np.bool_)
    for mine, some in zip(places, numbers, strict=True):
        merged[mine], is_present[mine] = some, True
        if merged.dtype.kind == "i" and np.any(some > np.iinfo(np.int64).max):
            raise InputError(f"{what} mixes types ({union.form.type}), too large for int64")
    if is_present.all():
        return NumpyArray(merged)
    return ByteMaskedArray(Index8(is_present.view(np.int8)), NumpyArray(merged), valid_when=True)


def order_of_elements(split_: Split, key: Column, *, ascending: bool) -> Int64:
    """Return the order of the elements of dense rows, each sorted by itself."""
    order = np.arange(int(split_.stops[-1]) if len(split_.stops) else 0)
    where = split_.starts, split_.stops
    if key.gaps:
        raise InputError(f"field {key.feature.name!r}, by which constituents are sorted, has None")
    bad = _kernels.sort(order, key.values, key.index, *where, ascending)
    if bad >= 0:
        raise InputError(
            f"field {key.feature.name!r}, by which constituents are sorted, is NaN or infinite in "
            f"event {split_.rows.event_of(bad)}"
        )
    return order
