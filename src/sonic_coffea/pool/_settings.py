"""The settings of a pool: flat options for users, groups of values inside."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.pool._options import OPTIONS
from sonic_coffea.transport import Address, ConnectionOptions, Timeouts, Tls, TokenFile, read_text

# What is in flight is in memory two or three times: as tensors, in messages, and in gRPC's buffers.
_IN_FLIGHT_PART, _MAX_IN_FLIGHT_BYTES = 1 / 32, 256_000_000
# Memory of a thread for each suspended chunk. A chunk with 100 MB of columns takes 300 MB. A worker
# with 2 GB peaks at half of its memory with no chunk suspended, and spills with two.
_CHUNK_BYTES, _MAX_SUSPENDED_CHUNKS = 2_000_000_000, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds of requests, of their tensors, and of suspended chunks.

    Parameters
    ----------
    max_in_flight : int
        Requests in flight, for each model and server, from this process. The adaptive in-flight
        limit stays below.
    max_in_flight_bytes : int or None
        Tensor bytes in flight, over all servers. None: chosen by the memory limit of this process.
    max_request_bytes : int
        Tensor bytes of one request.
    max_suspended_chunks : int or None
        Suspended chunks for each thread of a dask worker. None: chosen by the memory of a thread.
    """

    max_in_flight: int = 256
    max_in_flight_bytes: int | None = None
    max_request_bytes: int = 32_000_000
    max_suspended_chunks: int | None = None

    def in_flight_bytes(self, memory_bytes: float | None) -> float:
        """Return the tensor bytes that may be in flight.

        Parameters
        ----------
        memory_bytes : float or None
            The memory that this process may use, if that is limited.
        """
        if self.max_in_flight_bytes is not None:
            return self.max_in_flight_bytes
        part = math.inf if memory_bytes is None else _IN_FLIGHT_PART * memory_bytes
        return min(part, _MAX_IN_FLIGHT_BYTES)

    def suspended_chunks(self, memory_bytes: float | None, threads: int) -> int:
        """Return how many chunks may be suspended, for each thread.

        Parameters
        ----------
        memory_bytes : float or None
            The memory that this process may use, if that is limited.
        threads : int
            Threads that run chunks.
        """
        if self.max_suspended_chunks is not None:
            return self.max_suspended_chunks
        if memory_bytes is None:
            return _MAX_SUSPENDED_CHUNKS
        fitting = int(memory_bytes / threads / _CHUNK_BYTES)
        return min(max(fitting, 1), _MAX_SUSPENDED_CHUNKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When a request is sent more than once.

    Parameters
    ----------
    timeout_s : float
        How long all servers may be lost before a call fails. The default is long enough to restart
        a server: on two busy cores, a Triton that was killed is ready after 4 to 5 s with one
        model, and after 24 to 35 s with ten models.
    hedge_after_s : float or None
        Time after which a hedged request goes to another server with capacity; the first response
        counts. None: only overdue requests are hedged.
    """

    timeout_s: float = 60.0
    hedge_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A local server that serves a model while no other server does.

    Parameters
    ----------
    source : str, path, callable or None
        A model repository that a local server of this machine serves, or a function that returns
        the URL of a running server. None: no fallback.
    after_s : float
        How long all servers of a model must be lost before the fallback starts.
    """

    source: str | Path | Callable[[], str] | None = None
    after_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """A file that keeps scores, so that rows with a score in it are not sent.

    Parameters
    ----------
    path : str, path or None
        The file. None: no cache.
    max_bytes : int
        Approximate size limit of the file.
    trusts_versions : bool
        Whether scores are kept for servers that tell no digest of a version. Such a server may
        serve another file under the same version later, unnoticed.
    """

    path: str | Path | None = None
    max_bytes: int = 1_000_000_000
    trusts_versions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The servers of a pool, and how it uses them.

    `make` builds it from the flat options of `connect`, such as ``max_in_flight``, and checks them.

    Parameters
    ----------
    servers : sequence of str
        URLs: ``grpc://host:port``, ``grpcs://host:port`` (TLS), ``triton+grpc://host:port``.
    servers_file : str or None
        Path of a file with a server's URL on each line; it is read again when it changes. Lines may
        be empty, or comments that begin with ``#``. A file that cannot be used changes nothing, and
        is logged.
    token : str, path, callable or None
        Bearer token. A `pathlib.Path` is read for every call, because tokens expire.
    headers : mapping
        Headers of every call.
    compression : {"gzip", "deflate"} or None
        Compression of requests; it helps if the network is slower than the compression.
    shared_memory : bool
        Whether the server, which has to be on this machine and to allow it, reads large tensors
        from shared memory instead of messages.
    channels : int or "auto"
        Connections to one URL; more than one if a balancer leads each connection to another server.
        ``"auto"``: one, and up to four to a server that is far away, as TCP bounds what a
        connection carries in a round trip.
    balance : {"load", "priority"}
        ``"load"``: each server gets requests by its adaptive limit. ``"priority"``: a server gets
        requests only while all servers named before it are lost.
    weight : float
        Share of the servers beside other clusters: a cluster of weight 2 gets about twice as much
        as a cluster of weight 1.
    timeouts, limits, retry, tls, fallback, cache
        The other options, in groups.
    withheld : tuple of str
        Options that are secret, and so stayed in the process that set them.
    """

    servers: tuple[str, ...]
    servers_file: str | None = None
    token: str | Path | Callable[[], str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    compression: str | None = None
    shared_memory: bool = False
    channels: int | str = "auto"
    balance: str = "load"
    weight: float = 1.0
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    retry: Retry = field(default_factory=Retry)
    tls: Tls = field(default_factory=Tls)
    fallback: Fallback = field(default_factory=Fallback)
    cache: CacheSettings = field(default_factory=CacheSettings)
    withheld: tuple[str, ...] = ()

    @classmethod
    def make(cls, servers: Any, **options: Any) -> Settings:
        """Check flat options, and build.

        Raises
        ------
        ConfigError
            Naming the nearest option or the expected value.
        """
        token_file = options.pop("token_file", None)
        if token_file is not None:
            if not isinstance(token_file, (str, Path)) or not str(token_file):
                got = type(token_file).__name__
                raise ConfigError(f"token_file: expected a path, got {got}")
            options["token"] = Path(token_file).expanduser()
        if isinstance(servers, Path):
            options["servers_file"] = str(servers.expanduser().absolute())
            servers = read_servers(options["servers_file"])
        urls = _urls(servers)
        groups: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in options.items():
            if name not in OPTIONS:
                known = [*OPTIONS, "token_file"]
                raise ConfigError(f"connect has no option {name!r}; {nearest(name, known)}")
            option = OPTIONS[name]
            if (expected := option.expects(value)) is not None:
                got = type(value).__name__ if option.secret else repr(value)
                raise ConfigError(f"{name}: expected {expected}, got {got}")
            groups[option.group][option.field] = _from_anywhere(name, value)
        settings = cls(servers=urls, **groups.pop("", {}))
        changed = {name: replace(getattr(settings, name), **groups[name]) for name in groups}
        settings = replace(settings, **changed)
        _check_tls(settings)
        settings.connection_options()
        return settings

    def options(self) -> dict[str, Any]:
        """Return the flat options, as `make` takes them."""
        return {
            name: getattr(getattr(self, o.group) if o.group else self, o.field)
            for name, o in OPTIONS.items()
        }

    def with_options(self, **options: Any) -> Settings:
        """Return the same with other flat options, which are checked."""
        return Settings.make(self.servers, **{**self.options(), **options})

    def with_servers(self, servers: Any) -> Settings:
        """Return the same for other servers."""
        return replace(self, servers=_urls(servers))

    @classmethod
    def from_config(cls, profile: str | None = None) -> Settings | None:
        """Return what dask's configuration says under ``sonic``; None if it names no server.

        Parameters
        ----------
        profile : str, optional
            One of ``sonic.profiles``, whose options override the others; by default, the profile
            that ``sonic.profile`` names.

        Raises
        ------
        ConfigError
            Naming the nearest option or profile, or the expected value.
        """
        import dask.config

        _offer_defaults()
        options = _underscored(dask.config.get("sonic", None) or {})
        options.pop("local", None)  # which is for local servers
        profiles = options.pop("profiles", None) or {}
        configured = options.pop("profile", None)
        profile = profile or configured
        if profile is not None and profile not in profiles:
            raise ConfigError(f"no profile {profile!r}; {nearest(profile, profiles)}")
        own = {} if profile is None else _underscored(profiles[profile])
        options |= own
        for name in _EXPANDED:
            if isinstance(options.get(name), str):
                options[name] = os.path.expandvars(options[name])
        servers = options.pop("servers", None)
        servers_file = options.pop("servers_file", None)
        if servers_file is not None and "servers" not in own:
            servers = Path(servers_file)
        # The load balancer of a job, by the variables of the CMS software.
        balancer = [os.environ.get(f"SONIC_LOCAL_BALANCER_{name}") for name in ("HOST", "PORT")]
        if not servers and all(balancer):
            servers = "grpc://{}:{}".format(*balancer)
        if not servers:
            return None
        return cls.make(servers, **options)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The options that are not pickled; a token's path is."""
        secrets = {
            "token": self.token is not None and not isinstance(self.token, Path),
            "headers": bool(self.headers),
        }
        return tuple(name for name, secret in secrets.items() if secret)

    def without_secrets(self) -> Settings:
        """Return what may be written into pickles: a token's path, but no token and no header."""
        token = self.token if isinstance(self.token, Path) else None
        withheld = self.withheld + self.secrets
        return replace(self, token=token, headers={}, withheld=withheld)

    @staticmethod
    def profiles() -> list[str]:
        """Return the names of the profiles of dask's configuration."""
        import dask.config

        _offer_defaults()
        return list(dask.config.get("sonic.profiles", None) or {})

    def connection_options(self) -> ConnectionOptions:
        """Return what the transport needs to know."""
        token = TokenFile(self.token) if isinstance(self.token, Path) else self.token
        return ConnectionOptions(
            token=token,
            headers=self.headers,
            tls=self.tls,
            compression=self.compression,
            shared_memory=self.shared_memory,
            timeouts=self.timeouts,
        )


# In these options, the configuration may name variables of the environment.
_EXPANDED = ("token", "token_file", "servers_file", "tls_root", "tls_cert", "tls_key", "cache")


def _check_tls(settings: Settings) -> None:
    tls = {name: value for name, value in settings.options().items() if name.startswith("tls_")}
    present = [name for name, value in tls.items() if value]
    plain = [url for url in settings.servers if not url.startswith("grpcs://")]
    if present and plain:
        raise ConfigError(
            f"{present[0]} is for servers with TLS, and {plain[0]} has none; did you mean "
            f"{plain[0].replace('grpc://', 'grpcs://')!r}?"
        )
    if bool(settings.tls.cert) != bool(settings.tls.key):
        missing = "tls_key" if settings.tls.cert else "tls_cert"
        raise ConfigError(f"a certificate and its key belong together; {missing} is missing")


def _from_anywhere(option: str, value: Any) -> Any:
    """Return a path that processes in other folders can read; "~" stays, as homes differ."""
    if isinstance(value, Path) and option == "token":
        return value.expanduser().absolute()
    if option.startswith("tls_") and value and not str(value).startswith("~"):
        return str(Path(value).absolute())
    return value


def read_servers(path: str) -> tuple[str, ...]:
    """Return the URLs in a file; raise if it cannot be read, or a line cannot be used."""
    text = read_text("file of servers", path)
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return _urls([line for line in lines if line])


def _underscored(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items()}


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
