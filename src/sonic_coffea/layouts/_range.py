"""Numbers that a tensor cannot hold: which they are, and the errors that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from sonic_coffea.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sonic_coffea.layouts._fields import Column
    from sonic_coffea.layouts._rows import Int64, Rows, Split

HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""Types that compiled code lacks: their tensors are packed as float32."""


def check_range(columns: Sequence[Column], split: Split, target: np.dtype[Any]) -> None:
    """Refuse numbers that a tensor of integers, bools, or of half precision, cannot hold.

    Kernels find those that other tensors cannot hold.
    """
    if target.kind not in "iub" and target not in HALF:
        return
    elements: Int64 | None = None
    for column in columns:
        whole = target.kind == "b" and column.values.dtype.kind in "iu"
        if column.feature.plain and (whole or np.can_cast(column.values.dtype, target)):
            continue
        if elements is None:
            elements = split.positions()
        where = elements if column.index is None else column.index[elements]
        wrong = _wrong(column, where, target)
        if wrong.any():
            element = int(np.argmax(wrong))
            row = int(np.searchsorted(split.offsets, element, side="right")) - 1
            error = misfit(column, where[element : element + 1], split.rows, row, target)
            raise error or _cannot_hold(column, where[element], split.rows, row, target)


def misfit(
    column: Column, where: Int64, rows: Rows, row: int, target: np.dtype[Any]
) -> InputError | None:
    """Return the error for the first of some numbers of a row that cannot be sent, or None."""
    feature = column.feature
    values = column.values[where]
    if feature.function is not None:
        with np.errstate(all="ignore"):
            values = getattr(np, feature.function)(values)
    if feature.nonfinite is None and not np.all(np.isfinite(values)):
        after = f" after {feature.function}" if feature.function else ""
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


def _wrong(column: Column, where: Int64, target: np.dtype[Any]) -> NDArray[np.bool_]:
    """Say which numbers become infinite, or as integers not what they are, or are near."""
    sent = _transformed(column, where)
    wrong: NDArray[np.bool_]
    if target.kind == "b":
        wrong = ~np.isfinite(sent)
        return wrong
    if target.kind not in "iu":
        with np.errstate(over="ignore"):
            wrong = np.isfinite(column.values[where]) & ~np.isfinite(sent.astype(target))
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


def _transformed(column: Column, where: Int64) -> NDArray[Any]:
    """Return what a kernel makes of numbers of a column."""
    feature = column.feature
    if feature.plain:
        return column.values[where]
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
