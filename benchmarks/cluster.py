"""Workers of a dask cluster: whether their cores wait, and how they share a server.

Up to 16 workers are real processes, with a stand-in accelerator in a real Triton. More workers are
simulated on virtual time, with the real code for limits and quotas.

Notes
-----
The limit for real workers is one warm process that sends prebuilt tensors. It is the best of
several runs with 2 to 16 requests in flight, before and after the workers run; several such
processes were not faster. The workers send messages, too, and their rows count while all workers
run. Workers and limit share the machine's cores with the server, but the limit's process neither
packs nor unpacks.

Suspended chunks hide the wait for scores, but not the CPU time for packing, sending and changing
threads. This time adds to the CPU time of the analysis, and shows unless inference is longer.

With 16 processes, the target is missed in the first seconds of a cluster: its scheduler looks for
the rate of the server, and measures its baseline RTT. In four turns of 8 s one after the other, the
processes reached 0.92, 0.95, 0.98 and 0.98.
"""

from __future__ import annotations

import functools
import time
from functools import partial
from typing import Any

import accelerator
import awkward as ak
import numpy as np
from accelerator import MODEL, collection, compute
from harness import Results, common_rates, run
from pool import ROWS, saturated
from simulation import Accelerator, Simulation, Work, fairness

import sonic_coffea as sonic

CHUNK = 4 * ROWS
# The median of so many counts: a machine may be busy for a moment.
TURNS = 3


def chunk(number: int, cpu_s: float, *, scores: bool = True) -> float:
    """Half of the work before the scores are there, half after."""
    jets = collection(ROWS, mean=2, seed=number)
    compute(cpu_s / 2)
    if not scores:
        compute(cpu_s / 2)
        return 0.0
    result = MODEL(jets)
    compute(cpu_s / 2)
    return float(ak.sum(result.a))


def waiting(results: Results, parts: list[float], chunks: int, cpu_s: float) -> None:
    """Compare wall time with the larger of that without scores and all inference time."""
    for part in parts:
        infer_s = part * cpu_s
        walls = {}
        with (
            accelerator.serving(launch_s=infer_s, row_s=0.0) as server,
            accelerator.workers(1, server) as client,
        ):
            for way, most in {"without scores": 0, "blocking": 0, "suspended": 4}.items():
                options: Any = {"max_suspended_chunks": most, "shared_memory": False}
                with sonic.connect(server, client=client, **options):
                    do = partial(client.map, chunk, pure=False, scores=way != "without scores")
                    client.gather(do(range(2), cpu_s=0.0))
                    start = time.perf_counter()
                    client.gather(do(range(chunks), cpu_s=cpu_s))
                    walls[way] = time.perf_counter() - start
        ideal = max(walls["without scores"], chunks * infer_s)
        name = (
            f"wall time over the larger of CPU's and inference's, inference {part:.0%} of the CPU's"
        )
        results.note(f"{name}, suspended", walls["suspended"] / ideal, at_most=1.15)
        results.note(f"{name}, blocking", walls["blocking"] / ideal)


@functools.cache
def jets_of_chunk() -> ak.Array:
    """Return the rows of a chunk, made once a process."""
    return collection(CHUNK, mean=10, seed=1)


def score_for(seconds: float) -> np.ndarray:
    """Score without pause; return when each chunk began and when it ended."""
    jets = jets_of_chunk()
    MODEL(jets)
    times = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.monotonic()
        assert ak.count(MODEL(jets).a) == CHUNK
        times.append((begun, time.monotonic()))
    return np.array(times)


def score_chunk(number: int) -> float:
    """Score a chunk as a task of its own; return when it ended."""
    del number
    assert ak.count(MODEL(jets_of_chunk()).a) == CHUNK
    return time.time()


def suspended_rate(url: str, seconds: float) -> float:
    """Return the rows a second of one worker whose chunks are tasks, which are suspended."""
    with accelerator.workers(1, url) as client:
        client.gather(client.map(score_chunk, range(16), pure=False))
        tasks, rates = round(seconds * 30 / TURNS), []
        for _ in range(TURNS):
            ends = sorted(client.gather(client.map(score_chunk, range(tasks), pure=False)))
            # Neither while the first begin, nor while only the last of them are answered.
            first, last = tasks // 5, tasks - 8
            rates.append(CHUNK * (last - first) / (ends[last] - ends[first]))
    return float(np.median(rates))


def scaling(results: Results, url: str, counts: list[int], seconds: float) -> None:
    """Compare the rows of all workers with those of a load generator, and with each other's."""
    limits = [saturated(url, seconds=seconds / 8)]
    turns_of = {}
    for workers in counts:
        with accelerator.workers(workers, url, max_suspended_chunks=0) as client:
            names = list(client.scheduler_info(n_workers=-1)["workers"])
            turns = []
            # The first time, they import what they need.
            for lasts_s in (0.0, *[seconds / TURNS] * TURNS):
                futures = [
                    client.submit(score_for, lasts_s, workers=[n], pure=False) for n in names
                ]
                turns.append(client.gather(futures))
            turns_of[workers] = sorted(turns[1:], key=lambda times: sum(common_rates(times)))
    single_rate = suspended_rate(url, seconds)
    limits.append(saturated(url, seconds=seconds / 8))
    results.numbers["rows a second of the saturated server, before and after"] = limits
    name = "1 worker process, suspended chunks: rows/s over the saturated server's"
    results.note(name, single_rate / max(limits), at_least=0.95)
    for workers, turns in turns_of.items():
        times = turns[TURNS // 2]
        each = [CHUNK * rate for rate in common_rates(times)]
        name, several = f"{workers} worker processes", workers > 1
        results.note(
            f"{name}: rows/s over the saturated server's",
            sum(each) / max(limits),
            at_least=0.95 if several else None,
        )
        results.note(f"{name}: fairness", fairness(each), at_least=0.95 if several else None)


def simulated(results: Results, counts: list[int], seconds: float) -> None:
    """As `scaling`, in virtual time."""
    for workers in counts:
        # Each has some tens of requests in the time that is looked at.
        warm = seconds + workers / 20
        until = warm + seconds + workers / 5
        simulation = Simulation([Accelerator()], Work())
        simulation.join(workers, within_s=1.0)
        simulation.run(until)
        name = f"{workers} simulated workers"
        rate = simulation.throughput(since=warm)
        results.note(f"{name}: rows/s over the saturated server's", rate, at_least=0.95)
        results.note(f"{name}: fairness", fairness(simulation.rows(since=warm)), at_least=0.95)


def clients(results: Results, counts: list[int], seconds: float) -> None:
    """How many clients a server has before a request takes 10 % longer."""
    # A chunk of 0.5 s of CPU time and 1,000 rows, as an analysis that scores a few jets an event.
    work = Work(rows=1000, cpu_s=0.5, max_suspended_chunks=1)
    medians = []
    for number in counts:
        simulation = Simulation([Accelerator()], work)
        simulation.join(number, within_s=1.0)
        simulation.run(10.0 + seconds)
        late = [a for a in simulation.answered if a.at > 10.0]
        medians.append(float(np.median([a.at - a.made_at for a in late])))
    slower = [n for n, m in zip(counts, medians, strict=True) if m > 1.1 * medians[0]]
    fits = max((n for n in counts if not slower or n < slower[0]), default=0)
    results.note("clients until a request takes 10 % longer (0.5 s of CPU, 1,000 rows)", fits)
    results.numbers["clients, median seconds"] = [counts, medians]


def measure(results: Results, *, quick: bool) -> None:
    """Measure real workers, and simulated ones."""
    with accelerator.serving() as server:
        scaling(results, server.url, [2] if quick else [1, 2, 4, 8, 16], 1.2 if quick else 24.0)
    parts = [1.0] if quick else [0.25, 1.0, 4.0]
    waiting(results, parts, 6 if quick else 32, 0.05 if quick else 0.2)
    simulated(results, [5] if quick else [1, 5, 16, 100, 1000], 5.0 if quick else 30.0)
    counts = [1, 2, 5, 10, 20, 30, 40, 50, 60, 65, 70, 75, 80, 90, 100, 120]
    clients(results, [1, 50] if quick else counts, 5.0 if quick else 60.0)


if __name__ == "__main__":
    title = "Cluster: dask workers and a stand-in accelerator in a real Triton"
    run(__doc__, title, measure)
