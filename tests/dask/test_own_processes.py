"""Processes that commands start on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from distributed import Client, Security

from sonic_coffea.dask import cluster


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster(1) as client:
        yield client


@pytest.mark.parametrize("security", [None, Security.temporary()], ids=["plain", "certified"])
def test_strangers_do_not_reach_own_processes(client: Client, security: Security | None) -> None:
    assert client.submit(int, 3).result() == 3
    for address in (client.scheduler.address, *client.nthreads()):
        own = address if security else address.replace("tls://", "tcp://")
        with pytest.raises(OSError, match="TLS|reset|closed|Timed out"):
            Client(own, security=security, timeout=1)


def test_ctrl_c_is_for_the_process_of_the_client(client: Client) -> None:
    """A terminal sends it to all; the workers go on until their client stops them."""
    (pid,) = client.run(os.getpid).values()
    os.kill(pid, signal.SIGINT)
    assert client.submit(int, pure=False).result(60) == 0
    assert list(client.run(os.getpid).values()) == [pid]
