"""One run of a local server, below the supervisor process that ends it in any case."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from sonic_coffea.errors import ServerStartError

if TYPE_CHECKING:
    from sonic_coffea.server._folders import ServerFolder
    from sonic_coffea.server.launch.runtimes import Launch

logger = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("_supervisor.py")


class Run:
    """A supervisor process and, below it, a server.

    When it ends, requests in progress may take `grace_s` to finish.

    Attributes
    ----------
    pid : int or None
        The server's process, once it has started.
    hidden : bool
        Whether other users cannot read the server's shared memory.
    ended, crashed, on_request : bool
        Whether it has ended; by a signal that nobody asked for; as its supervisor was told to.
    end : str
        How it has ended.
    """

    def __init__(
        self, launch: Launch, folder: ServerFolder, *, python: Path, log: Path, grace_s: float
    ) -> None:
        self.pid: int | None = None
        self.hidden = True
        self.ended = self.crashed = self.on_request = False
        self.end = "ended without a word"
        self._grace_s = grace_s
        lock = folder.open()
        job = {
            **dataclasses.asdict(launch),
            "owner": os.getpid(),
            "folder": str(folder.path),
            "shared_memory": folder.shared_memory,
            "log": str(log),
            "grace_s": grace_s,
        }
        try:
            # A session of its own: Ctrl-C reaches the owner, which ends the server in good order.
            self._supervisor = subprocess.Popen(
                [str(python), "-I", "-S", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                pass_fds=[lock],
            )
        except OSError as error:
            raise ServerStartError(
                f"cannot start the server's supervisor process: {error}"
            ) from None
        self.supervisor_pid = self._supervisor.pid
        self._stdin = cast("IO[bytes]", self._supervisor.stdin)
        self._stdout = cast("IO[bytes]", self._supervisor.stdout)
        self._events = select.poll()
        self._events.register(self._stdout, select.POLLIN | select.POLLHUP)
        self._unread = b""
        # If the supervisor has ended already, `wait` notices.
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(job).encode() + b"\n")
            self._stdin.flush()

    def wait(self, timeout_s: float) -> bool:
        """Wait for what the supervisor reports; return whether the server has ended."""
        while not self.ended and self._events.poll(timeout_s * 1000):
            data = os.read(self._stdout.fileno(), 65536)
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            self.ended = not data
            timeout_s = 0.0
        return self.ended

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.pid, self.hidden = event["pid"], event["hidden"]
        elif event["event"] == "exited":
            self.on_request = event["on_request"]
            self.crashed = event["code"] < 0 and not self.on_request
            self.end = _describe_exit(event["code"])
        else:
            self.end = f"cannot be started: {event['message']}"

    def stop(self) -> None:
        """End the server and wait until nothing of it is left; harmless when it has ended."""
        if self._stdout.closed:
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
        self._stdout.close()
        self.ended = True


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
