"""How a pool is configured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.transport import Address, ConnectionOptions

# Room is left for what a message has beside the tensors.
_LARGEST_REQUEST = 2_000_000_000
_CHOICES = {
    "compression": ("gzip", "deflate", None),
    "balance": ("load", "order"),
    "shared_memory": ("auto", True, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The servers of a pool, and its limits.

    Parameters
    ----------
    servers : sequence of str
        URLs: ``grpc://host:port``, ``grpcs://host:port`` (TLS), ``triton+grpc://host:port``.
    token : str, path, callable or None
        Bearer token; a `pathlib.Path` is read again for every call, as tokens expire.
    headers : mapping
        Headers for every call.
    tls_root : str or None
        PEM file with the certificate authority of ``grpcs`` servers.
    tls_cert, tls_key : str or None
        PEM files with a certificate and its key, for ``grpcs`` servers that want clients to show
        one (mutual TLS).
    compression : {"gzip", "deflate"} or None
        How tensors are compressed on their way, where the network is slower than that.
    shared_memory : bool or "auto"
        Whether a server on this machine reads large tensors where they are, instead of from
        messages: if it can, always, or never.
    channels : int
        Connections to one server; several, if a balancer leads each to another server behind it.
    in_flight : int
        Requests for a model that may ever be out to one server at a time, from this process. How
        many are, follows what the server bears.
    in_flight_bytes : int
        Tensor bytes that may be out at a time, over all servers.
    max_request_bytes : int
        Tensor bytes of one request.
    request_timeout_s : float
        Deadline of one request.
    metadata_timeout_s : float
        Deadline of a call that carries no tensors.
    retry_for_s : float
        For how long requests of lost servers are tried elsewhere, or again, before it is an error.
    balance : {"load", "order"}
        Whether each server gets what it bears at the moment, or one is used only while those that
        are named before it cannot be.
    waiting_chunks : int
        Chunks that may wait for scores without a thread, for each thread of a dask worker.
    hedge_after_s : float or None
        After so long, a request is also sent to another server that has room; the answer that is
        first counts.
    """

    servers: tuple[str, ...]
    token: str | Path | Callable[[], str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls_root: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    compression: str | None = None
    shared_memory: bool | str = "auto"
    channels: int = 1
    in_flight: int = 256
    in_flight_bytes: int = 256_000_000
    max_request_bytes: int = 32_000_000
    request_timeout_s: float = 120.0
    metadata_timeout_s: float = 10.0
    retry_for_s: float = 10.0
    balance: str = "load"
    hedge_after_s: float | None = None
    waiting_chunks: int = 4

    @classmethod
    def make(cls, servers: Any, **options: Any) -> Settings:
        """Check and build.

        Raises
        ------
        ConfigError
            Naming the nearest option or the expected value.
        """
        known = [f.name for f in fields(cls) if f.name != "servers"]
        for name in options:
            if name not in known:
                raise ConfigError(f"connect has no option {name!r}; {nearest(name, known)}")
        settings = cls(servers=_urls(servers), **options)
        for name, least in {"channels": 1, "in_flight": 1, "waiting_chunks": 0}.items():
            value = getattr(settings, name)
            if not isinstance(value, int) or value < least:
                expected = f"a whole number of at least {least}"
                raise ConfigError(f"{name}: expected {expected}, got {value!r}")
        for name in known:
            value = getattr(settings, name)
            optional = value is None and cls.__dataclass_fields__[name].default is None
            if name.endswith(("_s", "_bytes")) and not optional and not value > 0:
                raise ConfigError(f"{name}: expected more than 0, got {value!r}")
        if settings.max_request_bytes > _LARGEST_REQUEST:
            raise ConfigError(
                f"max_request_bytes: expected at most {_LARGEST_REQUEST}, got "
                f"{settings.max_request_bytes}; a message of gRPC holds less than 2 GiB"
            )
        settings._check_tls()
        for name, choices in _CHOICES.items():
            value = getattr(settings, name)
            if value not in choices:
                expected = ", ".join(str(c) for c in choices)
                raise ConfigError(f"{name}: expected one of {expected}, got {value!r}")
        return settings

    def _check_tls(self) -> None:
        given = [name for name in ("tls_root", "tls_cert", "tls_key") if getattr(self, name)]
        plain = [url for url in self.servers if not url.startswith("grpcs://")]
        if given and plain:
            raise ConfigError(
                f"{given[0]} is for servers with TLS, and {plain[0]} has none; did you mean "
                f"{plain[0].replace('grpc://', 'grpcs://')!r}?"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ConfigError(f"a certificate and its key belong together; {missing} is missing")

    def with_servers(self, servers: Any) -> Settings:
        """Return the same for other servers."""
        return replace(self, servers=_urls(servers))

    @classmethod
    def from_config(cls) -> Settings | None:
        """Return what dask's configuration says under ``sonic``; None if it names no server."""
        import dask.config

        _offer_defaults()
        given = dask.config.get("sonic", None) or {}
        options = {name.replace("-", "_"): value for name, value in given.items()}
        servers = options.pop("servers", None)
        if not servers:
            return None
        if "token" in options and isinstance(options["token"], str):
            options["token"] = os.path.expandvars(options["token"])
        token_file = options.pop("token_file", None)
        if token_file is not None:
            options["token"] = Path(token_file).expanduser()
        return cls.make(servers, **options)

    def without_secrets(self) -> Settings:
        """Return what may be written into pickles: a token's path, but no token and no header."""
        token = self.token if isinstance(self.token, Path) else None
        return replace(self, token=token, headers={})

    def connection_options(self) -> ConnectionOptions:
        """Return what the transport needs to know."""
        token = self.token
        if isinstance(token, Path):
            path = token

            def token() -> str:
                try:
                    return path.read_text().strip()
                except OSError as error:
                    message = f"cannot read the token file {str(path)!r}: {error.strerror}"
                raise ConfigError(message)

        return ConnectionOptions(
            token=token,
            headers=self.headers,
            tls_root=self.tls_root,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            compression=self.compression,
            shared_memory=self.shared_memory,
            request_timeout_s=self.request_timeout_s,
            metadata_timeout_s=self.metadata_timeout_s,
        )


@cache
def _offer_defaults() -> None:
    """Put ``sonic.yaml`` below whatever dask's configuration has, once."""
    import dask.config
    import yaml

    text = Path(__file__).parents[1].joinpath("sonic.yaml").read_text(encoding="utf-8")
    dask.config.update_defaults(yaml.safe_load(text))


def _urls(servers: Any) -> tuple[str, ...]:
    if isinstance(servers, str):
        servers = servers.split(",")
    elif not isinstance(servers, Sequence):
        servers = [servers]
    # A local server can be given as it is.
    urls = [str(getattr(s, "url", s)).strip() for s in servers]
    if not urls or not all(urls):
        raise ConfigError("expected at least one server, such as 'grpc://triton.example:8001'")
    return tuple(dict.fromkeys(Address.parse(url).url for url in urls))
