"""A slot of one core and 2 GB, as batch systems have them, with the default limits."""

from __future__ import annotations

import time
from typing import Any

import awkward as ak
import numpy as np
import pytest
from distributed import Client
from tests.dask.conftest import local_cluster

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer

FIELDS = [f"f{i}" for i in range(10)]
pytestmark = [pytest.mark.server, pytest.mark.slow]  # a cluster of processes
MODEL = sonic.Model("tagger", {"x": sonic.Padded(FIELDS, 64)}, {"y": ["sum"]})
JETS, CONSTITUENTS = 50_000, 30


def score(number: int) -> tuple[float, float, list[float]]:
    """Score 128 MB of tensors; return when this began and ended, and the first and last score."""
    began = time.time()
    counts = np.full(JETS, CONSTITUENTS)
    column = np.full(counts.sum(), number, np.float32)
    constituents = ak.zip({name: ak.unflatten(column.copy(), counts) for name in FIELDS})
    scores = MODEL(constituents)["sum"]
    return began, time.time(), [float(scores[0]), float(scores[-1])]


def memory(dask_worker: Any) -> tuple[float, float, float, str]:
    """Return the greatest and the allowed memory, what was spilled, and the worker's state."""
    most = max(dask_worker.monitor.quantities["memory"])
    limit = dask_worker.memory_manager.memory_limit
    return most, limit, sum(dask_worker.data.spilled_total), dask_worker.status.name


def test_nothing_is_spilled_while_chunks_are_suspended() -> None:
    def slowly(inputs: Any) -> dict[str, Any]:
        server.requests.clear()  # of 0.5 GB in all
        time.sleep(0.02)
        return {"y": inputs["x"].sum(axis=(1, 2))[:, np.newaxis]}

    server = FakeServer({"tagger": FakeModel.of(MODEL, slowly)})
    with (
        server,
        local_cluster(1, memory_limit="2 GB") as cluster,
        Client(cluster) as client,
        sonic.connect(server.url, client=client),
    ):
        chunks = client.gather(client.map(score, range(4)))
        ((most, limit, spilled, state),) = client.run(memory).values()
    total = CONSTITUENTS * len(FIELDS)
    assert [scores for *_, scores in chunks] == [[total * n, total * n] for n in range(4)]
    assert max(sum(a <= began < b for a, b, _ in chunks) for began, *_ in chunks) > 1
    assert limit == 2_000_000_000
    assert most < 0.6 * limit  # from which dask spills
    assert (spilled, state) == (0, "running")
