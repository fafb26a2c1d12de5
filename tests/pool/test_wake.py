"""Services that sleep are woken, and waited for."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import awkward as ak
import grpc
import pytest
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
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


@pytest.fixture
def asleep(awake: FakeServer) -> FakeServer:
    fall_asleep(awake)
    return awake


def index_requests(server: FakeServer) -> int:
    return sum(method == "RepositoryIndex" for method, _ in server.calls)


def test_models_are_requested_until_they_are_ready(
    asleep: FakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "sonic_coffea")
    monkeypatch.setattr("sonic_coffea.pool._pool.WAKE_INTERVAL_S", 0.01)
    with sonic.connect(asleep.url) as pool, ThreadPoolExecutor(1) as thread:
        woken = thread.submit(pool.wake, "m", timeout_s=100)
        until(lambda: index_requests(asleep) >= 3)
        # The server is ready before its model is, and does not list its models.
        asleep.accept("ServerReady")
        before = index_requests(asleep)
        until(lambda: index_requests(asleep) >= before + 2)
        assert not woken.done()
        asleep.accept("ModelMetadata")
        assert 0 < woken.result() < 100
    messages = [r.getMessage() for r in caplog.records if "no server is ready" in r.getMessage()]
    assert " s of 100 s" in messages[0]
    assert "no healthy upstream" in messages[0]


def test_the_wait_ends_with_its_timeout_or_with_the_pool(
    asleep: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with sonic.connect(asleep.url) as pool:
        with pytest.raises(errors.DeadlineError, match=r"within 0\.1 s.*no healthy upstream"):
            pool.wake("m", timeout_s=0.1)
        with ThreadPoolExecutor(1) as thread:
            before = index_requests(asleep)
            woken = thread.submit(pool.wake, progress=False)
            until(lambda: index_requests(asleep) > before)
            pool.close()
            with pytest.raises(errors.CancelledError, match="closed"):
                woken.result()
    assert capsys.readouterr().out == ""


def test_failures_that_waiting_does_not_mend_are_raised(awake: FakeServer) -> None:
    headers = {"authorization": "Bearer x"}
    with FakeServer({"m": FakeModel.of(MODEL)}, headers=headers) as closed:
        with sonic.connect([closed.url, awake.url]) as pool:
            assert pool.wake("m") < 100
            with pytest.raises(errors.SonicError):
                pool.wake("n")
        with sonic.connect(closed.url) as pool, pytest.raises(errors.AccessError):
            pool.wake()


def test_calls_wake_a_service_that_went_to_sleep_between_them(awake: FakeServer) -> None:
    jets = ak.Array([[{"pt": 1.0}], []])
    with sonic.connect(awake.url), ThreadPoolExecutor(1) as thread:
        before = MODEL(jets)
        fall_asleep(awake)
        scores = thread.submit(MODEL, jets)
        until(lambda: index_requests(awake) >= 2)
        assert not scores.done()
        for method in METHODS:
            awake.accept(method)
        assert scores.result().to_list() == before.to_list()
