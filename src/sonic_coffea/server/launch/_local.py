"""A real Triton server on this machine, for development and as a fallback."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from sonic_coffea.server._probe import fetch_metadata
from sonic_coffea.server.launch._logs import last_words, loaded_models, new_log
from sonic_coffea.server.launch._run import Run
from sonic_coffea.server.launch.runtimes import AUTO, Options, Runtime, Serving, choose
from sonic_coffea.server.repository import no_models
from sonic_coffea.transport import HeldPort, ServerMetadata, local_state

if TYPE_CHECKING:
    from typing import Self

    from sonic_coffea.server._install import Progress, ServerInstall

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STARTS = 3
_RESTARTS = 5
# A server that has run for this time did not fail at its start.
_LASTED_S = 60.0


class LocalServer:
    """A Triton server on loopback that ends with this process, whatever ends it.

    Use it as a context manager, or with `start` and `stop`. It listens only on loopback, and
    demands a secret that only processes of the same user can read. These find the secret by the
    URL. Triton is installed on first use.

    Parameters
    ----------
    repository : path-like
        The model repository.
    port : int, optional
        The gRPC port; by default a free one.
    models : sequence of str, optional
        The models to load; by default all. Implies ``model_control="explicit"``.
    startup_timeout_s : float
        Longest time for starting the server and loading the models.
    threads : int, optional
        Threads that a model may use for one request.
    log_dir : path-like, optional
        Folder of the log; by default, in the user's state directory.
    model_control : {"none", "poll", "explicit"}
        ``"none"``: all models are loaded at the start. ``"poll"``: models follow changes of the
        repository. ``"explicit"``: models are loaded and unloaded by request.
    poll_s : int
        Time between two looks at the repository with ``model_control="poll"``.
    metrics : bool
        Whether to serve Prometheus metrics, on another loopback port.
    stop_timeout_s : float
        Longest time for requests in progress to finish before the server is killed.
    restart : bool
        Whether a server that ends by itself is started again at the same port: up to 5 times, with
        a back-off that doubles from 0.5 s, with the models that it had loaded. A server that
        ``sonic-coffea status --stop`` ended is not started again. Whether or not, a start that
        crashes is tried up to 3 times: Triton's Python backend aborts now and then as it loads.
    extra_args : sequence of str
        More arguments of ``tritonserver``.
    env : mapping, optional
        More environment variables for the server and its models.
    runtime : {"auto", "pip", "apptainer", "singularity", "podman", "docker"}, optional
        The runtime of Triton: the binary from PyPI, or a container engine. By default,
        ``sonic.local.runtime`` of dask's configuration, or else what the machine has.
    image : str, optional
        The container's image: a name in a registry; for apptainer and singularity also a file or an
        unpacked directory. By default, ``sonic.local.image``, or else NVIDIA's image of the same
        version as the binary.
    gpu : bool, optional
        Whether a container gets the machine's GPUs; by default, if there are any.
    installation : ServerInstall, optional
        The binary to run; by default the one of `sonic_coffea.server.ensure`.
    progress : callable, optional
        Called with a short text at each stage.
    """

    _first_pause_s = 0.5

    def __init__(  # noqa: PLR0913  independent options, each with a default
        self,
        repository: str | os.PathLike[str],
        *,
        port: int | None = None,
        models: Sequence[str] | None = None,
        startup_timeout_s: float = 120.0,
        threads: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        model_control: Literal["none", "poll", "explicit"] = "none",
        poll_s: int = 2,
        metrics: bool = False,
        stop_timeout_s: float = 10.0,
        restart: bool = True,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        runtime: str | None = None,
        image: str | os.PathLike[str] | None = None,
        gpu: bool | None = None,
        installation: ServerInstall | None = None,
        progress: Progress | None = None,
    ) -> None:
        if isinstance(models, str):
            raise ConfigError(f"expected models as a sequence of names, got the string {models!r}")
        if models is not None and model_control == "poll":
            raise ConfigError("models chooses what to load, which model_control='poll' cannot do")
        self.repository = Path(repository).absolute()
        self._requested_port = port
        self._startup_timeout_s = startup_timeout_s
        self._threads = threads
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._control = "explicit" if models is not None else model_control
        self._arguments = [
            "--grpc-address=127.0.0.1",
            # This process and clients hold the port, lest others take it when the server ends.
            "--reuse-grpc-port=true",
            "--allow-http=false",
            f"--model-control-mode={self._control}",
            f"--exit-timeout-secs={max(1, int(stop_timeout_s) - 1)}",
            *([f"--repository-poll-secs={poll_s}"] if model_control == "poll" else ()),
            *extra_args,
        ]
        self._models = tuple(models or ())
        self._metrics = metrics
        self._stop_timeout_s = stop_timeout_s
        self._env = dict(env or {})
        configured = dask.config.get("sonic.local", {})
        self._runtime = runtime or configured.get("runtime") or AUTO
        image = image or configured.get("image")
        self._options = Options(
            image=None if image is None else os.fspath(image), gpu=gpu, installation=installation
        )
        self._progress = progress or install.warn
        self._restart = restart
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._held: HeldPort | None = None
        self._metrics_port: int | None = None

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
            self._begin()
            if self._restart and not self._watched:
                self._stopping = threading.Event()
                self._watcher = threading.Thread(
                    target=self._watch, args=[self._stopping], name="sonic-server", daemon=True
                )
                self._watcher.start()
            return self

    def _begin(self) -> None:
        if self.running:
            return
        if self._run is not None:
            self._run.end()
        models = any(path.is_dir() for path in self.repository.glob("*"))
        if self._control == "none" and not models:
            raise no_models(self.repository)
        begun = time.monotonic()
        runtime = choose(self._runtime, self._options)
        runtime.prepare(self._progress)
        for left in reversed(range(_STARTS)):
            try:
                self._launch(runtime)
            except ServerStartError as error:
                if not (left and self._run is not None and self._run.crashed):
                    raise
                logger.warning("%s; starting it once more", error)
            else:
                break
        logger.info("%s is ready after %.1f s", self, time.monotonic() - begun)

    def reason_against(self) -> str | None:
        """Say why this machine has no runtime for it; None if it has one."""
        try:
            choose(self._runtime, self._options)
        except ServerStartError as error:
            return error.message
        return None

    def stop(self) -> None:
        """End the server and wait until it is gone; harmless when it does not run."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._lock:
            if self._run is not None:
                self._run.end()
            if self._held is not None:
                self._held.release()
            self._held = None

    def wait(self) -> None:
        """Return when the server has ended, and is not about to be started again."""
        while self.running or self._watched:
            time.sleep(_POLL_S)

    @property
    def _watched(self) -> bool:
        return self._watcher is not None and self._watcher.is_alive()

    def _watch(self, stopping: threading.Event) -> None:
        """Start the server again when it ends by itself, until it is stopped."""
        failures, started = 0, time.monotonic()
        while not stopping.wait(_POLL_S):
            if self.running:
                continue
            if self.ended_on_request:
                logger.info("%s was stopped on request", self)
                return
            if time.monotonic() - started > _LASTED_S:
                failures = 0
            failures += 1
            if failures > _RESTARTS:
                logger.error("%s has ended %d times in a row; it is left", self, _RESTARTS)
                return
            run, words = self._run_or_raise(), last_words(self.logs)
            end = f"{run.end_reason}{f': {words}' if words else ''} (log: {run.log})"
            logger.warning("%s %s; it is started again", self, end)
            if stopping.wait(self._first_pause_s * 2 ** (failures - 1)):
                return
            try:
                self._start_again()
            except SonicError as error:
                logger.warning("%s", error)
            started = time.monotonic()

    def _start_again(self) -> None:
        with self._lock:
            if self._control == "explicit" and self._run is not None and self._run.was_ready:
                # Clients may have loaded and unloaded models since its start.
                self._models = tuple(
                    name for name in loaded_models(self.logs) if (self.repository / name).is_dir()
                )
            self._begin()

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
        return self._run_or_raise().headers

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus finds its metrics, if it serves them."""
        self._run_or_raise()
        port = self._metrics_port
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
        until = time.monotonic() + timeout_s
        requested = None if version is None else str(version)
        while True:
            try:
                models = self.metadata.models
            except ServerError:
                if not self._watched:
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
        return self._run_or_raise().log

    @property
    def logs(self) -> str:
        """What the server has logged so far, or, before the first start, nothing."""
        return "" if self._run is None else self._run.read_log()

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        return self._run.server_pid if self._run is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the server runs."""
        return self._run is not None and self._run.running

    @property
    def ended_on_request(self) -> bool:
        """Whether another process has ended the server: ``sonic-coffea status --stop``."""
        return self._run is not None and not self.running and self._run.ended_on_request

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"{self.url} pid={self.pid}" if self.running else "stopped"
        return f"<LocalServer {state} repository={str(self.repository)!r}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Any]] = [("state", "running" if self.running else "stopped")]
        if self.running:
            models = ", ".join(f"{m.name} v{m.version} {m.state}" for m in self.metadata.models)
            rows += [("url", self.url), ("models", models or "none"), ("pid", self.pid)]
        rows.append(("repository", self.repository))
        if self._run is not None:
            rows.append(("log", self.log_path))
        return tables.table("LocalServer", rows)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a LocalServer belongs to its process; pass its url instead")

    def _run_or_raise(self) -> Run:
        if self._run is None:
            raise ServerError("expected a started server, got one that never was; start() it")
        return self._run

    def _launch(self, runtime: Runtime) -> None:
        self._held = self._held or HeldPort.claim(self._requested_port)
        port = self._held.number
        # The record of an earlier server at this port does not hold for this one.
        local_state.remove(f"grpc://127.0.0.1:{port}")
        metrics = ["--allow-metrics=false"]
        if self._metrics:
            free = HeldPort.hold()
            free.release()
            self._metrics_port = free.number
            metrics = ["--metrics-address=127.0.0.1", f"--metrics-port={self._metrics_port}"]
        serving = Serving(
            arguments=[
                f"--grpc-port={port}",
                *metrics,
                *(f"--load-model={name}" for name in self._models),
                *self._arguments,
            ],
            repository=self.repository,
            secret=secrets.token_hex(32),
            name=f"sonic_{os.getpid()}_{secrets.token_hex(6)}_",
            threads=self._threads,
            env=self._env,
        )
        log = new_log(self._log_dir)
        self._run = Run(runtime, serving, port=port, log=log, grace_s=self._stop_timeout_s)
        try:
            self._run.wait_until_ready(self._startup_timeout_s, metrics_port=self._metrics_port)
        except BaseException:
            self._run.end()
            raise
