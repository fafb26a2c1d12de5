"""A cluster of processes on this machine, which a Ctrl-C neither hurts nor leaves behind."""

from __future__ import annotations

import os
import signal

import pytest
from distributed import Client, default_client

from sonic_coffea.dask import cluster

pytestmark = pytest.mark.server  # a cluster of processes


def test_ctrl_c_is_for_the_process_of_the_client() -> None:
    """A terminal sends it to all; the workers go on until their client stops them."""
    with cluster(1) as client:
        (pid,) = client.run(os.getpid).values()
        os.kill(pid, signal.SIGINT)
        assert client.submit(int).result() == 0
        assert list(client.run(os.getpid).values()) == [pid]


def test_its_client_is_the_current_one(one_worker: Client) -> None:
    """coffea's progress bar would wait for ever for the tasks of another cluster."""
    with one_worker.as_current(), cluster(1) as client:
        assert default_client() is client
    with one_worker.as_current():
        assert default_client() is one_worker
