"""Calls through a pool keep order, limits and deadlines, and leave nothing when it closes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
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


def test_errors_inside_the_pool_fail_the_calls_until_then(
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


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: {"y": None}, "could not be taken: .*NoneType"),
        (lambda x: np.hstack([x, x]), "expected 1 values for labels v0"),
    ],
)
def test_answers_that_do_not_fit_are_errors(
    servers: dict[str, ScriptedServer], answer: Behaviour, message: str
) -> None:
    """Nobody waits for ever, and such an answer has scored nothing."""
    (one, _) = servers.values()
    one.behaviour = answer
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(objects(8), pool=pool)
        with pytest.raises(errors.ResponseError, match=message) as caught:
            pending.result(timeout_s=10)
        assert caught.value.server == "grpc://s1:8001"
        until(lambda: all(s.in_flight == 0 for s in pool.servers))
        assert pool.statistics.total().rows == 0
        assert pool.statistics.total().requests >= 1


def test_cancelled_calls_send_no_more(servers: dict[str, ScriptedServer]) -> None:
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


def test_cancelled_requests_that_have_not_left_stay(servers: dict[str, ScriptedServer]) -> None:
    """A connection's thread is held up with the first one, as the call is cancelled."""
    (one, _) = servers.values()
    with pool_of("grpc://s1:8001", max_in_flight=2) as pool:
        MODEL.check(pool)
        one.blocks = "infer"
        pending = MODEL.submit(objects(8), pool=pool)
        assert one.blocked.wait(20)
        until(lambda: pool.servers[0].in_flight == 2)
        pending.cancel()
        one.released.set()
        assert doubled(MODEL(objects(4), pool=pool)) == [0, 1, 2, 3]
    assert len(one.requests) == 2


def test_deadlines_cancel_the_requests_in_flight(servers: dict[str, ScriptedServer]) -> None:
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


def test_calls_that_come_as_the_pool_closes_are_refused(servers: dict[str, ScriptedServer]) -> None:
    class Closing(Pool):
        def submit(self, call: Any) -> None:
            self.close()
            super().submit(call)

    with (
        Closing(Settings.make(tuple(servers)), connect=connect) as pool,
        pytest.raises(errors.ConfigError, match="has been closed"),
    ):
        MODEL(objects(4), pool=pool, timeout_s=20, on_error="mask")


def test_pools_recover_from_a_moment_without_threads(servers: dict[str, ScriptedServer]) -> None:
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


def test_states_name_the_last_error(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.behaviour = lambda _: LOST
    with pool_of(*servers) as pool:
        MODEL(objects(40), pool=pool)
        states = {s.url: s for s in pool.servers}
        assert states["grpc://s1:8001"].last_error is not None
        assert states["grpc://s2:8001"].usable
        assert "s1" in repr(pool)


@pytest.mark.parametrize("blocking", ["infer", "metadata", "live", "close"])
def test_stopped_servers_delay_no_other(servers: dict[str, ScriptedServer], blocking: str) -> None:
    """It blocks where its token, its shared memory or its connection is needed."""
    one, two = servers.values()
    with pool_of(*servers) as pool:
        if blocking != "metadata":
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


def test_a_transport_with_threads_infers_several_requests_at_the_same_time(
    servers: dict[str, ScriptedServer],
) -> None:
    (one, _) = servers.values()
    both, infer = threading.Barrier(2, timeout=60), one.infer

    def meet(*args: Any, **options: Any) -> Any:
        both.wait()
        return infer(*args, **options)

    one.threads, one.infer = 2, meet
    with pool_of("grpc://s1:8001") as pool:
        assert doubled(MODEL(objects(8), pool=pool)) == list(range(8))


def test_rows_are_shared_out_equally_among_as_few_requests_as_may_be(
    servers: dict[str, ScriptedServer],
) -> None:
    (one, _) = servers.values()
    one.max_rows = 40
    with pool_of("grpc://s1:8001") as pool:
        assert doubled(MODEL(objects(90), pool=pool)) == list(range(90))
    assert [len(r) for r in one.requests] == [30, 30, 30]


# In a process of its own, as other tests of this process may have pools in use.
CODE = """
import json, sys
from tests.pool.scripted import MODEL, ScriptedServer, objects, pool_of

ScriptedServer("grpc://s1:8001")
seen = {}

def note(when):
    seen[when] = sys.getswitchinterval()

with pool_of("grpc://s1:8001") as pool:
    note("before its first use")
    MODEL(objects(1), pool=pool)
    note("in use")
    with pool_of("grpc://s1:8001") as other:
        MODEL(objects(1), pool=other)
    note("one of two closed")
note("closed")

with pool_of("grpc://s1:8001") as pool:
    MODEL(objects(1), pool=pool)
    sys.setswitchinterval(0.003)
note("set meanwhile")

with pool_of("grpc://s1:8001") as pool:
    MODEL(objects(1), pool=pool)
    note("set before")
note("set before, and closed")
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def intervals() -> dict[str, float]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True, timeout=200
    )
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def test_the_interval_is_short_while_a_pool_is_in_use(intervals: dict[str, float]) -> None:
    assert intervals["before its first use"] == intervals["closed"] == 0.005
    assert intervals["in use"] == intervals["one of two closed"] < 0.002


@pytest.mark.parametrize("when", ["set meanwhile", "set before", "set before, and closed"])
def test_switch_intervals_of_the_user_stay(intervals: dict[str, float], when: str) -> None:
    assert intervals[when] == 0.003
