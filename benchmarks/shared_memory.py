"""Requests with tensors in shared memory, to a server on this machine, and as plain messages."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerator
import awkward as ak
import numpy as np
from harness import Results, finish, interleaved, parser
from matplotlib.figure import Figure

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW_BYTES = 4 * accelerator.FEATURES * accelerator.LENGTH
MODEL = sonic.Model(
    "accelerator",
    inputs={"x": sonic.Dense("x", (accelerator.FEATURES, accelerator.LENGTH))},
    outputs={"y": ["a", "b"]},
)


def measure(results: Results, server: sonic.LocalServer, sizes: Sequence[float]) -> None:
    """Time the same call both ways."""
    rng = np.random.default_rng(1)
    ratios = {}
    with (
        Pool(Settings.make(server, shared_memory=True, max_request_bytes=2_000_000_000)) as shared,
        Pool(Settings.make(server, shared_memory=False, max_request_bytes=2_000_000_000)) as plain,
    ):
        for megabytes in sizes:
            rows = round(megabytes * 1e6 / ROW_BYTES)
            shape = rows, accelerator.FEATURES, accelerator.LENGTH
            objects = ak.Array({"x": rng.normal(size=shape).astype(np.float32)})
            names = [f"{way}, {megabytes:g} MB" for way in ("messages", "shared memory")]
            times = interleaved(
                {
                    names[0]: lambda o=objects: MODEL(o, pool=plain),
                    names[1]: lambda o=objects: MODEL(o, pool=shared),
                },
                max(5, min(100, round(300 / megabytes))),
                title=f"{megabytes:g} MB",
            )
            results.add(times, names[0])
            ratios[f"{megabytes:g}"] = results.add(times, names[1], against=names[0]).ratio
    results.numbers["shared memory over messages, by megabytes"] = ratios


def draw(content: dict[str, Any]) -> Figure:
    """Draw the ratio by size."""
    ratios = content["shared memory over messages, by megabytes"]
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([float(size) for size in ratios], list(ratios.values()), "o-")
    axes.axhline(1.0, color="gray", linewidth=1)
    axes.set(xscale="log", xlabel="tensors of a request (MB)", ylim=0)
    axes.set_ylabel("time with shared memory over messages")
    return figure


def main() -> None:
    """Run it."""
    options = parser(__doc__ or "").parse_args()
    results = Results("Shared memory: a model in a real Triton that only reads its input")
    with tempfile.TemporaryDirectory() as folder:
        repository = accelerator.write(Path(folder), launch_s=0.0, row_s=0.0, max_rows=200_000)
        with sonic.LocalServer(repository) as server:
            measure(results, server, (1,) if options.quick else (0.3, 1, 3, 10, 30, 100))
    finish(results, options, draw)


if __name__ == "__main__":
    main()
