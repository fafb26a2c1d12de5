"""URLs of servers: ``grpc://host:port``, ``grpcs://host:port``, ``unix:PATH``, and coffea's.

``triton+grpc://host:443`` and ``host:443`` mean TLS, with a warning in the log.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, urlsplit

from sonic_coffea.errors import ConfigError, nearest

logger = logging.getLogger(__name__)

# coffea's scheme cannot express TLS, and a server without a scheme has none.
_TLS_BY_PORT = re.compile(
    r"(?P<coffea>triton\+grpc://)?(?P<server>[^/:@]+|\[[0-9a-f:]+\]):443(?=/|$)"
)
SCHEMES = ("grpc", "grpcs", "triton+grpc", "triton+grpcs")
DEFAULT_PORT = {"grpc": 8001, "grpcs": 443}
_UNIX = "unix:"
# What the kernel takes, without the byte that ends the path.
_SOCKET_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A server's address.

    Attributes
    ----------
    model, version : str or None
        Given by coffea's form only, ``triton+grpc://host:port/model/version``.
    path : str or None
        Of a Unix socket, which has neither host nor port.
    """

    host: str = ""
    port: int = 0
    tls: bool = False
    model: str | None = None
    version: str | None = None
    path: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a URL.

        Raises
        ------
        ConfigError
            Saying what was expected.

        Examples
        --------
        >>> Address.parse("grpcs://triton.example").target
        'triton.example:443'
        """
        if url.startswith(_UNIX):
            return cls(path=_socket_path(url))
        # Before any message that shows the URL.
        if "@" in url:
            raise ConfigError("a server's URL must not hold a secret; use token= or headers=")
        if separator := next((c for c in url if c in "?#"), ""):
            raise ConfigError(
                f"expected grpc://host:port, got a URL with {separator!r}, and what follows it is "
                "not sent; use token= or headers= for a secret"
            )
        url = _with_tls(url)
        scheme, separator, _ = url.partition("://")
        if not separator:
            added = "" if ":" in url or "/" in url else f":{DEFAULT_PORT['grpc']}"
            raise ConfigError(
                f"expected a server as grpc://host:port, got {url!r}; did you mean "
                f"'grpc://{url}{added}'?"
            )
        bare = scheme.removeprefix("triton+")
        if bare in ("http", "https"):
            raise ConfigError(
                f"{url!r} is Triton's HTTP endpoint; expected its gRPC endpoint, grpc://host:port, "
                "by default on port 8001"
            )
        if scheme not in SCHEMES:
            raise ConfigError(
                f"expected grpc:// or grpcs:// (TLS), got {url!r}; {nearest(scheme, SCHEMES)}"
            )
        parts, host, port = _split(url)
        path = [part for part in parts.path.split("/") if part]
        if path and bare == scheme:
            raise ConfigError(
                f"expected grpc://host:port without a path, got {url!r}; "
                "the model is named by sonic.Model"
            )
        if len(path) > 2:
            raise ConfigError(f"expected triton+grpc://host:port/model/version, got {url!r}")
        model, version = (*path, None, None)[:2]
        return cls(
            host=host,
            port=DEFAULT_PORT[bare] if port is None else port,
            tls=bare == "grpcs",
            model=model,
            version=version,
        )

    @property
    def target(self) -> str:
        """The socket, or host and port, as gRPC wants them."""
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The canonical URL, without the model."""
        if self.path is not None:
            return self.target
        return f"{'grpcs' if self.tls else 'grpc'}://{self.target}"

    @property
    def loopback(self) -> bool:
        """Whether the server is on this machine."""
        if self.path is not None:
            return True
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def __str__(self) -> str:
        return self.url


def _split(url: str) -> tuple[SplitResult, str, int | None]:
    """Return the parts of a URL, its host and its port; raise if one cannot be used."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"cannot read the server's address {url!r}: {error}") from None
    host, expected = parts.hostname, f"expected a server as {parts.scheme}://host:port, got {url!r}"
    if not host or not host.isprintable():
        raise ConfigError(expected)
    if port == 0:
        raise ConfigError(f"expected a port from 1 to 65535, got 0 in {url!r}")
    return parts, host, port


def _socket_path(url: str) -> str:
    """Return the path of a Unix socket's URL, ``unix:PATH`` or ``unix:///PATH``."""
    path = url.removeprefix(_UNIX)
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/") or path.startswith("//") or not path.isprintable():
        raise ConfigError(f"expected a Unix socket as unix:/path/to/socket, got {url!r}")
    if len(os.fsencode(path)) > _SOCKET_BYTES:
        raise ConfigError(
            f"expected a Unix socket with a path of at most {_SOCKET_BYTES} bytes, got {path!r}"
        )
    return path


@cache
def _with_tls(url: str) -> str:
    """Return a URL with a scheme for TLS if port 443 implies it, and log that once."""
    match = _TLS_BY_PORT.match(url)
    if match is None:
        return url
    scheme = "triton+grpcs" if match["coffea"] else "grpcs"
    secure = f"{scheme}://{match['server']}{url[match.end() :]}"
    logger.warning("%r is taken for %r, as port 443 is for TLS", url, secure)
    return secure
