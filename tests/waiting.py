"""Waiting for what another thread, process or server is about to do."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# The environment of servers whose models' processes may stand still, as on a busy machine. By
# default, a server ends when one does, and is started again.
PATIENT = {"SONIC_COFFEA_STALL_S": "30"}


def until(
    condition: Callable[[], bool], timeout_s: float = 100.0, what: str = "the condition"
) -> None:
    """Return as soon as `condition` holds; it fails the test when that takes too long.

    What takes long is asked for seldom, as the machine has other things to do meanwhile.
    """
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        assert waited < timeout_s, f"{what} did not come true in {timeout_s} s"
        time.sleep(min(max(0.002, waited / 50), 0.02))


@contextlib.contextmanager
def ctrl_c_in(waiting: Any) -> Iterator[None]:
    """Press Ctrl-C once ``waiting.wait()`` is called, until this thread has heard it, once."""
    wait, called, heard = waiting.wait, threading.Event(), threading.Event()
    main = threading.get_ident()

    def noticed(timeout_s: float | None) -> bool:
        called.set()
        return wait(timeout_s)

    def handler(*_: Any) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def press() -> None:
        called.wait(30)
        while called.is_set() and not heard.is_set():
            # One that comes as a wait begins is heard only when the wait ends.
            signal.pthread_kill(main, signal.SIGINT)
            heard.wait(0.05)

    before = signal.signal(signal.SIGINT, handler)
    waiting.wait = noticed
    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        heard.set()
        called.set()
        thread.join()
        waiting.wait = wait
        signal.signal(signal.SIGINT, before)
