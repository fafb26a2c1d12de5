"""What a process holds, before and after: threads, files, children, memory."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

BYTES, NATIVES = "bytes of memory", "threads of the kernel"


def held() -> Counter[str]:
    """Count Python's threads by their names, open files by their kinds, and the above."""
    gc.collect()
    process = psutil.Process()
    counts = Counter(thread.name for thread in threading.enumerate())
    counts.update(filter(None, map(_kind, Path("/proc/self/fd").iterdir())))
    counts[NATIVES], counts[BYTES] = process.num_threads(), process.memory_info().rss
    return counts


def settled(before: Counter[str], allowed: dict[str, int], *, within_s: float) -> Counter[str]:
    """Wait until no more is left than is allowed, as of threads that end by themselves.

    Return what there is more of in the end.
    """
    until = time.monotonic() + within_s
    while True:
        more = held() - before
        leaks = Counter({name: n for name, n in more.items() if n > allowed.get(name, 0)})
        if not leaks or time.monotonic() > until:
            return leaks
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
