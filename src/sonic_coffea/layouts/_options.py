"""The options of declarations: what each takes, by its name or by its annotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts._expressions import FUNCTIONS
from sonic_coffea.layouts._structure import STRING

DType = np.dtype[Any]

_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
TARGETS = tuple(_NAMES.split())
ONE_ARGUMENT = tuple(name for name, (_, least, _) in FUNCTIONS.items() if least == 1)


def equals(self: Any, other: object) -> bool:
    """Return whether two declarations have the same text, also with NaN in it."""
    return self is other or (type(self) is type(other) and repr(self) == repr(other))


def hashed(self: Any) -> int:
    """Return the hash of a declaration's text."""
    return hash(repr(self))


def declare(self: Any, **values: Any) -> None:
    """Set attributes of a frozen declaration."""
    for name, value in values.items():
        object.__setattr__(self, name, value)


def _demand(*holds: Any) -> None:
    """Raise a TypeError unless all hold; `checked` says what was expected."""
    if not all(holds):
        raise TypeError


def several(values: Any) -> tuple[Any, ...]:
    """Return several values in their order; TypeError if they have none, or are no list."""
    _demand(not isinstance(values, (str, bytes, AbstractSet, Mapping)))
    _demand(not isinstance(values, np.ndarray) or values.ndim == 1)
    return tuple(values)


def _one(kind: type | tuple[type, ...]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        _demand(isinstance(value, kind))
        return value

    return convert


def _number(value: Any) -> float:
    number: float = value.item() if isinstance(value, np.generic) else value
    _demand(isinstance(number, (int, float)))
    float(number)  # of an integer, it may be too large
    return number


def _real(value: Any) -> float:
    return float(_number(value))


def _finite(value: Any) -> float:
    _demand(math.isfinite(_number(value)))
    return float(value)


def _whole(value: Any) -> float:
    real = _number(value)
    return int(real) if float(real).is_integer() else float(real)


def _length(value: Any) -> int:
    _demand(isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1)
    return int(value)


def _shape(values: Any) -> tuple[int, ...]:
    return tuple(map(_length, several(values)))


def _lengths(values: Any) -> tuple[int, ...]:
    lengths = _shape(values if isinstance(values, Iterable) else (values,))
    _demand(len(lengths) > 0, list(lengths) == sorted(set(lengths)))
    return lengths


def _names(values: Any) -> tuple[str, ...]:
    return tuple(map(str, map(_one(str), several(values))))


def _name(name: Any) -> str | tuple[str | int, ...]:
    if isinstance(name, str):
        return name
    steps = [step.item() if isinstance(step, np.generic) else step for step in _one(tuple)(name)]
    _demand({*map(type, steps)} <= {str, int})
    return tuple(steps)


def _pairs(pairs: Any) -> tuple[tuple[float | None, float], ...]:
    """Return numbers by numbers, or by None for all others."""
    items = [(k if k is None else _whole(k), _whole(v)) for k, v in dict(pairs).items()]
    keys = [key for key, _ in items if key is not None]
    _demand(len(keys) > 0, not any(map(math.isnan, keys)))  # no number equals NaN
    return tuple(items)


def _limits(within: Any) -> tuple[float | None, float | None]:
    lower, upper = (x if x is None else _real(x) for x in several(within))
    _demand((-math.inf if lower is None else lower) <= (math.inf if upper is None else upper))
    return lower, upper


def _members(members: Any) -> Any:
    if isinstance(members, slice):
        members.indices(0)  # raises if its ends are no numbers, or its step is 0
        return members
    each = [members] if isinstance(members, (str, int)) else several(members)
    _demand(len(each) > 0, all(isinstance(member, (str, int, np.integer)) for member in each))
    return tuple(member if isinstance(member, str) else int(member) for member in each)


def _groups(groups: Any) -> tuple[tuple[str, Any], ...]:
    named = tuple((_one(str)(name), _members(members)) for name, members in dict(groups).items())
    _demand(len(named) > 0)
    return named


def _target(dtype: Any) -> DType:
    """Return the type of a tensor; numpy has no bfloat16, and no such strings."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        dtype = ml_dtypes.bfloat16
    is_string = dtype is str or (isinstance(dtype, str) and dtype == "string")
    target = STRING if is_string else np.dtype(dtype).newbyteorder("=")
    _demand(target == STRING or target.name in TARGETS)
    return target


def dtype_name(dtype: DType) -> str:
    """Return the name of a type as a declaration has it."""
    return "string" if dtype == STRING else dtype.name


CHECKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "categories": (_pairs, "a dict of numbers, such as {-1: 0, 1: 1, None: 2}"),
    "discriminants": (lambda texts: tuple(dict(texts).items()), "a dict of expressions"),
    "dtype": (_target, "the type of a tensor"),
    "fields": (several, "a list of fields"),
    "formulae": (_names, "a list of strings"),
    "function": (lambda name: ONE_ARGUMENT[ONE_ARGUMENT.index(name)], "a function of one argument"),
    "groups": (_groups, "a dict of names, each with labels, indices or a slice of them"),
    "labels": (_names, "a list of names"),
    "length": (_length, "a number of at least 1"),
    "lengths": (_lengths, "a number of at least 1, or several that ascend"),
    "name": (_name, "a field such as 'pf.pt', or a tuple of names and indices"),
    "over": (_members, "labels, indices, or a slice of them"),
    "replace": (_pairs, "a dict of numbers, such as {-1: 999}"),
    "shape": (_shape, "a list of numbers of at least 1"),
    "values": (several, "a list of numbers"),
    "within": (_limits, "limits (lower, upper)"),
    "Any": (_one(object), "anything"),
    "bool": (_one(bool), "True or False"),
    "finite": (_finite, "a finite number"),
    "float": (_real, "a number"),
    "number": (_number, "a number"),
    "str": (_one(str), "a string"),
}
"""What an option with a name, or else with an annotation, is made of; and what it is to be."""


_NEAREST = {"dtype": TARGETS, "function": ONE_ARGUMENT}


def checked(what: str, value: Any, expected: str) -> Any:
    """Return the value of an option as declarations hold it; `what` is a key of `CHECKS`.

    Raises
    ------
    ConfigError
        With what was expected, if it is anything else.
    """
    convert, words = CHECKS[what]
    try:
        return convert(value.item() if isinstance(value, np.generic) else value)
    except (TypeError, ValueError, SyntaxError, OverflowError):
        hint = f"; {nearest(str(value), _NEAREST[what])}" if what in _NEAREST else ""
        raise ConfigError(f"{expected} {words}, got {value!r}{hint}") from None


def check_options(self: Any, what: str = "", **checks: str) -> None:
    """Check the options of a declaration; None is one where it is the default.

    Numbers, strings and bools of numpy become Python's own, whose text differs.

    Parameters
    ----------
    self : dataclass
        The declaration. Options in its ``choices`` are one of some strings.
    what : str
        What messages call it.
    **checks : str
        The keys of `CHECKS` of options that are others than their names and annotations tell.
    """
    for option in fields(self):
        name, value, kind = option.name, getattr(self, option.name, None), str(option.type)
        is_none = value is None and (option.default is None or "None" in kind)
        if is_none or not option.init:
            continue
        expected = f"{what or type(self).__name__}: expected {name} to be"
        choices = getattr(self, "choices", {}).get(name)
        if choices is not None and not (isinstance(value, str) and value in choices):
            raise ConfigError(f"{expected} {' or '.join(map(repr, choices))}, got {value!r}")
        known = ("str",) if choices else (checks.get(name), name, kind.removesuffix(" | None"))
        value = checked(next((c for c in known if c in CHECKS), "Any"), value, expected)
        if name == "dtype" and value == STRING and not self.holds_strings:
            raise ConfigError(f"{expected} of numbers; Row, Padded, Bucketed and Flat send strings")
        declare(self, **{name: value})


def refuse(what: str, cases: Mapping[str, Any]) -> None:
    """Raise the message of the first case that holds, if one does."""
    for message, holds in cases.items():
        if holds:
            raise ConfigError(f"{what}: {message}")


def held(value: Any, dtype: DType, layout: str, what: str) -> Any:
    """Return a constant of a declaration, refusing one that the tensor cannot hold."""
    expected = f"{layout}: expected {what} to be"
    if dtype == STRING:
        return str(checked("str", value, expected))
    real: float = checked("float", value, expected)
    with np.errstate(all="ignore"):
        cast = float(np.asarray(real, np.float64).astype(dtype))
    exact = dtype.kind in "iub"
    if (exact and cast != value) or (np.isfinite(real) and not np.isfinite(cast)):
        raise ConfigError(f"{layout}: {dtype.name} cannot hold the {what} {value!r}")
    return real


def one_for_each(what: str, layout: Any, count: int) -> None:
    """Make an option one constant for each channel, refusing one that the tensor cannot hold."""
    name, value = type(layout).__name__, getattr(layout, what)
    is_one = isinstance(value, (str, bytes)) or not isinstance(value, Iterable)
    try:
        values = (value,) * count if is_one else several(value)
    except TypeError:
        values = ()
    if len(values) != count:
        got = len(values) or repr(value)
        expected = f"{name}: expected one {what} or one for each of {count} channels"
        raise ConfigError(f"{expected}, got {got}")
    declare(layout, **{what: tuple(held(each, layout.dtype, name, what) for each in values)})
