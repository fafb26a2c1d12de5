"""Requests with tensors in shared memory, to a server on this machine, and as plain messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import accelerator
import awkward as ak
import numpy as np
from harness import Results, run

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

ROW_BYTES = 4 * accelerator.FEATURES * accelerator.LENGTH
MODEL = sonic.Model(
    "accelerator",
    inputs={"x": sonic.Dense("x", (accelerator.FEATURES, accelerator.LENGTH))},
    outputs={"y": ["a", "b"]},
)


def measure(results: Results, *, quick: bool) -> None:
    """Time the same call both ways."""
    rng = np.random.default_rng(1)
    ratios = {}
    options: dict[str, Any] = {"max_request_bytes": 2_000_000_000}
    with (
        accelerator.serving(launch_s=0.0, row_s=0.0, max_rows=200_000) as server,
        Pool(Settings.make(server, shared_memory=True, **options)) as shared,
        Pool(Settings.make(server, shared_memory=False, **options)) as plain,
    ):
        for megabytes in (1,) if quick else (0.3, 1, 3, 10, 30, 100):
            rows = round(megabytes * 1e6 / ROW_BYTES)
            shape = rows, accelerator.FEATURES, accelerator.LENGTH
            objects = ak.Array({"x": rng.normal(size=shape).astype(np.float32)})
            ways = {
                f"{way}, {megabytes:g} MB": partial(MODEL, objects, pool=pool)
                for way, pool in (("messages", plain), ("shared memory", shared))
            }
            repeats = max(5, min(100, round(300 / megabytes)))
            ratios[f"{megabytes:g}"] = results.compare(ways, repeats, peer=True).ratio
    results.numbers["shared memory over messages, by megabytes"] = ratios


if __name__ == "__main__":
    title = "Shared memory: a model in a real Triton that only reads its input"
    run(__doc__, title, measure)
