"""Programs that tests start: whatever ends a test, nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

KEEPER = Path(__file__).with_name("keeper.py")


class Service:
    """A program below a keeper of its own, which ends it when this process ends.

    Parameters
    ----------
    argv : sequence of str
        What runs.
    log : Path
        Where it writes.
    ready : callable
        Whether it does what it is for.
    env : mapping, optional
        Its environment; by default that of this process.
    grace_s : float
        How long it may take to end.
    leftovers : sequence of str
        Patterns of what it may leave in /dev/shm.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        ready: Callable[[], bool],
        *,
        env: Mapping[str, str] | None = None,
        grace_s: float = 2.0,
        leftovers: Sequence[str] = (),
    ) -> None:
        self.log = log
        self._ready = ready
        self._job = {
            "argv": list(argv),
            "log": str(log),
            "env": dict(os.environ if env is None else env),
            "grace_s": grace_s,
            "leftovers": list(leftovers),
        }
        self._keeper: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start it, and do not wait; harmless when it runs."""
        if self.running:
            return
        self.end()
        # A session of its own: Ctrl-C reaches this process alone, which ends it in good order.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        stdin, stdout = self._pipes
        try:
            stdin.write(json.dumps({**self._job, "owner": os.getpid()}).encode() + b"\n")
            stdin.flush()
            self.pid = int(stdout.readline())
        except BaseException:
            self.end()
            raise

    def wait(self, timeout_s: float = 120.0) -> None:
        """Return when it is ready; raise with its log if it ends or is late."""
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            if not self.running or time.monotonic() > deadline:
                log = self.log.read_text(errors="replace")
                self.end()
                raise RuntimeError(f"{self.log.stem} is not ready:\n{log}")
            time.sleep(0.02)

    def start(self) -> None:
        """Start it, and return when it is ready; harmless when it runs."""
        self.launch()
        self.wait()

    @property
    def running(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Have it die at once, and wait until nothing of it is left."""
        self.send(signal.SIGKILL)
        until(lambda: not self.running, 30.0, f"the end of {self.log.stem}")

    def end(self) -> None:
        """End it, and wait until nothing of it is left; harmless when it has ended."""
        if self._keeper is not None:
            stdin, stdout = self._pipes
            with contextlib.suppress(OSError):
                stdin.close()
            self._keeper.wait(60)
            stdout.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        return self._keeper.stdin, self._keeper.stdout


def accepts(port: int, address: str = "127.0.0.1") -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True
