"""URLs of servers: ``grpc://host:port``, ``grpcs://host:port``, ``unix:PATH``, and coffea's.

coffea's ``triton+grpc://host:443`` means TLS, as its scheme cannot say so.
"""

from __future__ import annotations

import ipaddress
import os
import re
from contextlib import suppress
from dataclasses import dataclass

from sonic_coffea.errors import ConfigError

_URL = re.compile(
    r"(?P<coffea>triton\+)?(?P<scheme>grpcs?|https?)://"
    r"(?P<host>[\w.-]+|\[[\w:.%]+\])(:(?P<port>[0-9]+))?(?P<path>(/[^/]+)*)/?"
)
_PLAIN_PORT, _TLS_PORT = 8001, 443
_UNIX = "unix:"
# What the kernel takes, without the byte that ends the path.
_SOCKET_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A server's address.

    Attributes
    ----------
    model, version : str or None
        Only coffea's form has them, ``triton+grpc://host:port/model/version``.
    path : str or None
        Path of a Unix socket; such a server has neither host nor port.
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
        if any(c in url for c in "@?#"):
            raise ConfigError(
                "a server's URL must not hold a secret, nor '@', '?' or '#'; use token= or headers="
            )
        match = _URL.fullmatch(url)
        if match is None:
            scheme = "grpcs" if url.endswith(f":{_TLS_PORT}") else "grpc"
            added = "" if ":" in url or "/" in url else f":{_PLAIN_PORT}"
            hint = "" if "://" in url else f"; did you mean '{scheme}://{url}{added}'?"
            raise ConfigError(
                f"expected a server as grpc://host:port, or grpcs:// for TLS, got {url!r}{hint}"
            )
        if match["scheme"].startswith("http"):
            raise ConfigError(
                f"{url!r} is Triton's HTTP endpoint; expected its gRPC endpoint, grpc://host:port, "
                f"by default on port {_PLAIN_PORT}"
            )
        path = [part for part in match["path"].split("/") if part]
        if len(path) > (2 if match["coffea"] else 0):
            raise ConfigError(
                "expected grpc://host:port, whose model sonic.Model names, or coffea's "
                f"triton+grpc://host:port/model/version, got {url!r}"
            )
        tls = match["scheme"] == "grpcs"
        port = int(match["port"] or (_TLS_PORT if tls else _PLAIN_PORT))
        if not 0 < port < 1 << 16:
            raise ConfigError(f"expected a port from 1 to 65535, got {port} in {url!r}")
        model, version = (*path, None, None)[:2]
        return cls(
            host=match["host"].strip("[]").lower(),
            port=port,
            tls=tls or (match["coffea"] is not None and port == _TLS_PORT),
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
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.path is not None or self.host == "localhost"

    def __str__(self) -> str:
        return self.url


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
