"""Calls through a pool keep order, limits and deadlines, and leave nothing when it closes."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.doubling import MODEL, jets, twice
from tests.limits import without_threads
from tests.pool.scripted import ONE, TWO, Behaviour, ScriptedServer, connect, pool_of
from tests.waiting import ctrl_c_in, until

from sonic_coffea import Pending, errors
from sonic_coffea.pool import Deadline, Pool, Settings
from sonic_coffea.reporting import Statistics


@pytest.mark.parametrize(
    ("max_rows", "rows", "sizes"), [(4, 1001, [4] * 250 + [1]), (40, 90, [30, 30, 30])]
)
def test_few_requests_of_equal_size_come_back_in_order(
    one: ScriptedServer, max_rows: int, rows: int, sizes: list[int]
) -> None:
    one.max_rows = max_rows
    with pool_of(ONE) as pool:
        assert twice(MODEL(jets(*range(rows)), pool=pool)) == list(range(rows))
        assert MODEL.check(pool).version == "1"
        assert pool.timings([(ONE, "m", "1")]) == {}  # not every transport has statistics
    assert [len(r) for r in one.requests] == sizes
    assert np.concatenate(one.requests).ravel().tolist() == list(range(rows))


def test_known_contracts_do_not_wait_for_the_engine(one: ScriptedServer) -> None:
    held, released = threading.Event(), threading.Event()
    one.gate.clear()
    with pool_of(ONE) as pool:
        (part,) = MODEL.submit(jets(0), pool=pool).parts
        part.call.ended = lambda: (held.set(), released.wait(30))
        one.gate.set()
        assert held.wait(30)
        assert pool.contract("m", None, deadline=Deadline.after(10)) == part.call.contract
        released.set()
    with pytest.raises(errors.ConfigError, match="closed"):
        pool.contract("m", None)


class Indivisible(int):
    """A number of rows that the core cannot work with, once a request is answered."""

    def __truediv__(self, other: object) -> float:
        raise ZeroDivisionError


def test_errors_inside_the_pool_fail_the_calls_until_then(
    one: ScriptedServer, two: ScriptedServer
) -> None:
    """And nothing else: neither are rows masked, nor does a later call hang."""
    one.max_rows = two.max_rows = Indivisible(4)
    with pool_of(ONE, TWO) as pool:
        pending = MODEL.submit(jets(*range(40)), pool=pool, on_error="mask")
        with pytest.raises(errors.SonicError, match=r"ZeroDivisionError.*model m") as caught:
            pending.result(timeout_s=20)
        assert caught.value.events == (0, 40)
        assert all(s.in_flight == 0 for s in pool.servers)
        one.max_rows = two.max_rows = 4
        assert twice(MODEL(jets(*range(40)), pool=pool, timeout_s=20)) == list(range(40))


def test_logs_that_fail_end_no_thread(
    one: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise BlockingIOError("the log is full")

    caplog.set_level("DEBUG", "sonic_coffea")
    for max_rows, row, message in ((4, np.nan, "NaN"), (Indivisible(4), 1, "ZeroDivision")):
        one.max_rows = max_rows
        with pool_of(ONE) as pool:
            with monkeypatch.context() as patched:
                patched.setattr(logging.Logger, "handle", fail)
                with pytest.raises(errors.SonicError, match=message):
                    MODEL(jets(row), pool=pool, timeout_s=20)
            assert all(s.in_flight == 0 for s in pool.servers)
            one.max_rows = 4
            assert twice(MODEL(jets(1), pool=pool, timeout_s=20)) == [1]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: {"y": None}, "could not be taken: .*NoneType"),
        (lambda x: np.hstack([x, x]), "expected 1 values for labels twice"),
    ],
)
def test_answers_that_do_not_fit_are_errors(
    one: ScriptedServer, answer: Behaviour, message: str
) -> None:
    """Nobody waits for ever, and such an answer has scored nothing."""
    one.behaviour = answer
    with pool_of(ONE) as pool:
        pending = MODEL.submit(jets(*range(8)), pool=pool)
        with pytest.raises(errors.ResponseError, match=message) as caught:
            pending.result(timeout_s=10)
        assert caught.value.server == ONE
        until(lambda: all(s.in_flight == 0 for s in pool.servers))
        assert pool.statistics.total().rows == 0
        assert pool.statistics.total().requests >= 1


def cancelled(pending: Pending) -> None:
    pending.cancel()
    pending.result()


def late(pending: Pending) -> None:
    pending.result(timeout_s=0.2)


def interrupted(pending: Pending) -> None:
    (call,) = (part.call for part in pending.parts)
    with ctrl_c_in(call):
        pending.result()


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        (cancelled, errors.CancelledError, "cancelled"),
        (late, errors.DeadlineError, "within 0.2 s"),
        (interrupted, KeyboardInterrupt, None),
    ],
)
def test_calls_that_end_early_cancel_their_requests_and_send_no_more(
    one: ScriptedServer, ends: Callable[[Pending], None], error: Any, message: str | None
) -> None:
    one.gate.clear()
    with pool_of(ONE, max_in_flight=2, hedge_after_s=60.0) as pool:
        pending = MODEL.submit(jets(*range(100)), pool=pool)
        until(lambda: one.out == 2)
        other = MODEL.submit(jets(*range(4)), pool=pool)
        with pytest.raises(error, match=message):
            ends(pending)
        assert pending.done()
        assert all(cancelled.wait(20) for cancelled in one.cancelled[:2])
        one.gate.set()
        assert twice(other.result(timeout_s=30)) == [0, 1, 2, 3]
    assert len(one.requests) == 3


def test_cancelled_requests_that_have_not_left_stay(one: ScriptedServer) -> None:
    """A connection's thread is held up with the first one, as the call is cancelled."""
    with pool_of(ONE, max_in_flight=2) as pool:
        MODEL.check(pool)
        one.blocks = "infer"
        pending = MODEL.submit(jets(*range(8)), pool=pool)
        assert one.blocked.wait(20)
        until(lambda: pool.servers[0].in_flight == 2)
        pending.cancel()
        one.released.set()
        assert twice(MODEL(jets(*range(4)), pool=pool)) == [0, 1, 2, 3]
    assert len(one.requests) == 2


def test_close_is_final_idempotent_and_leaves_nothing(one: ScriptedServer) -> None:
    before = threading.active_count()
    one.gate.clear()
    pool = pool_of(ONE)
    pending = MODEL.submit(jets(*range(100)), pool=pool)
    pool.close()
    pool.close()
    assert one.closed
    with pytest.raises(errors.CancelledError):
        pending.result(timeout_s=5)
    # Nothing can be asked of it, and rows are not lost to any server.
    for on_error in ("raise", "mask"):
        with pytest.raises(errors.ConfigError, match="has been closed"):
            MODEL(jets(0), pool=pool, on_error=on_error)
    one.gate.set()
    until(lambda: threading.active_count() <= before)


def test_calls_that_come_as_the_pool_closes_are_refused(one: ScriptedServer) -> None:
    class Closing(Pool):
        def submit(self, call: Any) -> None:
            self.close()
            super().submit(call)

    with (
        Closing(Settings.make(ONE), connect=connect) as pool,
        pytest.raises(errors.ConfigError, match="has been closed"),
    ):
        MODEL(jets(*range(4)), pool=pool, timeout_s=20, on_error="mask")


def test_pools_recover_from_a_moment_without_threads(one: ScriptedServer) -> None:
    with pool_of(ONE) as pool:
        with without_threads(), pytest.raises(RuntimeError, match="thread"):
            MODEL.submit(jets(*range(4)), pool=pool)
        assert twice(MODEL(jets(*range(4)), pool=pool, timeout_s=20)) == list(range(4))


def test_pools_close_without_threads_and_leave_none(one: ScriptedServer) -> None:
    before = threading.active_count()
    with pool_of(ONE) as pool:
        assert twice(MODEL(jets(*range(4)), pool=pool)) == [0, 1, 2, 3]
        with without_threads():
            pool.close()
    assert one.closed
    until(lambda: threading.active_count() <= before)


def test_calls_share_the_pool(one: ScriptedServer, two: ScriptedServer) -> None:
    with pool_of(ONE, TWO) as pool:
        calls = {n: MODEL.submit(jets(*range(n)), pool=pool) for n in (100, 1, 57)}
        for n, call in calls.items():
            assert twice(call.result(timeout_s=30)) == list(range(n))
        each = sum((call.statistics for call in calls.values()), Statistics())
        whole, parts = pool.statistics.total(), each.total()
        assert (whole.rows, whole.requests) == (parts.rows, parts.requests) == (158, 41)
        assert whole.latencies.sum() == 41


@pytest.mark.parametrize("blocking", ["infer", "metadata", "live", "close"])
def test_stopped_servers_delay_no_other(
    one: ScriptedServer, two: ScriptedServer, blocking: str
) -> None:
    """It blocks where its token, its shared memory or its connection is needed."""
    with pool_of(ONE, TWO) as pool:
        if blocking != "metadata":
            MODEL.check(pool)
        one.blocks = blocking
        if blocking == "live":
            one.gate.clear()  # it is probed after some silence
        if blocking == "close":
            pool.set_servers(TWO)
        try:
            pending = [MODEL.submit(jets(*range(4)), pool=pool) for _ in range(20)]
            assert one.blocked.wait(20)
            until(lambda: sum(len(x) for x in two.requests) >= 36)
            assert pool.servers
            assert pool.telemetry()
        finally:
            one.released.set()
            one.gate.set()
        for call in pending:
            assert twice(call.result(timeout_s=20)) == [0, 1, 2, 3]


def test_a_transport_needs_five_methods() -> None:
    with ScriptedServer(ONE) as transport:
        contract = transport.metadata("m", None)
        assert transport.ready()
        assert transport.info().name
        assert transport.labels(contract) == {}
        assert transport.digest("m", "1") == contract.digest
        with pytest.raises(errors.ServerError, match="counts no requests"):
            transport.statistics("m", None)
    assert transport.closed


def test_a_transport_with_threads_infers_several_requests_at_the_same_time(
    one: ScriptedServer,
) -> None:
    both, infer = threading.Barrier(2, timeout=60), one.infer

    def meet(*args: Any, **options: Any) -> Any:
        both.wait()
        return infer(*args, **options)

    one.threads, one.infer = 2, meet
    with pool_of(ONE) as pool:
        assert twice(MODEL(jets(*range(8)), pool=pool)) == list(range(8))


def test_the_switch_interval_is_short_while_a_pool_is_in_use_unless_the_user_set_it(
    one: ScriptedServer,
) -> None:
    default_s = sys.getswitchinterval()
    try:
        with pool_of(ONE) as pool:
            assert sys.getswitchinterval() == 0.005
            MODEL(jets(0), pool=pool)
            with pool_of(ONE) as other:
                MODEL(jets(0), pool=other)
            assert sys.getswitchinterval() == 0.0005
        assert sys.getswitchinterval() == 0.005
        with pool_of(ONE) as pool:
            MODEL(jets(0), pool=pool)
            sys.setswitchinterval(0.003)
        with pool_of(ONE) as pool:
            MODEL(jets(0), pool=pool)
            assert sys.getswitchinterval() == 0.003
        assert sys.getswitchinterval() == 0.003
    finally:
        sys.setswitchinterval(default_s)
