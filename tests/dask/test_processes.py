"""A cluster of processes on this machine, which a Ctrl-C neither hurts nor leaves behind."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import dask
import pytest
from distributed import Client, default_client

from sonic_coffea.dask import cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.server  # a cluster of processes

# dask runs this in the scheduler, which is in the process of the test, as it starts and ends.
PRELOADED = """
import os
import signal

from distributed import SchedulerPlugin

def dask_setup(scheduler):
    scheduler.add_plugin(Notes())
    press("dask_setup")

def dask_teardown(scheduler):
    press("dask_teardown")

def press(when):
    if when == {when!r}:
        os.kill(os.getpid(), signal.SIGINT)

class Notes(SchedulerPlugin):
    def add_worker(self, scheduler, worker):
        self.note("a worker")

    async def close(self):
        self.note("closed")

    def note(self, event):
        with open({path!r}, "a") as file:
            file.write(event + ";")
"""


@pytest.mark.parametrize("when", ["dask_setup", "dask_teardown"])
def test_ctrl_c_waits_until_the_processes_have_started_or_ended(when: str, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    notes = tmp_path / "notes"
    preloaded = PRELOADED.format(when=when, path=str(notes))
    clients = list[Client]()

    def run() -> None:
        with cluster(1) as client:
            clients.append(client)

    with (
        dask.config.set({"distributed.scheduler.preload": [preloaded]}),
        pytest.raises(KeyboardInterrupt),
    ):
        run()
    assert notes.read_text() == "a worker;closed;"
    closed = ["closed"] if when == "dask_teardown" else []
    assert [client.cluster.status.name for client in clients] == closed
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert signal.getsignal(signal.SIGINT) is before


def test_its_client_is_the_current_one(one_worker: Client) -> None:
    """coffea's progress bar would wait for ever for the tasks of another cluster."""
    with one_worker.as_current(), cluster(1) as client:
        assert default_client() is client
    with one_worker.as_current():
        assert default_client() is one_worker
