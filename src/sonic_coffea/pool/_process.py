"""The process of a pool: the wait for an event, the memory limit, and the switch interval.

A dask worker installs its own wait and memory limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

Wait = Callable[[threading.Event, float | None], bool]

_wait: Wait = threading.Event.wait
_memory_bytes: float | None = None
_pool_of_task: Callable[[], Any] | None = None

# By version of control groups: the controller in /proc/self/cgroup, where its groups are, and the
# file with a group's limit.
_CGROUPS = {
    "": (PurePosixPath("sys/fs/cgroup"), "memory.max"),
    "memory": (PurePosixPath("sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}

# A response and the next request pass through four threads. Beside Python code that computes, each
# thread waits until the interpreter interrupts that code, after 5 ms by default, and the server
# would be idle.
_DEFAULT_S, _SOON_S = 0.005, 0.0005

# No lock: it could be locked for ever in a forked child.
_users: set[object] = set()


def take_part(
    wait: Wait,
    memory_bytes: float | None = None,
    pool_of_task: Callable[[], Any] | None = None,
) -> None:
    """Install what a dask worker knows better than its process.

    Parameters
    ----------
    wait : callable
        Waits for an event, up to a timeout, in threads of this process.
    memory_bytes : float or None
        The memory that the tasks of this process may use.
    pool_of_task : callable
        Returns the pool of the client that sent the task of this thread; None if nobody knows.
    """
    global _wait, _memory_bytes, _pool_of_task
    _wait, _memory_bytes, _pool_of_task = wait, memory_bytes, pool_of_task


def pool_of_task() -> Any:
    """Return the pool of the client that sent the task of this thread; None if nobody knows."""
    return None if _pool_of_task is None else _pool_of_task()


def memory_bytes() -> float | None:
    """Return the memory that tasks of this process may use; None if it is not limited."""
    return memory_limit_bytes() if _memory_bytes is None else _memory_bytes


def wait_for(event: threading.Event, timeout_s: float | None) -> bool:
    """Wait for an event; False if the timeout passes first."""
    return event.is_set() or _wait(event, timeout_s)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the lowest memory limit of this process; None if the system has none.

    Limits are the machine's memory, control groups of batch systems and containers, and those of
    the shell (``ulimit -v``, ``ulimit -m``). ``root`` is the folder of the system's files.
    """
    return min([*_machine(), *_control_groups(root), *_resource_limits()], default=None)


def _machine() -> Iterator[int]:
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_groups(root: Path) -> Iterator[int]:
    """Yield the limits of the groups of this process, and of their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in {"", "memory"}.intersection(controllers.split(",")):
            mount, name = _CGROUPS[controller]
            group = PurePosixPath(path)
            for folder in (group, *group.parents):
                file = root / mount / str(folder).lstrip("/") / name
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    yield int(file.read_text())


def _resource_limits() -> Iterator[int]:
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_RSS):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield limit


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
