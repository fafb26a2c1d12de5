"""Chunks that have as much inference as CPU work, and how long they take.

The least that a worker can take is what it takes without scores, and what the client itself
computes: packing, requests, scores. What is more is waiting.
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import accelerator
import awkward as ak
import numpy as np
from cluster import MODEL, compute, local
from distributed import Client
from harness import Results, finish, parser
from layouts import FIELDS, collection
from matplotlib.figure import Figure
from pool import saturated

import sonic_coffea as sonic

RATIO = "wall over that without scores and the client's own CPU time"
NONE, BLOCKING, SUSPENDED = "without scores", "blocking", "suspended"


@functools.cache
def objects(rows: int) -> ak.Array:
    """Return the rows of a chunk, made once a process."""
    return collection(rows, fields=FIELDS, mean=45)


def chunk(number: int, rows: int, cpu_s: float, *, scores: bool = True) -> int:
    """Half of the work before the scores are there, half after."""
    del number
    jets = objects(rows)
    compute(cpu_s / 2)
    scored = int(ak.count(MODEL(jets).a)) if scores else 0
    compute(cpu_s / 2)
    return scored


def client_s(rows: int, turns: int) -> float:
    """Return the CPU time that scoring a chunk takes the client, and nothing beside it."""
    jets = objects(rows)
    MODEL(jets)
    begun = time.process_time()
    for _ in range(turns):
        MODEL(jets)
    return (time.process_time() - begun) / turns


def measure(results: Results, folder: Path, rows: int, chunks: int, turns: int) -> None:
    """Compare the walls with that without scores, and the client's own CPU time."""
    repository = accelerator.write(folder)
    with sonic.LocalServer(repository) as server, local(1) as cluster, Client(cluster) as client:
        # As long as the server really takes, of which the stand-in sleeps some 80 %.
        infer_s = rows / saturated(server.url, seconds=0.2 if turns == 1 else 2.0)
        ratios: dict[str, list[float]] = {}
        for _ in range(turns):
            walls, own_s = {}, 0.0
            for way, most in {NONE: 0, BLOCKING: 0, SUSPENDED: 4}.items():
                with sonic.connect(server, client=client, max_suspended_chunks=most):
                    run: Any = functools.partial(
                        client.map, chunk, pure=False, rows=rows, scores=way != NONE
                    )
                    client.gather(run(range(2), cpu_s=0.0))
                    if way == BLOCKING:
                        own_s = client.submit(client_s, rows, 3, pure=False).result()
                    begun = time.perf_counter()
                    client.gather(run(range(chunks), cpu_s=infer_s))
                    walls[way] = time.perf_counter() - begun
            least_s = walls[NONE] + chunks * own_s
            for way, wall_s in walls.items():
                ratios.setdefault(way, []).append(wall_s / least_s)
            ratios.setdefault("own", []).append(own_s / infer_s)
    name = f"chunks of {rows} rows"
    medians = {way: float(np.median(samples)) for way, samples in ratios.items()}
    for way in (BLOCKING, SUSPENDED):
        results.note(
            f"{name}, {way}: {RATIO}", medians[way], at_most=1.05 if way == SUSPENDED else None
        )
    results.note(f"{name}: the client's own CPU time over the work", medians.pop("own"))
    results.numbers[RATIO] = medians


def draw(content: dict[str, Any]) -> Figure:
    """Draw the walls over the least."""
    ratios = content[RATIO]
    figure = Figure(figsize=(6, 2), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(ratios), list(ratios.values()))
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_xlabel(RATIO)
    return figure


def main() -> None:
    """Run it."""
    options = parser(__doc__ or "").parse_args()
    quick = options.quick
    results = Results("Beside CPU work: one dask worker with one thread")
    with tempfile.TemporaryDirectory() as folder:
        rows = 2_000 if quick else 15_000
        measure(results, Path(folder), rows, 4 if quick else 8, 1 if quick else 5)
    finish(results, options, draw)


if __name__ == "__main__":
    main()
