"""Watching what a pool thinks of its servers while it has work."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sonic_coffea.pool import Pool


@contextlib.contextmanager
def circuits(*pools: Pool) -> Iterator[set[str]]:
    """Collect the states that the circuit breakers of pools are seen in."""
    seen: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen.update(server.circuit for pool in pools for server in pool.servers)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
