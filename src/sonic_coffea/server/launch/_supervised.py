"""The owner's handle of the supervisor process: start it, hear from it, end it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
from pathlib import Path
from typing import IO, Any, cast

from sonic_coffea.errors import ServerStartError

__all__ = ["SupervisedServer"]

logger = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("_supervisor.py")


class SupervisedServer:
    """A supervisor process and, below it, a server.

    Parameters
    ----------
    python : Path
        The interpreter to run it with.
    job : dict
        What `_supervisor.main` reads: argv, env, secret, log, record, shm_prefix, grace_s, cleanup.
    """

    def __init__(self, python: Path, job: dict[str, Any]) -> None:
        self.server_pid: int | None = None
        self.failure = "ended without a word"
        self.asked = False
        self._grace_s = float(job["grace_s"])
        self._ended = threading.Event()
        try:
            # A session of its own: Ctrl-C reaches the owner, which ends the server in good order.
            self._process = subprocess.Popen(
                [str(python), "-I", "-S", str(_SCRIPT)],
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
        self.pid = self._process.pid
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._stdout = cast("IO[bytes]", self._process.stdout)
        self._thread = threading.Thread(target=self._listen, name="sonic-supervised", daemon=True)
        self._thread.start()
        # If it has ended already, it is heard to.
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps({**job, "owner": os.getpid()}).encode() + b"\n")
            self._stdin.flush()

    @property
    def running(self) -> bool:
        """Whether the supervisor, and so the server, has not ended."""
        return not self._ended.is_set()

    def ended_within(self, timeout_s: float) -> bool:
        """Wait for the end for a while, and return whether it came."""
        return self._ended.wait(timeout_s)

    def end(self) -> None:
        """End the server and wait until nothing of it is left; harmless when it has ended."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(self._grace_s + 10.0)
        except subprocess.TimeoutExpired:
            logger.warning("the supervisor process %d does not end; killing it", self.pid)
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._stdout.close()

    def disown(self) -> None:
        """Let go of it in a forked child, where it is somebody else's."""
        self._stdin.close()
        self._stdout.close()
        # Popen would wait, in vain, for a process that is not this one's child.
        self._process.returncode = 0
        self._ended.set()

    def _listen(self) -> None:
        # Not by the buffered stream, which an exiting interpreter could not lock.
        pending, fd = b"", self._stdout.fileno()
        while block := os.read(fd, 65536):
            *lines, pending = (pending + block).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        self._ended.set()

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self.server_pid = event["pid"]
        elif kind == "exited":
            self.failure, self.asked = f"ended with exit status {event['code']}", event["asked"]
        elif kind == "failed":
            self.failure = f"cannot be started: {event['message']}"
        elif kind == "hidden" and event["message"]:
            logger.debug(
                "the secret stays in the server's command line, where other users of this machine "
                "can read it: %s",
                event["message"],
            )
