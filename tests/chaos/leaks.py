"""What processes hold, before and after: threads, files, children, memory."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Attributes
    ----------
    threads, files : Counter
        Names of Python's threads, and kinds of open files.
    natives : int
        Threads, with those that Python does not know.
    memory_bytes : int
        Resident.
    """

    threads: Counter[str]
    files: Counter[str]
    natives: int
    memory_bytes: int

    @classmethod
    def now(cls) -> Held:
        """Look at this process."""
        gc.collect()
        process = psutil.Process()
        return cls(
            threads=Counter(thread.name for thread in threading.enumerate()),
            files=Counter(filter(None, map(_kind, Path("/proc/self/fd").iterdir()))),
            natives=process.num_threads(),
            memory_bytes=process.memory_info().rss,
        )

    def leaked_since(self, before: Held, *, memory_bytes: int, natives: int = 0) -> list[str]:
        """Say what there is more of than before, memory and threads of the kernel by so much."""
        more = {
            "threads": dict(self.threads - before.threads),
            "open files": dict(self.files - before.files),
            "threads of the kernel": max(0, self.natives - before.natives - natives),
        }
        leaks = [f"{what}: {these}" for what, these in more.items() if these]
        grown = self.memory_bytes - before.memory_bytes
        if grown > memory_bytes:
            leaks.append(f"memory: {grown / 1e6:.0f} MB more")
        return leaks


def settled(before: Held, *, within_s: float, **kept: int) -> tuple[Held, list[str]]:
    """Wait until nothing is left, as of threads that end by themselves; say what still is."""
    until = time.monotonic() + within_s
    while True:
        held = Held.now()
        leaks = held.leaked_since(before, **kept)
        if not leaks or time.monotonic() > until:
            return held, leaks
        time.sleep(0.2)


def children() -> list[str]:
    """Return the processes below this one, but for the one that Python keeps for itself."""
    below = psutil.Process().children(recursive=True)
    lines = {child.pid: " ".join(child.cmdline()) for child in below}
    return [f"{pid} {line[:100]}" for pid, line in lines.items() if "resource_tracker" not in line]


def _kind(descriptor: Path) -> str:
    try:
        target = str(descriptor.readlink())
    except OSError:  # closed since, as that of the folder itself is
        return ""
    return target.partition(":")[0] if ":[" in target else target
