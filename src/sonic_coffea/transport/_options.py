"""Options of a connection to a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.transport._tokens import check_header, read_text, token_of, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
        raise unreadable(role, path, problem)
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
    shared_memory : bool or "auto"
        Whether a server on this machine reads large tensors from shared memory: always, never, or
        if it can.
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
    shared_memory: bool | str = "auto"
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            check_header(name, value)
        if self.token is not None and not callable(self.token):
            token_of(self.token)
