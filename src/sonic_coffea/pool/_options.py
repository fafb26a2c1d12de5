"""Checks of options: each returns what a value should be instead, or None."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

# gRPC's limit of 2 GiB holds for the whole message, which has more in it than the tensors.
_MAX_REQUEST_BYTES = 2_000_000_000
# Longer times, and infinite ones, overflow in gRPC or in the system's clock.
MAX_TIME_S = 604_800
_PROXY = re.compile(r"http://([\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}/?")


Check = Callable[[Any], str | None]
"""Returns what a value should be instead; None if it can be used."""


def option(default: Any, expects: Check, *, secret: bool = False) -> Any:
    """Return a field of `Settings` that users set; a secret one is never shown."""
    return field(default_factory=lambda: default, repr=not secret, metadata={"expects": expects})


def _instance(text: str, *types: type) -> Check:
    return lambda value: None if isinstance(value, types) else text


def one_of(*choices: Any) -> Check:
    text = "one of " + ", ".join(str(c) for c in choices)
    return lambda value: None if value in choices else text


def whole(minimum: int) -> Check:
    text = f"a whole number of at least {minimum}"
    return lambda value: None if isinstance(value, Integral) and int(value) >= minimum else text


def positive(value: Any) -> str | None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return None if number and float(value) > 0 else "a number of more than 0"


def seconds(value: Any) -> str | None:
    if positive(value) is None and 0.001 <= value <= MAX_TIME_S:
        return None
    return f"a number of seconds from 0.001 to {MAX_TIME_S} (a week)"


def request_bytes(value: Any) -> str | None:
    if (expected := positive(value)) or value <= _MAX_REQUEST_BYTES:
        return expected
    return f"at most {_MAX_REQUEST_BYTES}, as a message of gRPC holds less than 2 GiB"


def a_proxy(value: Any) -> str | None:
    expected = "a URL such as http://proxy.example:3128, without a user or a password"
    return None if isinstance(value, str) and _PROXY.fullmatch(value) else expected


def auto_or(expects: Check) -> Check:
    def check(value: Any) -> str | None:
        expected = None if value == "auto" else expects(value)
        return expected and f"auto, or {expected}"

    return check


def or_none(expects: Check) -> Check:
    return lambda value: None if value is None else expects(value)


a_bool = _instance("True or False", bool)
a_file = _instance("str, Path or None", str, Path, type(None))
headers = _instance("a mapping of names to values", Mapping)
a_source = _instance("a path, a function or None", str, Path, Callable, type(None))  # type: ignore[arg-type]
