"""How options are read: each reader returns the value to use, or raises what it expected."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from sonic_coffea.transport import MAX_REQUEST_BYTES

# Longer times, and infinite ones, overflow in gRPC or in the system's clock.
MAX_TIME_S = 604_800
_PROXY = re.compile(r"http://([\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}/?")


Read = Callable[[Any], Any]
"""Returns the value to use; a ValueError says what was expected instead."""


def option(default: Any, read: Read, *, secret: bool = False) -> Any:
    """Return a field of `Settings` that users set; a secret one is never shown."""
    metadata = {"read": read, "default": default}
    return field(default_factory=lambda: default, repr=not secret, metadata=metadata)


def _reader(expected: str, usable: Callable[[Any], bool], convert: Read | None = None) -> Read:
    """Return a function that reads usable values."""

    def read(value: Any) -> Any:
        if not usable(value):
            raise ValueError(expected)
        return value if convert is None else convert(value)

    return read


def _number(expected: str, kind: type, minimum: float, maximum: float, convert: type) -> Read:
    """Return a reader of numbers; those of numpy become Python's, as float32 is too coarse."""

    def usable(value: Any) -> bool:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return is_number and minimum <= value <= maximum

    return _reader(expected, usable, convert)


def one_of(*choices: Any) -> Read:
    return _reader("one of " + ", ".join(choices), lambda value: value in choices)


def whole(minimum: int, maximum: float = math.inf) -> Read:
    of = f"of at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum}"
    return _number(f"a whole number {of}", Integral, minimum, maximum, int)


_SECONDS = f"a number of seconds from 0.001 to {MAX_TIME_S} (a week)"
seconds = _number(_SECONDS, Real, 0.001, MAX_TIME_S, float)
nbytes = _number("a number of bytes of at least 1", Real, 1, sys.float_info.max, int)
_REQUEST = f"from 1 to {MAX_REQUEST_BYTES} bytes, as a message of gRPC holds less than 2 GiB"
request_bytes = _number(_REQUEST, Real, 1, MAX_REQUEST_BYTES, int)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


def _is_source(value: Any) -> bool:
    return _is_path(value) or callable(value)


def _same_everywhere(path: Any) -> Any:
    """Return a path that processes in other folders can use; a token is no path."""
    return path.expanduser().absolute() if isinstance(path, Path) else path


def _same_on_hosts(path: Any) -> str:
    """Return a path that processes in other folders can use; "~" stays, as homes differ."""
    return str(path) if str(path).startswith("~") else str(Path(path).absolute())


flag = _reader("True or False", lambda value: isinstance(value, bool))
headers = _reader("a mapping of names to values", lambda value: isinstance(value, Mapping))
path = _reader("a path", _is_path)
source = _reader("a path or a function", _is_source)
token = _reader("a token, a path or a function", _is_source, _same_everywhere)
tls_file = _reader("a path", _is_path, _same_on_hosts)
proxy = _reader(
    "a URL such as http://proxy.example:3128, without a user or a password",
    lambda value: bool(_PROXY.fullmatch(str(value))),
)
