"""The memory that this process may use, as the system limits it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# By version of control groups: the controller in /proc/self/cgroup, where its groups are, and the
# file with a group's limit.
_CGROUPS = {
    "": (PurePosixPath("sys/fs/cgroup"), "memory.max"),
    "memory": (PurePosixPath("sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the least of the limits of this process; None if the system tells of none.

    These are the machine's memory, the control groups of batch systems and containers, and limits
    of the shell (``ulimit -v``, ``ulimit -m``).

    Parameters
    ----------
    root : pathlib.Path
        Where the system's files are.
    """
    return min([*_machine(), *_control_groups(root), *_resource_limits()], default=None)


def _machine() -> Iterator[int]:
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_groups(root: Path) -> Iterator[int]:
    """Yield the limits of the groups of this process, and of those that they are in."""
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
