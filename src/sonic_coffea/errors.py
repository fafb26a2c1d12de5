"""All errors that sonic-coffea raises on purpose.

::

    SonicError
    ├── ConfigError            an option, URL or configuration key that cannot be used
    ├── InputError             the arrays do not fit the layout
    │   └── FieldError         a field or collection that is not there
    ├── ContractError          the model on the server is not the one that was declared
    ├── ServerError
    │   ├── ServerStartError   a local server did not start
    │   ├── ServerLostError    no connection to the server, or the connection broke
    │   ├── OverloadError      the server refused for lack of capacity
    │   │   └── RouteTimeoutError      a proxy cut the request, as its route's timeout passed
    │   ├── AccessError        the server wants another token or certificate
    │   │   └── TokenExpiredError      the token is no longer valid; a new one may be there soon
    │   ├── ModelNotFoundError the server does not have the model, or the version
    │   │   └── ModelNotReadyError     the server knows the model, and cannot serve it now
    │   ├── RequestError       the server rejected the request itself
    │   │   ├── RequestTooLargeError   the request is larger than the server, or a proxy, takes
    │   │   └── InferenceError         the model, or the server, failed on the request
    │   └── ResponseError      the response does not fit the contract
    ├── DeadlineError          a deadline passed
    └── CancelledError         the call was cancelled

No error is an :class:`OSError`, and none is raised from an `OSError`: coffea's ``skipbadfiles``
would take it for a broken file, and drop the chunk silently. All errors keep their attributes when
they are pickled, because they cross processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from typing import Any

__all__ = [
    "AccessError",
    "CancelledError",
    "ConfigError",
    "ContractError",
    "DeadlineError",
    "FieldError",
    "InferenceError",
    "InputError",
    "ModelNotFoundError",
    "ModelNotReadyError",
    "OverloadError",
    "RequestError",
    "RequestTooLargeError",
    "ResponseError",
    "RouteTimeoutError",
    "ServerError",
    "ServerLostError",
    "ServerStartError",
    "SonicError",
    "TokenExpiredError",
    "find",
    "nearest",
]


class SonicError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    message : str
        What was wrong, what was expected, and what to do.
    server, model, version, request : str, optional
        The server, model, version and request of the error; appended to the message.
    events : tuple of int, optional
        First event and one past the last event of these rows, counted in the array of the call.
    rows : tuple of int, optional
        First row and one past the last row of the request.
    """

    def __init__(
        self,
        message: str,
        *,
        server: str | None = None,
        model: str | None = None,
        version: str | None = None,
        request: str | None = None,
        events: tuple[int, int] | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self.message = printable(message, lines=True)
        self.server = server
        self.model = model
        self.version = version
        self.request = request
        self.events = events
        self.rows = rows
        super().__init__(self._text())

    def _context(self) -> dict[str, Any]:
        names = ("server", "model", "version", "request", "events", "rows")
        return {name: getattr(self, name) for name in names}

    def _text(self) -> str:
        where = []
        for name, value in self._context().items():
            if value is None:
                continue
            shown = f"{value[0]}..{value[1] - 1}" if isinstance(value, tuple) else value
            where.append(f"{name} {shown}")
        # A message of several lines is a table; the context stands below.
        between = "\n" if "\n" in self.message else " "
        return f"{self.message}{between}[{printable(', '.join(where))}]" if where else self.message

    def at(self, **context: Any) -> SonicError:
        """Return the same error with the rest of its context filled in."""
        known = {k: v for k, v in self._context().items() if v is not None}
        return type(self)(self.message, **{**context, **known})

    def because(self, remark: str) -> SonicError:
        """Return the same error with a remark."""
        return type(self)(f"{self.message} ({remark})", **self._context())

    def within(self, place: str) -> SonicError:
        """Return the same error, whose message begins with the place."""
        return type(self)(f"{place}: {self.message}", **self._context())

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._context()), (self.message,), self.__dict__


class ConfigError(SonicError):
    """An option, URL or configuration key that cannot be used."""


class InputError(SonicError):
    """The arrays do not fit the layout; sending them again cannot help."""


class FieldError(InputError):
    """A field or collection that is not in the arrays or the file."""


class ContractError(SonicError):
    """The model on the server has other inputs, outputs, shapes or types than declared."""


class ServerError(SonicError):
    """Something about a server."""


class ServerStartError(ServerError):
    """A local server did not start."""


class ServerLostError(ServerError):
    """No connection could be made, or the connection broke while a request was in flight.

    Attributes
    ----------
    undelivered : bool
        Whether no server can have got the request.
    unreached : bool
        Whether nothing is at the address: nothing listens, or no such host or socket is known.
    gone : bool
        Whether it cannot come back at this address, as a local server that was stopped.
    """

    undelivered: bool = False
    unreached: bool = False
    gone: bool = False


class OverloadError(ServerError):
    """The server refused for lack of capacity.

    Attributes
    ----------
    retry_after_s : float or None
        Time after which the server wants the next request, if it says so.
    """

    retry_after_s: float | None = None


class RouteTimeoutError(OverloadError):
    """A proxy cut the request, because its route's timeout passed."""


class AccessError(ServerError):
    """The server wants another token or certificate."""


class TokenExpiredError(AccessError):
    """The token is no longer valid; its file or function may have a new one soon."""


class ModelNotFoundError(ServerError):
    """The server does not have the model, or the version."""


class ModelNotReadyError(ModelNotFoundError):
    """The server knows the model, but cannot serve it now, because it loads or unloads it."""


class RequestError(ServerError):
    """The server rejected the request itself, or the model failed on it."""


class RequestTooLargeError(RequestError):
    """The request is larger than the server, its accelerator or a proxy takes."""


class InferenceError(RequestError):
    """The model, or the server, failed on the request."""


class ResponseError(ServerError):
    """The server's response does not fit the contract of its model."""


class DeadlineError(SonicError):
    """A deadline passed; the requests in flight were cancelled."""


class CancelledError(SonicError):
    """The call was cancelled before it was complete."""


def find(error: BaseException) -> SonicError | None:
    """Return the `SonicError` behind an exception that coffea or dask has wrapped, if there is one.

    coffea's runner re-raises errors of a processor as a plain `Exception`, whose cause this is.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, SonicError):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return text whose control characters are written out, as ``\x1b``.

    Names and messages of others may clear a terminal, forge a line of a log, or reverse the order
    of letters. With `lines`, ends of lines and tabs stay.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a phrase that offers the names closest to `name`, or lists all names."""
    names = [str(k) for k in known]
    lowered = {n.lower(): n for n in names}
    close = [lowered[m] for m in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)]
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    if not names:
        return "there are none"
    shown = ", ".join(sorted(names)[:12]) + (", …" if len(names) > 12 else "")
    return f"there are: {shown}"
