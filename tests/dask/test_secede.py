"""Threads that are given back, and whose tasks do not wait for them longer than they may."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from distributed import Client, secede
from tests.dask.conftest import fake_server, local_cluster
from tests.doubling import MODEL, jets, twice
from tests.waiting import until

from sonic_coffea import errors

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
        scores = MODEL(jets(1, 2), timeout_s=TIMEOUT_S).twice.tolist()
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


def test_a_call_with_a_time_limit_keeps_its_thread(client: Client) -> None:
    """Another task, which may take long, would have the worker's only thread when it is over."""
    with fake_server(client) as (server, pool):
        assert client.submit(score).result() == [2.0, 4.0]
        server.hold()
        scoring = client.submit(score_in_time)
        until(lambda: pool.servers[0].in_flight > 0)
        other = client.submit(keep_busy)
        took_s, scores = scoring.result()
        assert scores == []
        assert TIMEOUT_S <= took_s < MOST_S
        until(BUSY.is_set)
        server.release()
        GO_ON.set()
        other.result()
        assert client.gather(client.map(_numbers_at_once, range(4))) == [1] * 4


RUNNING: list[int] = []


def _numbers_at_once(number: int) -> int:
    RUNNING.append(number)
    time.sleep(0.05)
    at_once = len(RUNNING)
    RUNNING.remove(number)
    return at_once


def score() -> list[float]:
    return twice(MODEL(jets(2, 4)))


def score_after_secede() -> list[float]:
    secede()
    return score()


def test_a_task_that_has_seceded_may_score(client: Client) -> None:
    with fake_server(client) as (server, pool):
        server.hold()
        scoring = client.submit(score_after_secede)
        until(lambda: any(server.in_flight for server in pool.servers))
        server.release()
        assert scoring.result() == [2.0, 4.0]
        assert client.gather(client.map(_numbers_at_once, range(4))) == [1] * 4


def score_and_count(number: int) -> int:
    MODEL(jets(number))
    return _numbers_at_once(number)


def test_chunks_wait_for_a_thread_before_they_go_on(client: Client) -> None:
    """The scores of several come at once, and the worker has one thread."""
    with fake_server(client, max_suspended_chunks=3) as (server, _):
        server.hold()
        counting = client.map(score_and_count, range(4))
        until(lambda: len(server.requests) > 2)
        server.release()
        assert client.gather(counting) == [1] * 4


def score_in_a_forked_child() -> tuple[list[float], list[str]]:
    """Return the scores, and which threads of dask the child has started."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        started, start = list[str](), threading.Thread.start

        def noted(thread: threading.Thread) -> None:
            started.append(thread.name)
            start(thread)

        threading.Thread.start = noted  # type: ignore[method-assign]
        scores = score()
        of_dask = [name for name in started if "Dask" in name]
        os.write(sender, json.dumps((scores, of_dask)).encode())
        os._exit(0)
    answered = select.select([receiver], [], [], MOST_S)[0]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    scores, of_dask = json.loads(os.read(receiver, 1000)) if answered else ([], [])
    return scores, of_dask


def test_forked_children_of_a_task_wait_without_the_threads_of_its_worker(
    one_worker: Client,
) -> None:
    with fake_server(one_worker):
        tasks = [one_worker.submit(score_in_a_forked_child, pure=False) for _ in range(3)]
        assert one_worker.gather(tasks) == [([2.0, 4.0], [])] * 3
