"""Threads that are given back, and whose tasks do not wait for them longer than they may."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from distributed import Client
from tests.dask.conftest import MODEL, jets, local_cluster, twice
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.server  # and a cluster

# Tasks of a cluster in this process find these by their names.
BUSY, GO_ON = threading.Event(), threading.Event()
TIMEOUT_S, MOST_S = 2.0, 20.0


def keep_busy() -> None:
    BUSY.set()
    GO_ON.wait(60)


def score_in_time() -> tuple[float, list[float]]:
    begun = time.monotonic()
    try:
        scores = twice(MODEL(jets(1, 2), timeout_s=TIMEOUT_S))
    except errors.DeadlineError:
        scores = []
    return time.monotonic() - begun, scores


@pytest.fixture
def client() -> Iterator[Client]:
    BUSY.clear()
    GO_ON.clear()
    with local_cluster(1, processes=False) as cluster, Client(cluster) as client:
        yield client
        GO_ON.set()


@pytest.mark.parametrize("answers", [True, False])
def test_a_deadline_does_not_wait_for_a_thread(client: Client, answers: bool) -> None:
    """The worker's only thread has another task meanwhile, which takes a minute."""
    served = FakeModel.of(MODEL, lambda inputs: {"y": 2 * inputs["x"]})
    with (
        FakeServer({"double": served}) as server,
        sonic.connect(server.url, client=client) as pool,
    ):
        assert client.submit(lambda: twice(MODEL(jets(0, 1)))).result() == [0.0]
        server.hold()
        scoring = client.submit(score_in_time)
        until(lambda: pool.servers[0].in_flight > 0)
        other = client.submit(keep_busy)
        until(BUSY.is_set)
        if answers:
            server.release()
        took_s, scores = scoring.result()
        assert not other.done()
        assert scores == ([2.0, 4.0] if answers else [])
        assert TIMEOUT_S <= took_s < MOST_S
        server.release()
        GO_ON.set()
        # The worker is as it was: one thread, which does one thing after another.
        assert client.gather(client.map(_numbers_at_once, range(4))) == [1] * 4


RUNNING: list[int] = []


def _numbers_at_once(number: int) -> int:
    RUNNING.append(number)
    time.sleep(0.05)
    at_once = len(RUNNING)
    RUNNING.remove(number)
    return at_once
