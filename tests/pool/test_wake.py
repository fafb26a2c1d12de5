"""Calls wake a service that sleeps, and wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tests.doubling import MODEL, jets, served
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.testing import FakeServer

METHODS = ("RepositoryIndex", "ServerReady", "ModelMetadata", "ModelInfer")


def fall_asleep(server: FakeServer) -> None:
    """Answer as a proxy without a server behind it."""
    for method in METHODS:
        server.refuse(method, grpc.StatusCode.UNAVAILABLE, "no healthy upstream")


def index_requests(server: FakeServer) -> int:
    return sum(method == "RepositoryIndex" for method, _ in server.calls)


@pytest.mark.parametrize("used", [False, True])
def test_calls_wake_a_service_that_sleeps_before_or_between_them(used: bool) -> None:
    with FakeServer(served()) as server, sonic.connect(server.url), ThreadPoolExecutor(1) as thread:
        if used:
            MODEL(jets(1.0))
        fall_asleep(server)
        asked = index_requests(server)
        scores = thread.submit(MODEL, jets(1.0))
        until(lambda: index_requests(server) > asked)
        assert not scores.done()
        for method in METHODS:
            server.accept(method)
        assert scores.result().twice.tolist() == [2.0]
