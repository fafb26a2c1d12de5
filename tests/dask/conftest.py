"""A real Triton whose model takes its time, and dask clusters of processes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from distributed import Client, LocalCluster
from tests.server.support import function

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = sonic.Model("double", {"x": sonic.Row("pt")}, {"y": ["twice"]})


@pytest.fixture(scope="session")
def slow_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that doubles each row, in 50 ms for a request."""
    folder = tmp_path_factory.mktemp("slow")
    code = "import time\ndef double(x):\n    time.sleep(0.05)\n    return {'y': 2 * x}\n"
    double = function(folder / "double.py", code, width=1)
    options = {"max_batch_size": 64, "dynamic_batching": False}
    return sonic.build_repository(folder / "repository", {"double": double}, **options)


@pytest.fixture(scope="session")
def slow_server(slow_repository: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    with sonic.LocalServer(slow_repository) as server:
        yield server


def local_cluster(workers: int = 2, **options: Any) -> LocalCluster:
    """Return a cluster of workers with one thread each; its dashboard takes a free port."""
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0", **options
    )


@contextlib.contextmanager
def connected_cluster(
    servers: Any,
    workers: int = 1,
    *,
    processes: bool = False,
    memory_limit: str = "auto",
    **options: Any,
) -> Iterator[tuple[LocalCluster, Client, sonic.Pool]]:
    """Yield a cluster, its client, and its pool of servers."""
    with (
        local_cluster(workers, processes=processes, memory_limit=memory_limit) as cluster,
        Client(cluster) as client,
        sonic.connect(servers, client=client, **options) as pool,
    ):
        yield cluster, client, pool


@contextlib.contextmanager
def fake_server(client: Client, **options: Any) -> Iterator[tuple[FakeServer, sonic.Pool]]:
    """Yield a server that doubles, to which a client is connected, and the pool."""
    with (
        FakeServer(multiplied()) as server,
        sonic.connect(server.url, client=client, **options) as pool,
    ):
        yield server, pool


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Client]:
    """The client of one worker with one thread, for tests that leave it as it was.

    A worker of its own takes a test some seconds: it compiles, and numba takes its time to end.
    """
    with local_cluster(1) as cluster, Client(cluster) as client:
        yield client


def multiplied(factor: float = 2, **options: Any) -> dict[str, FakeModel]:
    """Return the models of a fake server, whose factor tells which server scored a row."""
    return {"double": FakeModel.of(MODEL, lambda inputs: {"y": factor * inputs["x"]}, **options)}


def jets(first: int, number: int) -> ak.Array:
    return ak.zip({"pt": np.arange(first, first + number, dtype=np.float32)})


def twice(scores: Any) -> list[float]:
    return ak.to_list(scores.twice)
