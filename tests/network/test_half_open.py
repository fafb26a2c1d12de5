"""Connections that only this side believes in: a host that vanished, a NAT that forgot."""

from __future__ import annotations

import threading
import time

import pytest
from tests.network.fault_server import FaultServer
from tests.network.misbehaviour import silent
from tests.network.test_fault_server import JETS, MODEL, MODELS
from tests.network.toxics import ToxicProxy
from tests.waiting import until

from sonic_coffea.pool import Pool, Settings


@pytest.mark.parametrize("way", ["the server", "the network"])
def test_another_connection_takes_the_place_of_a_silent_one(way: str) -> None:
    with (
        FaultServer(MODELS) as server,
        ToxicProxy(server.url) as proxy,
        Pool(Settings.make(proxy.url)) as pool,
    ):
        right = MODEL(JETS, pool=pool).top.tolist()
        for _ in range(2):
            before = server.connections
            if way == "the server":
                server.freeze()
            else:
                proxy.lose()
                proxy.find()
            begun = time.monotonic()
            assert MODEL(JETS, pool=pool).top.tolist() == right
            assert time.monotonic() - begun < 10.0
            assert server.connections > before
        assert pool.statistics.total().failures == 0
        if way == "the server":  # the network tells it nothing of what was closed
            pool.close()
            until(lambda: server.open_connections == 0)


def test_the_answer_to_a_probe_alone_is_lost() -> None:
    """The rows of a connection that seemed to be lost come back all the same, once."""
    with FaultServer(MODELS) as server, Pool(Settings.make(server.url)) as pool:
        right = MODEL(JETS, pool=pool).top.tolist()
        server.misbehave(silent, method="ServerLive")
        server.misbehave(silent, times=2)
        results: list[object] = []
        calls = [
            threading.Thread(target=lambda: results.append(MODEL(JETS, pool=pool).top.tolist()))
            for _ in range(4)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        assert results == [right] * 4
