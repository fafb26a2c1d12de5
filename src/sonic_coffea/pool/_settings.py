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
    "balance": ("load", "priority"),
    "shared_memory": ("auto", True, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The servers of a pool, and its limits.

    Parameters
    ----------
    servers : sequence of str
        URLs: ``grpc://host:port``, ``grpcs://host:port`` (TLS), ``triton+grpc://host:port``.
    servers_file : str or None
        A file with a URL on each line, from which the servers are; it is read again when it
        changes. Lines may be empty, or comments that begin with ``#``. One that cannot be used
        changes nothing, and the log says so.
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
    max_in_flight : int
        Requests for a model that may ever be out to one server at a time, from this process. How
        many are, follows what the server bears.
    max_in_flight_bytes : int
        Tensor bytes that may be out at a time, over all servers.
    max_request_bytes : int
        Tensor bytes of one request.
    request_timeout_s : float
        Deadline of one request.
    metadata_timeout_s : float
        Deadline of a call that carries no tensors.
    retry_timeout_s : float
        For how long requests of lost servers are tried elsewhere, or again, before it is an error.
    balance : {"load", "priority"}
        Whether each server gets what it bears at the moment, or one is used only while those that
        are named before it cannot be.
    fallback : str, path, callable or None
        A model repository that a local server of this machine serves while no server has a model:
        or a function that returns the URL of such a server.
    fallback_after_s : float
        For how long all servers of a model must be lost before.
    fallback_tolerance : float
        By how much scores of the fallback may differ from those of the servers, relative to 1 and
        to the scores, on some rows that these have scored before.
    cache : str, path or None
        A file in which scores are kept, so that rows that were scored before are not sent again.
    cache_bytes : int
        About how large it may become.
    cache_trusts_versions : bool
        Whether scores are kept also where the server does not say what file a version is, and may
        serve another under the same number tomorrow.
    max_suspended_chunks : int
        Chunks that may wait for scores without a thread, for each thread of a dask worker.
    hedge_after_s : float or None
        After so long, a request is also sent to another server that has room; the answer that is
        first counts.
    """

    servers: tuple[str, ...]
    servers_file: str | None = None
    token: str | Path | Callable[[], str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls_root: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    compression: str | None = None
    shared_memory: bool | str = "auto"
    channels: int = 1
    max_in_flight: int = 256
    max_in_flight_bytes: int = 256_000_000
    max_request_bytes: int = 32_000_000
    request_timeout_s: float = 120.0
    metadata_timeout_s: float = 10.0
    retry_timeout_s: float = 10.0
    balance: str = "load"
    hedge_after_s: float | None = None
    fallback: str | Path | Callable[[], str] | None = None
    fallback_after_s: float = 5.0
    fallback_tolerance: float = 1e-3
    cache: str | Path | None = None
    cache_bytes: int = 1_000_000_000
    cache_trusts_versions: bool = False
    max_suspended_chunks: int = 4

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
        if isinstance(servers, Path):
            options["servers_file"] = str(servers.expanduser().absolute())
            servers = read_servers(options["servers_file"])
        settings = cls(servers=_urls(servers), **options)
        settings._check_numbers()
        settings._check_tls()
        for name, choices in _CHOICES.items():
            value = getattr(settings, name)
            if value not in choices:
                expected = ", ".join(str(c) for c in choices)
                raise ConfigError(f"{name}: expected one of {expected}, got {value!r}")
        return settings

    def _check_numbers(self) -> None:
        for name, least in {"channels": 1, "max_in_flight": 1, "max_suspended_chunks": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                expected = f"a whole number of at least {least}"
                raise ConfigError(f"{name}: expected {expected}, got {value!r}")
        for one in fields(self):
            value = getattr(self, one.name)
            optional = value is None and one.default is None
            if one.name.endswith(("_s", "_bytes")) and not optional and not value > 0:
                raise ConfigError(f"{one.name}: expected more than 0, got {value!r}")
        if self.max_request_bytes > _LARGEST_REQUEST:
            raise ConfigError(
                f"max_request_bytes: expected at most {_LARGEST_REQUEST}, got "
                f"{self.max_request_bytes}; a message of gRPC holds less than 2 GiB"
            )

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

    def with_options(self, **options: Any) -> Settings:
        """Return the same with other options, which are checked."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "servers"}
        return Settings.make(self.servers, **{**given, **options})

    def with_servers(self, servers: Any) -> Settings:
        """Return the same for other servers."""
        return replace(self, servers=_urls(servers))

    @classmethod
    def from_config(cls, profile: str | None = None) -> Settings | None:
        """Return what dask's configuration says under ``sonic``; None if it names no server.

        Parameters
        ----------
        profile : str, optional
            One of ``sonic.profiles``, whose options are over the others; by default that which
            ``sonic.profile`` names.

        Raises
        ------
        ConfigError
            Naming the nearest option or profile, or the expected value.
        """
        import dask.config

        _offer_defaults()
        given = _underscored(dask.config.get("sonic", None) or {})
        given.pop("local", None)  # which is for local servers
        profiles = given.pop("profiles", None) or {}
        profile = profile or given.pop("profile", None)
        if profile is not None and profile not in profiles:
            raise ConfigError(f"no profile {profile!r}; {nearest(profile, profiles)}")
        own = {} if profile is None else _underscored(profiles[profile])
        options = {**{name: v for name, v in given.items() if name != "profile"}, **own}
        servers = options.pop("servers", None)
        servers_file = options.pop("servers_file", None)
        if servers_file is not None and "servers" not in own:
            servers = Path(servers_file)
        servers = servers or _local_balancer()
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
                    return path.read_text(encoding="utf-8").strip()
                except OSError as error:
                    reason = error.strerror
                except UnicodeDecodeError:
                    # Its own words quote the token.
                    reason = "expected text, got bytes that are not UTF-8"
                raise ConfigError(f"cannot read the token file {str(path)!r}: {reason}")

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


def read_servers(path: str) -> tuple[str, ...]:
    """Return the URLs in a file.

    Raises
    ------
    ConfigError
        If it cannot be read, or a line cannot be used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = f"cannot read the file of servers {path!r}: {reason}"
    else:
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return _urls([line for line in lines if line])
    raise ConfigError(message)


def _underscored(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items()}


def _local_balancer() -> str | None:
    """Return the load balancer of a job, by the variables that the CMS software reads."""
    host, port = (os.environ.get(f"SONIC_LOCAL_BALANCER_{what}") for what in ("HOST", "PORT"))
    return f"grpc://{host}:{port}" if host and port else None


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
