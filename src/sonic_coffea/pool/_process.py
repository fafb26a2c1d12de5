"""The process of a pool: the wait for an event, the switch interval, and what dask knows of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._settings import Settings

Wait = Callable[[threading.Event, float | None, Settings], bool]

_wait: Wait | None = None
_memory_bytes: float | None = None
_pool_of_task: Callable[[], Any] | None = None

# A response and the next request pass through four threads. Beside Python code that computes, each
# thread waits until the interpreter interrupts that code, after 5 ms by default, and the server
# would be idle.
_DEFAULT_S, _SOON_S = 0.005, 0.0005

# No lock: it could be locked for ever in a forked child.
_users: set[object] = set()


def take_part(wait: Wait, memory_bytes: float | None, pool_of_task: Callable[[], Any]) -> None:
    """Install what a dask worker knows better than its process.

    Parameters
    ----------
    wait : callable
        Waits for an event, up to a timeout, in threads of this process; the settings are those of
        the pool that the event is of.
    memory_bytes : float or None
        The memory that the tasks of this process may use.
    pool_of_task : callable
        Returns the pool of the client that sent the task of this thread; None if nobody knows.
    """
    global _wait, _memory_bytes, _pool_of_task
    _wait, _memory_bytes, _pool_of_task = wait, memory_bytes, pool_of_task


def keep_thread() -> None:
    """Wait without dask, as in a forked child: the worker's other threads are its parent's."""
    global _wait  # noqa: PLW0603
    _wait = None


def pool_of_task() -> Any:
    """Return the pool of the client that sent the task of this thread; None if nobody knows."""
    return None if _pool_of_task is None else _pool_of_task()


def is_in_task() -> bool:
    """Return whether this thread runs a task of a dask worker that is connected."""
    try:
        return pool_of_task() is not None
    except ConfigError:  # the client of the task is not
        return True


def memory_bytes() -> float | None:
    """Return the memory that tasks of this process may use; None if nobody knows."""
    return _memory_bytes


def wait_for(event: threading.Event, timeout_s: float | None, settings: Settings) -> bool:
    """Wait for an event of a pool with these settings; False if the timeout passes first."""
    if _wait is None or event.is_set():
        return event.wait(timeout_s)
    return _wait(event, timeout_s, settings)


def switch_sooner(user: object) -> None:
    """Shorten the switch interval, unless the user has set it."""
    _users.add(user)
    if sys.getswitchinterval() == _DEFAULT_S:
        sys.setswitchinterval(_SOON_S)


def switch_as_before(user: object) -> None:
    """Undo `switch_sooner` when the last pool closes, unless the user has set the interval."""
    _users.discard(user)
    if not _users and sys.getswitchinterval() == _SOON_S:
        sys.setswitchinterval(_DEFAULT_S)
