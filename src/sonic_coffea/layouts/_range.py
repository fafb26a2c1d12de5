"""Whether a tensor's type can hold the numbers that it shall be made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from sonic_coffea.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sonic_coffea.layouts._columns import Column
    from sonic_coffea.layouts._rows import Int64, Rows, Split

HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""Types that compiled code lacks: tensors of them are made from float32."""


def check_range(columns: Sequence[Column], rows: Split, target: np.dtype[Any]) -> None:
    """Refuse numbers that a tensor of integers, or of half precision, cannot hold.

    Those that other tensors cannot hold are found as they are packed.
    """
    whole = target.kind in "iu"
    if not whole and target not in HALF:
        return
    for column in columns:
        wrong = _no_integer(column, target) if whole else too_large(column, slice(None), target)
        if not wrong.any():
            continue
        for row, (start, stop) in enumerate(zip(rows.starts, rows.stops, strict=True)):
            where = slice(start, stop) if column.index is None else column.index[start:stop]
            if wrong[where].any():
                raise cannot_hold(column, where, wrong[where], rows.rows, row, target)


def cannot_hold(
    column: Column,
    where: slice | Int64,
    wrong: NDArray[np.bool_],
    rows: Rows,
    row: int,
    target: np.dtype[Any],
) -> InputError:
    """Return the error for the first of some numbers of a row that are wrong."""
    feature = column.feature
    sent = column.values[where] if feature.plain else _transformed(column, where)
    after = "" if feature.plain else " after its transformation"
    event = rows.events_of(row, row + 1)[0]
    return InputError(
        f"field {feature.name!r} is {sent[wrong][0]}{after} in event {event}, which {target.name} "
        "cannot hold; declare a wider dtype for the layout",
        rows=(row, row + 1),
    )


def _no_integer(column: Column, target: np.dtype[Any]) -> NDArray[np.bool_]:
    """Say which numbers do not become what they are, or are near, as integers."""
    feature, limits = column.feature, np.iinfo(target)
    if feature.plain and np.can_cast(column.values.dtype, target):
        return np.zeros(len(column.values), np.bool_)
    sent = column.values if feature.plain else _transformed(column, slice(None))
    # As a float, the largest of 64 bits is one more than that.
    above = sent >= limits.max + 1.0 if sent.dtype.kind == "f" else sent > limits.max
    wrong: NDArray[np.bool_] = (sent < limits.min) | above
    if feature.plain:
        # A fraction that a transformation leaves is cut off; one in the file is a mistake.
        with np.errstate(invalid="ignore"):
            wrong |= sent.astype(target).astype(sent.dtype) != sent
    return wrong


def too_large(column: Column, where: slice | Int64, target: np.dtype[Any]) -> NDArray[np.bool_]:
    """Say which finite numbers would become infinite."""
    sent = column.values[where] if column.feature.plain else _transformed(column, where)
    with np.errstate(over="ignore"):
        made = sent.astype(target)
    wrong: NDArray[np.bool_] = np.isfinite(column.values[where]) & ~np.isfinite(made)
    return wrong


def _transformed(column: Column, where: slice | Int64) -> NDArray[Any]:
    """Return what a kernel makes of numbers of a column."""
    feature = column.feature
    real = np.result_type(column.values.dtype, np.float32)
    values = column.values[where].astype(real)
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
