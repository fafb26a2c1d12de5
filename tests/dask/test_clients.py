"""Clients of one cluster with servers of their own, which may lose their scheduler."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from tests.dask.conftest import connected_cluster, local_cluster
from tests.doubling import MODEL, Doubling, jets, multiplier, served
from tests.ports import held_port
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeServer

pytestmark = pytest.mark.server  # clusters of processes


def by_reference(number: int) -> float:
    """Score by a model that the worker imports."""
    (score,) = MODEL(jets(number)).twice.tolist()
    return float(score) / number


class Processor(Doubling):
    def produce(self, events: Any, scores: Any) -> Any:
        return float(scores["m"].twice[0]) / float(events.pt[0])


def by_processor(number: int, processor: Processor) -> Any:
    return processor.process(jets(number))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


@pytest.fixture
def second(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


@pytest.fixture
def one() -> Iterator[FakeServer]:
    with multiplier(2) as server:
        yield server


@pytest.fixture
def other() -> Iterator[FakeServer]:
    with multiplier(3) as server:
        yield server


def test_clients_of_a_cluster_have_their_own_servers(
    client: Client, second: Client, one: FakeServer, other: FakeServer
) -> None:
    """Chunks that are under way, and those that come later, whatever was connected last."""
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})

    def by_value(number: int) -> float:
        (score,) = model(jets(number)).twice.tolist()
        return float(score) / number

    # On a machine that is busy, an answer is late as if its server hung, and rows are sent again.
    patient: dict[str, Any] = {"hedge_after_s": 60.0}

    def submit(client: Client, numbers: range) -> list[Any]:
        ways = by_reference, by_value
        futures = [f for way in ways for f in client.map(way, numbers, pure=False)]
        return futures + client.map(by_processor, numbers, processor=Processor(), pure=False)

    with sonic.connect(one.url, client=client, **patient):
        one.hold()
        under_way = submit(client, range(1, 11))
        until(lambda: bool(one.requests))
    with sonic.connect(other.url, client=second, **patient):
        of_second = submit(second, range(11, 21))
        with sonic.connect(one.url, **patient):
            under_way += submit(client, range(21, 31))
        of_second += submit(second, range(31, 41))
        one.release()
        assert set(client.gather(under_way)) == {2.0}
        assert set(second.gather(of_second)) == {3.0}
    assert one.statistics["m", "rows"] == other.statistics["m", "rows"] == 60


def test_blocks_of_a_client_have_their_own_servers(
    client: Client, one: FakeServer, other: FakeServer
) -> None:
    """Also tasks that are sent last, which arrive after the block has ended."""

    def factors() -> list[Any]:
        return client.map(by_reference, range(1, 40), pure=False)

    with sonic.connect(one.url, client=client) as outer:
        sent = {2.0: factors()}
        with sonic.connect(other.url, client=client):
            sent[3.0] = factors()
            with outer:
                sent[2.0] += factors()
            sent[3.0] += factors()
        sent[2.0] += factors()
    sonic.connect(one.url, client=client)
    last = sonic.connect(other.url, client=client)
    with ThreadPoolExecutor(1) as threads:  # which changes nothing here
        threads.submit(sonic.connect, one.url).result()
    assert by_reference(1) == 3.0
    sent[3.0] += factors()
    with sonic.connect(one.url, client=client):
        sent[2.0] += factors()
        sonic.connect(other.url, client=client)
        assert by_reference(1) == 3.0
        sent[3.0] += factors()
        last.close()
        assert by_reference(1) == 2.0
        sent[2.0] += factors()
    sent[2.0] += factors()
    for factor, futures in sent.items():
        assert set(client.gather(futures)) == {factor}


def test_threads_of_one_client_have_to_say_whose_servers_they_mean(client: Client) -> None:
    """By a model that is passed: the scheduler knows which client has sent a task, and no more."""
    both = threading.Barrier(2, timeout=60)

    def run(factor: int) -> None:
        with multiplier(factor) as mine, sonic.connect(mine.url, client=client):
            both.wait()
            lost = client.submit(by_reference, 1, pure=False).exception()
            passed = client.submit(by_model, 1, MODEL).result(), Processor()
            assert passed[0] == client.submit(by_processor, 1, passed[1]).result() == factor
            assert isinstance(lost, errors.ConfigError)
            assert "give each thread a client of its own" in str(lost)
            both.wait()

    with (
        multiplier(4) as outer,
        sonic.connect(outer.url, client=client),
        ThreadPoolExecutor() as threads,
    ):
        list(threads.map(run, (2, 3)))
        assert client.submit(by_reference, 1, pure=False).result() == 4.0


def test_servers_of_workers_are_not_replaced_in_part_or_by_a_connection_that_fails(
    client: Client, one: FakeServer, other: FakeServer
) -> None:
    lock = threading.Lock()
    with sonic.connect(one.url, client=client) as pool:
        with pytest.raises(errors.ConfigError, match="the workers .* have the servers, too"):
            pool.set_servers(other.url)
        with pytest.raises(TypeError, match="pickle"):
            sonic.connect(other.url, client=client, token=lambda: str(lock))
        assert by_reference(1) == client.submit(by_reference, 1, pure=False).result() == 2.0


def test_quotas_come_for_each_settings(client: Client, second: Client, one: FakeServer) -> None:
    """Two clients on one server, with other options, have quotas on each worker."""

    def on_each_worker(client: Client) -> list[Any]:
        """Score a chunk on each: it is suspended, and leaves its thread to another client's."""
        addresses = client.scheduler_info(n_workers=-1)["workers"]
        return [
            client.submit(by_reference, number, workers=[address], pure=False)
            for number, address in enumerate(addresses, 1)
        ]

    def clients(dask_scheduler: Any) -> int:
        plugin = dask_scheduler.plugins["sonic-coffea-scheduler"]
        return sum(bool(client.telemetry) for client in plugin.allocator.clients.values())

    with sonic.connect(one.url, client=client, max_in_flight=7):
        one.hold()
        of_first = on_each_worker(client)
        with sonic.connect(one.url, client=second, max_in_flight=9):
            of_second = on_each_worker(second)
            until(lambda: client.run_on_scheduler(clients) == 4)
            one.release()
            assert set(client.gather(of_first)) == set(second.gather(of_second)) == {2.0}


def made(number: int) -> sonic.Model:
    return sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})


def by_model(number: int, model: sonic.Model) -> float:
    return float(model(jets(number)).twice[0]) / number


def in_thread(number: int) -> float:
    with ThreadPoolExecutor() as threads:
        return threads.submit(by_reference, number).result()


def in_block(number: int, url: str) -> float:
    with sonic.connect(url):
        return by_reference(number)


def test_what_no_task_of_a_client_does_has_not_its_servers(
    cluster: LocalCluster, client: Client, second: Client, one: FakeServer, other: FakeServer
) -> None:
    """A model that a task made is pickled in dask's threads, and tasks start threads."""
    here, there = client.scheduler_info(n_workers=-1)["workers"]
    with sonic.connect(one.url, client=client), sonic.connect(other.url, client=second):
        model = client.submit(made, 1, workers=[here], pure=False)
        assert client.submit(by_model, 1, model, workers=[there]).result() == 2.0
        assert client.submit(in_block, 1, one.url, workers=[here]).result() == 2.0
        assert client.submit(by_reference, 1, workers=[here], pure=False).result() == 2.0
        with pytest.raises(errors.ConfigError, match="is in no .* task of dask"):
            client.submit(in_thread, 1).result()
        message = "the client that sent this task is not connected"
        with Client(cluster) as third, pytest.raises(errors.ConfigError, match=message):
            third.submit(by_reference, 1, pure=False).result()


def test_a_connection_that_fails_changes_none_that_is_made_meanwhile(
    cluster: LocalCluster, one: FakeServer, other: FakeServer
) -> None:
    async def run(url: str, other_url: str) -> None:
        lock = threading.Lock()
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            failed, pool = await asyncio.gather(
                sonic.connect(other_url, client=client, token=lambda: str(lock)),
                sonic.connect(url, client=client),
                return_exceptions=True,
            )
            assert isinstance(failed, TypeError)
            with await sonic.connect(other_url, client=client):
                assert await client.submit(by_reference, 1, pure=False) == 3.0
            assert await client.submit(by_reference, 1, pure=False) == 2.0
            with pool:
                pass
            with pytest.raises(errors.ConfigError, match="no servers"):
                by_reference(1)

    asyncio.run(run(one.url, other.url))


@pytest.mark.parametrize("closed", [False, True])
def test_blocks_of_tasks_cancel_no_calls_of_other_tasks(
    client: Client, one: FakeServer, closed: bool
) -> None:
    def enter(url: str) -> None:
        with sonic.connect(url):
            pass

    def close(url: str) -> None:
        sonic.connect(url).close()

    with sonic.connect(one.url, client=client):
        (here, *_) = client.scheduler_info(n_workers=-1)["workers"]
        if closed:  # before, so that the next task has opened it again
            client.submit(close, one.url, workers=[here]).result()
        one.hold()
        under_way = client.submit(by_reference, 1, workers=[here], pure=False)
        until(lambda: bool(one.requests))
        client.submit(enter, one.url, workers=[here]).result()
        one.release()
        assert under_way.result() == 2.0


@pytest.mark.parametrize("before", [0, 4])
def test_workers_that_join_do_not_change_the_servers_of_their_process(
    one: FakeServer, other: FakeServer, before: int
) -> None:
    with (
        local_cluster(1, processes=False) as cluster,
        Client(cluster) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        pools = [sonic.connect(one.url, client=client)]
        pools += [sonic.connect(f"grpc://127.0.0.1:{port + 1}") for port in range(before)]
        pools.append(sonic.connect(other.url))
        assert threads.submit(by_reference, 1).result() == 3.0
        cluster.scale(2)
        client.wait_for_workers(2, timeout=60)
        assert threads.submit(by_reference, 1).result() == 3.0
        assert client.submit(by_reference, 1).result() == 2.0
        for pool in pools:
            pool.close()


def test_models_in_functions_keep_the_servers_of_their_client(
    one: FakeServer, other: FakeServer
) -> None:
    """Also where the client, which has closed its pools, has the workers in its own process."""
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})

    def by_value(number: int) -> float:
        return by_model(number, model)

    with (
        local_cluster(1, processes=False) as cluster,
        Client(cluster) as client,
        Client(cluster) as second,
    ):
        for servers, each in ((one, client), (other, second)):
            sonic.connect(servers.url, client=each).close()
        for each, factor in ((second, 3.0), (client, 2.0), (second, 3.0), (client, 2.0)):
            assert each.submit(by_value, 5, pure=False).result() == factor


def test_models_that_are_passed_keep_the_options_of_their_block(
    client: Client, second: Client, one: FakeServer
) -> None:
    """Also on their way through the scheduler, which is in this process."""

    def users(client: Client) -> set[str]:
        one.calls.clear()
        assert client.submit(by_model, 5, made(1), pure=False).result() == 2.0
        return {headers["x-user"] for method, headers in one.calls if method == "ModelInfer"}

    with (
        sonic.connect(one.url, client=client, headers={"x-user": "a"}) as outer,
        sonic.connect(one.url, client=second, headers={"x-user": "b"}),
    ):
        with outer:
            assert users(client) == {"a"}
        assert users(second) == {"b"}


def test_pools_that_are_closed_keep_no_workers(one: FakeServer) -> None:
    with connected_cluster(one.url) as (_, client, pool):
        assert pool.workers
        pool.close()
        assert client.submit(by_reference, 1).result() == 2.0
        assert not pool.workers


def test_workers_keep_nothing_of_clients_that_left(
    cluster: LocalCluster, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: set(client.run(plugins_of_worker).values()) == {0})
    with Client(cluster) as leaving:
        sonic.connect("grpc://127.0.0.1:1", client=client)
        sonic.connect("grpc://127.0.0.1:1", client=leaving)
        sonic.connect("grpc://127.0.0.1:1", client=leaving, proxy="http://127.0.0.1:1")
        assert set(client.run(plugins_of_worker).values()) == {2}
    until(lambda: set(client.run(plugins_of_worker).values()) == {1})
    with sonic.connect("grpc://127.0.0.1:1", client=client):
        client.run(plugins_of_worker)  # what the block has begun is done
    assert "already closed" not in caplog.text


class Polled(FakeServer):
    """A server whose statistics are asked for, and which may owe them."""

    def __init__(self) -> None:
        super().__init__(served())
        self.answers = threading.Event()
        self.answers.set()

    @property
    def polls(self) -> int:
        return sum(method == "ModelStatistics" for method, _ in self.calls)

    def answer(self, method: str, request: Any, context: Any) -> Any:
        answer = super().answer(method, request, context)
        if method == "ModelStatistics":
            self.answers.wait(60)
        return answer


def test_servers_that_owe_statistics_keep_no_thread_of_dask_and_idle_ones_are_not_asked() -> None:
    had: list[int] = []

    async def work() -> int:
        return await asyncio.get_running_loop().run_in_executor(None, int)

    with (
        Polled() as polled,
        connected_cluster(polled.url, metadata_timeout_s=60) as (own, client, _),
    ):
        (worker,) = own.workers.values()
        (callback,) = (c for name, c in worker.periodic_callbacks.items() if "sonic" in name)
        report = callback.callback

        def count() -> None:
            report()
            had.append(polled.polls)

        callback.callback = count
        polled.hold()
        polled.answers.clear()
        future = client.submit(by_reference, 2)
        until(lambda: polled.polls > 0)
        # As many as an event loop's executor has.
        until(lambda: len(had) > min(32, (os.cpu_count() or 1) + 4) + 2)
        assert client.sync(work, callback_timeout=20) == 0
        polled.answers.set()
        until(lambda: polled.polls > 1)
        polled.release()
        assert future.result() == 2.0
        before = len(had)
        until(lambda: len(had) > before + 5 and len(set(had[-5:])) == 1, what="rest")


ROOT = Path(__file__).parents[2]


def plugins(dask_worker: Any) -> list[Any]:
    return [plugin for name, plugin in list(dask_worker.plugins.items()) if "sonic" in name]


def plugins_of_worker(dask_worker: Any) -> int:
    return len(plugins(dask_worker))


def joined(dask_scheduler: Any) -> int:
    plugin = dask_scheduler.plugins.get("sonic-coffea-scheduler")
    return len(plugin.allocator.clients) if plugin is not None else 0


@contextmanager
def two_processes(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a scheduler and a worker, and kill them."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    scheduler = ("scheduler", "--host", "127.0.0.1", "--port", str(port))
    worker = ("worker", f"tcp://127.0.0.1:{port}", "--nthreads", "1", "--no-nanny")
    processes = []
    try:
        for kind, *arguments in (scheduler, worker):
            command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *arguments]
            environment = {**os.environ, "PYTHONPATH": path}
            processes.append(subprocess.Popen([*command, "--no-dashboard"], env=environment))
        yield processes[0]
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def test_a_scheduler_that_is_started_again_has_the_servers_again(
    one: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with held_port() as port:
        with two_processes(port) as scheduler:
            client = Client(f"tcp://127.0.0.1:{port}", timeout=60)
            with sonic.connect(one.url, client=client, token="secret"):
                assert client.submit(by_reference, 1, pure=False).result(60) == 2
                scheduler.kill()
                until(lambda: client.status == "connecting")
        with client, two_processes(port):
            until(lambda: client.status == "running")
            client.wait_for_workers(1, timeout=60)
            until(lambda: list(client.run(plugins_of_worker).values()) == [1])
            assert client.submit(by_reference, 2, pure=False).result(60) == 2
            until(lambda: client.run_on_scheduler(joined) == 1)
    for words in (
        "lost its scheduler; registering its servers again when it is back",
        "if it stays away, call sonic.connect(..., client=client) again",
    ):
        assert words in caplog.text


@pytest.mark.parametrize("heard_after_s", [0, 1])
def test_a_client_that_lost_its_link_has_its_servers_again(
    one: FakeServer, caplog: pytest.LogCaptureFixture, heard_after_s: float
) -> None:
    """Its scheduler takes its servers away meanwhile, of which large clusters hear late."""
    taken = threading.Event()
    with connected_cluster(one.url) as (own, client, _):
        scheduler, (worker,) = own.scheduler, own.workers.values()
        broadcast = scheduler.broadcast

        async def slowly(*, msg: Any, **options: Any) -> Any:
            if msg["op"] != "plugin-remove":
                return await broadcast(msg=msg, **options)
            await asyncio.sleep(heard_after_s)
            answers = await broadcast(msg=msg, **options)
            taken.set()
            return answers

        scheduler.broadcast = slowly
        assert client.submit(by_reference, 1, pure=False).result(60) == 2
        (before,) = plugins(worker)
        client.loop.add_callback(scheduler.client_comms[client.id].abort)
        until(taken.is_set)
        until(lambda: [plugin is not before for plugin in plugins(worker)] == [True])
        assert client.submit(by_reference, 2, pure=False).result(60) == 2
    assert caplog.text.count("registering its servers again") == 1
