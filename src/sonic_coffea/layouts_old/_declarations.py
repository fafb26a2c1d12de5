"""Declarations of layouts and outputs: their values are checked, and set once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts_old._texts import TEXT, dtype_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts_old._fields import Feature

T = TypeVar("T")
DType = np.dtype[Any]

_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
TARGETS = tuple(_NAMES.split())


def declare(layout: T, **values: Any) -> T:
    """Set the attributes of a frozen declaration."""
    for name, value in values.items():
        object.__setattr__(layout, name, value)
    return layout


def target_of(dtype: DTypeLike, layout: Any) -> DType:
    """Return the type of a tensor, refusing one that is not supported."""
    try:
        target = dtype_of(dtype)
    except TypeError:
        target = None
    if target == TEXT and isinstance(dtype, (str, type)) and dtype in ("string", str):
        if not layout.holds_strings:
            raise ConfigError(
                f"{type(layout).__name__} holds numbers; strings are sent by Row, Padded, Bucketed "
                "and Flat"
            )
        return TEXT
    if target is None or target.name not in TARGETS:
        raise ConfigError(
            f"{type(layout).__name__} cannot make dtype {dtype!r}; {nearest(str(dtype), TARGETS)}"
        )
    return target


def check_strings(features: Sequence[Feature], sort_by: str | None, layout: str) -> None:
    """Refuse what cannot be done with strings."""
    for feature in features:
        if not feature.plain or feature.expression is not None:
            raise ConfigError(
                f"{layout}, feature {feature.name!r}: strings are sent as they are, got {feature!r}"
            )
        if feature.name == sort_by:
            raise ConfigError(
                f"{layout}: elements are not sorted by strings, such as {sort_by!r}; expected "
                "sort_by to be a field of numbers"
            )


def check_held(number: float, dtype: DType, layout: str, what: str) -> None:
    """Refuse a number of a declaration, if the tensor cannot hold it."""
    with np.errstate(all="ignore"):
        held = float(np.asarray(number, np.float64).astype(dtype))
    exact = dtype.kind in "iub"
    if (exact and held != number) or (np.isfinite(number) and not np.isfinite(held)):
        raise ConfigError(f"{layout}: {dtype.name} cannot hold the {what} {number!r}")


def length_of(length: Any, declaration: object) -> int:
    """Return the length of an axis, refusing anything but a positive integer."""
    if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or length < 1:
        name = type(declaration).__name__
        raise ConfigError(f"{name}: expected a length of at least 1, got {length!r}")
    return int(length)


def lengths_of(lengths: Sequence[int], layout: Any) -> tuple[int, ...]:
    """Return the lengths to which rows are padded, which must ascend."""
    checked = tuple(length_of(n, layout) for n in lengths)
    if not checked or list(checked) != sorted(set(checked)):
        raise ConfigError(f"{type(layout).__name__}: expected ascending lengths, got {lengths}")
    return checked


def order_of(
    axis_order: Any, layout: Any, fields: int = 1, orders: Sequence[str] = ("FL", "LF", "L")
) -> str:
    """Return the order of a tensor's axes, refusing one that lacks a needed axis."""
    name = type(layout).__name__
    if axis_order not in orders:
        raise ConfigError(f"{name}: expected axis_order {_any_of(orders)}, got {axis_order!r}")
    if fields != 1 and "F" not in axis_order:
        able = _any_of([order for order in orders if "F" in order])
        raise ConfigError(
            f"{name}: axis_order {axis_order!r} has no axis for {fields} fields; expected one "
            f"field, or axis_order {able}"
        )
    return str(axis_order)


def _any_of(choices: Sequence[str]) -> str:
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}"
