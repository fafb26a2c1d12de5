"""Programs that tests start: whatever ends a test, nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

KEEPER = Path(__file__).with_name("keeper.py")
_STARTS = 5


def program(name: str) -> str | None:
    """Return where a program is, also one for administrators."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test where programs are not installed."""
    missing = [name for name in names if program(name) is None]
    reason = f"not installed on this machine: {', '.join(missing)}"
    return pytest.mark.skipif(bool(missing), reason=reason)


class Service:
    """A program below a keeper of its own, which ends it when this process ends.

    Parameters
    ----------
    argv : sequence of str or Path
        What runs.
    log : Path
        Where it writes.
    ready : callable
        Whether it does what it is for.
    settings : tuple of Path and str, optional
        A file to write, whose path is the last argument, and what is in it.
    env : mapping, optional
        Its environment; by default that of this process.
    grace_s : float
        How long it may take to end.
    leftovers : sequence of str
        Patterns of what it may leave in /dev/shm.
    aborts : str, optional
        What it says when it ends before it is ready, by no fault of the test: it is started again.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        log: Path,
        ready: Callable[[], bool],
        *,
        settings: tuple[Path, str] | None = None,
        env: Mapping[str, str] | None = None,
        grace_s: float = 2.0,
        leftovers: Sequence[str] = (),
        aborts: str | None = None,
    ) -> None:
        self.log = log
        self._ready, self._aborts = ready, aborts
        if settings is not None:
            settings[0].write_text(settings[1])
            argv = [*argv, settings[0]]
        self._job = {
            "argv": list(map(str, argv)),
            "log": str(log),
            "env": dict(os.environ if env is None else env),
            "grace_s": grace_s,
            "leftovers": list(leftovers),
        }
        self._keeper: Any = None

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
        try:
            job = json.dumps({**self._job, "owner": os.getpid()})
            self._keeper.stdin.write(f"{job}\n".encode())
            self._keeper.stdin.flush()
            self.pid = int(self._keeper.stdout.readline())
        except BaseException:
            self.end()
            raise

    def wait(self, timeout_s: float = 120.0) -> None:
        """Return when it is ready; raise with its log if it ends or is late."""
        deadline, starts = time.monotonic() + timeout_s, 1
        while not self._ready():
            if self.running and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            log = self.log.read_text(errors="replace")
            self.end()
            if self._aborts is None or self._aborts not in log or starts == _STARTS:
                raise RuntimeError(f"{self.log.stem} is not ready:\n{log}")
            starts += 1
            self.launch()

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

    def ends(self, number: signal.Signals) -> None:
        """Send it a signal, and wait until nothing of it is left."""
        self.send(number)
        until(lambda: not self.running, 60.0, f"the end of {self.log.stem}")

    def kill(self) -> None:
        """Have it die at once."""
        self.ends(signal.SIGKILL)

    def end(self) -> None:
        """End it, and wait until nothing of it is left; harmless when it has ended."""
        if self._keeper is not None:
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()
            self._keeper.wait(60)
            self._keeper.stdout.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def page(url: str) -> str:
    """Return a page of a web server on loopback."""
    with urlopen(url, timeout=60) as answer:  # noqa: S310
        text: str = answer.read().decode()
        return text


def answers(url: str) -> bool:
    """Whether a page of a web server is there."""
    try:
        page(url)
    except OSError:
        return False
    return True


def accepts(port: int) -> bool:
    """Whether somebody listens at a port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
