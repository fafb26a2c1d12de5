"""Models on real dask clusters: chunks are suspended, servers shared, and failures told."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import awkward as ak
import dask
import grpc
import numpy as np
import pytest
from distributed import Client, default_client, get_worker, secede
from distributed.batched import BatchedSend
from tests.dask.browser import browser
from tests.dask.conftest import SlowServer, connected_cluster, fake_server, local_cluster
from tests.doubling import MODEL, Doubling, jets, multiplier, served, twice
from tests.waiting import until
from tornado.ioloop import PeriodicCallback

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.dask import SonicSchedulerPlugin
from sonic_coffea.dask import cluster as cluster_of_processes
from sonic_coffea.dask._worker import JOIN, REPORT
from sonic_coffea.pool import hooks
from sonic_coffea.testing import FakeModel, FakeServer

pytestmark = pytest.mark.server  # and a cluster of processes


def chunk(number: int) -> tuple[float, float, list[float]]:
    """Score a few jets; return when they left, when the scores came, and the scores."""
    left = time.monotonic()
    scores = MODEL(jets(*range(10 * number, 10 * number + 3)))
    return left, time.monotonic(), scores.twice.tolist()


def rounds_of(dask_worker: Any) -> list[PeriodicCallback]:
    """Return what a worker does in each round: it has rounds for each settings that it reports."""
    return [rounds for name, rounds in dask_worker.periodic_callbacks.items() if "sonic" in name]


def number_of_rounds(dask_worker: Any) -> int:
    return len(rounds_of(dask_worker))


def most_at_a_time(chunks: list[tuple[float, float, list[float]]]) -> int:
    """How many chunks were between their first and last line at the same time."""
    return max(sum(a <= left < b for a, b, _ in chunks) for left, _, _ in chunks)


@pytest.mark.parametrize(("limit", "of_other"), [(3, 0), (0, 4)])
def test_waiting_chunks_are_suspended_by_the_limit_of_their_own_client(
    one_worker: Client, slow_server: FakeServer, limit: int, of_other: int
) -> None:
    with (
        Client(one_worker.cluster) as other,
        sonic.connect(slow_server.url, client=one_worker, max_suspended_chunks=limit),
        multiplier() as server,
        sonic.connect(server.url, client=other, max_suspended_chunks=of_other),
    ):
        chunks = one_worker.gather(one_worker.map(chunk, range(12), pure=False))
    assert [scores for *_, scores in chunks] == [
        [20.0 * n, 20.0 * n + 2, 20.0 * n + 4] for n in range(12)
    ]
    assert limit <= most_at_a_time(chunks) <= limit + 1


def score_while_others_leave() -> list[float]:
    plugins = get_worker().plugins

    class Leaving:
        """Leaves, as the worker's event loop may have it, while a task looks what it is."""

        @property
        def __class__(self) -> type:
            plugins.pop("leaving", None)
            return object

    plugins["leaving"] = Leaving()
    return MODEL(jets(1, 2)).twice.tolist()


def test_clients_may_come_and_go_while_a_task_scores(one_worker: Client) -> None:
    with multiplier() as server, sonic.connect(server.url, client=one_worker):
        assert one_worker.submit(score_while_others_leave, pure=False).result() == [2.0, 4.0]


class Overlapping(Doubling):
    """Waits for scores in `overlap`, while dask starts other chunks."""

    def overlap(self, events: Any) -> Any:
        return MODEL(events).twice.tolist()

    def produce(self, events: Any, scores: Any) -> Any:
        return {"twice": scores["m"].twice.tolist(), "overlap": scores.overlap}


def test_chunks_that_are_started_meanwhile_count_for_themselves(one_worker: Client) -> None:
    def process(number: int) -> Any:
        return Overlapping().process(jets(number))

    def score(number: int) -> Any:
        return MODEL(jets(number)).twice.tolist()

    with fake_server(one_worker, max_suspended_chunks=4) as (server, _):
        server.hold()
        futures = [one_worker.submit(each, n) for n in range(8) for each in (process, score)]
        until(lambda: len(server.requests) > 4)
        server.release()
        outputs = one_worker.gather(futures[::2])
        assert one_worker.gather(futures[1::2]) == [[2.0 * number] for number in range(8)]
    for number, output in enumerate(outputs):
        assert output["twice"] == output["overlap"] == [2.0 * number]
        assert sonic.report(output).statistics.total().rows == 2


def test_a_full_memory_keeps_the_thread(slow_server: FakeServer) -> None:
    # A process with numpy in it needs more; dask itself would pause the worker.
    parts = ("target", "spill", "pause", "terminate")
    with (
        dask.config.set({f"distributed.worker.memory.{part}": False for part in parts}),
        connected_cluster(slow_server.url, memory_limit="64 MiB") as (_, client, _),
    ):
        chunks = client.gather(client.map(chunk, range(4)))
    assert most_at_a_time(chunks) == 1


def test_workers_of_one_process_share_its_pool(slow_server: FakeServer) -> None:
    """Its reports count once, and it has the share of one."""
    with connected_cluster(slow_server.url, 2) as (cluster, client, pool):
        plugin = cluster.scheduler.plugins[SonicSchedulerPlugin.name]

        def in_flight() -> list[int]:
            shown = plugin.allocator.demand(slow_server.url, "m", "1")[0]
            return [sum(state.in_flight for state in pool.servers), shown]

        slow_server.hold()
        before = hooks.statistics.total().rows
        held = client.map(chunk, range(100, 104))
        until(lambda: in_flight() == [4, 4])
        assert sum(bool(each.telemetry) for each in plugin.allocator.clients.values()) == 1
        slow_server.release()
        client.gather(held)
        chunks = client.gather(client.map(chunk, range(40)))
        assert all(scores[0] == 20.0 * n for n, (*_, scores) in enumerate(chunks))
        assert pool.statistics.total().rows == 132
        requests = pool.statistics.total().requests

        def reported() -> list[tuple[float, float]]:
            histories = list(plugin.history.versions.values())
            return [(version.totals["rows"], version.totals["requests"]) for version in histories]

        until(lambda: reported() == [(132, requests)])
        until(lambda: plugin.allocator.demand(slow_server.url, "m", "1")[:2] == (0, 0))
        # The other goes on if one leaves, and works off again what is lost with it.
        *_, last = client.scheduler_info(n_workers=-1)["workers"]
        client.retire_workers([last])
        until(lambda: len(plugin.allocator.clients) == 1)
        assert client.submit(chunk, 1000).result()[2][0] == 20000.0
        until(lambda: reported()[0][0] == pool.statistics.total().rows > 132)
        _, rows = metrics(client)
        assert rows - before == pool.statistics.total().rows
    assert pool.closed


@pytest.mark.parametrize("processes", [False, True])
def test_what_was_counted_last_is_on_the_dashboard(processes: bool) -> None:
    """Also if the worker leaves, or the connection ends, before the next round."""

    def rows(dask_scheduler: Any) -> float:
        history = dask_scheduler.plugins[SonicSchedulerPlugin.name].history
        return sum(version.totals["rows"] for version in history.versions.values())

    with (
        multiplier() as server,
        local_cluster(2, processes=processes) as cluster,
        Client(cluster) as client,
    ):
        for retired in (True, False):
            with sonic.connect(server.url, client=client):
                client.gather(client.map(chunk, range(20), pure=False))
                if retired:
                    first, *_ = client.scheduler_info(n_workers=-1)["workers"]
                    client.retire_workers([first])
            until(lambda: client.run_on_scheduler(rows) == server.statistics["m", "rows"] > 0)


def test_workers_that_come_later_are_killed_and_leave(slow_server: FakeServer) -> None:
    def joined(dask_scheduler: Any) -> int:
        return len(dask_scheduler.plugins[SonicSchedulerPlugin.name].allocator.clients)

    def asking(dask_scheduler: Any) -> int:
        allocator = dask_scheduler.plugins[SonicSchedulerPlugin.name].allocator
        return sum(bool(client.telemetry) for client in allocator.clients.values())

    with connected_cluster(slow_server.url, processes=True) as (cluster, client, _):
        until(lambda: client.run_on_scheduler(joined) == 1)
        cluster.scale(2)
        client.wait_for_workers(2)
        until(lambda: client.run_on_scheduler(joined) == 2)
        futures = client.map(chunk, range(60))
        until(lambda: client.run_on_scheduler(asking) == 2)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        scores = [out[2] for out in client.gather(futures)]
        assert scores == [[20.0 * n, 20.0 * n + 2, 20.0 * n + 4] for n in range(60)]
        cluster.scale(1)
        until(lambda: client.run_on_scheduler(joined) == 1)


def test_a_scheduler_without_the_package_is_no_obstacle(
    slow_server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def unpickle(**_: Any) -> None:
        raise ModuleNotFoundError("No module named 'sonic_coffea'")

    with (
        caplog.at_level(logging.WARNING),
        local_cluster(1, processes=False) as cluster,
        Client(cluster) as client,
    ):
        cluster.scheduler.handlers["register_scheduler_plugin"] = unpickle
        with sonic.connect(slow_server.url, client=client):
            chunks = client.gather(client.map(chunk, range(4)))
    assert chunks[3][2] == [60.0, 62.0, 64.0]
    for words in ("the scheduler cannot load sonic-coffea", "the scheduler allocates no quotas"):
        assert words in caplog.text


@pytest.mark.parametrize(
    ("code", "tries"), [(grpc.StatusCode.INVALID_ARGUMENT, 1), (grpc.StatusCode.UNAVAILABLE, 4)]
)
def test_what_another_try_repeats_is_not_tried_again(
    one_worker: Client, tmp_path: Path, code: Any, tries: int
) -> None:
    """A wrong input stays wrong; lost servers are dask's business."""

    def score() -> None:
        (tmp_path / str(time.monotonic_ns())).touch()
        MODEL(jets(1))

    with fake_server(one_worker, retry_timeout_s=0.1) as (server, _):
        server.fail(code, "not this", times=1000)
        with pytest.raises(errors.SonicError):
            one_worker.submit(score, retries=3).result()
    assert len(list(tmp_path.iterdir())) == tries


@pytest.mark.parametrize(("why", "tries"), [("caught", 3), ("instead", 3), ("because", 1)])
def test_what_a_task_catches_is_its_own_business(
    one_worker: Client, tmp_path: Path, why: str, tries: int
) -> None:
    """A task that goes on without a model, and cannot read a file after that."""
    absent = sonic.Model("absent", {"x": sonic.Row("pt")}, {"y": ["twice"]})

    def careful() -> int:
        (tmp_path / str(time.monotonic_ns())).touch()
        number = len(list(tmp_path.iterdir()))
        hiccup = OSError("cannot read") if number < 3 else None
        try:
            absent(jets(0))
        except errors.ModelNotFoundError as error:
            if hiccup is not None and why == "instead":
                raise hiccup  # noqa: B904  it is no consequence
            if hiccup is not None and why == "because":
                raise hiccup from error
        if hiccup is not None:
            raise hiccup
        return number

    with FakeServer({}) as server, sonic.connect(server.url, client=one_worker):
        future = one_worker.submit(careful, retries=5)
        until(future.done)
        assert future.status == ("finished" if tries == 3 else "error")
        assert len(list(tmp_path.iterdir())) == tries


def test_a_lost_server_is_an_event(one_worker: Client) -> None:
    with (
        multiplier() as server,
        multiplier() as other,
        sonic.connect([server.url, other.url], client=one_worker),
    ):

        def lost() -> list[dict[str, Any]]:
            events = [event for _, event in one_worker.get_events("sonic-coffea")]
            return [event for event in events if event["server"] in (server.url, other.url)]

        def is_lost() -> bool:
            """Whether it is told; each chunk may be the one that finds the server gone."""
            assert one_worker.submit(chunk, 30, pure=False).result()[2][0] == 600.0
            return any(event["action"] == "lost" for event in lost())

        server.hold()
        futures = one_worker.map(chunk, range(20))
        until(lambda: bool(server.requests))
        server.stop()
        assert all(out[2][0] == 20.0 * n for n, out in enumerate(one_worker.gather(futures)))
        until(is_lost)
        assert {event["server"] for event in lost()} == {server.url}
        assert all("worker" in event for event in lost())


def test_a_server_that_is_lost_before_there_are_requests_is_an_event(one_worker: Client) -> None:
    with multiplier() as server:
        pass
    with sonic.connect(server.url, client=one_worker):
        one_worker.submit(chunk, 1, pure=False)
        until(lambda: server.url in str(one_worker.get_events("sonic-coffea")))


def test_what_cannot_be_reported_is_reported_later() -> None:
    """Without a connection to the scheduler, dask drops messages silently."""
    answers: list[int] = []
    with (
        FakeServer(served(max_rows=4)) as server,
        connected_cluster(server.url) as (cluster, client, pool),
    ):
        handlers, (worker,) = cluster.scheduler.stream_handlers, cluster.workers.values()
        take = handlers[REPORT]

        def note(**report: Any) -> None:
            telemetry, *_ = pickle.loads(report["report"])
            for reported in telemetry.values():
                answers.extend(number for number, *_ in reported.rtts.values())
            take(**report)

        handlers[REPORT] = note
        (rounds,) = rounds_of(worker)
        rounds.stop()

        async def report() -> None:
            rounds.callback()

        stream, worker.batched_stream = worker.batched_stream, BatchedSend(interval="2ms")
        assert MODEL(jets(*range(40))).twice.tolist()[39] == 78.0
        client.sync(report)
        assert answers == []
        worker.batched_stream = stream
        client.sync(report)
        until(lambda: sum(answers) == 10)
        assert pool.statistics.total().requests == 10


def test_connecting_again_keeps_what_is_out(one_worker: Client) -> None:
    def score(number: int) -> list[float]:
        return MODEL(jets(number, number + 1)).twice.tolist()

    with (
        multiplier() as server,
        multiplier(0.5) as other,
        sonic.connect(server.url, client=one_worker),
    ):
        url = server.url

        def look(dask_worker: Any) -> tuple[int, int]:
            pools = [getattr(plugin, "pool", None) for plugin in dask_worker.plugins.values()]
            (pool,) = (p for p in pools if p is not None and p.settings.servers == (url,))
            return id(pool), sum(state.in_flight for state in pool.servers)

        assert one_worker.submit(score, 1).result() == [2.0, 4.0]
        ((before, _),) = one_worker.run(look).values()
        server.hold()
        future = one_worker.submit(score, 2)
        until(lambda: one_worker.run(look).popitem()[1][1] > 0)
        sonic.connect(server.url, client=one_worker)
        assert one_worker.run(look).popitem()[1][0] == before
        # Other settings are for later tasks.
        with sonic.connect(other.url, client=one_worker):
            assert one_worker.submit(score, 2, pure=False).result() == [1.0, 1.5]
        server.release()
        assert future.result() == [4.0, 6.0]


def test_workers_have_joined_and_are_set_up_before_their_first_task(one_worker: Client) -> None:
    """A pool knows its worker's memory, and no profiler freezes it.

    dask's looks at threads, which Python before 3.11.9 must not do while one is started.
    """

    def answer_late(dask_scheduler: Any) -> None:
        import asyncio

        join = dask_scheduler.handlers[JOIN]

        async def joined(**message: str) -> Any:
            await asyncio.sleep(0.2)
            dask_scheduler.handlers[JOIN] = join
            return join(**message)

        dask_scheduler.handlers[JOIN] = joined

    def state(dask_worker: Any) -> tuple[Any, Any, bool]:
        from sonic_coffea.pool import hooks

        limit = dask_worker.memory_manager.memory_limit
        return hooks.memory_bytes, limit, "profile" in dask_worker.periodic_callbacks

    with sonic.connect("grpc://127.0.0.1:1", client=one_worker):
        ((told, limit, profiled),) = one_worker.run(state).values()
        assert told == limit > 0
        assert profiled == (sys.version_info >= (3, 11, 9))
        (before,) = one_worker.run(number_of_rounds).values()
        one_worker.run_on_scheduler(answer_late)
        with sonic.connect("grpc://127.0.0.1:2", client=one_worker):
            assert list(one_worker.run(number_of_rounds).values()) == [before + 1]


def metrics(client: Client) -> tuple[str, float]:
    """Return the text of the page of the only worker, and the sum of the rows."""
    (worker,) = client.scheduler_info(n_workers=-1)["workers"].values()
    url = f"http://127.0.0.1:{worker['services']['dashboard']}/metrics"
    text = urlopen(url).read().decode()
    rows = (line for line in text.splitlines() if line.startswith("sonic_rows_total{"))
    return text, sum(float(line.split()[-1]) for line in rows)


def test_figures_are_where_dask_shows_them(one_worker: Client, slow_server: FakeServer) -> None:
    """Of all pools of a worker together, also of those of clients that have left."""
    with sonic.connect(slow_server.url, client=one_worker):
        _, before = metrics(one_worker)
        one_worker.gather(one_worker.map(chunk, range(10), pure=False))
        rounds = one_worker.run(number_of_rounds)
        with Client(one_worker.cluster) as other:
            sonic.connect(slow_server.url, client=other, max_in_flight=5)
            other.gather(other.map(chunk, range(20), pure=False))
        # To Prometheus, the rest of a sum that falls would be new.
        until(lambda: one_worker.run(number_of_rounds) == rounds)
        text, rows = metrics(one_worker)
    assert text.count(f'sonic_in_flight{{server="{slow_server.url}"}}') == 1
    assert rows - before == 90


def test_the_page_of_the_dashboard(one_worker: Client) -> None:
    """It has the figures of all servers, whichever of a client's connections they are from."""
    client = one_worker
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(SlowServer()) for _ in range(2)]
        text = stack.enter_context(browser())(client.dashboard_link.replace("/status", "/sonic"))
        futures: list[Any] = []
        for server in servers:
            stack.enter_context(sonic.connect(server.url, client=client))
            futures += client.map(chunk, range(60), pure=False)
        client.gather(futures)
        for server in servers:
            cells: list[str] = []

            def is_whole(server: FakeServer = server, cells: list[str] = cells) -> bool:
                """Whether all is reported; workers ask for a server's own statistics meanwhile."""
                row = re.search(rf"{re.escape(server.url)} (m v1 [^■\n]*)", text())
                cells[:] = row[1].split() if row else []
                return len(cells) == 15 and cells[11] == "180"

            until(is_whole)
            assert cells[:3] == ["m", "v1", "up"]
            round_trip_ms, _, model_ms = map(float, cells[7:10])
            assert round_trip_ms > 45
            assert model_ms > 45
            assert cells[12:] == ["60", "0", "0"]


def test_each_model_of_a_server_is_asked_for(one_worker: Client) -> None:
    """Also if another connection has the server, and another model of it."""

    def named(number: int, name: str) -> list[float]:
        model = sonic.Model(name, {"x": sonic.Row("pt")}, {"y": ["twice"]})
        return model(jets(number)).twice.tolist()

    def compute_s(dask_scheduler: Any) -> dict[tuple[str, str], Any]:
        history = dask_scheduler.plugins[SonicSchedulerPlugin.name].history
        return {key[:2]: version.model_s for key, version in history.versions.items()}

    with SlowServer() as server:
        server.models["n"] = server.models["m"]
        with (
            sonic.connect(server.url, client=one_worker) as outer,
            sonic.connect(server.url, client=one_worker, max_in_flight=5) as inner,
        ):

            def shown() -> list[float]:
                """Score by both, and return the compute times of both models."""
                futures = []
                for pool, name in ((outer, "m"), (inner, "n")):
                    with pool:
                        futures += one_worker.map(named, range(5), name=name, pure=False)
                assert one_worker.gather(futures) == [[2.0 * n] for n in (*range(5), *range(5))]
                found = one_worker.run_on_scheduler(compute_s)
                return [round(found.get((server.url, name)) or 0.0, 3) for name in "mn"]

            until(lambda: shown() == [0.05, 0.05])


def test_the_dashboard_links_to_the_page_behind_a_proxy() -> None:
    prefix = "/behind/a-proxy"
    with (
        dask.config.set({"distributed.scheduler.http.prefix": prefix}),
        connected_cluster("grpc://127.0.0.1:1", 0) as (cluster, *_),
    ):
        root = f"http://127.0.0.1:{cluster.scheduler.services['dashboard'].port}{prefix}"
        page = urlopen(f"{root}/sonic").read().decode()  # noqa: S310
        # In the bar above all pages, and in the menu below "More...".
        assert page.count('<a href="sonic">') == 2


def test_a_token_reaches_the_workers_and_no_result(one_worker: Client) -> None:
    def score(number: int) -> Any:
        return MODEL(jets(number, number + 1))

    with fake_server(one_worker, token="hush-hush") as (server, _):
        server.headers["authorization"] = "Bearer hush-hush"
        scores = one_worker.submit(score, 5).result()
        assert scores.twice.tolist() == [10.0, 12.0]
        assert b"hush" not in pickle.dumps(scores)


def test_its_client_is_the_current_one(one_worker: Client) -> None:
    """coffea's progress bar would wait for ever for the tasks of another cluster."""
    with one_worker.as_current(), cluster_of_processes(1) as client:
        assert default_client() is client
    with one_worker.as_current():
        assert default_client() is one_worker


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


def score_and_count(number: int) -> int:
    MODEL(jets(number))
    return _numbers_at_once(number)


def test_chunks_wait_for_a_thread_before_they_go_on(client: Client) -> None:
    """The scores of several come at once, and the worker has one thread; a task has seceded."""
    with fake_server(client, max_suspended_chunks=3) as (server, _):
        server.hold()
        seceded = client.submit(score_after_secede)
        until(lambda: bool(server.requests))
        counting = client.map(score_and_count, range(4))
        until(lambda: len(server.requests) > 3)
        server.release()
        assert seceded.result() == [2.0, 4.0]
        assert client.gather(counting) == [1] * 4
        assert client.gather(client.map(_numbers_at_once, range(4))) == [1] * 4


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


FIELDS = [f"f{i}" for i in range(10)]
WIDE = sonic.Model("tagger", {"x": sonic.Padded(FIELDS, 64)}, {"y": ["sum"]})
WIDE_JETS, CONSTITUENTS = 50_000, 30


def score_wide(number: int) -> tuple[float, float, list[float]]:
    """Score 128 MB of tensors; return when this began and ended, and the first and last score."""
    began = time.time()
    counts = np.full(WIDE_JETS, CONSTITUENTS)
    column = np.full(counts.sum(), number, np.float32)
    constituents = ak.zip({name: ak.unflatten(column.copy(), counts) for name in FIELDS})
    scores = WIDE(constituents)["sum"]
    return began, time.time(), [float(scores[0]), float(scores[-1])]


def memory(dask_worker: Any) -> tuple[float, float, float, str]:
    """Return the greatest and the allowed memory, what was spilled, and the worker's state."""
    most = max(dask_worker.monitor.quantities["memory"])
    limit = dask_worker.memory_manager.memory_limit
    return most, limit, sum(dask_worker.data.spilled_total), dask_worker.status.name


@pytest.mark.slow
def test_nothing_is_spilled_while_chunks_are_suspended() -> None:
    def slowly(inputs: Any) -> dict[str, Any]:
        server.requests.clear()  # of 0.5 GB in all
        time.sleep(0.02)
        return {"y": inputs["x"].sum(axis=(1, 2))[:, np.newaxis]}

    server = FakeServer({"tagger": FakeModel.of(WIDE, slowly)})
    with (
        server,
        local_cluster(1, memory_limit="2 GB") as cluster,
        Client(cluster) as client,
        sonic.connect(server.url, client=client),
    ):
        chunks = client.gather(client.map(score_wide, range(4)))
        ((most, limit, spilled, state),) = client.run(memory).values()
    total = CONSTITUENTS * len(FIELDS)
    assert [scores for *_, scores in chunks] == [[total * n, total * n] for n in range(4)]
    assert max(sum(a <= began < b for a, b, _ in chunks) for began, *_ in chunks) > 1
    assert limit == 2_000_000_000
    assert most < 0.6 * limit  # from which dask spills
    assert (spilled, state) == (0, "running")
