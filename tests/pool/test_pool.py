"""Calls through a pool to scripted servers: order, limits, deadlines, errors, and the close."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.limits import without_threads
from tests.pool.scripted import (
    LOST,
    MODEL,
    Behaviour,
    ScriptedServer,
    connect,
    doubled,
    objects,
    pool_of,
)
from tests.waiting import ctrl_c_in, until

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.reporting import Statistics


def test_many_small_requests_come_back_in_order(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    with pool_of("grpc://s1:8001") as pool:
        assert doubled(MODEL(objects(1001), pool=pool)) == list(range(1001))
    sizes = [len(r) for r in one.requests]
    assert sizes == [4] * 250 + [1]
    assert np.concatenate(one.requests).ravel().tolist() == list(range(1001))


class Indivisible(int):
    """A number of rows that the core cannot work with, once a request is answered."""

    def __truediv__(self, other: object) -> float:
        raise ZeroDivisionError


def test_an_error_inside_the_pool_fails_the_calls_until_then(
    servers: dict[str, ScriptedServer],
) -> None:
    """And nothing else: neither are rows masked, nor does a later call hang."""
    for server in servers.values():
        server.max_rows = Indivisible(4)
    with pool_of(*servers) as pool:
        pending = MODEL.submit(objects(40), pool=pool, on_error="mask")
        with pytest.raises(errors.SonicError, match=r"ZeroDivisionError.*model m") as caught:
            pending.result(timeout_s=20)
        assert caught.value.events == (0, 40)
        assert all(s.in_flight == 0 for s in pool.servers)
        for server in servers.values():
            server.max_rows = 4
        assert doubled(MODEL(objects(40), pool=pool, timeout_s=20)) == list(range(40))


def test_a_request_from_before_an_error_inside_the_pool_is_not_taken_for_a_later_one(
    servers: dict[str, ScriptedServer],
) -> None:
    for server in servers.values():
        server.max_rows = Indivisible(4)
        server.gate.clear()
    with pool_of(*servers) as pool:
        early = MODEL.submit(objects(4), pool=pool)
        until(lambda: sum(server.out for server in servers.values()) == 1)
        holds, free = sorted(servers.values(), key=lambda server: -server.out)
        free.gate.set()
        late = MODEL.submit(objects(4), pool=pool)
        for pending in (early, late):
            with pytest.raises(errors.SonicError, match="ZeroDivisionError"):
                pending.result(timeout_s=20)
        for server in servers.values():
            server.max_rows = 4
        again = MODEL.submit(objects(4), pool=pool)
        holds.gate.set()
        assert doubled(again.result(timeout_s=20)) == list(range(4))
        until(lambda: holds.out == 0)
        in_flight = [n for report in pool.telemetry()[0] for n, _ in report.models.values()]
        assert not any(in_flight)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x[:-1], "came back with shape .* for 4 rows"),
        (lambda x: {"z": x}, "the answer lacks output 'y'; it has z"),
        (lambda x: np.hstack([x, x]), "expected 1 values for labels v0"),
    ],
)
def test_wrong_answers_are_refused(
    servers: dict[str, ScriptedServer], answer: Behaviour, message: str
) -> None:
    (one, _) = servers.values()
    one.behaviour = answer
    with pool_of("grpc://s1:8001") as pool, pytest.raises(errors.ResponseError, match=message):
        MODEL(objects(8), pool=pool)


def test_an_answer_that_cannot_be_taken_is_an_error(servers: dict[str, ScriptedServer]) -> None:
    """Whatever goes wrong on the connection's thread, nobody waits for ever."""
    (one, _) = servers.values()
    one.behaviour = lambda _: {"y": None}
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(objects(8), pool=pool)
        with pytest.raises(errors.ResponseError, match="NoneType") as caught:
            pending.result(timeout_s=10)
        assert caught.value.server == "grpc://s1:8001"
        until(lambda: all(s.in_flight == 0 for s in pool.servers))
        # What could not be taken has scored nothing.
        assert pool.statistics.total().rows == 0
        assert pool.statistics.total().requests >= 1


def test_cancel(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.gate.clear()
    with pool_of("grpc://s1:8001", max_in_flight=2) as pool:
        pending = MODEL.submit(objects(100), pool=pool)
        other = MODEL.submit(objects(4), pool=pool)
        pending.cancel()
        with pytest.raises(errors.CancelledError):
            pending.result()
        one.gate.set()
        assert doubled(other.result(timeout_s=30)) == [0, 1, 2, 3]
    assert len(one.requests) <= 4  # the rest of the cancelled call never left
    assert pending.done()


def test_a_deadline_cancels_the_requests_in_flight(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.gate.clear()
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(objects(8), pool=pool)
        until(lambda: bool(one.handles))
        with pytest.raises(errors.DeadlineError, match="within 0.2 s"):
            pending.result(timeout_s=0.2)
        assert all(handle.cancelled.wait(20) for handle in one.handles)


def test_ctrl_c_cancels_the_requests_in_flight(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.gate.clear()
    with pool_of("grpc://s1:8001", max_in_flight=4) as pool:
        pending = MODEL.submit(objects(100), pool=pool)
        until(lambda: one.out == pool.settings.max_in_flight)
        (call,) = (part.call for part in pending.parts)
        with pytest.raises(KeyboardInterrupt), ctrl_c_in(call):
            pending.result()
        assert pending.done()
        assert all(handle.cancelled.wait(20) for handle in one.handles)
        assert len(one.requests) == pool.settings.max_in_flight
        one.gate.set()
        assert doubled(MODEL(objects(3), pool=pool)) == [0, 1, 2]


def test_close_is_final_idempotent_and_leaves_nothing(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    before = threading.active_count()
    one.gate.clear()
    pool = pool_of("grpc://s1:8001")
    pending = MODEL.submit(objects(100), pool=pool)
    pool.close()
    pool.close()
    assert one.closed
    with pytest.raises(errors.CancelledError):
        pending.result(timeout_s=5)
    # Nothing can be asked of it, and rows are not lost to any server.
    for on_error in ("raise", "mask"):
        with pytest.raises(errors.ConfigError, match="has been closed"):
            MODEL(objects(1), pool=pool, on_error=on_error)
    one.gate.set()
    until(lambda: threading.active_count() <= before)


def test_a_call_that_comes_as_the_pool_is_closed(servers: dict[str, ScriptedServer]) -> None:
    class Closing(Pool):
        def submit(self, call: Any) -> None:
            self.close()
            super().submit(call)

    with (
        Closing(Settings.make(tuple(servers)), connect=connect) as pool,
        pytest.raises(errors.ConfigError, match="has been closed"),
    ):
        MODEL(objects(4), pool=pool, timeout_s=20, on_error="mask")


def test_a_system_without_threads_for_a_moment(servers: dict[str, ScriptedServer]) -> None:
    with pool_of(*servers) as pool:
        with without_threads(), pytest.raises(RuntimeError, match="thread"):
            MODEL.submit(objects(4), pool=pool)
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))


def test_calls_share_the_pool(servers: dict[str, ScriptedServer]) -> None:
    with pool_of(*servers) as pool:
        pending = [MODEL.submit(objects(n), pool=pool) for n in (100, 1, 57)]
        for one, n in zip(pending, (100, 1, 57), strict=True):
            assert doubled(one.result(timeout_s=30)) == list(range(n))
        each = Statistics()
        for one in pending:
            each += one.statistics
        whole, parts = pool.statistics.total(), each.total()
        assert (whole.rows, whole.requests) == (parts.rows, parts.requests) == (158, 41)
        assert whole.latencies.sum() == 41


def test_states(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.behaviour = lambda _: LOST
    with pool_of(*servers) as pool:
        MODEL(objects(40), pool=pool)
        states = {s.url: s for s in pool.servers}
        assert states["grpc://s1:8001"].last_error is not None
        assert states["grpc://s2:8001"].usable
        assert "s1" in repr(pool)


# What may block


@pytest.mark.parametrize("blocking", ["infer", "contract", "live", "close"])
def test_a_stopped_server_delays_no_other(
    servers: dict[str, ScriptedServer], blocking: str
) -> None:
    """It blocks where its token, its shared memory or its connection is needed."""
    one, two = servers.values()
    with pool_of(*servers) as pool:
        if blocking != "contract":
            MODEL.check(pool)
        one.blocks = blocking
        if blocking == "live":
            one.gate.clear()  # it is probed after some silence
        if blocking == "close":
            pool.set_servers(str(two.address))
        try:
            pending = [MODEL.submit(objects(4), pool=pool) for _ in range(20)]
            assert one.blocked.wait(20)
            until(lambda: sum(len(x) for x in two.requests) >= 36)
            assert pool.servers
            assert pool.telemetry()
        finally:
            one.released.set()
            one.gate.set()
        for call in pending:
            assert doubled(call.result(timeout_s=20)) == [0, 1, 2, 3]
