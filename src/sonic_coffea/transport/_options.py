"""Options of a connection: deadlines, PEM files, and tokens and headers that gRPC takes.

Other tokens and headers are refused before gRPC logs them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError, SonicError

if TYPE_CHECKING:
    from ssl import SSLContext

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-z_.-]+")
_RETRY_INTERVAL_S = 0.05
# A function that takes longer is logged: requests wait for it.
_SLOW_S = 1.0


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
            Naming the option and the file that cannot be used.
        """
        contents = (
            _read_pem(self.root, "certificate authority (tls_root)"),
            _read_pem(self.cert, "certificate (tls_cert)"),
            _read_pem(self.key, "key (tls_key)"),
        )
        self.context()
        return contents

    def context(self) -> SSLContext:
        """Return what the standard library makes of the files; reading may block.

        gRPC would take files that do not fit each other, and never make a connection.

        Raises
        ------
        ConfigError
            Naming the option and the file that cannot be used.
        """
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with contextlib.suppress(ssl.SSLError):  # gRPC takes short keys, too
            context.set_ciphers("DEFAULT@SECLEVEL=0")
        if self.root is not None:
            try:
                context.load_verify_locations(Path(self.root).expanduser())
            except OSError:  # as an SSLError is
                problem = "expected certificates in PEM format"
                raise _unreadable("certificate authority (tls_root)", self.root, problem) from None
        if self.cert is not None and self.key is not None:
            cert, key = Path(self.cert).expanduser(), Path(self.key).expanduser()
            try:
                context.load_cert_chain(cert, key, password="")
            except OSError as error:
                problem = (
                    f"expected the key, without a password, of the certificate (tls_cert) "
                    f"{self.cert!r}: {getattr(error, 'reason', None) or error.strerror or error}"
                )
                raise _unreadable("key (tls_key)", self.key, problem) from None
        return context

    def changed(self) -> tuple[Any, ...]:
        """Return what is another once a file has changed; looking may block."""
        return tuple(_state(path) for path in (self.root, self.cert, self.key))


def _state(path: str | None) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        if path is not None:
            state = Path(path).expanduser().stat()
            return state.st_mtime_ns, state.st_ino, state.st_size
    return None


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
    token : str, Path, callable or None
        Bearer token of every call, or a file or a function that has it. Never shown.
    headers : mapping
        More headers of every call. Never shown.
    tls : Tls
        PEM files, for servers with TLS.
    compression : {"gzip", "deflate"} or None
        How requests with tensors are compressed.
    shared_memory : bool
        Whether the server, on this machine, reads large tensors from shared memory.
    proxy : str or None
        URL of the HTTP proxy that leads to the server.
    request_timeout_s : float
        Deadline of one inference request.
    metadata_timeout_s : float
        Deadline of a call that carries no tensors.

    Raises
    ------
    ConfigError
        If gRPC does not take the token or a header.
    """

    token: Any = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: Tls = field(default_factory=Tls)
    compression: str | None = None
    shared_memory: bool = False
    proxy: str | None = None
    request_timeout_s: float = 120.0
    metadata_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            _check_header(name, value)
        if self.token is not None and not isinstance(self.token, Token):
            object.__setattr__(self, "token", Token(self.token))

    def metadata(self, token: str | None) -> tuple[tuple[str, str], ...]:
        """Return the headers of a call: the user's, and the token."""
        headers = dict(self.headers)
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
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


class Token:
    """A bearer token, which may have to be had anew, as tokens expire.

    A file is read again for every call. A function is called once, and again when its token was
    refused or, if it is a JWT, is near its end. While no new token can be had, the last is
    returned.

    Parameters
    ----------
    source : str, Path or callable
        The token, or the file or the function that has it.
    renewed_within_s : float
        Time to wait for a file's first token, as whoever renews it may write the file in two steps.

    Attributes
    ----------
    renewable : bool
        Whether there may be another one later.
    accepted : bool
        Whether a server has taken the last one.
    """

    def __init__(self, source: Any, *, renewed_within_s: float = 1.0) -> None:
        self.renewable = isinstance(source, Path) or callable(source)
        self.accepted = False
        self._source = source.expanduser() if isinstance(source, Path) else source
        self._renewed_within_s = renewed_within_s
        self._last = "" if self.renewable else _token(source, "the token has")
        self._renews_at = -math.inf if self.renewable else math.inf
        self._warned = self._refused = False
        self._having = threading.Lock()

    def __call__(self) -> str:
        """Return the token; this may block.

        Raises
        ------
        ConfigError
            If there has been none yet.
        """
        with self._having:
            until = time.monotonic() + self._renewed_within_s
            while self._refused or time.time() >= self._renews_at:
                try:
                    last = self._have()
                except ConfigError as problem:
                    if not self._last:
                        if callable(self._source) or time.monotonic() >= until:
                            raise
                        time.sleep(_RETRY_INTERVAL_S)
                        continue
                    if not self._warned:
                        logger.warning("%s; the token that it had is used", problem)
                    self._warned = True
                else:
                    self._last, self._warned, self._refused = last, False, False
                    if callable(self._source):
                        self._renews_at = _renews_at(last)
                break
            return self._last

    def refused(self, token: str) -> bool:
        """Take note that a server refused a token; return whether another one may be taken."""
        if token != self._last or self._refused:
            return True
        accepted, self.accepted, self._refused = self.accepted, False, True
        return accepted

    def _have(self) -> str:
        if not callable(self._source):
            if token := read_text("token file", self._source).strip():
                return token
            raise _unreadable("token file", self._source, "it is empty")
        slow = "the function that token= names takes more than %g s, and requests wait for it"
        timer = threading.Timer(_SLOW_S, logger.warning, (slow, _SLOW_S))
        timer.daemon = True
        timer.start()
        try:
            token = self._source()
        except SonicError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  it may hold the token
            failure = type(error).__name__
        else:
            return _token(token, "the function that token= names returned")
        finally:
            timer.cancel()
        # Without the exception as its context.
        raise ConfigError(f"the function that token= names failed: {failure}")


def _token(token: Any, origin: str) -> str:
    """Return a token that gRPC takes; no error shows it."""
    if not isinstance(token, str):
        raise ConfigError(f"{origin} {type(token).__name__}, expected str")
    if not token.strip():
        raise ConfigError(f"{origin} no characters, expected a token")
    if not _printable(token):
        raise ConfigError(f"{origin} characters, such as a line break, that no token has")
    return token


def _renews_at(token: str) -> float:
    """Return when a token is near its end: when a tenth of its time is left; else infinity."""
    with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):
        claims = token.split(".")[1]
        now = time.time()
        ends_at = float(json.loads(base64.urlsafe_b64decode(claims + "=="))["exp"])
        return now + 0.9 * (ends_at - now)
    return math.inf


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
