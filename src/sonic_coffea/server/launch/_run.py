"""One run of a local server, below the supervisor process that ends it in any case."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, cast

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server._probe import is_ready
from sonic_coffea.server.launch import _logs
from sonic_coffea.server.launch.runtimes import Runtime, Serving
from sonic_coffea.transport import local_state

logger = logging.getLogger(__name__)

_HEADER = f"triton-grpc-protocol-{Serving.header}"
_SCRIPT = Path(__file__).with_name("_supervisor.py")


class Run:
    """A supervisor process and, below it, a server.

    When it ends, requests in progress may take ``grace_s`` to finish.
    """

    def __init__(
        self, runtime: Runtime, serving: Serving, *, port: int, log: Path, grace_s: float
    ) -> None:
        self.port, self.log = port, log
        self.url = f"grpc://127.0.0.1:{port}"
        self.headers = {_HEADER: serving.secret}
        self.server_pid: int | None = None
        self.ended_on_request = self.crashed = self.was_ready = False
        self.end_reason = "ended without a word"
        self._serving = serving
        self._grace_s = grace_s
        self._owner = os.getpid()
        self._ended = threading.Event()
        record = local_state.record_path(self.url)
        job = {
            **dataclasses.asdict(runtime.launch(serving)),
            "owner": self._owner,
            "secret": serving.secret,
            "log": str(log),
            "record": None if record is None else str(record),
            "shm_prefix": serving.name,
            "grace_s": grace_s,
        }
        try:
            # A session of its own: Ctrl-C reaches the owner, which ends the server in good order.
            self._supervisor = subprocess.Popen(
                [str(runtime.python), "-I", "-S", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise ServerStartError(
                f"cannot start the server's supervisor process: {error}"
            ) from None
        self._stdin = cast("IO[bytes]", self._supervisor.stdin)
        self._stdout = cast("IO[bytes]", self._supervisor.stdout)
        self._thread = threading.Thread(target=self._listen, name="sonic-run", daemon=True)
        self._thread.start()
        # If the supervisor has ended already, `_listen` notices.
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(job).encode() + b"\n")
            self._stdin.flush()

    @property
    def running(self) -> bool:
        """Whether the supervisor, and so the server, has not ended, and is of this process."""
        return os.getpid() == self._owner and not self._ended.is_set()

    def read_log(self) -> str:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def wait_until_ready(self, timeout_s: float, *, metrics_port: int | None) -> None:
        """Return when the server is ready and recorded; raise if it ends or is late."""
        deadline = time.monotonic() + timeout_s
        # Another process may answer at the port, so probe only after this server listens.
        last = ("GRPCInferenceService", self.port)
        if metrics_port is not None:  # which it starts after gRPC
            last = ("Metrics Service", metrics_port)
        listening = "Started {} at 127.0.0.1:{}".format(*last)
        while (
            self.server_pid is None
            or listening not in self.read_log()
            or not is_ready(self.url, self.headers)
        ):
            if self._ended.wait(0.02):
                raise self._failure(self.end_reason)
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready after {timeout_s:g} s")
        self.was_ready = True
        ticks = local_state.process_start_ticks(self.server_pid)
        if ticks is None:
            raise self._failure("ended as soon as it was ready")
        other = local_state.lookup(self.url)
        if other is not None and other.pid != self.server_pid:
            # Both servers claimed the port before either listened at it.
            raise self._failure(f"has its port in common with process {other.pid}")
        # This user's processes find the server by its record.
        record = local_state.ServerRecord(
            url=self.url,
            pid=self.server_pid,
            start_ticks=ticks,
            supervisor_pid=self._supervisor.pid,
            header=_HEADER,
            secret=self._serving.secret,
            repository=str(self._serving.repository),
            log=str(self.log),
            shm_prefix=self._serving.name,
        )
        local_state.register(record)

    def end(self) -> None:
        """End the server and wait until nothing of it is left; harmless when it has ended."""
        if self._stdout.closed or os.getpid() != self._owner:
            # The server of a forked child is its parent's.
            return
        with contextlib.suppress(OSError):
            # Not only closed: forked children hold the pipe open.
            self._stdin.write(b"\n")
            self._stdin.close()
        try:
            self._supervisor.wait(self._grace_s + 10.0)
        except subprocess.TimeoutExpired:
            logger.warning("the supervisor %d does not end; killing it", self._supervisor.pid)
            self._supervisor.kill()
            self._supervisor.wait()
        self._thread.join()
        self._stdout.close()
        local_state.remove(self.url, self.server_pid)

    def _listen(self) -> None:
        # Unbuffered: an exiting interpreter could not lock the buffered stream.
        events = os.fdopen(self._stdout.fileno(), "rb", buffering=0, closefd=False)
        try:
            for line in events:
                event = json.loads(line)
                if event["event"] == "started":
                    self.server_pid = event["pid"]
                elif event["event"] == "exited":
                    self.ended_on_request = event["on_request"]
                    self.crashed = event["code"] < 0 and not self.ended_on_request
                    self.end_reason = _describe_exit(event["code"])
                else:
                    self.end_reason = f"cannot be started: {event['message']}"
        finally:
            self._ended.set()

    def _failure(self, end: str) -> Exception:
        lines = _logs.error_lines(self.read_log().replace(self._serving.secret, "…"))
        quoted = "\n".join(f"  {line}" for text in lines for line in text.splitlines())
        return ServerStartError(
            f"the local server for {self._serving.repository} {end}. It said:\n"
            f"{quoted or '  (nothing)'}\nIts log: {self.log}",
            server=self.url,
        )


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
