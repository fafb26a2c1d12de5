"""Calls wake a service that sleeps, and wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import awkward as ak
import grpc
import pytest
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["a"]})
METHODS = ("RepositoryIndex", "ServerReady", "ModelMetadata", "ModelInfer")


def fall_asleep(server: FakeServer) -> None:
    """Answer as a proxy without a server behind it."""
    for method in METHODS:
        server.refuse(method, grpc.StatusCode.UNAVAILABLE, "no healthy upstream")


@pytest.fixture
def awake() -> Iterator[FakeServer]:
    with FakeServer({"m": FakeModel.of(MODEL)}) as server:
        yield server


def index_requests(server: FakeServer) -> int:
    return sum(method == "RepositoryIndex" for method, _ in server.calls)


@pytest.mark.parametrize("used", [False, True])
def test_calls_wake_a_service_that_sleeps_before_or_between_them(
    awake: FakeServer, *, used: bool
) -> None:
    jets = ak.Array([[{"pt": 1.0}], []])
    with sonic.connect(awake.url), ThreadPoolExecutor(1) as thread:
        if used:
            MODEL(jets)
        fall_asleep(awake)
        asked = index_requests(awake)
        scores = thread.submit(MODEL, jets)
        until(lambda: index_requests(awake) > asked)
        assert not scores.done()
        for method in METHODS:
            awake.accept(method)
        assert ak.num(scores.result().a).to_list() == [1, 0]
