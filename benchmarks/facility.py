"""Whether `sonic-coffea plan` is right: its plans for 1 to 16 workers, and what the workers do.

`sonic-coffea bench` measures a stand-in accelerator in a real Triton, and a run with a fake server
measures the CPU time of a chunk, as the documentation says. Then real dask workers, processes with
one thread each, run with the server. A sleep stands for their CPU work, because there are more
workers than cores.
"""

from __future__ import annotations

import time

import accelerator
import numpy as np
from accelerator import MODEL, collection
from harness import Results, run

import sonic_coffea as sonic
from sonic_coffea.pool import Settings
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.tools import measure as bench
from sonic_coffea.tools import plan

# Slow enough that the machine's cores are not what limits it.
LAUNCH_S, ROW_S, ROWS = 20e-3, 1e-4, 256
SLEEP_S = 0.4
RATE = "rows a second"


def chunk(number: int) -> tuple[float, int]:
    """Score the jets of a chunk after its CPU work; return when it was over, and its jets."""
    jets = collection(ROWS, mean=10, seed=number % 10)
    time.sleep(SLEEP_S)
    scores = MODEL(jets)
    return time.time(), int(sum(map(len, scores.a)))


def cpu_s(turns: int) -> float:
    """Return the time of a chunk if scores come at once."""
    model = FakeModel.of(MODEL, lambda inputs: {"y": inputs["x"][:, :2, 0]}, max_rows=ROWS)
    with FakeServer({"accelerator": model}) as fake, sonic.connect(fake.url, shared_memory=False):
        times = []
        for number in range(turns + 1):
            begun = time.perf_counter()
            chunk(number)
            times.append(time.perf_counter() - begun)
    return float(np.median(times[1:]))


def rate(workers: int, url: str, seconds: float) -> float:
    """Return the rows a second of so many workers, when they have settled."""
    number = round(workers * seconds / SLEEP_S) + 8 * workers
    with accelerator.workers(workers, url) as client:
        client.gather(client.map(chunk, range(2 * workers), pure=False))
        out = client.gather(client.map(chunk, range(number), pure=False))
    at, rows = (np.array(column) for column in zip(*sorted(out), strict=True))
    # Neither while the first begin, nor while only the last of them work.
    first, last = len(at) // 4, len(at) - 3 * workers
    return float(rows[first + 1 : last + 1].sum() / (at[last] - at[first]))


def measure(results: Results, *, quick: bool) -> None:
    """Compare what was planned with what was done."""
    counts, seconds = ([1], 2.0) if quick else ([1, 2, 4, 8, 12, 16], 20.0)
    table = []
    with accelerator.serving(launch_s=LAUNCH_S, row_s=ROW_S, max_rows=ROWS) as server:
        settings = Settings.make(server, shared_memory=False)
        curve = bench(settings, "accelerator", seconds=0.1 if quick else 1.0)
        busy_s = cpu_s(5)
        for workers in counts:
            planned = plan(
                curve, cores=workers, cpu_s=busy_s, rows_per_event=ROWS, events=1e6, servers=1
            )
            done = rate(workers, server.url, seconds)
            expected = planned.events_per_s * ROWS
            table.append([workers, done, expected])
            results.note(f"{workers} workers: {RATE}", done)
            off = abs(expected / done - 1)
            results.note(f"{workers} workers: planned, off by", off, at_most=0.1)
    results.numbers["workers, measured, planned"] = table


if __name__ == "__main__":
    title = "Facility: what is planned for 1 to 16 workers, and what they do"
    run(__doc__, title, measure)
