"""Faults that pass cost time and no rows; others end the call with an error that says where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.network import fault_server as wrong
from tests.network.fault_server import FaultServer
from tests.network.faults import CASES, JETS, MODEL, MODELS, Case, assert_right
from tests.network.toxics import ToxicProxy
from tests.waiting import until

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeServer

LASTING = (errors.AccessError, errors.RequestError)
# Waited for as long as a request may take; an answer that is late for the machine has time.
WAITED_FOR, WAIT_S = (errors.OverloadError, errors.RouteTimeoutError), 2.0
# On a machine that is busy, an answer is late as if its server hung.
PATIENT: dict[str, Any] = {"hedge_after_s": 60.0}
PASSES = [c for c in CASES if c.kind not in LASTING]


def pool_of(*servers: FakeServer | ToxicProxy, **options: Any) -> Pool:
    # A token that is asked for anew, as one that has expired needs it.
    options = {"request_timeout_s": 20, "retry_timeout_s": 20, "token": lambda: "t", **options}
    return Pool(Settings.make([server.url for server in servers], **options))


@pytest.fixture
def faulty() -> Iterator[FaultServer]:
    with FaultServer(MODELS) as server:
        yield server


@pytest.fixture
def healthy() -> Iterator[FakeServer]:
    with FakeServer(MODELS) as server:
        yield server


# Nothing is wrong.


def test_slowness_is_no_fault(healthy: FakeServer) -> None:
    """Of bytes that come late, in parts, and few at a time."""
    with ToxicProxy(healthy.url) as proxy, pool_of(proxy, **PATIENT) as pool:
        proxy.latency_s, proxy.slice_bytes, proxy.bytes_per_s = 0.001, 7, 100_000
        assert_right(MODEL(JETS, pool=pool))
        assert pool.statistics.total().retries == 0


# Faults that pass.


@pytest.mark.parametrize("case", PASSES, ids=str)
def test_faults_that_pass_cost_no_rows(case: Case, faulty: FaultServer) -> None:
    """The deadline of one request says nothing of a server that answers others."""
    with pool_of(faulty, request_timeout_s=case.timeout_s) as pool:
        if case.connects:
            case.happen(faulty, times=2)
        else:
            MODEL(JETS, pool=pool)
            case.happen(faulty, times=1)
        assert_right(MODEL(JETS, pool=pool))


# One of each kind from each origin.
FIRST = {
    (c.kind, c.name.split()[0]): c
    for c in PASSES
    if c.words and not c.connects and c.kind is not errors.ModelNotFoundError
}


@pytest.mark.parametrize("method", ["ModelMetadata", "ModelConfig"])
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_faults_of_the_first_question_pass(case: Case, method: str, faulty: FaultServer) -> None:
    case.happen(faulty, method=method)
    with pool_of(faulty, metadata_timeout_s=min(case.timeout_s, 10.0)) as pool:
        assert_right(MODEL(JETS, pool=pool))


# Faults that last.


def assert_named(error: errors.SonicError, faulty: FaultServer) -> None:
    """Assert that an error says where it was."""
    assert (error.server, error.model) == (faulty.url, "tagger")
    assert error.events is not None
    assert 0 <= error.events[0] < error.events[1] <= 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lasting_faults_end_the_call_and_say_where(case: Case, faulty: FaultServer) -> None:
    """As the error that the fault is taken for, with the words of the server."""
    options: dict[str, Any] = {"retry_timeout_s": 0.1, "request_timeout_s": case.timeout_s}
    if case.kind in LASTING:
        options = {"token": "t", **PATIENT}  # a function would be asked for another token
    elif case.kind is errors.InferenceError:
        options = {}  # few tries end the call, not the time
    elif case.kind in WAITED_FOR:
        options["request_timeout_s"] = WAIT_S
    with pool_of(faulty, **options) as pool:
        MODEL(JETS, pool=pool)
        case.happen(faulty, times=10**6)
        if case.connects:
            faulty.break_connections()
        with pytest.raises(case.kind) as raised:
            MODEL(JETS, pool=pool)
        assert type(raised.value) is case.kind
        assert case.words in str(raised.value)
        assert_named(raised.value, faulty)
        if case.kind in LASTING:
            assert pool.statistics.total().retries == 0
        elif case.kind is errors.InferenceError:
            # Each request once more, and one that is smaller may be tried then.
            assert len(faulty.calls) < 40


# Connections, and what a TCP proxy does to them.


@pytest.mark.parametrize("reset", [False, True])
def test_connections_that_broke_while_idle_cost_no_rows(faulty: FaultServer, reset: bool) -> None:
    with pool_of(faulty) as pool:
        assert_right(MODEL(JETS, pool=pool))
        faulty.break_connections(reset=reset)
        assert_right(MODEL(JETS, pool=pool))


# What hangs.


@pytest.mark.parametrize("way", ["the server", "the network"])
def test_silent_connections_are_replaced(faulty: FaultServer, way: str) -> None:
    """Of a host that vanished, or that a NAT has forgotten: no byte comes, and no end."""
    with ToxicProxy(faulty.url) as proxy, pool_of(proxy) as pool:
        assert_right(MODEL(JETS, pool=pool))
        for _ in range(2):
            before = faulty.connections
            if way == "the server":
                faulty.freeze()
            else:
                proxy.lose()
                proxy.find()
            assert_right(MODEL.submit(JETS, pool=pool).result(timeout_s=60))
            assert faulty.connections > before
        assert pool.statistics.total().failures == 0
        if way == "the server":  # the network tells it nothing of what was closed
            pool.close()
            until(lambda: not faulty.alive)


@pytest.mark.parametrize("fault", [wrong.deaf, wrong.mute])
def test_first_connections_that_hang_are_replaced(faulty: FaultServer, fault: Any) -> None:
    """It was accepted, by a host or a balancer that is not there any more."""
    faulty.misbehave(fault, method="")
    with pool_of(faulty) as pool:
        assert_right(MODEL(JETS, pool=pool))
    assert faulty.connections >= 2
