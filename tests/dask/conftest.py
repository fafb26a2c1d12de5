"""Servers of a model that doubles, one of which takes its time, and dask clusters."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster
from tests.doubling import double, multiplier, served

import sonic_coffea as sonic
from sonic_coffea.testing import FakeServer


class SlowServer(FakeServer):
    """Doubles each row, in 50 ms for a request, one after the other; its statistics say so."""

    def __init__(self) -> None:
        turn = threading.Lock()

        def slowly(inputs: Any) -> dict[str, Any]:
            with turn:
                time.sleep(0.05)
            return double(inputs)

        super().__init__(served(slowly))

    def answer(self, method: str, request: Any, context: Any) -> Any:
        answer = super().answer(method, request, context)
        if method == "ModelStatistics":
            counted = answer.model_stats[0].inference_stats
            counted.compute_infer.ns = 50_000_000 * counted.success.count
        return answer


@pytest.fixture(scope="module")
def slow_server() -> Iterator[FakeServer]:
    with SlowServer() as server:
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
    with multiplier() as server, sonic.connect(server.url, client=client, **options) as pool:
        yield server, pool


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Client]:
    """The client of one worker with one thread, for tests that leave it as it was.

    A worker of its own takes a test some seconds: it compiles, and numba takes its time to end.
    """
    with local_cluster(1) as cluster, Client(cluster) as client:
        yield client
