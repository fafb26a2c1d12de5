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
    │   ├── OverloadError      the server is full
    │   │   └── RouteTimeoutError      a proxy's time limit passed
    │   ├── AccessError        the server wants another token or certificate
    │   │   └── TokenExpiredError      the token has expired
    │   ├── ModelNotFoundError the server does not have the model, or the version
    │   │   └── ModelNotReadyError     the server is loading or unloading the model
    │   ├── RequestError       the server rejected the request
    │   │   ├── RequestTooLargeError   the request is larger than the server, or a proxy, takes
    │   │   └── InferenceError         the model, or the server, failed on the request
    │   └── ResponseError      the response does not fit the model
    ├── DeadlineError          a deadline passed
    └── CancelledError         the call was cancelled

No error is an :class:`OSError`, and none is raised from an `OSError`: coffea's ``skipbadfiles``
would take it for a broken file, and drop the chunk. All errors keep their attributes when they are
pickled, because they cross processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial, wraps
from types import TracebackType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(eq=False, repr=False)
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

    message: str
    _: KW_ONLY
    server: str | None = None
    model: str | None = None
    version: str | None = None
    request: str | None = None
    events: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.message = printable(self.message, lines=True)
        where = []
        for name, value in self._context.items():
            shown = f"{value[0]}..{value[1] - 1}" if isinstance(value, tuple) else value
            where.append(f"{name} {shown}")
        # A message of several lines is a table; the context stands below.
        between = "\n" if "\n" in self.message else " "
        context = f"{between}[{printable(', '.join(where))}]" if where else ""
        super().__init__(f"{self.message}{context}")

    @property
    def _context(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: value for name, value in values.items() if value is not None}

    def at(self, **context: Any) -> SonicError:
        """Return the same error with more context; context that it has stays."""
        return self._copy(self.message, **{**context, **self._context})

    def because(self, remark: str) -> SonicError:
        """Return the same error with a remark."""
        return self._copy(f"{self.message} ({remark})", **self._context)

    def within(self, place: str) -> SonicError:
        """Return the same error, whose message begins with the place."""
        return self._copy(f"{place}: {self.message}", **self._context)

    def _copy(self, message: str, **context: Any) -> SonicError:
        """Return an error with another message, and with attributes such as ``retry_after_s``."""
        error = type(self)(message, **context)
        error.__dict__ = {**self.__dict__, **error.__dict__}
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._context), (self.message,), self.__dict__


class ConfigError(SonicError):
    """An option, URL or configuration key that cannot be used."""


class InputError(SonicError):
    """The arrays do not fit the layout; sending them again cannot help."""


class FieldError(InputError):
    """A field or collection that is not in the arrays or the file."""


class ContractError(SonicError):
    """The model on the server has other inputs, outputs, shapes or types than declared."""


class ServerError(SonicError):
    """A server failed, or could not be reached; catch it for any error of a server."""


class ServerStartError(ServerError):
    """A local server did not start."""


class ServerLostError(ServerError):
    """No connection could be made, or the connection broke while a request was in flight.

    Attributes
    ----------
    undelivered : bool
        Whether the request certainly reached no server.
    unreached : bool
        Whether nothing is at the address: nothing listens, or the host or socket does not exist.
    gone : bool
        Whether the server cannot come back at this address, as a local server after its stop.
    """

    undelivered: bool = False
    unreached: bool = False
    gone: bool = False


class OverloadError(ServerError):
    """The server is full, and refused the request.

    Attributes
    ----------
    retry_after_s : float or None
        How long the server asks to wait; None if it does not say.
    """

    retry_after_s: float | None = None


class RouteTimeoutError(OverloadError):
    """A proxy cut the request, because its time limit passed."""


class AccessError(ServerError):
    """The server wants another token or certificate."""


class TokenExpiredError(AccessError):
    """The token has expired; its file or function may have a new one soon."""


class ModelNotFoundError(ServerError):
    """The server does not have the model, or the version."""


class ModelNotReadyError(ModelNotFoundError):
    """The server has the model, but is loading or unloading it."""


class RequestError(ServerError):
    """The server rejected the request, or the model failed on it."""


class RequestTooLargeError(RequestError):
    """The request is too large for the server, its accelerator or a proxy."""


class InferenceError(RequestError):
    """The model, or the server, failed on the request."""


class ResponseError(ServerError):
    """The server's response does not fit its description of the model."""


class DeadlineError(SonicError):
    """A deadline passed; the requests in flight were cancelled."""


class CancelledError(SonicError):
    """The call was cancelled before it was complete."""


def find(error: BaseException) -> SonicError | None:
    """Return the `SonicError` behind an exception that coffea or dask has wrapped, or None.

    coffea's runner raises a plain `Exception` from the error of a processor.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, SonicError):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None


def brief(function: Function) -> Function:
    """Leave this package's frames out of the traceback of its errors: users look for theirs."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except SonicError as error:
            __tracebackhide__ = True  # of IPython and pytest
            raise error.with_traceback(_of_others(error.__traceback__))  # noqa: B904  the same

    return call  # type: ignore[return-value]


def _of_others(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    frame, below = traceback.tb_frame, _of_others(traceback.tb_next)
    module = str(frame.f_globals.get("__name__"))
    if module == "contextlib" or module.startswith("sonic_coffea."):
        return below
    return TracebackType(below, frame, traceback.tb_lasti, traceback.tb_lineno)


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return text whose control characters are written out, as ``\x1b``.

    Names and messages of servers may clear a terminal, forge a line of a log, or reverse the order
    of letters. With `lines`, line ends and tabs stay.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def shortened(value: object, length: int = 100) -> str:
    """Return a value as text of at most some characters: the type of a jet may have thousands."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def require(
    names: Iterable[Any], known: Collection[Any], problem: str, kind: type[SonicError] = ConfigError
) -> None:
    """Raise an error for the first of some names that is not known, with the nearest known ones."""
    for name in names:
        if name not in known:
            raise kind(f"{problem} {name!r}; {nearest(name, known)}")


def expect(holds: object, expected: str, got: object, place: str = "") -> None:
    """Raise a `ConfigError` that says what was expected and what was given, unless that holds.

    The message begins with the place, if one is given.
    """
    if not holds:
        shown = shortened(repr(got), 500)
        raise ConfigError(f"{place and f'{place}: '}expected {expected}, got {shown}")


def nearest(name: Any, known: Iterable[str]) -> str:
    """Return a phrase with the names closest to `name`, or with all names."""
    names = [printable(str(k)) for k in known]
    lowered = {n.lower(): n for n in names}
    if close := difflib.get_close_matches(str(name).lower(), lowered, n=3, cutoff=0.6):
        return f"did you mean {' or '.join(repr(lowered[match]) for match in close)}?"
    if not names:
        return "there are none"
    shown = ", ".join(sorted(names)[:12]) + (", …" if len(names) > 12 else "")
    return f"there are: {shown}"
