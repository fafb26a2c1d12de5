"""A real Triton server on this machine, for development and as a fallback."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import dask.config

from sonic_coffea.errors import (
    ConfigError,
    ModelNotFoundError,
    ServerError,
    ServerStartError,
    SonicError,
)
from sonic_coffea.reporting import tables
from sonic_coffea.server import _install as install
from sonic_coffea.server._folders import ServerFolder, ServerRecord
from sonic_coffea.server._probe import fetch_metadata, is_ready
from sonic_coffea.server.launch._logs import error_lines, last_words, new_log
from sonic_coffea.server.launch._run import Run
from sonic_coffea.server.launch.runtimes import AUTO, Serving, choose
from sonic_coffea.server.repository import no_models
from sonic_coffea.transport import Address, ServerMetadata

if TYPE_CHECKING:
    from sonic_coffea.server._install import Progress, ServerInstall

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_RESTARTS = 5
_MAX_TIME_S = 86_400
# A server that has run for this time did not fail at its start.
_LASTED_S = 60.0
_LOOPBACK = "127.0.0.1"
_ANYWHERE = ("0.0.0.0", "::")  # noqa: S104  what a user may ask for
# What leads from one state of a server to the next. A failure is one that another start would not
# mend; a server that was ready once is started again after any end that nobody asked for.
_NEXT: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("stopped", "start"): "starting",
        ("ended", "start"): "starting",
        ("starting", "ready"): "running",
        ("starting", "crash"): "backing off",
        ("starting", "failure"): "ended",
        ("starting", "stop"): "stopped",
        ("running", "crash"): "backing off",
        ("running", "failure"): "ended",
        ("running", "stop"): "stopped",
        ("backing off", "retry"): "starting",
        ("backing off", "failure"): "ended",
        ("backing off", "stop"): "stopped",
    }
)
_OVER = ("stopped", "ended")
# Arguments of Triton without which nothing reaches it, or its models.
_OWN_ARGUMENTS = (
    "--allow-grpc",
    "--backend-directory",
    "--grpc-address",
    "--grpc-port",
    "--grpc-restricted-protocol",
    "--grpc-use-ssl",
    "--grpc-use-ssl-mutual",
    "--load-model",
    "--model-control-mode",
    "--model-repository",
)


class LocalServer:
    """A Triton server on this machine that ends with this process, whatever ends it.

    Use it as a context manager, or with `start` and `stop`. It listens at a Unix socket in a folder
    that only this user can enter, so that processes of this user on this machine reach it by its
    URL, and nobody else does. Triton is installed on first use.

    Parameters
    ----------
    repository : path-like
        The model repository.
    models : sequence of str, optional
        What is served: the models to load at the start, to which clients may load others, and
        unload them; by default all.
    poll : bool
        Whether what is served follows changes of the repository, each second.
    port : int, optional
        Where it listens, for whoever cannot reach a Unix socket: a port of TCP, 0 for a free one.
        All who can connect to the port can use the server, and load and unload its models.
    host : str
        The address of the port: by default loopback, which all users of this machine can reach;
        ``"0.0.0.0"`` for other machines.
    runtime : {"auto", "pip", "apptainer", "singularity", "podman", "docker"}, optional
        How it runs: the binary from PyPI, or a container engine. By default,
        ``sonic.local.runtime`` of dask's configuration, or else what the machine has.
    image : str, optional
        The container's image: a name in a registry; for apptainer and singularity also a file or an
        unpacked directory. By default, ``sonic.local.image``, or else NVIDIA's image of the same
        version as the binary.
    gpu : bool, optional
        Whether a container gets the machine's GPUs; by default, if there are any.
    installation : ServerInstall, optional
        The binary to run; by default the one of `sonic_coffea.server.ensure`.
    threads : int, optional
        Threads that a model may use for one request.
    env : mapping, optional
        More environment variables for the server and its models.
    extra_args : sequence of str
        More arguments of ``tritonserver``, such as those of its HTTP and metrics endpoints, which
        are off by default.
    startup_timeout_s : float
        How it lives: longest time for starting the server and loading the models.
    stop_timeout_s : float
        Longest time for requests in progress to finish before the server is killed.
    restart : bool
        Whether a server that ends by itself is started again at the same URL: up to 5 times, with
        a back-off that doubles from 0.5 s, with the models that it had loaded a second before. A
        server that ``sonic-coffea status --stop`` ended is not started again. Whether or not, a
        start that crashes is tried again, within `startup_timeout_s`: Triton's Python backend
        aborts now and then as it loads.
    progress : callable, optional
        Called with a short text at each stage of an installation.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If options contradict each other, or a time is no number of seconds up to a day.
    """

    _first_pause_s = 0.5

    def __init__(  # noqa: PLR0913  independent options, each with a default
        self,
        repository: str | os.PathLike[str],
        *,
        models: Sequence[str] | None = None,
        poll: bool = False,
        port: int | None = None,
        host: str = _LOOPBACK,
        runtime: str | None = None,
        image: str | os.PathLike[str] | None = None,
        gpu: bool | None = None,
        installation: ServerInstall | None = None,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        startup_timeout_s: float = 120.0,
        stop_timeout_s: float = 10.0,
        restart: bool = True,
        progress: Progress | None = None,
    ) -> None:
        if isinstance(models, str):
            raise ConfigError(f"expected models as a sequence of names, got the string {models!r}")
        if models is not None and poll:
            raise ConfigError("models chooses what to load, and poll=True loads all")
        if port is None and host != _LOOPBACK:
            raise ConfigError(f"host={host!r} needs a port=, 0 for a free one")
        for name in (argument.partition("=")[0] for argument in extra_args):
            if name in _OWN_ARGUMENTS:
                raise ConfigError(f"extra_args has {name}, which LocalServer sets by its options")
        _check_seconds("startup_timeout_s", startup_timeout_s)
        _check_seconds("stop_timeout_s", stop_timeout_s)
        self.repository = Path(repository).absolute()
        self._models = tuple(models or ())
        self._control = "poll" if poll else "none" if models is None else "explicit"
        self._port, self._host = port, host
        configured = dask.config.get("sonic.local", {})
        image = image or configured.get("image")
        self._runtime_name = runtime or configured.get("runtime") or AUTO
        self._image = None if image is None else os.fspath(image)
        self._gpu, self._installation = gpu, installation
        self._threads = threads
        self._env = dict(env or {})
        self._arguments = [
            "--allow-http=false",
            "--allow-metrics=false",
            f"--model-control-mode={self._control}",
            f"--exit-timeout-secs={max(1, int(stop_timeout_s) - 1)}",
            *(["--repository-poll-secs=1"] if poll else ()),
            *extra_args,
        ]
        self._startup_timeout_s, self._stop_timeout_s = startup_timeout_s, stop_timeout_s
        self._restart = restart
        self._progress = progress or install.warn
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._state = "stopped"
        self._stopping = threading.Event()
        self._supervising: threading.Thread | None = None
        self._folder: ServerFolder | None = None
        self._run: Run | None = None
        self._log: Path | None = None
        self._error: SonicError | None = None
        self._failures = 0
        self._was_ready = False

    def start(self) -> LocalServer:
        """Start the server and return when it is ready; harmless when it runs.

        Raises
        ------
        sonic_coffea.errors.ServerStartError
            If it cannot be installed, does not start, or is not ready in time; with the server's
            message.
        sonic_coffea.errors.ConfigError
            If the repository has no models.
        """
        with self._lock:
            if not self._supervised:
                self._supervising = self._prepare()
                self._supervising.start()
            try:
                with self._changed:
                    while self._supervised and self._state not in ("running", *_OVER):
                        self._changed.wait(_POLL_S)
            except BaseException:  # such as Ctrl-C
                self.stop()
                raise
        if self._state != "running":
            raise self._error or ServerStartError(f"{self} was stopped while it started")
        return self

    def _prepare(self) -> threading.Thread:
        """Do before a start what the caller waits for, and what may be wrong with its options."""
        if os.getpid() != self._owner:  # a forked child, whose parent has the server
            self._owner, self._folder, self._run = os.getpid(), None, None
        if self._control == "none" and not any(p.is_dir() for p in self.repository.glob("*")):
            raise no_models(self.repository)
        self._runtime = choose(
            self._runtime_name, image=self._image, gpu=self._gpu, installation=self._installation
        )
        self._runtime.prepare(self._progress)
        self._folder = self._folder or ServerFolder()
        if self._port is not None:
            self._port = _free_port(self._host, self._port)
            logger.warning(
                "%s has no access control: %s can use it, and load and unload its models",
                self.url,
                "all who reach this machine by the network"
                if self._host != _LOOPBACK
                else "all users of this machine",
            )
        self._failures, self._was_ready, self._error = 0, False, None
        self._deadline = time.monotonic() + self._startup_timeout_s
        self._stopping = threading.Event()
        self._enter("start")
        return threading.Thread(target=self._supervise, name="sonic-server", daemon=True)

    def stop(self) -> None:
        """End the server and wait until it is gone; harmless when it does not run."""
        if os.getpid() == self._owner and self._supervising is not None:
            self._stopping.set()
            self._supervising.join()

    def wait(self) -> None:
        """Return when the server has ended, and is not about to be started again."""
        while self._supervised and self._supervising is not None:
            self._supervising.join(_POLL_S)

    @property
    def _supervised(self) -> bool:
        alive = self._supervising is not None and self._supervising.is_alive()
        return alive and os.getpid() == self._owner

    def _supervise(self) -> None:
        """Go from state to state until the server is stopped, or is left as it is."""
        acts = {"starting": self._begin, "running": self._watch, "backing off": self._back_off}
        while self._state not in _OVER:
            try:
                event = acts[self._state]()
            except Exception as error:  # nobody else would hear of it
                logger.exception("%s is left", self)
                self._error = ServerStartError(f"the local server cannot be minded: {error!r}")
                event = "failure"
            self._enter(event)

    def _enter(self, event: str) -> None:
        state = _NEXT[self._state, event]
        if self._run is not None and state != "running":
            self._run.stop()
        if self._folder is not None and state in _OVER:
            self._folder.close()
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _begin(self) -> str:
        """Start the server, and return what comes of it."""
        begun = time.monotonic()
        deadline = begun + self._startup_timeout_s if self._was_ready else self._deadline
        run, crashed = None, False
        try:
            run = self._launch()
            while not self._is_ready(run):
                if run.wait(0.02):
                    crashed = run.crashed
                    raise self._failure(run.end)
                if self._stopping.is_set():
                    return "stop"
                if time.monotonic() > deadline:
                    raise self._failure(f"was not ready after {self._startup_timeout_s:g} s")
        except SonicError as error:
            self._error = error
            if run is not None and run.on_request:
                return "stop"
            if self._was_ready or (crashed and time.monotonic() < deadline):
                logger.warning("%s", error)
                return "crash"
            return "failure"
        self._was_ready = True
        logger.info("%s is ready after %.1f s", self, time.monotonic() - begun)
        if not run.hidden:
            logger.warning(
                "users of this machine can read the rows and scores of %s in /dev/shm: the kernel "
                "does not let you hide them (user namespaces are off)",
                self,
            )
        return "ready"

    def _is_ready(self, run: Run) -> bool:
        """Ask the server, which nobody else can be, in a folder that is this user's alone."""
        run.wait(0.0)
        if run.pid is None or run.ended:
            return False
        if self._port is None:
            return self._socket.exists() and is_ready(self.url)
        host = _LOOPBACK if self._host in _ANYWHERE else self._host
        return is_ready(Address(host=host, port=self._port).url)

    def _watch(self) -> str:
        """Wait for the end of the server that runs, and return what it means."""
        run, started = cast("Run", self._run), time.monotonic()
        look_at = started
        while not run.wait(_POLL_S):
            if self._stopping.is_set():
                return "stop"
            if self._control == "explicit" and time.monotonic() > look_at:
                # Clients may load and unload models.
                with contextlib.suppress(SonicError):
                    models = fetch_metadata(self.url).models
                    self._models = tuple({m.name for m in models if m.state == "READY"})
                look_at = time.monotonic() + 1.0
        if run.on_request:
            logger.info("%s was stopped on request", self)
            return "stop"
        words = last_words(self.logs)
        end = f"{run.end}{f': {words}' if words else ''} (log: {self._log})"
        logger.warning("%s %s", self, end)
        if time.monotonic() - started > _LASTED_S:
            self._failures = 0
        return "crash" if self._restart else "failure"

    def _back_off(self) -> str:
        self._failures += 1
        if self._failures > _RESTARTS:
            logger.error("%s has ended %d times in a row; it is left", self, _RESTARTS)
            return "failure"
        pause_s = self._first_pause_s * 2 ** (self._failures - 1)
        logger.warning("%s is started again in %g s", self, pause_s)
        return "stop" if self._stopping.wait(pause_s) else "retry"

    def _launch(self) -> Run:
        folder = self._folder_or_raise()
        folder.open()
        self._socket.unlink(missing_ok=True)
        if self._port is None:
            listening = [f"--grpc-address=unix:{folder.path}/grpc", "--grpc-port=1"]
        else:
            host = f"[{self._host}]" if ":" in self._host else self._host
            listening = [f"--grpc-address={host}", f"--grpc-port={self._port}"]
        models = (name for name in self._models if (self.repository / name).is_dir())
        serving = Serving(
            arguments=[
                *listening,
                *(f"--load-model={name}" for name in models),
                *self._arguments,
            ],
            repository=self.repository,
            folder=folder.path,
            shared_memory=folder.shared_memory,
            threads=self._threads,
            env=self._env,
        )
        self._log = new_log()
        self._run = run = Run(
            self._runtime.launch(serving),
            folder,
            python=self._runtime.python,
            log=self._log,
            grace_s=self._stop_timeout_s,
        )
        while run.pid is None and not run.wait(_POLL_S):
            pass
        if run.pid is not None:
            record = ServerRecord(
                url=self.url,
                pid=run.pid,
                supervisor_pid=run.supervisor_pid,
                repository=str(self.repository),
                log=str(self._log),
            )
            folder.record(record)
        return run

    def _failure(self, end: str) -> ServerStartError:
        quoted = "\n".join(f"  {line}" for line in error_lines(self.logs))
        return ServerStartError(
            f"the local server for {self.repository} {end}. It said:\n"
            f"{quoted or '  (nothing)'}\nIts log: {self._log}",
            server=self.url,
        )

    @property
    def url(self) -> str:
        """Where it listens: ``unix:PATH``, or ``grpc://HOST:PORT`` if it has a port."""
        socket_path = self._socket
        if self._port is None:
            return f"unix:{socket_path}"
        host = socket.gethostname() if self._host in _ANYWHERE else self._host
        return Address(host=host, port=self._port).url

    @property
    def _socket(self) -> Path:
        # Triton adds what it takes for the number of a port.
        return self._folder_or_raise().path / "grpc:1"

    @property
    def metadata(self) -> ServerMetadata:
        """Name, version, extensions and models of the running server."""
        if not self.running:
            raise ServerError("expected a running server, got one that is stopped; start() it")
        return fetch_metadata(self.url)

    def wait_for(
        self, model: str, version: str | int | None = None, *, timeout_s: float = 60.0
    ) -> None:
        """Return when a model that was added to the repository is served.

        A server that ends meanwhile, and is started again, is waited for, too.

        Parameters
        ----------
        model : str
            Its name.
        version : str or int, optional
            Version of the model; by default, any version.
        timeout_s : float
            How long to wait.

        Raises
        ------
        sonic_coffea.errors.ModelNotFoundError
            If the model is not ready in time; with the server's message.
        sonic_coffea.errors.ServerError
            If the server does not run.
        """
        _check_seconds("timeout_s", timeout_s)
        until = time.monotonic() + timeout_s
        requested = None if version is None else str(version)
        while True:
            try:
                models = self.metadata.models
            except ServerError:
                if not self._supervised:
                    raise
                models = ()
            versions = [m for m in models if m.name == model and requested in (None, m.version)]
            if any(m.state == "READY" for m in versions):
                return
            if time.monotonic() > until:
                break
            time.sleep(_POLL_S)
        states = ", ".join(f"version {m.version} {m.state} {m.reason}".rstrip() for m in versions)
        raise ModelNotFoundError(
            f"the model was not ready after {timeout_s:g} s; "
            f"the server says: {states or 'nothing'}",
            server=self.url,
            model=model,
            version=requested,
        )

    @property
    def log_path(self) -> Path:
        """The file that the server logs to."""
        if self._log is None:
            raise ServerError("expected a started server, got one that never was; start() it")
        return self._log

    @property
    def logs(self) -> str:
        """What the server has logged so far, or, before the first start, nothing."""
        try:
            return "" if self._log is None else self._log.read_text("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        return self._run.pid if self._run is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the server runs, and is of this process."""
        return self._state == "running" and os.getpid() == self._owner

    @property
    def ended_on_request(self) -> bool:
        """Whether another process has ended the server: ``sonic-coffea status --stop``."""
        return self._state == "stopped" and self._run is not None and self._run.on_request

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"{self.url} pid={self.pid}" if self.running else self._state
        return f"<LocalServer {state} repository={str(self.repository)!r}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Any]] = [("state", self._state)]
        if self.running:
            models = ", ".join(f"{m.name} v{m.version} {m.state}" for m in self.metadata.models)
            rows += [("url", self.url), ("models", models or "none"), ("pid", self.pid)]
        rows.append(("repository", self.repository))
        if self._log is not None:
            rows.append(("log", self._log))
        return tables.table("LocalServer", rows)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a LocalServer belongs to its process; pass its url instead")

    def _folder_or_raise(self) -> ServerFolder:
        if self._folder is None:
            raise ServerError("expected a started server, got one that never was; start() it")
        return self._folder


def _free_port(host: str, port: int) -> int:
    """Return a port of this machine at which nobody listens.

    Raises
    ------
    sonic_coffea.errors.ServerStartError
        If the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as free:
            number: int = free.getsockname()[1]
            return number
    except OSError as error:
        raise ServerStartError(
            f"port {port} of {host} cannot be had: {error.strerror}; port=0 takes a free one, and "
            "without port= the server needs none"
        ) from None


def _check_seconds(name: str, value: Any) -> None:
    if not isinstance(value, Real) or not 0 <= float(value) <= _MAX_TIME_S:
        raise ConfigError(
            f"{name}: expected a number of seconds up to {_MAX_TIME_S} (a day), got {value!r}"
        )
