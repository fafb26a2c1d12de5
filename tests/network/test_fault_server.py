"""The fault server and the proxy themselves: right answers, and nothing left behind."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import psutil
import pytest
from tests.network.fault_server import FaultServer
from tests.network.misbehaviour import dribble, pings
from tests.network.toxics import ToxicProxy
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = sonic.Model("tagger", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
MODELS = {"tagger": FakeModel.of(MODEL)}
JETS = ak.unflatten(ak.zip({"pt": np.linspace(-3, 3, 1000, dtype=np.float32)}), [400, 0, 600])


@pytest.fixture
def fakes_scores() -> list[Any]:
    """The scores of a server of gRPC's own."""
    with FakeServer(MODELS) as server, Pool(Settings.make(server.url)) as pool:
        return MODEL(JETS, pool=pool).top.tolist()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves threads or sockets of the servers behind."""
    process = psutil.Process()
    files = process.num_fds()
    yield
    names = [t.name for t in threading.enumerate()]
    assert not {"fault-server", "toxic-proxy"} & set(names)
    deadline = time.monotonic() + 20
    while process.num_fds() > files:  # gRPC closes its own a moment after the pool
        assert time.monotonic() < deadline, process.net_connections()
        time.sleep(0.01)


def test_right_scores_without_a_fault(fakes_scores: list[Any], nothing_is_left: None) -> None:
    with FaultServer(MODELS) as server, Pool(Settings.make(server.url)) as pool:
        assert MODEL(JETS, pool=pool).top.tolist() == fakes_scores
        assert pool.connections()[0].ready()
        assert pool.connections()[0].info().name == "fake"
        assert pool.statistics.total().retries == 0


@pytest.mark.parametrize("fault", [pings(20), dribble(3, 0.0)])
def test_slow_and_noisy_answers_are_right(fakes_scores: list[Any], fault: Any) -> None:
    with FaultServer(MODELS) as server, Pool(Settings.make(server.url)) as pool:
        server.misbehave(fault, times=3)
        assert MODEL(JETS, pool=pool).top.tolist() == fakes_scores
        assert pool.statistics.total().retries == 0


def test_a_large_message_passes_the_windows() -> None:
    rows = ak.unflatten(ak.zip({"pt": np.linspace(-3, 3, 200_000, dtype=np.float32)}), [200_000])
    served = {"tagger": FakeModel.of(MODEL, max_rows=200_000)}
    with FaultServer(served) as server, Pool(Settings.make(server.url)) as pool:
        scores = MODEL(rows, pool=pool).top
        assert pool.statistics.total().requests == 1
    np.testing.assert_allclose(ak.to_numpy(scores)[0], (1 + np.sin(rows.pt[0])) / 2, atol=1e-6)


def test_a_toxic_proxy(fakes_scores: list[Any], nothing_is_left: None) -> None:
    with FakeServer(MODELS) as server, ToxicProxy(server.url) as proxy:
        proxy.latency_s, proxy.slice_bytes = 0.02, 11
        with Pool(Settings.make(proxy.url)) as pool:
            begun = time.monotonic()
            assert MODEL(JETS, pool=pool).top.tolist() == fakes_scores
            assert time.monotonic() - begun > 0.08  # metadata and rows, there and back
            assert pool.statistics.total().retries == 0
        assert proxy.connections == 1


def test_a_proxy_that_refuses(fakes_scores: list[Any]) -> None:
    with (
        FakeServer(MODELS) as server,
        ToxicProxy(server.url) as proxy,
        Pool(Settings.make(proxy.url)) as pool,
    ):
        assert MODEL(JETS, pool=pool).top.tolist() == fakes_scores
        proxy.refuse()
        proxy.reset()
        pending = MODEL.submit(JETS, pool=pool)
        until(lambda: pool.statistics.total().retries > 0)
        proxy.accept()
        assert pending.result(timeout_s=60).top.tolist() == fakes_scores


def test_a_bandwidth() -> None:
    with FakeServer(MODELS) as server, ToxicProxy(server.url) as proxy:
        proxy.bytes_per_s = 40_000
        with Pool(Settings.make(proxy.url)) as pool:
            begun = time.monotonic()
            MODEL(JETS, pool=pool)
            assert 8000 / 40_000 < time.monotonic() - begun < 10
