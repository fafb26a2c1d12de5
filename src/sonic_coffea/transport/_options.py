"""Options of a connection: deadlines, PEM files, tokens and headers.

Tokens and headers that gRPC does not take are refused here, because gRPC would log them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import re
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from typing import Any

from sonic_coffea._files import read_text, state_of, unreadable
from sonic_coffea.errors import ConfigError, SonicError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-z_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """How to connect.

    Parameters
    ----------
    token : Token or None
        Bearer token of every call. Never shown.
    headers : mapping
        More headers of every call. Never shown.
    tls_root : str or None
        PEM file with the certificate authority to trust, for ``grpcs``; by default those of gRPC.
    tls_cert, tls_key : str or None
        PEM files of the certificate and its key that the client shows (mutual TLS).
    compression : {"gzip", "deflate"} or None
        How what is sent is compressed.
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
        If gRPC does not take a header.
    """

    token: Token | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls_root: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    compression: str | None = None
    shared_memory: bool = False
    proxy: str | None = None
    request_timeout_s: float = 120.0
    metadata_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            _check_header(name, value)
        names = [name.lower() for name in self.headers]
        names += ["authorization"] * (self.token is not None)
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"headers: {', '.join(sorted(twice))} is given twice; names of headers differ in "
                "more than case, and token= is the header authorization"
            )

    def metadata(self, token: str | None) -> tuple[tuple[str, str], ...]:
        """Return the headers of a call: the user's, and the token."""
        headers = dict(self.headers)
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return tuple((name.lower(), value) for name, value in headers.items())

    def read_certificates(self) -> list[bytes | None]:
        """Return the contents of root, cert and key; reading may block.

        Raises
        ------
        ConfigError
            Naming the option and the file that cannot be used.
        """
        self.ssl_context()
        try:
            return [None if path is None else path.read_bytes() for path in self._paths()]
        except OSError as error:  # it has gone since
            raise unreadable("the files of tls_root, tls_cert and tls_key", error) from None

    def ssl_context(self) -> ssl.SSLContext:
        """Return what the standard library makes of the files; reading may block.

        gRPC would take files that do not fit each other, and never make a connection.

        Raises
        ------
        ConfigError
            Naming the option and the file that cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with contextlib.suppress(ssl.SSLError):  # gRPC takes short keys, too
            context.set_ciphers("DEFAULT@SECLEVEL=0")
        root, cert, key = self._paths()
        try:
            what, expected = f"tls_root {str(root)!r}", "certificates in PEM format"
            if root is not None:
                context.load_verify_locations(root)
            what = f"tls_cert {str(cert)!r} with tls_key {str(key)!r}"
            expected = "a certificate and its key, without a password, in PEM format"
            if cert is not None and key is not None:
                context.load_cert_chain(cert, key, password="")
        except OSError as error:  # as an SSLError is
            problem = getattr(error, "reason", None) or error.strerror
            raise unreadable(what, f"{problem}; expected {expected}") from None
        return context

    def certificate_states(self) -> list[Any]:
        """Return a value that changes whenever one of the files does; this may block."""
        return [path and state_of(path) for path in self._paths()]

    def _paths(self) -> list[Path | None]:
        paths = (self.tls_root, self.tls_cert, self.tls_key)
        return [Path(path).expanduser() if path else None for path in paths]


class Token:
    """A bearer token, and where to get a new one when it expires.

    A file is read again for every call. A function is called once, and again when its token was
    refused or, if it is a JWT, is near its end. If there is no new token, the last one is returned.

    Parameters
    ----------
    source : str, Path or callable
        The token, or a file or a function that returns it.

    Attributes
    ----------
    renewable : bool
        Whether the source may return another token later.
    accepted : bool
        Whether a server has accepted the last token.
    """

    def __init__(self, source: Any) -> None:
        self.renewable = isinstance(source, Path) or callable(source)
        self.accepted = False
        self._source = source
        self._last = "" if self.renewable else _token(source, "the token has")
        self._renews_at = -math.inf if self.renewable else math.inf
        self._warned = self._refused = False
        self._lock = threading.Lock()

    def __call__(self) -> str:
        """Return the token; this may block.

        Raises
        ------
        ConfigError
            If there has been none yet.
        """
        with self._lock:
            if self._refused or time.time() >= self._renews_at:
                try:
                    self._last = self._fetch()
                    self._warned = self._refused = False
                except ConfigError as problem:
                    if not self._last:
                        raise
                    if not self._warned:
                        logger.warning("%s; the token that it had is used", problem)
                    self._warned = True
            return self._last

    def refused(self, token: str) -> bool:
        """Note that a server refused a token; return whether another one may be accepted."""
        if token != self._last or self._refused:
            return True
        accepted, self.accepted, self._refused = self.accepted, False, True
        return accepted

    def _fetch(self) -> str:
        if isinstance(self._source, Path):
            text = read_text(self._source, "the token file").strip()
            return _token(text, f"the token file {str(self._source)!r} on {gethostname()} has")
        token = _token(self._call(), "the function that token= names returned")
        self._renews_at = _renews_at(token)
        return token

    def _call(self) -> Any:
        slow = "the function that token= names takes more than 1 s, and requests wait for it"
        timer = threading.Timer(1.0, logger.warning, (slow,))
        timer.daemon = True
        timer.start()
        try:
            return self._source()
        except SonicError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  it may hold the token
            failure = type(error).__name__
        finally:
            timer.cancel()
        # Without the exception as its context.
        raise ConfigError(f"the function that token= names failed: {failure}")


def _token(token: Any, origin: str) -> str:
    """Return a token that gRPC takes; no error shows it."""
    if not isinstance(token, str):
        raise ConfigError(f"{origin} {type(token).__name__}, expected str")
    if not token.strip():
        raise ConfigError(f"{origin} no characters")
    if not _printable(token):
        raise ConfigError(f"{origin} characters, such as a line break, that no token has")
    return token


def _renews_at(token: str) -> float:
    """Return when a JWT is near its end, with a tenth of its time left; infinity for others.

    The clock may be wrong: whether a token that has ended by it is refused, the server knows.
    """
    with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):
        claims = token.split(".")[1]
        now = time.time()
        ends_at = float(json.loads(base64.urlsafe_b64decode(claims + "=="))["exp"])
        return now + 0.9 * (ends_at - now) if ends_at > now else math.inf
    return math.inf


def _check_header(name: Any, value: Any) -> None:
    """Refuse a header that gRPC does not take; no error shows its value."""
    named = isinstance(name, str) and _NAME.fullmatch(name.lower())
    kind = bytes if named and name.lower().endswith("-bin") else str
    if not (named and isinstance(value, kind) and (isinstance(value, bytes) or _printable(value))):
        raise ConfigError(
            "headers: expected names of letters, digits, hyphens, underscores and full stops, with "
            "values of printable ASCII, without line breaks, or of bytes if the name ends in -bin; "
            f"got {name!r} with a value of type {type(value).__name__}"
        )


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable()
