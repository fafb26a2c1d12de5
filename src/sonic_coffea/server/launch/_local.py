"""A real Triton server on this machine, for development and as a fallback."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import dask.config

from sonic_coffea.errors import (
    ConfigError,
    ModelNotFoundError,
    ServerError,
    ServerStartError,
    SonicError,
    expect,
)
from sonic_coffea.reporting import tables
from sonic_coffea.server import _folders as folders
from sonic_coffea.server._install import print_stage
from sonic_coffea.server.launch._runtimes import RUNTIMES, choose
from sonic_coffea.server.repository._config import check_integer, check_unchanged
from sonic_coffea.server.repository._sources import is_list
from sonic_coffea.transport import Address, ConnectionOptions, ServerMetadata, connect_transport

logger = logging.getLogger(__name__)

_SUPERVISOR = Path(__file__).with_name("_supervisor.py")
_LOOPBACK = "127.0.0.1"
_ANYWHERE = "0.0.0.0"  # noqa: S104  what a user may ask for
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Arguments of Triton without which nothing reaches it, or its models.
_OWN_ARGUMENTS = ("--allow-grpc", "--grpc-", "--backend-directory", "--id", "--model-repository")

# Lines of the log that errors do not quote: all but errors, one error of servers without a GPU, and
# one that comes again, as a model that failed to load. Triton's two formats are
# "E1123 22:01:11.5 ..." and "2026-11-23T22:01:11Z E ...".
_QUIET = re.compile(
    r'[IW]\d{4} |\d{4}-\S+ [IW] |[+|]|"?\s*$'
    r"|.*(CudaDriverHelper has not been init|Failed to create instance)"
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
    poll : bool
        Whether the server looks for changes of the repository each second.
    threads : int, optional
        Threads that a model may use for one request.
    env : mapping, optional
        More environment variables for the server and its models.
    extra_args : sequence of str
        More arguments of ``tritonserver``, such as those of its HTTP and metrics endpoints, which
        are off by default.
    port : int, optional
        TCP port, 0 for a free one, for clients that cannot reach a Unix socket. All who can connect
        to the port can use the server, and load and unload its models.
    host : str
        The address of the port: by default loopback, which all users of this machine can reach;
        ``"0.0.0.0"`` for other machines.
    runtime : {"auto", "pip", "apptainer", "singularity", "podman", "docker"}, optional
        The binary from PyPI, or a container engine. By default, ``sonic.local.runtime`` of dask's
        configuration, or else what the machine has. A container gets the machine's GPUs, unless
        ``CUDA_VISIBLE_DEVICES`` is empty.
    image : str, optional
        The container's image: a name in a registry; for apptainer and singularity also a file or an
        unpacked directory. By default, ``sonic.local.image``, or else NVIDIA's image of the same
        version as the binary.
    startup_timeout_s : float
        Longest time for starting the server and loading the models.
    stop_timeout_s : float
        Longest time for requests in progress to finish before the server is killed.
    restart : bool
        Whether a server that ends by itself is started again at the same URL: up to 5 times in a
        row, with a back-off that doubles from 0.5 s; after a run of a minute, they count anew. A
        server that ``sonic-coffea status --stop`` ended is not started again. With `restart` or
        without, a start that crashes is tried again, within `startup_timeout_s`: Triton's Python
        backend aborts now and then as it loads.

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
        poll: bool = False,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        port: int | None = None,
        host: str = _LOOPBACK,
        runtime: str | None = None,
        image: str | os.PathLike[str] | None = None,
        startup_timeout_s: float = 120.0,
        stop_timeout_s: float = 10.0,
        restart: bool = True,
    ) -> None:
        if port is None and host != _LOOPBACK:
            raise ConfigError(f"host={host!r} needs a port=, 0 for a free one")
        _check_types(port, threads, env, extra_args)
        for name in (argument.partition("=")[0] for argument in extra_args):
            if name.startswith(_OWN_ARGUMENTS):
                raise ConfigError(f"extra_args has {name}, which LocalServer sets by its options")
        times = {"startup_timeout_s": startup_timeout_s, "stop_timeout_s": stop_timeout_s}
        for name, value in times.items():
            is_time = isinstance(value, Real) and 0 <= float(value) <= 86_400
            expect(is_time, f"{name} as a number of seconds up to 86400 (a day)", value)
        self.repository = Path(repository).expanduser().absolute()
        self._port, self._host = port, host
        configured = dask.config.get("sonic.local", None) or {}
        is_dict = isinstance(configured, Mapping)
        expect(is_dict, "a dict as sonic.local in dask's config", configured)
        image = image or configured.get("image")
        expect(isinstance(image, str | os.PathLike | None), "image as a name or a path", image)
        self._image = None if image is None else os.fspath(image)
        self._runtime = runtime or configured.get("runtime") or "auto"
        self._env = {} if threads is None else dict.fromkeys(_THREADS, str(threads))
        self._env |= env or {}
        self._arguments = [
            "--allow-http=false",
            "--allow-metrics=false",
            f"--exit-timeout-secs={max(1, int(stop_timeout_s) - 1)}",
            *(["--model-control-mode=poll", "--repository-poll-secs=1"] if poll else ()),
            *extra_args,
        ]
        self._life_cycle = {**times, "restart": restart, "first_pause_s": self._first_pause_s}
        self._name = f"triton-{secrets.token_hex(4)}"
        self._starting = threading.Lock()
        # As its supervisor reports it.
        self._state, self._report = "stopped", dict[str, Any]()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._listening: threading.Thread | None = None
        self._folder: Path | None = None
        # What `local_servers` lists of it; from its first start on, its URL and log, too.
        self._record = {"repository": str(self.repository)}
        self._error: ServerStartError | None = None

    def start(self, *, progress: Callable[[str], None] = print_stage) -> LocalServer:
        """Start the server and return when it is ready; harmless when it runs.

        Parameters
        ----------
        progress : callable, optional
            Called with a short text at each stage of an installation; by default, it is printed.

        Raises
        ------
        sonic_coffea.errors.ServerStartError
            If it cannot be installed, does not start, or is not ready in time; with the server's
            message.
        sonic_coffea.errors.ConfigError
            If the repository has no models, or a version's files were replaced since it was built.
        """
        with self._starting:
            if self._state in ("stopped", "ended"):
                self.wait()
            if not self._supervised:
                self._launch(progress)
            try:
                while self._supervised and not self.running:
                    time.sleep(0.02)
            except BaseException:  # such as Ctrl-C
                self.stop()
                raise
        if not self.running:
            raise self._error or ServerStartError(f"{self} was stopped while it started")
        return self

    def _launch(self, progress: Callable[[str], None]) -> None:
        """Check the options against this machine, then start the supervisor."""
        # In the other modes, models may come and change later.
        if not any("--model-control-mode" in argument for argument in self._arguments):
            check_unchanged(self.repository)
        name = choose(self._runtime, self._image)
        launch = RUNTIMES[name](name, self._image, progress)
        supervisor = None
        folder, lock = folders.make_folder(self._folder)
        try:
            self._folder = folder
            address, url, arguments = self._listen_at(folder)
            self._record |= {"url": url, "log": str(folders.new_log())}
            job = {
                **launch(self.repository, folder, [*arguments, *self._arguments], self._env),
                **self._life_cycle,
                "address": address,
                "owner": os.getpid(),
                "folder": str(folder),
                "shared_memory": folders.shared_memory(folder),
                "record": self._record,
            }
            supervisor = self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C reaches the owner, which ends the server in good order.
                start_new_session=True,
                cwd="/",
                pass_fds=[lock],
                bufsize=0,
            )
            listening = threading.Thread(
                target=self._listen, args=[supervisor, folder], name="sonic-server", daemon=True
            )
            # First: if the supervisor ends at once, the thread says so at once.
            self._state, self._error = "starting", None
            listening.start()
            self._listening = listening
            # Last: a server that nobody listens to could not be stopped.
            self._tell(json.dumps(job))
        except BaseException as error:
            if supervisor is not None:
                with supervisor:  # which closes its pipes
                    supervisor.kill()
            self._state = "stopped"
            folders.remove_folder(folder)  # the next start makes it again
            if isinstance(error, OSError | RuntimeError):  # no more processes, files or threads
                message = f"cannot start the server's supervisor: {error}"
                raise ServerStartError(message) from None
            raise
        finally:
            os.close(lock)

    def _listen_at(self, folder: Path) -> tuple[str | tuple[str, int], str, list[str]]:
        """Return where the server will listen: its address, URL, and arguments of Triton."""
        if self._port is None:
            path = f"{folder}/grpc:1"  # Triton adds what it takes for the number of a port
            return path, f"unix:{path}", [f"--grpc-address=unix:{folder}/grpc", "--grpc-port=1"]
        self._port = _free_port(self._host, self._port)
        host = socket.gethostname() if self._host == _ANYWHERE else self._host
        url = Address(host=host, port=self._port).url
        logger.warning(
            "%s has no access control: all %s can use it, and load and unload its models",
            url,
            "users of this machine" if self._host == _LOOPBACK else "who reach it by the network",
        )
        where = [f"--grpc-address={self._host}", f"--grpc-port={self._port}", f"--id={self._name}"]
        return (self._host, self._port), url, where

    def _is_at_its_port(self) -> bool:
        """Whether no other server answers at the port, which one may have taken meanwhile."""
        if self._port is None:
            return True
        url = Address(host=self._host, port=self._port).url
        with contextlib.suppress(SonicError), connect_transport(url) as connection:
            return connection.info().name == self._name
        return True  # it has ended, or stands still

    def _tell(self, line: str) -> None:
        """Send a line to the supervisor; if it has ended, `_listen` notices."""
        if self._supervisor is not None and self._supervisor.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._supervisor.stdin.write(f"{line}\n".encode())

    def stop(self) -> None:
        """End the server and wait until it is gone; harmless when it does not run."""
        if self._supervised:
            # Closing the pipe is not enough: forked children hold it open.
            self._tell("")
            self.wait()

    def wait(self) -> None:
        """Return when the server has ended, and is not about to be started again."""
        if self._listening is not None:  # a forked child has no such thread, and does not wait
            self._listening.join()

    @property
    def _supervised(self) -> bool:
        """Whether this process has the supervisor; a forked child has no such thread."""
        return self._listening is not None and self._listening.is_alive()

    def _listen(self, supervisor: subprocess.Popen[bytes], folder: Path) -> None:
        """Take the states that the supervisor reports, until nothing of the server is left."""
        try:
            with supervisor:
                for line in supervisor.stdout or ():
                    self._take(json.loads(line))
        finally:
            folders.remove_folder(folder)
            if self._state != "stopped":
                self._state = "ended"

    def _take(self, report: dict[str, Any]) -> None:
        """Log what has led to a new state; keep it as an error if the server did not start."""
        state, self._report = report["state"], report
        logger.info("%s: %s", self, state)
        if report["problem"]:
            self._error = ServerStartError(
                f"the local server for {self.repository} {report['problem']}. It said:\n"
                f"{self._errors(report['since'])}\nIts log: {self.log_path}",
                server=self.url,
            )
            if state == "backing off" or self._state != "starting":
                logger.warning("%s", self._error)
        if state == "running" and not report["hidden"]:
            logger.warning(
                "users of this machine can read the rows and scores of %s in /dev/shm: the kernel "
                "does not let you hide them (user namespaces are off)",
                self,
            )
        if state == "running" and not self._is_at_its_port():
            self._error = ServerStartError(
                f"another server has taken port {self._port}; port=0 takes a free one"
            )
            logger.warning("%s ends: %s", self, self._error)
            self._tell("")
            return
        self._state = state

    def _errors(self, since: int) -> str:
        """Return the last errors in the log, each line once; of a log without any, its end."""
        log = self.logs.encode()[since:].decode(errors="replace")
        # After a wrong argument, Triton prints all options, some 500 lines. The reason is before
        # or after them.
        before, _, after = log.partition("Usage: tritonserver")
        lines = (before if before.strip() else after).splitlines()
        errors = [line for line in lines if not _QUIET.match(line)] or lines
        texts = dict.fromkeys("\n".join(errors).replace("\\n", "\n").splitlines())
        quoted = [text for text in texts if text.strip('" ')][-20:]
        return "\n".join(f"  {line}" for line in quoted) or "  (nothing)"

    @property
    def url(self) -> str:
        """Where it listens: ``unix:PATH``, or ``grpc://HOST:PORT`` if it has a port."""
        return self._recorded("url")

    def _recorded(self, entry: str) -> str:
        if entry not in self._record:
            raise ServerError("expected a started server, got one that never was; start() it")
        return self._record[entry]

    @property
    def metadata(self) -> ServerMetadata:
        """Name, version, extensions and models of the running server."""
        if not self.running:
            raise ServerError("expected a running server, got one that is stopped; start() it")
        options = ConnectionOptions(metadata_timeout_s=5.0)
        with connect_transport(self.url, options=options) as connection:
            return connection.info()._replace(models=tuple(connection.index()))

    def wait_for(
        self, model: str, version: str | int | None = None, *, timeout_s: float = 60.0
    ) -> None:
        """Return when a model that was added to the repository is served.

        A server may end meanwhile and be started again.

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
            versions = []
            try:
                listed = [m for m in self.metadata.models if m.name == model]
                versions = [m for m in listed if requested in (None, m.version)]
            except SonicError:  # it may stand still for a while
                if not self._supervised:
                    raise
            if any(m.state == "READY" for m in versions):
                return
            if time.monotonic() > until:
                states = [f"version {m.version} {m.state} {m.reason}".rstrip() for m in versions]
                raise ModelNotFoundError(
                    f"the model was not ready after {timeout_s:g} s; "
                    f"the server says: {', '.join(states) or 'nothing'}",
                    server=self.url,
                    model=model,
                    version=requested,
                )
            time.sleep(0.1)

    @property
    def log_path(self) -> Path:
        """The file that the server logs to."""
        return Path(self._recorded("log"))

    @property
    def logs(self) -> str:
        """What the server has logged so far, or, before the first start, nothing."""
        with contextlib.suppress(FileNotFoundError, ServerError):
            return self.log_path.read_text("utf-8", errors="replace")
        return ""

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        return self._report.get("pid") if self.running else None

    @property
    def running(self) -> bool:
        """Whether the server runs, and is of this process."""
        return self._state == "running" and self._supervised

    @property
    def ended_on_request(self) -> bool:
        """Whether another process has ended the server: ``sonic-coffea status --stop``."""
        return self._state == "stopped" and bool(self._report.get("on_request"))

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"{self.url} pid={self.pid}" if self.running else self._state
        return f"<LocalServer {state} repository={str(self.repository)!r}>"

    def _repr_html_(self) -> str:
        shown: dict[str, Any] = {"state": self._state, **self._record}
        if self.running:
            models = ", ".join(f"{m.name} v{m.version} {m.state}" for m in self.metadata.models)
            shown |= {"models": models or "none", "pid": self.pid}
        return tables.html(tables.described("LocalServer", shown.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a LocalServer belongs to its process; pass its url instead")


def _check_types(port: Any, threads: Any, env: Any, extra_args: Any) -> None:
    check_integer("port", port, 0)
    check_integer("threads", threads, 1)
    expect(port is None or port < 1 << 16, "port to be a number up to 65535", port)
    variables = env or {}
    is_dict = isinstance(variables, Mapping)
    are_texts = is_dict and all(isinstance(t, str) for item in variables.items() for t in item)
    expect(are_texts, "env as a dict of strings", env)
    are_texts = is_list(extra_args) and all(isinstance(each, str) for each in extra_args)
    expect(are_texts, "extra_args as a list of strings", extra_args)


def _free_port(host: str, port: int) -> int:
    """Return a port of this machine at which nobody listens."""
    try:
        with socket.create_server((host, port)) as free:
            return int(free.getsockname()[1])
    except OSError as error:
        raise ServerStartError(
            f"port {port} of {host} cannot be had: {error.strerror}; port=0 takes a free one, and "
            "without port= the server needs none"
        ) from None
