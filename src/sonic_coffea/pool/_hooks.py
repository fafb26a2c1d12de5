"""Hooks for what runs this process's tasks, such as a dask worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sonic_coffea.pool._memory_limit import memory_limit_bytes

Wait = Callable[[threading.Event, float | None], bool]

_wait: Wait = threading.Event.wait
_memory_bytes: float | None = None


def take_part(wait: Wait, memory_bytes: float | None = None) -> None:
    """Install what waits for an event in threads of this process, up to a number of seconds.

    ``memory_bytes`` is the memory that the tasks of this process may use.
    """
    global _wait, _memory_bytes
    _wait, _memory_bytes = wait, memory_bytes


def memory_bytes() -> float | None:
    """Return the memory that tasks of this process may use; None if nothing limits it."""
    return memory_limit_bytes() if _memory_bytes is None else _memory_bytes


def wait_for(event: threading.Event, timeout_s: float | None) -> bool:
    """Wait for an event; False if the time is over first."""
    return event.is_set() or _wait(event, timeout_s)
