"""Servers that are unequal, killed, restarted or stopped during a run; and memory.

The stand-in accelerators in real Tritons are so slow that the machine's cores do not limit them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import accelerator
import awkward as ak
from accelerator import FIELDS, LENGTH, MODEL, collection
from harness import Results, run
from pool import ROWS, check, saturated

import sonic_coffea as sonic

STEP_S = 0.1


class Course:
    """Rows that a pool has scored, over time."""

    def __init__(self, pool: sonic.Pool) -> None:
        self._pool = pool
        self._over = threading.Event()
        self.points: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Course:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(STEP_S):
            self.points.append((time.perf_counter(), self._pool.statistics.total().rows))

    def recovery_s(self, change: float, until: float, rate: float) -> float:
        """Return how long after a change the rate of a second is 90 % of what it can be.

        It is infinite if that has not been so: the longest of several then says it, too.
        """
        width = round(1.0 / STEP_S)
        for (start, before), (stop, after) in zip(self.points, self.points[width:], strict=False):
            if start >= change and stop <= until and after - before >= 0.9 * rate * (stop - start):
                return start - change
        return float("inf")


def unequal(results: Results, folder: Path, seconds: float) -> None:
    """Compare two servers, one twice as fast, with the sum of both."""
    slow = accelerator.write(folder / "slow", launch_s=0.04, row_s=2e-5)
    fast = accelerator.write(folder / "fast", launch_s=0.02, row_s=1e-5)
    with sonic.LocalServer(slow) as slow_server, sonic.LocalServer(fast) as fast_server:
        limit = sum(
            saturated(server.url, seconds=seconds / 5) for server in (slow_server, fast_server)
        )
        jets = collection(2 * int(seconds * limit / 2), mean=5)
        with sonic.connect([slow_server, fast_server], shared_memory=False):
            MODEL(jets[: 2 * ROWS])
            start = time.perf_counter()
            scores = MODEL(jets)
            rate = len(ak.flatten(jets)) / (time.perf_counter() - start)
            check(scores, jets)
    results.note("two unequal servers: rows/s over the sum", rate / limit, at_least=0.9)


def disturbed(results: Results, folder: Path, seconds: float) -> None:
    """Kill one of two servers and start it again; later, stop it and let it go on."""
    repository = accelerator.write(folder / "equal", launch_s=0.02, row_s=1e-5)
    first, second = (sonic.LocalServer(repository, restart=False).start() for _ in range(2))
    with first, second:
        each = saturated(second.url, seconds=seconds / 3)
        jets = collection(2 * int(5 * seconds * 0.8 * each), mean=2)
        with sonic.connect([first, second], shared_memory=False) as pool, Course(pool) as course:
            MODEL(jets[:ROWS])
            assert first.pid is not None
            pending = MODEL.submit(jets)
            marks = {}

            def at(name: str) -> None:
                marks[name] = time.perf_counter()
                time.sleep(seconds)

            at("begin")
            os.kill(first.pid, signal.SIGKILL)
            at("killed")
            again = first.start()
            at("started again")
            os.kill(again.pid or 0, signal.SIGSTOP)
            at("stopped")
            os.kill(again.pid or 0, signal.SIGCONT)
            at("went on")
            check(pending.result(), jets)
            total = pool.statistics.total()
            again.stop()
    names = [*marks, "end"]
    marks["end"] = time.perf_counter()
    for name, following, servers in zip(names[:-1], names[1:], (2, 1, 2, 1, 2), strict=True):
        if name != "begin":
            recovery_s = course.recovery_s(marks[name], marks[following], servers * each)
            results.note(f"one of two {name}: seconds until 90 %", recovery_s, at_most=2.0)
    lost = len(ak.flatten(jets)) + len(ak.flatten(jets[:ROWS])) - total.rows
    results.note("rows lost or scored twice in the result", abs(lost), at_most=0)
    results.note("requests sent again", total.retries)
    begun = course.points[0][0]
    results.numbers["course"] = [(at - begun, rows) for at, rows in course.points]
    results.numbers["marks"] = {name: mark - begun for name, mark in marks.items()}


_MEMORY = """
import json, sys, threading, psutil
import awkward as ak
sys.path.insert(0, sys.argv[1])
import sonic_coffea as sonic
from accelerator import MODEL, collection

jets = collection(int(sys.argv[3]), mean=2)
with sonic.connect(sys.argv[2], max_in_flight_bytes=256_000_000, shared_memory=False):
    MODEL(jets[:5000])
    process = psutil.Process()
    before = process.memory_info().rss
    peak, over = before, threading.Event()
    def watch():
        global peak
        while not over.wait(0.02):
            peak = max(peak, process.memory_info().rss)
    thread = threading.Thread(target=watch)
    thread.start()
    scores = MODEL(jets)
    over.set()
    thread.join()
print(json.dumps({"peak": peak - before, "output": scores.nbytes, "input": jets.nbytes}))
"""


def memory(results: Results, url: str, rows: int) -> None:
    """Measure the most memory of a process while it scores many rows."""
    command = [sys.executable, "-c", _MEMORY, str(Path(__file__).parent), url, str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peaks = json.loads(done.stdout.splitlines()[-1])
    above = peaks["peak"] - peaks["output"]
    name = f"{rows:,} rows of {4 * len(FIELDS) * LENGTH} bytes, budget 256 MB"
    results.note(f"{name}: peak memory above input and output, MB", above / 1e6)
    results.note(f"{name}: the same over the budget", above / 256e6, at_most=1.5)


def measure(results: Results, *, quick: bool) -> None:
    """Measure all of it."""
    with accelerator.serving() as server:
        memory(results, server.url, 20_000 if quick else 2_000_000)
    with tempfile.TemporaryDirectory() as folder:
        unequal(results, Path(folder), 1.0 if quick else 10.0)
        disturbed(results, Path(folder), 1.0 if quick else 6.0)


if __name__ == "__main__":
    run(__doc__, "Failover: several stand-in accelerators in real Tritons", measure)
