"""Numbers that a tensor cannot hold, and the errors that name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old._fields import Column, limits

if TYPE_CHECKING:
    from sonic_coffea.layouts_old._rows import Int64, Rows, Split, Tensor

HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""Types that compiled code lacks: their tensors are packed as float32."""


def check_range(
    columns: Sequence[Column], split: Split, target: np.dtype[Any], longest: int | None = None
) -> None:
    """Raise if a tensor of integers, bools, or of half precision, cannot hold a number.

    For other tensors, kernels find the numbers. No more than the `longest` first elements of
    each row are looked at.
    """
    if not is_checked(target):
        return
    if longest is not None:
        split = replace(split, stops=np.minimum(split.stops, split.starts + longest))
    elements, rows = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for column in columns:
        whole = target.kind == "b" and column.values.dtype.kind in "iu"
        if column.feature.plain and (whole or np.can_cast(column.values.dtype, target)):
            continue
        if not len(rows):
            elements = split.positions()
            rows = np.repeat(np.arange(len(split.rows)), split.counts)
        where = column.where(elements, rows)
        wrong = np.zeros(len(where), np.bool_)
        wrong[where >= 0] = _wrong(column, where[where >= 0], target)
        if wrong.any():
            element = int(np.argmax(wrong))
            row = int(rows[element])
            error = misfit(column, where[element : element + 1], split.rows, row, target)
            raise error or _cannot_hold(column, where[element], split.rows, row, target)


def is_checked(target: np.dtype[Any]) -> bool:
    """Whether numbers of a tensor are checked before it is filled."""
    return target.kind in "iub" or target in HALF


def misfit(
    column: Column, where: Int64, rows: Rows, row: int, target: np.dtype[Any]
) -> InputError | None:
    """Return the error for the first of some numbers of a row that cannot be sent, or None."""
    feature = column.feature
    where = where[where >= 0]
    real = np.result_type(column.values.dtype, np.float32)
    before = column.values[where]
    values = before if feature.plain else feature.apply(before.astype(real))
    strange = ~np.isin(before, [key for key, _ in feature.pairs if key is not None])
    if feature.pairs and strange.any() and dict(feature.pairs).get(None) is None:
        known = ", ".join(str(key) for key, _ in feature.pairs)
        event, value = rows.event_of(row), before[strange][0]
        return InputError(
            f"field {feature.name!r} is {value:g} in event {event}, which is none of its "
            f"categories {known}; add it, or None: … for all others",
            rows=(row, row + 1),
        )
    if feature.nonfinite is None and not np.all(np.isfinite(values)):
        function = feature.function or (feature.power and f"power {feature.power}")
        after = f" after {function}" if function else ""
        return InputError(
            f"field {feature.name!r} is NaN or infinite{after} in event {rows.event_of(row)}; "
            f"correct the input, or say what replaces it with Feature({feature.name!r}, "
            "nonfinite=…)",
            rows=(row, row + 1),
        )
    wrong = _wrong(column, where, target)
    if not wrong.any():
        return None
    return _cannot_hold(column, where[int(np.argmax(wrong))], rows, row, target)


def _cannot_hold(
    column: Column, position: Any, rows: Rows, row: int, target: np.dtype[Any]
) -> InputError:
    after = "" if column.feature.plain else " after its transformation"
    number = _transformed(column, np.asarray([position]))[0]
    return InputError(
        f"field {column.feature.name!r} is {number}{after} in event {rows.event_of(row)}, which "
        f"{target.name} cannot hold; declare a wider dtype for the layout",
        rows=(row, row + 1),
    )


def _wrong(column: Column, where: Int64, target: np.dtype[Any]) -> Tensor:
    """Say which numbers become infinite, or as integers not what they are, or are near."""
    sent = _transformed(column, where)
    wrong: Tensor
    if target.kind == "b":
        wrong = ~np.isfinite(sent)
        return wrong
    if target.kind not in "iu":
        with np.errstate(over="ignore"):
            wrong = ~np.isfinite(sent.astype(target))
        if column.feature.nonfinite is None or not np.isfinite(column.feature.nonfinite):
            wrong &= np.isfinite(column.feature.apply(column.values[where]))
        return wrong
    limits = np.iinfo(target)
    # As a float, the largest of 64 bits is one more than that.
    above = sent >= limits.max + 1.0 if sent.dtype.kind == "f" else sent > limits.max
    wrong = (sent < limits.min) | above
    if column.feature.plain:
        # A fraction that a transformation leaves is dropped; one in the file is a mistake.
        with np.errstate(invalid="ignore"):
            wrong |= sent.astype(target).astype(sent.dtype) != sent
    return wrong


def _transformed(column: Column, where: Int64) -> Tensor:
    """Return what a kernel makes of numbers of a column."""
    feature = column.feature
    if feature.plain:
        return column.values[where]
    real = np.result_type(column.values.dtype, np.float32)
    values = column.values[where].astype(real)
    values = feature.apply(values)
    with np.errstate(all="ignore"):
        if feature.nonfinite is not None:
            values = np.where(np.isfinite(values), values, real.type(feature.nonfinite))
        values = (values - real.type(feature.shift)) * real.type(feature.scale)
    clipped: Tensor = np.clip(values, *limits((feature.lower, feature.upper)))
    return clipped
