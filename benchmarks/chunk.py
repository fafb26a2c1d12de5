"""The CPU time of one chunk by part, with a server that answers at once.

A run without a profiler gives the CPU time, and the system's clocks give the part in gRPC's own
threads. A second run, with a profiler of the Python threads, divides the rest. The profiler
overestimates parts with many small calls.

Notes
-----
In a large chunk, gRPC takes more of the CPU time than any other part, most of it in gRPC's own
threads, because it copies the message on its way to the socket. Layouts, which pack and put the
scores back, take a third. On one machine, shared memory saves both copies. Over a network, smaller
types and `Bucketed` or `Flat` send less.

In a small chunk, a jet costs several times as much as in a large chunk. So large chunks are better.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import accelerator
import numpy as np
import yappi
from accelerator import MODEL, collection
from harness import Results, run

import sonic_coffea as sonic

# The first that a file's path has in it.
PARTS = {
    "sonic_coffea/layouts": "layouts: tensors and scores",
    "sonic_coffea/transport": "transport: messages",
    "sonic_coffea/pool": "pool: which, when, where",
    "sonic_coffea": "model and pending call",
    "tritonclient": "transport: messages",
    "google/": "transport: messages",
    "grpc": "gRPC",
    "awkward": "awkward",
    "numpy": "numpy",
    "threading": "locks and threads",
}
OTHER, BEYOND = "rest of Python", "gRPC's own threads"


def part_of(module: str) -> str:
    """Return what a function belongs to."""
    return next((part for place, part in PARTS.items() if place in module), OTHER)


def beyond_s() -> dict[int, float]:
    """Return the CPU time of each thread that is none of Python's."""
    ours = {thread.native_id for thread in threading.enumerate()}
    times = {}
    for number in {int(task.name) for task in Path("/proc/self/task").iterdir()} - ours:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            times[number] = time.clock_gettime((~number << 3) | 6)  # Linux's name of its clock
    return times


def cpu_s(jets: Any, turns: int) -> tuple[float, float, float]:
    """Return a call's CPU time, that beyond Python's threads, and the wall time, undisturbed."""
    before, cpu, wall = beyond_s(), time.process_time(), time.perf_counter()
    for _ in range(turns):
        MODEL(jets)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    beyond = sum(taken - before.get(number, 0.0) for number, taken in beyond_s().items())
    return cpu / turns, beyond / turns, wall / turns


def profiled(jets: Any, turns: int) -> Counter[str]:
    """Return what part of Python's CPU time each part has."""
    yappi.set_clock_type("cpu")
    yappi.clear_stats()
    yappi.start()
    try:
        for _ in range(turns):
            MODEL(jets)
    finally:
        yappi.stop()
    stats = yappi.get_func_stats()
    total = sum(function.tsub for function in stats)
    parts: Counter[str] = Counter()
    for function in stats:
        parts[part_of(function.module)] += function.tsub / total
    return parts


def split(
    results: Results, name: str, rows: int, turns: int, *, jet_us: float | None = None
) -> None:
    """Split the CPU time of a chunk, of which a jet may have so much."""
    jets = collection(rows, mean=45)
    MODEL(jets)
    used, beyond, wall = np.median([cpu_s(jets, turns) for _ in range(5)], axis=0)
    parts = profiled(jets, turns)
    python = 1 - beyond / used
    shares = Counter({part: share * python for part, share in parts.items()})
    shares[BEYOND] = beyond / used
    results.note(f"{name}: wall time, ms", wall * 1e3)
    results.note(f"{name}: CPU time, ms", used * 1e3)
    if jet_us is not None:
        results.note(f"{name}: CPU time of a jet, µs", used / rows * 1e6, at_most=jet_us)
    for part, share in shares.most_common():
        results.note(f"{name}: {part}, %", 100 * share)
    results.numbers.setdefault("shares of the CPU time", {})[name] = dict(shares.most_common())


def measure(results: Results, *, quick: bool) -> None:
    """Split the CPU time of a small chunk, and of a large one by both ways to send."""
    rows, turns = (2_000, 2) if quick else (20_000, 20)
    with accelerator.serving(launch_s=0.0, row_s=0.0) as server:
        with sonic.connect(server, shared_memory=False):
            split(results, "100 jets", 100, 20 if quick else 300)
            split(results, "20,000 jets", rows, turns, jet_us=2.5)
        with sonic.connect(server, shared_memory=True):
            split(results, "20,000 jets, shared memory", rows, turns, jet_us=1.2)


if __name__ == "__main__":
    run(__doc__, "Chunk: where the client's CPU time goes", measure)
