"""Processes of tests: whatever ends a test, nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.ports import held_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self

    from tests.network.tritons import Triton

KEEPER = Path(__file__).with_name("keeper.py")


class Kept:
    """A process below a keeper of its own, which ends it when this process ends.

    Parameters
    ----------
    argv : sequence of str
        What runs.
    log : Path
        Where it writes.
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
        *,
        env: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
        leftovers: Sequence[str] = (),
    ) -> None:
        self.log = log
        job = {
            "argv": list(argv),
            "log": str(log),
            "env": dict(os.environ if env is None else env),
            "grace_s": grace_s,
            "leftovers": list(leftovers),
            "owner": os.getpid(),
        }
        # A session of its own: Ctrl-C reaches this process alone, which ends it in good order.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._stdin, self._stdout = self._keeper.stdin, self._keeper.stdout
        try:
            self._stdin.write(json.dumps(job).encode() + b"\n")
            self._stdin.flush()
            self.pid = int(self._stdout.readline())
        except BaseException:
            self.end()
            raise

    @property
    def running(self) -> bool:
        return self._keeper.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal; harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, and wait until nothing of it is left."""
        self.send(signal.SIGKILL)
        self._keeper.wait(30)

    def end(self) -> None:
        """End the process, and wait until nothing of it is left; harmless when it has ended."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._keeper.wait(60)
        self._stdout.close()

    def wait(self, ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Return when it is ready; raise with its log if it ends or is late."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running or time.monotonic() > deadline:
                log = self.log.read_text(errors="replace")
                self.end()
                raise RuntimeError(f"{self.log.stem} is not ready:\n{log}")
            time.sleep(0.02)


class Proxy:
    """A program on loopback that leads to servers.

    Parameters
    ----------
    argv : sequence of str
        What runs.
    log : Path
        Where it writes.
    port : int
        Where it listens.
    ready : callable, optional
        Whether it leads to servers; by default, whether it listens.
    """

    ports = 1

    def __init__(
        self, argv: Sequence[str], log: Path, port: int, ready: Callable[[], bool] | None = None
    ) -> None:
        self.url = f"grpc://127.0.0.1:{port}"
        self._run = partial(Kept, argv, log, grace_s=2.0)
        self._ready = ready or partial(accepts, port)
        self._kept: Kept | None = None

    @classmethod
    @contextlib.contextmanager
    def before(cls, tritons: Sequence[Triton], folder: Path, **settings: Any) -> Iterator[Self]:
        """Run one before Tritons."""
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(held_port()) for _ in range(cls.ports)]
            running: Any = cls
            yield stack.enter_context(running(tritons, folder, *ports, **settings))

    def start(self) -> None:
        """Start it, and return when it is ready."""
        self._kept = self._run()
        self._kept.wait(self._ready)

    def kill(self) -> None:
        """Have it die at once."""
        assert self._kept is not None
        self._kept.kill()

    def end(self) -> None:
        """End it; harmless when it has ended."""
        if self._kept is not None:
            self._kept.end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def accepts(port: int, address: str = "127.0.0.1") -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True
