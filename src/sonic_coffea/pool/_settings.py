"""The settings of a pool: the options of `connect`, with their defaults and their checks."""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from sonic_coffea._files import read_text
from sonic_coffea.errors import ConfigError, expect, require
from sonic_coffea.transport import MAX_REQUEST_BYTES, Address, ConnectionOptions, Token

# Bytes in flight take memory two or three times: as tensors, in messages, in gRPC's buffers.
_IN_FLIGHT_PART, _MAX_IN_FLIGHT_BYTES = 1 / 32, 128_000_000
# Random for each process, so that nobody can guess secrets from their identifier.
_KEY = secrets.token_bytes(32)
# Memory of a thread for each suspended chunk. A chunk with 100 MB of columns takes 300 MB. A worker
# with 2 GB peaks at half of its memory with no chunk suspended, and spills with two.
_CHUNK_BYTES, _MAX_SUSPENDED_CHUNKS = 2_000_000_000, 4
# Longer times, and infinite ones, overflow in gRPC or in the system's clock.
MAX_TIME_S = 604_800
_PROXY = re.compile(r"http://([\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}/?")


class _Rule(NamedTuple):
    """What an option takes, in words; which values are usable; and the value to use for one."""

    expected: str
    usable: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def _option(default: Any, rule: _Rule, *, secret: bool = False) -> Any:
    """Return a field of `Settings` that users set; a secret one is never shown."""
    metadata = {"rule": rule, "default": default}
    return field(default_factory=lambda: default, repr=not secret, metadata=metadata)


def _number(expected: str, kind: type, minimum: float, maximum: float, convert: type) -> _Rule:
    """Return a rule for numbers; those of numpy become Python's, as float32 is too coarse."""

    def usable(value: Any) -> bool:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return is_number and minimum <= value <= maximum

    return _Rule(expected, usable, convert)


def _one_of(*choices: str) -> _Rule:
    return _Rule("one of " + ", ".join(choices), lambda value: value in choices)


def _whole(minimum: int) -> _Rule:
    return _number(f"a whole number of at least {minimum}", Integral, minimum, math.inf, int)


_SECONDS = f"a number of seconds from 0.001 to {MAX_TIME_S} (a week)"
_seconds = _number(_SECONDS, Real, 0.001, MAX_TIME_S, float)
_nbytes = _number("a number of bytes of at least 1", Real, 1, sys.float_info.max, int)
_REQUEST = f"from 1 to {MAX_REQUEST_BYTES} bytes, as a message of gRPC holds less than 2 GiB"
_request_bytes = _number(_REQUEST, Real, 1, MAX_REQUEST_BYTES, int)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


def _is_source(value: Any) -> bool:
    return _is_path(value) or callable(value)


def _same_everywhere(path: Any) -> Any:
    """Return a path that processes in other folders can use; a token is no path."""
    return path.expanduser().absolute() if isinstance(path, Path) else path


def _same_on_hosts(path: Any) -> str:
    """Return a path that processes in other folders can use; "~" stays, as homes differ."""
    return str(path) if str(path).startswith("~") else str(Path(path).absolute())


def _is_fallback(value: Any) -> bool:
    return _is_source(value) or hasattr(value, "url")


def _fallback(source: Any) -> Any:
    """Return a server's URL, or the whole path of a folder; others may be on another machine."""
    source = getattr(source, "url", source)
    is_folder = _is_path(source) and str(source) and Path(source).is_dir()
    return str(Path(source).absolute()) if is_folder else source


_flag = _Rule("True or False", lambda value: isinstance(value, bool))
_headers = _Rule("a mapping of names to values", lambda value: isinstance(value, Mapping), dict)
_source = _Rule("a path, a URL, a server or a function", _is_fallback, _fallback)
_token = _Rule("a token, a path or a function", _is_source, _same_everywhere)
_file = _Rule("a path", _is_path, _same_on_hosts)
_proxy = _Rule(
    "a URL such as http://proxy.example:3128, without a user or a password",
    lambda value: bool(_PROXY.fullmatch(str(value))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The servers of a pool, and how it uses them: the options of `sonic_coffea.connect`.

    Times are from 0.001 s to a week.

    Parameters
    ----------
    servers : sequence of str
        URLs: ``grpc://host:port``, ``grpcs://host:port`` (TLS), ``unix:/path``,
        ``triton+grpc://host:port``, or ``file:///path`` of a model repository whose models run in
        this process.
    servers_file : str or None
        Path of a file with a server's URL on each line, read again when it changes. Lines may be
        empty, or comments that begin with ``#``. A file that cannot be used changes nothing, and is
        logged.
    token : str, path, callable or None
        Bearer token. A `pathlib.Path` is read for every call, because tokens expire.
    headers : mapping
        Headers of every call.
    tls_root : str or None
        PEM file with the certificate authority to trust; by default, gRPC's own.
    tls_cert, tls_key : str or None
        PEM files of this client's certificate and its key (mutual TLS).
    proxy : str or None
        URL of an HTTP proxy that leads to the servers, ``http://host:port``. ``http_proxy`` of the
        environment is not used.
    compression : {"gzip", "deflate"} or None
        Compression of requests; it helps only on a slow network.
    shared_memory : bool
        Whether servers on this machine read large tensors from shared memory; an error for a server
        that does not allow it.
    channels : int or "auto"
        Connections to one URL; more than one if a balancer leads each connection to another server.
        ``"auto"``: one, and up to four to a distant server, because TCP limits what a connection
        carries in a round trip.
    max_in_flight : int
        Most requests in flight, for each model and server, from this process. The adaptive
        in-flight limit stays below.
    max_in_flight_bytes : int or None
        Most tensor bytes in flight, over all servers. None: 128 MB, or 1/32 of a dask worker's
        memory limit if that is less.
    max_request_bytes : int
        Most tensor bytes of one request.
    max_suspended_chunks : int or None
        Most suspended chunks for each thread of a dask worker. None: one for each 2 GB of the
        thread's memory, from 1 to 4.
    request_timeout_s, metadata_timeout_s : float
        Deadlines of one inference request, and of a call without tensors.
    retry_timeout_s : float
        How long all servers may be lost before a call fails. The default is long enough to restart
        a server: on two busy cores, a Triton that was killed is ready after 4 to 5 s with one
        model, and after 24 to 35 s with ten models.
    hedge_after_s : float or None
        Shortest time after which a request that takes longer than usual is sent a second time, to
        another server or over another connection; the first response counts. None: 1 s, while the
        server answers others. Models that run in this process are never run twice.
    balance : {"load", "priority"}
        ``"load"``: each server gets requests by its adaptive limit. ``"priority"``: a server gets
        requests only while all servers named before it are lost.
    fallback : str, path, LocalServer, callable or None
        What scores rows while no server has their model: a model repository, whose models run in
        this process, a running server or its URL, or a function that returns a URL. None: nothing.
    fallback_after_s : float
        How long all servers of a model must be lost before the fallback starts.
    cache : str, path or None
        A file that keeps scores, so that rows with a score in it are not sent.
    cache_bytes : int
        Approximate size limit of that file.
    cache_trusts_versions : bool
        Whether scores are kept for servers that tell no digest of a version. If such a server
        serves another file under the same version later, nobody notices.
    withheld : tuple of str
        Secret options, which stayed in the process that set them.
    secrets_id : str
        Differs between settings with different secrets, also where these are withheld, and with
        different functions.
    """

    servers: tuple[str, ...]
    servers_file: str | None = _option(None, _file)
    token: str | Path | Callable[[], str] | None = _option(None, _token, secret=True)
    headers: Mapping[str, str] = _option({}, _headers, secret=True)
    tls_root: str | None = _option(None, _file)
    tls_cert: str | None = _option(None, _file)
    tls_key: str | None = _option(None, _file)
    proxy: str | None = _option(None, _proxy, secret=True)
    compression: str | None = _option(None, _one_of("gzip", "deflate"))
    shared_memory: bool = _option(False, _flag)
    channels: int | str = _option("auto", _whole(1))
    max_in_flight: int = _option(256, _whole(1))
    max_in_flight_bytes: int | None = _option(None, _nbytes)
    max_request_bytes: int = _option(32_000_000, _request_bytes)
    max_suspended_chunks: int | None = _option(None, _whole(0))
    request_timeout_s: float = _option(120.0, _seconds)
    metadata_timeout_s: float = _option(10.0, _seconds)
    retry_timeout_s: float = _option(60.0, _seconds)
    hedge_after_s: float | None = _option(None, _seconds)
    balance: str = _option("load", _one_of("load", "priority"))
    fallback: str | Path | Callable[[], str] | None = _option(None, _source)
    fallback_after_s: float = _option(5.0, _seconds)
    cache: str | None = _option(None, _file)
    cache_bytes: int = _option(1_000_000_000, _nbytes)
    cache_trusts_versions: bool = _option(False, _flag)
    withheld: tuple[str, ...] = ()
    secrets_id: str = field(default="", repr=False)

    @classmethod
    def make(cls, servers: Any, **options: Any) -> Settings:
        """Check flat options, and build.

        Raises
        ------
        ConfigError
            Naming the nearest option or the expected value.
        """
        options = _with_paths({"servers": servers, **options})
        servers, file = options.pop("servers"), None
        if isinstance(servers, Path) and not servers.expanduser().is_dir():
            file = str(servers.expanduser().absolute())
            servers = read_servers(file)
        known, values = {f.name: f for f in fields(cls) if f.metadata}, {}
        require(options, [*known, "token_file"], "connect has no option")
        for name, value in options.items():
            rule, default = known[name].metadata["rule"], known[name].metadata["default"]
            by_default = isinstance(value, str | None) and value == default
            if not (by_default or rule.usable(value)):
                got = repr(value) if known[name].repr else type(value).__name__
                message = f"{name}: expected {rule.expected} (by default {default!r}), got {got}"
                raise ConfigError(message)
            values[name] = value if by_default else rule.convert(value)
        settings = cls(servers=_urls(servers), servers_file=file, **values)
        settings.check_tls()
        settings.connection_options()
        if settings.secrets or callable(settings.fallback):
            settings = replace(settings, secrets_id=_secrets_id(settings))
        if isinstance(settings.fallback, str):
            _check_fallback(settings.fallback)
        return settings

    @classmethod
    def of(cls, source: Settings | str) -> Settings:
        """Return settings of one server as they are, or those of a server's URL.

        Raises
        ------
        ConfigError
            If there are several servers, of which only one would be tried.
        """
        settings = source if isinstance(source, Settings) else cls.make(source)
        expect(len(settings.servers) == 1, "one server", settings.servers)
        return settings

    def options(self) -> dict[str, Any]:
        """Return the options, as `make` takes them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata}

    def with_options(self, **options: Any) -> Settings:
        """Return these settings with other options, which are checked."""
        servers = self.servers if self.servers_file is None else None
        return Settings.make(servers, **{**self.options(), **_with_paths(options)})

    def with_servers(self, servers: Any) -> Settings:
        """Return these settings for other servers."""
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
        expect(isinstance(profiles, Mapping), "a mapping of names to options", profiles, "profiles")
        configured = options.pop("profile", None)
        profile = profile or configured
        own = {}
        if profile is not None:
            require([profile], profiles, "no profile")
            own = _underscored(profiles[profile])
        options = {
            name: _expanded(name, value) if isinstance(value, str | Path) else value
            for name, value in {**_with_paths(options), **_with_paths(own)}.items()
        }
        servers = options.pop("servers", None)
        # The load balancer of a job, by the variables of the CMS software.
        balancer = [os.environ.get(f"SONIC_LOCAL_BALANCER_{name}") for name in ("HOST", "PORT")]
        if not servers and all(balancer):
            servers = "grpc://{}:{}".format(*balancer)
        if not servers:
            return None
        return cls.make(servers, **options)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The names of options that are not pickled; the path of a token file is pickled."""
        secrets = {
            "token": self.token is not None and not isinstance(self.token, Path),
            "headers": bool(self.headers),
        }
        return tuple(name for name, secret in secrets.items() if secret)

    def without_secrets(self) -> Settings:
        """Return the settings for pickles: with a token file's path, but no token or headers."""
        token = self.token if isinstance(self.token, Path) else None
        withheld = self.withheld + self.secrets
        return replace(self, token=token, headers={}, withheld=withheld)

    def identity(self) -> Settings:
        """Return what two settings must have in common to share a pool."""
        public = self.without_secrets()
        if callable(public.fallback):  # each pickle makes another function of it
            public = replace(public, fallback=None)
        return public if self.servers_file is None else replace(public, servers=())

    def in_flight_bytes(self, memory_bytes: float | None) -> int:
        """Return the tensor bytes that may be in flight.

        Parameters
        ----------
        memory_bytes : float or None
            The memory that this process may use, if that is limited.
        """
        if self.max_in_flight_bytes is not None:
            return self.max_in_flight_bytes
        part = math.inf if memory_bytes is None else _IN_FLIGHT_PART * memory_bytes
        return int(min(part, _MAX_IN_FLIGHT_BYTES))

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

    @staticmethod
    def profiles() -> list[str]:
        """Return the names of the profiles of dask's configuration."""
        import dask.config

        _offer_defaults()
        return list(dask.config.get("sonic.profiles", None) or {})

    def check_tls(self) -> None:
        """Raise if certificates are given for servers without TLS, or without their key."""
        present = [name for name in ("tls_root", "tls_cert", "tls_key") if getattr(self, name)]
        plain = [url for url in self.servers if url.startswith("grpc://")]
        if present and plain:
            raise ConfigError(
                f"{present[0]} is for servers with TLS, and {plain[0]} has none; did you mean "
                f"{plain[0].replace('grpc://', 'grpcs://')!r}?"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ConfigError(f"a certificate and its key belong together; {missing} is missing")

    def read_certificates(self) -> None:
        """Raise if certificates cannot be used, which connections read first; this may block."""
        if any(url.startswith("grpcs://") for url in self.servers):
            self.connection_options().read_certificates()

    def connection_options(self) -> ConnectionOptions:
        """Return what the transport needs to know."""
        values = {f.name: getattr(self, f.name) for f in fields(ConnectionOptions)}
        token = None if self.token is None else Token(self.token)
        return ConnectionOptions(**{**values, "token": token})


def _secrets_id(settings: Settings) -> str:
    """Return a text that differs between secrets or functions, and reveals nothing about them."""
    sources = settings.token, settings.fallback
    # Objects with the same text may have other tokens; a method is another object each time.
    owners = [id(getattr(each, "__self__", each)) if callable(each) else None for each in sources]
    text = repr((*sources, *owners, sorted(settings.headers.items())))
    return hashlib.blake2b(text.encode(), key=_KEY, digest_size=8).hexdigest()


def _check_fallback(fallback: str) -> None:
    """Refuse a URL that cannot be used; a folder may be there on the workers only."""
    if not fallback or (":" in fallback and not Path(fallback).is_dir()):
        try:
            _urls([fallback])
        except ConfigError as error:
            raise ConfigError(f"fallback: {error.message}") from None


def read_servers(path: str) -> tuple[str, ...]:
    """Return the URLs in a file; raise if it cannot be read, or a line cannot be used."""
    text = read_text(path, "the file of servers")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return _urls([line for line in lines if line])


def _expanded(option: str, value: str | Path) -> str | Path:
    """Return a value of the configuration with variables of the environment."""
    file = "_file" if isinstance(value, Path) else ""
    for variable in re.findall(r"\$\{?(\w+)", str(value)):
        if variable not in os.environ:
            raise ConfigError(f"sonic.{option}{file}: the environment has no variable {variable!r}")
    return type(value)(os.path.expandvars(value))


def _with_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which the servers, or the token, are the path of their file."""
    options = dict(options)
    for name, expected in (("servers", "servers"), ("token", "a token")):
        if (file := options.pop(f"{name}_file", None)) is not None:
            if options.get(name):
                raise ConfigError(f"expected {expected} or a {name}_file, got both")
            if not (isinstance(file, str | Path) and str(file)):
                raise ConfigError(f"{name}_file: expected a path, got {type(file).__name__}")
            options[name] = Path(file)
    return options


def _underscored(options: Any) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        got = type(options).__name__
        raise ConfigError(f"expected a mapping of options under sonic in dask's config, got {got}")
    return {str(name).replace("-", "_"): value for name, value in options.items()}


@cache
def _offer_defaults() -> None:
    """Give dask's configuration the defaults of ``sonic.yaml``, once."""
    import dask.config
    import yaml

    text = Path(__file__).parents[1].joinpath("sonic.yaml").read_text(encoding="utf-8")
    dask.config.update_defaults(yaml.safe_load(text))


def _urls(servers: Any) -> tuple[str, ...]:
    if isinstance(servers, str):
        servers = servers.split(",")
    elif not isinstance(servers, Sequence):
        servers = [servers]
    # A local server can be given as it is, and a model repository by its folder.
    urls = [_folder_url(str(getattr(s, "url", s)).strip()) for s in servers]
    if not urls or not all(urls):
        raise ConfigError("expected at least one server, such as 'grpc://triton.example:8001'")
    return tuple(
        dict.fromkeys(url if is_in_process(url) else Address.parse(url).url for url in urls)
    )


def _folder_url(server: str) -> str:
    """Return the URL of a folder, whose models run in this process; return others unchanged."""
    if "://" in server or server.startswith("unix:") or is_in_process(server) or not server:
        return server
    folder = Path(server).expanduser()
    if folder.is_dir():
        return folder.absolute().as_uri()
    if folder.is_file():
        build = f"sonic.build_repository('repository', {{{folder.stem!r}: {server!r}}})"
        raise ConfigError(
            f"{server!r} is a file; expected a server as grpc://host:port, or the folder of a "
            f"model repository, which {build} makes"
        )
    # What looks like a secret is refused by `Address.parse`, and not shown.
    if "@" not in server and (os.sep in server.strip(os.sep) or server.endswith(os.sep)):
        raise ConfigError(f"expected a model repository, got {server!r}, which is no folder here")
    return server


def is_in_process(url: str) -> bool:
    """Whether this process makes the scores of a URL, such as ``file:///path/of/a/repository``.

    `open_transport` opens these URLs.
    """
    return url.startswith("file:///")
