"""Clients that lose their scheduler: its process is killed and started again, or only the link."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from tests.dask.conftest import connected_cluster
from tests.doubling import MODEL, jets, multiplier
from tests.ports import held_port
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.testing import FakeServer

pytestmark = pytest.mark.server  # clusters of processes

ROOT = Path(__file__).parents[2]


def score(number: int) -> float:
    """Score by a model that the worker imports, which has no servers of its own."""
    (score,) = MODEL(jets(number)).twice.tolist()
    return float(score)


def plugins(dask_worker: Any) -> list[Any]:
    return [plugin for name, plugin in list(dask_worker.plugins.items()) if "sonic" in name]


def plugins_of_worker(dask_worker: Any) -> int:
    return len(plugins(dask_worker))


def joined(dask_scheduler: Any) -> int:
    plugin = dask_scheduler.plugins.get("sonic-coffea-scheduler")
    return len(plugin.allocator.clients) if plugin is not None else 0


@contextmanager
def cluster(port: int) -> Iterator[subprocess.Popen[bytes]]:
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


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with multiplier() as server:
        yield server


def test_a_scheduler_that_is_started_again_has_the_servers_again(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with held_port() as port:
        with cluster(port) as scheduler:
            client = Client(f"tcp://127.0.0.1:{port}", timeout=60)
            with sonic.connect(server.url, client=client, token="secret"):
                assert client.submit(score, 1, pure=False).result(60) == 2
                scheduler.kill()
                until(lambda: client.status == "connecting")
        with client, cluster(port):
            until(lambda: client.status == "running")
            client.wait_for_workers(1, timeout=60)
            until(lambda: list(client.run(plugins_of_worker).values()) == [1])
            assert client.submit(score, 2, pure=False).result(60) == 4
            until(lambda: client.run_on_scheduler(joined) == 1)
    for words in (
        "lost its scheduler; registering its servers again when it is back",
        "if it stays away, call sonic.connect(..., client=client) again",
    ):
        assert words in caplog.text


@pytest.mark.parametrize("heard_after_s", [0, 1])
def test_a_client_that_lost_its_link_has_its_servers_again(
    server: FakeServer, caplog: pytest.LogCaptureFixture, heard_after_s: float
) -> None:
    """Its scheduler takes its servers away meanwhile, of which large clusters hear late."""
    taken = threading.Event()
    with connected_cluster(server.url) as (own, client, _):
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
        assert client.submit(score, 1, pure=False).result(60) == 2
        (before,) = plugins(worker)
        client.loop.add_callback(scheduler.client_comms[client.id].abort)
        until(taken.is_set)
        until(lambda: [plugin is not before for plugin in plugins(worker)] == [True])
        assert client.submit(score, 2, pure=False).result(60) == 4
    assert caplog.text.count("registering its servers again") == 1
