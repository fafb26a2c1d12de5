"""The owner's handle of the supervisor process: start it, hear from it, end it."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import threading
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ServerStartError

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
        self.exit_code: int | None = None
        self.asked = False
        self._grace_s = float(job["grace_s"])
        self._lock = threading.Lock()
        self._pending = b""
        self._ended = False
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
        content = json.dumps({**job, "owner": os.getpid()}).encode() + b"\n"
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except OSError:
            self.end()
            raise ServerStartError("the server's supervisor ended at once") from None

    def hear(self, timeout_s: float) -> None:
        """Take in what the supervisor has to say, waiting for it at most `timeout_s`."""
        with self._lock:
            self._hear(timeout_s)

    @property
    def running(self) -> bool:
        """Whether the supervisor, and so the server, has not ended."""
        self.hear(0.0)
        return not self._ended

    def end(self) -> None:
        """End the server and wait until nothing of it is left; harmless when it has ended."""
        with self._lock:
            process = self._process
            if process.stdin is not None and not process.stdin.closed:
                try:
                    process.stdin.close()
                except OSError as error:
                    logger.debug("the supervisor %d was gone: %s", self.pid, error)
            try:
                process.wait(self._grace_s + 10.0)
            except subprocess.TimeoutExpired:
                logger.warning("the supervisor process %d does not end; killing it", self.pid)
                process.kill()
                process.wait()
            self._hear(0.0)
            if process.stdout is not None:
                process.stdout.close()
            self._ended = True

    def disown(self) -> None:
        """Let go of it in a forked child, where it is somebody else's."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        # Popen would wait, in vain, for a process that is not this one's child.
        self._process.returncode = 0
        self._ended = True

    def _hear(self, timeout_s: float) -> None:
        stdout = self._process.stdout
        if stdout is None or stdout.closed:
            return
        poll = select.poll()
        poll.register(stdout.fileno(), select.POLLIN | select.POLLHUP)
        wait_ms = timeout_s * 1000.0
        while poll.poll(wait_ms):
            wait_ms = 0.0
            block = os.read(stdout.fileno(), 65536)
            if not block:
                self._ended = True
                return
            *lines, self._pending = (self._pending + block).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self.server_pid = event["pid"]
        elif kind == "exited":
            self.exit_code, self.asked = event["code"], event["asked"]
        elif kind == "failed":
            raise ServerStartError(f"cannot start the server: {event['message']}")
        elif kind == "hidden" and event["message"]:
            logger.debug(
                "the secret stays in the server's command line, where other users of this machine "
                "can read it: %s",
                event["message"],
            )
