"""Processes that commands start on this machine."""

from __future__ import annotations

import pytest
from distributed import Client, Security

from sonic_coffea.dask import cluster


@pytest.mark.parametrize("security", [None, Security.temporary()], ids=["plain", "certified"])
def test_strangers_do_not_reach_own_processes(security: Security | None) -> None:
    with cluster(1) as client:
        assert client.submit(int, 3).result() == 3
        for address in (client.scheduler.address, *client.nthreads()):
            own = address if security else address.replace("tls://", "tcp://")
            with pytest.raises(OSError, match="TLS|reset|closed|Timed out"):
                Client(own, security=security, timeout=1)
