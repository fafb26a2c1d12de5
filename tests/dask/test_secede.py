"""Threads that are given back, and whose tasks do not wait for them longer than they may."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, secede, threadpoolexecutor
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


class OtherThreadPoolExecutor(threadpoolexecutor.ThreadPoolExecutor):  # type: ignore[misc]
    """As of another version of distributed, which may call what it keeps to itself otherwise.

    distributed finds threads by this name.
    """

    def __getattribute__(self, name: str) -> Any:
        asks = sys._getframe(1).f_globals["__name__"]
        if name == "_rejoin_list" and asks.startswith("sonic_coffea"):
            raise AttributeError(f"no attribute {name!r}")
        return super().__getattribute__(name)


def score_once() -> list[float]:
    return twice(MODEL(jets(1, 2)))


def score_after_secede() -> list[float]:
    secede()
    return twice(MODEL(jets(1, 2)))


def test_another_distributed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    served = FakeModel.of(MODEL, lambda inputs: {"y": 2 * inputs["x"]})
    with (
        OtherThreadPoolExecutor(1) as executor,
        FakeServer({"double": served}) as server,
        local_cluster(1, processes=False, executor=executor) as cluster,
        Client(cluster) as client,
        sonic.connect(server.url, client=client),
    ):
        said = "chunks keep their threads while they wait for scores"
        server.hold()
        first = client.submit(score_once, pure=False)
        until(lambda: said in caplog.text)
        second = client.submit(score_once, pure=False)
        server.release()
        assert client.gather([first, second]) == [[2.0, 4.0]] * 2
    assert caplog.text.count(said) == 1


def test_a_task_that_has_seceded_may_score(client: Client) -> None:
    served = FakeModel.of(MODEL, lambda inputs: {"y": 2 * inputs["x"]})
    with (
        FakeServer({"double": served}) as server,
        sonic.connect(server.url, client=client) as pool,
    ):
        server.hold()
        scoring = client.submit(score_after_secede)
        until(lambda: any(server.in_flight for server in pool.servers))
        server.release()
        assert scoring.result() == [2.0, 4.0]
        assert client.gather(client.map(_numbers_at_once, range(4))) == [1] * 4
