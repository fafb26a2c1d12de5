"""The flat options of a pool: where `Settings` keeps each, and its valid values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

# gRPC's limit of 2 GiB holds for the whole message, which has more in it than the tensors.
_MAX_REQUEST_BYTES = 2_000_000_000


class Option(NamedTuple):
    """Where the value of a flat option is kept, and what it may be."""

    group: str  # "": of Settings itself
    field: str
    expects: Callable[[Any], str | None]  # what it should be instead, if it cannot be this
    secret: bool = False  # never shown


def _instance(text: str, *types: type) -> Callable[[Any], str | None]:
    return lambda value: None if isinstance(value, types) else text


def _choice(*choices: Any) -> Callable[[Any], str | None]:
    text = "one of " + ", ".join(str(c) for c in choices)
    return lambda value: None if value in choices else text


def _whole(minimum: int) -> Callable[[Any], str | None]:
    text = f"a whole number of at least {minimum}"
    return lambda value: None if isinstance(value, Integral) and int(value) >= minimum else text


def _channels(value: Any) -> str | None:
    expected = None if value == "auto" else _whole(1)(value)
    return expected and f"auto, or {expected}"


def _positive(value: Any) -> str | None:
    return None if isinstance(value, Real) and float(value) > 0 else "a number of more than 0"


def _request_bytes(value: Any) -> str | None:
    if (expected := _positive(value)) or value <= _MAX_REQUEST_BYTES:
        return expected
    return f"at most {_MAX_REQUEST_BYTES}, as a message of gRPC holds less than 2 GiB"


def _weight(value: Any) -> str | None:
    # A larger one would be a longer queue.
    return None if _positive(value) is None and value <= 10 else "a number of more than 0, up to 10"


def _or_none(expects: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    return lambda value: None if value is None else expects(value)


_file = _instance("str, Path or None", str, Path, type(None))
_headers = _instance("a mapping of names to values", Mapping)
_source = _instance("a path, a function or None", str, Path, Callable, type(None))  # type: ignore[arg-type]

# The flat options of `connect`, of dask's configuration and of profiles.
OPTIONS: Mapping[str, Option] = {
    "servers_file": Option("", "servers_file", _file),
    "token": Option("", "token", _source, secret=True),
    "headers": Option("", "headers", _headers, secret=True),
    "tls_root": Option("tls", "root", _file),
    "tls_cert": Option("tls", "cert", _file),
    "tls_key": Option("tls", "key", _file),
    "compression": Option("", "compression", _choice("gzip", "deflate", None)),
    "shared_memory": Option("", "shared_memory", _choice(*(True, False))),
    "channels": Option("", "channels", _channels),
    "max_in_flight": Option("limits", "max_in_flight", _whole(1)),
    "max_in_flight_bytes": Option("limits", "max_in_flight_bytes", _or_none(_positive)),
    "max_request_bytes": Option("limits", "max_request_bytes", _request_bytes),
    "request_timeout_s": Option("timeouts", "request_s", _positive),
    "metadata_timeout_s": Option("timeouts", "metadata_s", _positive),
    "retry_timeout_s": Option("retry", "timeout_s", _positive),
    "balance": Option("", "balance", _choice("load", "priority")),
    "weight": Option("", "weight", _weight),
    "hedge_after_s": Option("retry", "hedge_after_s", _or_none(_positive)),
    "fallback": Option("fallback", "source", _source),
    "fallback_after_s": Option("fallback", "after_s", _positive),
    "cache": Option("cache", "path", _file),
    "cache_bytes": Option("cache", "max_bytes", _positive),
    "cache_trusts_versions": Option("cache", "trusts_versions", _instance("True or False", bool)),
    "max_suspended_chunks": Option("limits", "max_suspended_chunks", _or_none(_whole(0))),
}
