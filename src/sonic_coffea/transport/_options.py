"""Options of a connection: deadlines, PEM files, and tokens and headers that gRPC takes.

Other tokens and headers are refused before gRPC logs them.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, SonicError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-z_.-]+")
_RETRY_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines of calls.

    Parameters
    ----------
    request_s : float
        Of one inference request.
    metadata_s : float
        Of a call that carries no tensors.
    """

    request_s: float = 120.0
    metadata_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files for ``grpcs``.

    Parameters
    ----------
    root : str or None
        The certificate authority to trust; by default those of gRPC.
    cert, key : str or None
        The certificate and its key that the client shows (mutual TLS).
    """

    root: str | None = None
    cert: str | None = None
    key: str | None = None

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the contents of root, cert and key; reading may block.

        Raises
        ------
        ConfigError
            Naming the file that cannot be used.
        """
        return (
            _read_pem(self.root, "certificate authority"),
            _read_pem(self.cert, "certificate"),
            _read_pem(self.key, "key"),
        )


def _read_pem(path: str | None, role: str) -> bytes | None:
    if path is None:
        return None
    content = read_text(role, path, "latin-1")
    if "-----BEGIN" not in content:
        problem = "expected a file in PEM format, which begins with -----BEGIN"
        raise _unreadable(role, path, problem)
    return content.encode("latin-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """How to connect.

    Parameters
    ----------
    token : str, callable or None
        Bearer token of every call, or a function that returns it. Never shown.
    headers : mapping
        More headers of every call. Never shown.
    tls : Tls
        PEM files, for servers with TLS.
    compression : {"gzip", "deflate"} or None
        How requests with tensors are compressed.
    shared_memory : bool
        Whether the server, on this machine, reads large tensors from shared memory.
    timeouts : Timeouts
        Deadlines of calls.

    Raises
    ------
    ConfigError
        If gRPC does not take the token or a header.
    """

    token: str | Callable[[], str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: Tls = field(default_factory=Tls)
    compression: str | None = None
    shared_memory: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            _check_header(name, value)
        if self.token is not None and not callable(self.token):
            _token_of(self.token)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers of a call: the user's, and the token.

        Raises
        ------
        ConfigError
            If the token cannot be had.
        """
        headers = dict(self.headers)
        if self.token is not None:
            headers["authorization"] = f"Bearer {_token_of(self.token)}"
        return tuple((name.lower(), value) for name, value in headers.items())


def _unreadable(role: str, path: str | Path, problem: str) -> ConfigError:
    """Return the error for a file that cannot be used; it names the machine, one of many."""
    return ConfigError(f"cannot read the {role} {str(path)!r} on {socket.gethostname()}: {problem}")


def read_text(role: str, path: str | Path, encoding: str = "utf-8") -> str:
    """Return the text of a file that has a role.

    Raises
    ------
    ConfigError
        Without the error of the system, which coffea takes for that of a broken file of events.
    """
    try:
        return Path(path).expanduser().read_text(encoding)
    except OSError as error:
        problem = str(error.strerror)
    except UnicodeDecodeError:
        # Its own words quote the text, which may be a token.
        problem = "expected text, got bytes that are not UTF-8"
    raise _unreadable(role, path, problem)


class TokenFile:
    """A file that holds a token, which is read again for every call, as tokens expire.

    While it is being renewed, and cannot be read or is empty, the token that it had is returned.

    Parameters
    ----------
    path : str or Path
        The file.
    renewed_within_s : float
        Time to wait for the first token, as whoever renews it may write the file in two steps.
    """

    def __init__(self, path: str | Path, *, renewed_within_s: float = 1.0) -> None:
        self.path = Path(path).expanduser()
        self._renewed_within_s = renewed_within_s
        self._last = ""
        self._warned = False

    def __call__(self) -> str:
        """Return the token.

        Raises
        ------
        ConfigError
            If the file has held none yet.
        """
        until = time.monotonic() + self._renewed_within_s
        while True:
            try:
                self._last, self._warned = self._read(), False
            except ConfigError as problem:
                if not self._last:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(_RETRY_INTERVAL_S)
                    continue
                if not self._warned:
                    logger.warning("%s; the token that it had is used", problem)
                self._warned = True
            return self._last

    def _read(self) -> str:
        if token := read_text("token file", self.path).strip():
            return token
        raise _unreadable("token file", self.path, "it is empty")


def _token_of(source: Any) -> str:
    """Return a token that gRPC takes: a text, or what a function returns; no error shows it."""
    token, origin, failure = source, "the token has", ""
    if callable(source):
        origin = "the function that token= names returned"
        try:
            token = source()
        except SonicError:
            raise
        except Exception as error:  # noqa: BLE001  it is the user's, and may hold the token
            failure = type(error).__name__
    if failure:  # without the exception as its context
        raise ConfigError(f"the function that token= names failed: {failure}")
    if not isinstance(token, str):
        raise ConfigError(f"{origin} {type(token).__name__}, expected str")
    if not token.strip():
        raise ConfigError(f"{origin} no characters, expected a token")
    if not _printable(token):
        raise ConfigError(f"{origin} characters, such as a line break, that no token has")
    return token


def _check_header(name: Any, value: Any) -> None:
    """Refuse a header that gRPC does not take; no error shows its value."""
    if not isinstance(name, str) or not _NAME.fullmatch(name.lower()):
        raise ConfigError(
            "headers: expected names of letters, digits, hyphens, underscores and full stops, "
            f"got {name!r}"
        )
    expected = bytes if name.lower().endswith("-bin") else str
    if not isinstance(value, expected):
        got = type(value).__name__
        raise ConfigError(f"headers: expected {expected.__name__} for {name!r}, got {got}")
    if isinstance(value, str) and not _printable(value):
        raise ConfigError(
            f"headers: the value of {name!r} has characters, such as a line break, that no header "
            "has; expected printable ASCII"
        )


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable()
