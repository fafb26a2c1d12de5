"""The process of a pool: what dask knows of it, and the switch interval."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._settings import Settings
from sonic_coffea.reporting import Statistics


@dataclass
class Hooks:
    """What pools ask and tell the process around them; a dask worker installs its own answers.

    Attributes
    ----------
    wait : callable
        Waits for an event of a pool with these settings, up to a timeout; False if that passes.
    memory_bytes : float or None
        The memory that tasks of this process may use; None if nobody knows.
    pool_of_task : callable
        Returns the pool of the client that sent the task of this thread; None if nobody knows.
    statistics : Statistics
        The tallies of all pools so far, also of those that are closed: they only grow.
    """

    wait: Callable[[threading.Event, float | None, Settings], bool]
    memory_bytes: float | None = None
    pool_of_task: Callable[[], Any] = lambda: None
    statistics: Statistics = field(default_factory=Statistics)

    def is_in_task(self) -> bool:
        """Return whether this thread runs a task of a dask worker that is connected."""
        try:
            return self.pool_of_task() is not None
        except ConfigError:  # the client of the task is not
            return True


def keep_thread(event: threading.Event, timeout_s: float | None, _: Settings) -> bool:
    """Wait for an event, and keep the thread meanwhile."""
    return event.wait(timeout_s)


hooks = Hooks(keep_thread)

# A response and the next request pass through four threads. Beside Python code that computes, each
# thread waits until the interpreter interrupts that code, after 5 ms by default, and the server
# would be idle.
_DEFAULT_S, _SOON_S = 0.005, 0.0005

# No lock: it could be locked for ever in a forked child.
_users: set[object] = set()


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
