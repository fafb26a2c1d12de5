"""A real Triton server on this machine, for development and as a fallback."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import dask.config

from sonic_coffea import html, local_state
from sonic_coffea.errors import (
    ConfigError,
    ModelNotFoundError,
    ServerError,
    ServerStartError,
    SonicError,
)
from sonic_coffea.server import _log, _ways
from sonic_coffea.server._child import Guard
from sonic_coffea.server._probe import ServerMetadata, fetch_metadata, is_ready
from sonic_coffea.server._watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from sonic_coffea.server._ways import Container, Installed, Way
    from sonic_coffea.server.install import Progress, ServerInstall

__all__ = ["LocalServer"]

logger = logging.getLogger(__name__)

ModelControl = Literal["none", "poll", "explicit"]

_PROTOCOLS = (
    "health,metadata,statistics,inference,shared-memory,model-config,model-repository,trace,logging"
)
_HEADER_NAME = "sonic"
_HEADER = f"triton-grpc-protocol-{_HEADER_NAME}"
_PORT_TRIES = 5
_KEPT_LOGS = 20
_DAY_S = 86400.0
# Of other machines, of containers that are gone, and of before this machine started.
_STRANGE_KEPT_FOR_S = 30 * _DAY_S
_LOOK_S = 0.1


class LocalServer:
    """A Triton server on loopback that ends with this process, whatever ends it.

    Use it as a context manager, or with `start` and `stop`. It listens on loopback only and
    demands a secret that only processes of the same user can look up, so that its URL is all that
    has to be passed around. The server is installed on first use.

    Parameters
    ----------
    repository : path-like
        The model repository.
    port : int, optional
        The gRPC port; by default a free one.
    models : sequence of str, optional
        The models to load; by default all. Implies ``model_control="explicit"``.
    startup_timeout_s : float
        How long loading may take.
    threads : int, optional
        Threads that a model may use for one request.
    log_dir : path-like, optional
        Where the log goes; by default beside the user's other state.
    model_control : {"none", "poll", "explicit"}
        Whether models are loaded at the start for good, follow the repository, or are loaded and
        unloaded by request.
    poll_s : int
        How often the repository is looked at with ``model_control="poll"``.
    metrics : bool
        Whether to serve Prometheus metrics, on a loopback port of its own.
    stop_timeout_s : float
        How long requests in progress may take to finish before the server is killed.
    restart : bool
        Whether a server that ends by itself is started again, at the same port: a few times, with
        longer and longer pauses. One that ``sonic-coffea status --stop`` ends is not.
    extra_args : sequence of str
        More arguments of ``tritonserver``.
    env : mapping, optional
        More environment variables for the server and its models.
    way : {"auto", "pip", "apptainer", "singularity", "podman", "docker"}, optional
        How to run Triton: the binary from PyPI, or a container. By default what
        ``sonic.local.way`` of dask's configuration says, and else what the machine has.
    image : str, optional
        The container's image: a name in a registry, and for apptainer and singularity also a file
        or an unpacked directory. By default ``sonic.local.image``, and else NVIDIA's of the same
        version as the binary.
    gpu : bool, optional
        Whether a container is given the machine's GPUs; by default if there are any.
    installation : ServerInstall, optional
        The binary to run; by default that of `sonic_coffea.server.ensure`.
    progress : callable, optional
        Called with a short text at each stage.
    """

    def __init__(  # noqa: PLR0913  independent options, each with a default
        self,
        repository: str | os.PathLike[str],
        *,
        port: int | None = None,
        models: Sequence[str] | None = None,
        startup_timeout_s: float = 120.0,
        threads: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        model_control: ModelControl = "none",
        poll_s: int = 2,
        metrics: bool = False,
        stop_timeout_s: float = 10.0,
        restart: bool = False,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        way: Way | None = None,
        image: str | os.PathLike[str] | None = None,
        gpu: bool | None = None,
        installation: ServerInstall | None = None,
        progress: Progress | None = None,
    ) -> None:
        if model_control not in ("none", "poll", "explicit"):
            raise ConfigError(
                f"expected model_control 'none', 'poll' or 'explicit', got {model_control!r}"
            )
        if isinstance(models, str):
            raise ConfigError(f"expected models as a sequence of names, got the string {models!r}")
        if models is not None and model_control == "poll":
            raise ConfigError("models chooses what to load, which model_control='poll' cannot do")
        self.repository = Path(repository).absolute()
        self._port_wanted = port
        self._models = models
        self._startup_timeout_s = startup_timeout_s
        self._threads = threads
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._model_control = "explicit" if models is not None else model_control
        self._poll_s = poll_s
        self._metrics = metrics
        self._stop_timeout_s = stop_timeout_s
        self._extra_args = tuple(extra_args)
        self._env = dict(env or {})
        self._way = dask.config.get("sonic.local.way", None) or "auto" if way is None else way
        image = dask.config.get("sonic.local.image", None) if image is None else image
        self._image = None if image is None else os.fspath(image)
        self._gpu = gpu
        self._installation = installation
        self._progress = progress
        self._restart = restart
        self._watcher: Watcher | None = None
        self._lock = threading.RLock()
        self._run: _Run | None = None
        self._guard: Guard | None = None
        self._owner = os.getpid()

    def start(self) -> LocalServer:
        """Start the server and return when it is ready; harmless when it runs.

        Raises
        ------
        sonic_coffea.errors.ServerStartError
            If it cannot be installed, does not start, or is not ready in time: with its own words.
        sonic_coffea.errors.ConfigError
            If the repository is not a directory, or has no models.
        """
        with self._lock:
            self._begin()
            if self._restart and not (self._watcher and self._watcher.watching):
                self._watcher = Watcher(self)
            return self

    def _begin(self) -> LocalServer:
        with self._lock:
            if self.running:
                return self
            self._end()
            if not self.repository.is_dir():
                raise ConfigError(
                    f"expected a directory as model repository, got {self.repository}; "
                    "build_repository makes one"
                )
            models = [path for path in self.repository.iterdir() if path.is_dir()]
            if self._model_control == "none" and not models:
                raise ConfigError(
                    f"expected a model repository, got {self.repository}, which has no models; "
                    "build_repository makes one, and model_control='poll' waits for some"
                )
            begun = time.monotonic()
            way = _ways.choose(
                self._way,
                image=self._image,
                gpu=self._gpu,
                installation=self._installation,
                progress=self._progress,
            )
            self._owner = os.getpid()
            for attempt in range(_PORT_TRIES):
                try:
                    self._launch(way)
                    break
                except _PortTaken:
                    last = attempt == _PORT_TRIES - 1
                    if self._port_wanted is not None or last:
                        raise ServerStartError(
                            f"port {self._run_or_raise().port} is in use by another program; "
                            "leave port out for a free one"
                        ) from None
            logger.info("%s is ready after %.1f s", self, time.monotonic() - begun)
            return self

    def reason_against(self) -> str | None:
        """Say why this machine has no way of running it; None if there is one."""
        return _ways.reason_against(self._way)

    def stop(self) -> None:
        """End the server and wait until it is gone; harmless when it does not run."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()
        self._end()

    def wait(self) -> None:
        """Return when the server has ended, and is not about to be started again."""
        while self.running or (self._watcher is not None and self._watcher.watching):
            time.sleep(_LOOK_S)

    def start_again(self) -> None:
        """Start a server that has ended by itself, at the port that clients know."""
        with self._lock:
            self._port_wanted = self._run_or_raise().port
            self._begin()

    def _end(self) -> None:
        with self._lock:
            guard, self._guard = self._guard, None
            if guard is None:
                return
            if os.getpid() != self._owner:
                guard.disown()
                return
            guard.end()
            if self._run is not None:
                local_state.remove(self._run.url)

    @property
    def url(self) -> str:
        """Where it listens: ``grpc://127.0.0.1:PORT``."""
        return self._run_or_raise().url

    @property
    def port(self) -> int:
        """The gRPC port."""
        return self._run_or_raise().port

    @property
    def headers(self) -> dict[str, str]:
        """The gRPC metadata that it demands; clients of this package find it by themselves."""
        return {_HEADER: self._run_or_raise().secret}

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus finds its metrics, if it serves them."""
        port = self._run_or_raise().metrics_port
        return None if port is None else f"http://127.0.0.1:{port}/metrics"

    @property
    def metadata(self) -> ServerMetadata:
        """Name, version, extensions and models of the running server."""
        if not self.running:
            raise ServerError("expected a running server, got one that is stopped; start() it")
        return fetch_metadata(self.url, self.headers)

    def wait_for(
        self, model: str, version: str | int | None = None, *, timeout_s: float = 60.0
    ) -> None:
        """Return when a model that was added to the repository is served.

        Parameters
        ----------
        model : str
            Its name.
        version : str or int, optional
            The version that is wanted; by default any.
        timeout_s : float
            How long to wait.

        Raises
        ------
        sonic_coffea.errors.ModelNotFoundError
            If it is not there in time: with what the server says of it.
        sonic_coffea.errors.ServerError
            If the server does not run.
        """
        until = time.monotonic() + timeout_s
        while True:
            found = [m for m in self.metadata.models if m.name == model]
            found = [m for m in found if version is None or m.version == str(version)]
            if any(m.state == "READY" for m in found):
                return
            if time.monotonic() > until:
                break
            time.sleep(_LOOK_S)
        said = ", ".join(f"version {m.version} {m.state} {m.reason}".rstrip() for m in found)
        raise ModelNotFoundError(
            f"the model was not ready after {timeout_s:g} s; the server says: {said or 'nothing'}",
            server=self.url,
            model=model,
            version=None if version is None else str(version),
        )

    @property
    def log_path(self) -> Path:
        """The file that the server logs to."""
        return self._run_or_raise().log

    @property
    def logs(self) -> str:
        """What the server has logged so far, or, before the first start, nothing."""
        return "" if self._run is None else self._run.read_log()

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        return self._guard.server_pid if self._guard is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the server runs."""
        guard = self._guard
        return guard is not None and os.getpid() == self._owner and guard.running

    @property
    def ended_on_request(self) -> bool:
        """Whether another process has ended the server: ``sonic-coffea status --stop``."""
        guard = self._guard
        return guard is not None and not self.running and guard.asked

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        running = self.running
        state = f"{self.url} pid={self.pid}" if running else "stopped"
        return f"<LocalServer {state} repository={str(self.repository)!r}>"

    def _repr_html_(self) -> str:
        running = self.running
        rows: list[tuple[str, Any]] = [("state", "running" if running else "stopped")]
        if running:
            rows += [("url", self.url), ("models", self._shown_models()), ("pid", self.pid)]
        rows.append(("repository", self.repository))
        if self._run is not None:
            rows.append(("log", self.log_path))
        return html.table("LocalServer", rows)

    def _shown_models(self) -> str:
        try:
            models = [f"{m.name} v{m.version} {m.state}" for m in self.metadata.models]
        except SonicError as error:
            return f"it does not say: {error.message}"
        return ", ".join(models) or "none"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a LocalServer belongs to its process; pass its url instead")

    def _run_or_raise(self) -> _Run:
        if self._run is None:
            raise ServerError("expected a started server, got one that never was; start() it")
        return self._run

    def _launch(self, way: Installed | Container) -> None:
        run = self._run = self._new_run()
        record = local_state.record_path(run.url)
        deadline = time.monotonic() + self._startup_timeout_s
        launch = way.launch(
            self._arguments(run),
            self.repository,
            _ways.Secret(protocols=_PROTOCOLS, header=_HEADER_NAME, value=run.secret),
            name=run.shm_prefix,
            threads=self._threads,
            env=self._env,
        )
        self._guard = guard = Guard(
            way.python,
            {
                "argv": launch.argv,
                "env": launch.env,
                "cleanup": launch.cleanup,
                "secret": run.secret,
                "log": str(run.log),
                "record": None if record is None else str(record),
                "shm_prefix": run.shm_prefix,
                "grace_s": self._stop_timeout_s,
            },
        )
        try:
            self._wait(guard, run, deadline)
            self._register(guard, run)
        except BaseException:
            self._end()
            raise

    def _wait(self, guard: Guard, run: _Run, deadline: float) -> None:
        listening = f"Started GRPCInferenceService at 127.0.0.1:{run.port}"
        while True:
            guard.hear(0.02)
            if not guard.running:
                raise self._failure(run, f"ended with exit status {guard.exit_code}")
            # Whatever else answers on the port is not this server, so ask only once it listens.
            if listening in run.read_log() and is_ready(run.url, {_HEADER: run.secret}):
                return
            if time.monotonic() > deadline:
                raise self._failure(run, f"was not ready after {self._startup_timeout_s:g} s")

    def _failure(self, run: _Run, what: str) -> Exception:
        log = run.read_log()
        if _log.port_is_taken(log):
            return _PortTaken()
        lines = _log.error_lines(log.replace(run.secret, "…"))
        said = "\n".join(f"  {line}" for text in lines for line in text.splitlines())
        said = said or "  (nothing)"
        return ServerStartError(
            f"the local server for {self.repository} {what}. It said:\n{said}\nIts log: {run.log}",
            server=run.url,
        )

    def _register(self, guard: Guard, run: _Run) -> None:
        pid = guard.server_pid
        ticks = None if pid is None else local_state.process_start_ticks(pid)
        if pid is None or ticks is None:
            raise self._failure(run, "ended as soon as it was ready")
        local_state.register(
            local_state.ServerRecord(
                url=run.url,
                pid=pid,
                start_ticks=ticks,
                guard_pid=guard.pid,
                header=_HEADER,
                secret=run.secret,
                repository=str(self.repository),
                log=str(run.log),
                started=time.time(),
                shm_prefix=run.shm_prefix,
            )
        )

    def _new_run(self) -> _Run:
        port = self._port_wanted if self._port_wanted is not None else _free_port()
        secret = secrets.token_hex(32)
        return _Run(
            port=port,
            metrics_port=_free_port() if self._metrics else None,
            secret=secret,
            shm_prefix=f"sonic_{os.getpid()}_{secrets.token_hex(6)}_",
            log=_new_log(self._log_dir),
        )

    def _arguments(self, run: _Run) -> list[str]:
        arguments = [
            f"--model-repository={self.repository}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={run.port}",
            "--allow-http=false",
            f"--model-control-mode={self._model_control}",
            f"--exit-timeout-secs={max(1, int(self._stop_timeout_s) - 1)}",
        ]
        if run.metrics_port is None:
            arguments.append("--allow-metrics=false")
        else:
            arguments += ["--metrics-address=127.0.0.1", f"--metrics-port={run.metrics_port}"]
        if self._model_control == "poll":
            arguments.append(f"--repository-poll-secs={self._poll_s}")
        arguments += [f"--load-model={name}" for name in self._models or ()]
        return [*arguments, *self._extra_args]


class _PortTaken(Exception):  # noqa: N818  an outcome to act on, which no caller sees
    """Something else listens on the port that was chosen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One life of the server."""

    port: int
    metrics_port: int | None
    secret: str = dataclasses.field(repr=False)
    shm_prefix: str
    log: Path

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def read_log(self) -> str:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _new_log(folder: Path | None) -> Path:
    if folder is None:
        state = local_state.directory()
        folder = Path(tempfile.mkdtemp(prefix="sonic-coffea-")) if state is None else state / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune_logs(folder)
        fd, name = tempfile.mkstemp(dir=folder, prefix=_log_prefix(), suffix=".log")
    except OSError as error:
        raise ServerStartError(f"cannot write the server's log in {folder}: {error}") from None
    os.close(fd)
    return Path(name).absolute()


def _log_prefix() -> str:
    return f"triton-{local_state.machine()}-"


def _prune_logs(folder: Path) -> None:
    """Remove old logs: this machine's of another day beyond the newest, and others' after a month.

    A server that is starting is in no record yet and its log is read, so no log is removed within a
    day; what other machines with the same home use cannot be known here.
    """
    in_use = {record.log for record in local_state.records()}
    written = {}
    for path in folder.glob("triton-*.log"):
        # Another process may be removing the same ones.
        with contextlib.suppress(OSError):
            written[path] = path.stat().st_mtime
    now = time.time()
    own = [path for path in written if path.name.startswith(_log_prefix())]
    kept = set(sorted(own, key=written.__getitem__)[-_KEPT_LOGS:])
    for path in written.keys() - kept:
        most_s = _DAY_S if path in own else _STRANGE_KEPT_FOR_S
        if str(path) not in in_use and written[path] < now - most_s:
            with contextlib.suppress(OSError):
                path.unlink()
