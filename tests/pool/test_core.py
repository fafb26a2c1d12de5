"""Each row is delivered or failed once, on virtual time, whatever servers and schedulers do."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.pool.scenario import FAILURES, KEY, LOST, ONE, TWO, Scenario, contract

from sonic_coffea import errors, pool
from sonic_coffea.pool import Quota
from sonic_coffea.pool._core import PoolCore
from sonic_coffea.pool._tuning import MAX_LOSSES, MAX_RETRIES, SILENCE_S

PURE = (
    "_batching _breaker _channels _core _endpoint _endpoints _instructions"
    " _limits _models _record _request _signature _tuning _waiting"
)


def test_the_core_knows_no_clock_thread_or_connection() -> None:
    for module in PURE.split():
        tree = ast.parse(Path(pool.__file__).with_name(f"{module}.py").read_text())
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {getattr(n, "module", None) or n.names[0].name for n in nodes}
        assert not names & {"threading", "time", "socket", "grpc", "queue", "asyncio"}, module


def test_in_flight_bytes_are_bounded() -> None:
    scenario = Scenario(ONE, max_in_flight_bytes=40)
    scenario.submit(5, nbytes=16)
    assert len(scenario.in_flight) == 2
    scenario.answer_all()
    assert len(scenario.delivered) == 5
    # A request that is larger than the limit travels alone.
    scenario.submit(2, nbytes=100)
    assert len(scenario.in_flight) == 1


def test_rows_of_a_lost_server_go_to_another() -> None:
    scenario = Scenario()
    slices = scenario.submit(8)
    losses = scenario.lose(ONE)
    # Those that were in flight when the last chance was lost, too.
    assert MAX_LOSSES <= losses <= MAX_LOSSES + 4
    assert scenario.endpoint(ONE).breaker.failing_since is not None
    scenario.answer_all()
    assert set(scenario.delivered) == set(slices)
    assert set(scenario.delivered.values()) == {TWO}
    assert scenario.retries == losses


def test_the_server_that_lost_rows_is_the_last_to_get_them_again() -> None:
    """Even if it is the only one that is idle."""
    scenario = Scenario()
    scenario.submit(2)
    scenario.now += 0.5
    scenario.submit(4)
    first, *others = scenario.at(ONE)
    for attempt in others:
        scenario.answer(attempt)
    assert len(scenario.at(TWO)) == 3
    scenario.fail(first)
    assert scenario.endpoint(ONE).breaker.failing_since is None
    assert first.slice in [attempt.slice for attempt in scenario.at(TWO)]


def test_lone_lost_servers_are_tried_with_one_request_after_a_back_off() -> None:
    scenario = Scenario(ONE, retry_timeout_s=60)
    slices = scenario.submit(20)
    scenario.lose(ONE)
    assert scenario.core.states(scenario.now)[0].circuit == "open"
    scenario.wait(0.1)
    assert scenario.core.states(scenario.now)[0].circuit == "half-open"
    assert len(scenario.in_flight) == 1
    assert scenario.lose(ONE) == MAX_RETRIES
    retry_at = scenario.endpoint(ONE).breaker.retry_at
    assert 0.1 <= retry_at - scenario.now <= 0.2
    scenario.wait(0.2)
    scenario.answer_all()
    assert list(scenario.delivered.values()) == [ONE] * 20
    assert len(slices) == 20
    assert scenario.core.states(scenario.now)[0].circuit == "closed"


def test_servers_that_only_lose_are_lost_soon_however_little_is_sent() -> None:
    """Since the first loss, from which their time to come back counts."""
    scenario = Scenario(ONE)
    scenario.submit(1)
    begun, breaker = scenario.now, scenario.endpoint(ONE).breaker
    while breaker.failing_since is None:
        scenario.wait(0.4)
        scenario.lose(ONE, most=1)
        assert scenario.now - begun < SILENCE_S + 1
    assert breaker.failing_since == begun + 0.4


def test_lost_servers_are_given_up_after_the_retry_timeout() -> None:
    scenario = Scenario(ONE, retry_timeout_s=5)
    (lost,) = scenario.submit(1)
    begun = scenario.now
    while not scenario.failed:
        scenario.lose(ONE)
        scenario.wait(0.1)
    assert 5 <= scenario.now - begun <= 7.5
    assert isinstance(scenario.failed[lost], errors.ServerLostError)
    assert "tried" in str(scenario.failed[lost])
    # Who tries the same chunk again hears it after one more try.
    (again,) = scenario.submit(1)
    scenario.wait(2)
    scenario.lose(ONE)
    assert again in scenario.failed


def test_silent_servers_are_probed_and_their_rows_go_elsewhere() -> None:
    scenario = Scenario(ONE, TWO, balance="priority")
    slices = scenario.submit(3)
    sent = scenario.at(ONE)
    assert len(sent) == 3
    scenario.wait(SILENCE_S)
    assert scenario.cancelled == sent
    assert [attempt.slice for attempt in scenario.at(TWO)] == slices
    # A response that comes all the same changes nothing.
    scenario.tell(PoolCore.failed, attempt=sent[0], error=LOST)
    scenario.answer_all()
    assert set(scenario.delivered.values()) == {TWO}


def test_servers_that_are_lost_and_answer_again_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scenario = Scenario(ONE, lives=LOST)
    scenario.submit(1)
    scenario.wait(SILENCE_S + 0.1)
    assert "nothing gets through, and requests are sent again for up to 60 s" in caplog.text
    scenario.wait(1.0)
    scenario.answer_all()
    assert f"{ONE} answers again" in caplog.text


def test_slow_servers_that_live_are_waited_for() -> None:
    scenario = Scenario(ONE, lives=True)
    (slow,) = scenario.submit(1)
    scenario.wait(20 * SILENCE_S)
    assert scenario.probes >= 10
    # Another server behind the URL may be what lives.
    assert scenario.retries == 2
    scenario.answer(scenario.in_flight[0])
    assert scenario.delivered == {slow: ONE}


def test_servers_that_answer_while_probed_are_not_lost() -> None:
    scenario = Scenario(ONE, lives=None)
    scenario.submit(2)
    first, second = scenario.in_flight
    scenario.wait(SILENCE_S + 0.1)
    scenario.answer(first)
    scenario.tell(PoolCore.probed, url=ONE, outcome=LOST)
    assert second in scenario.in_flight
    assert scenario.endpoint(ONE).breaker.failing_since is None


def test_rows_of_a_cancelled_call_are_let_go_while_others_wait() -> None:
    scenario = Scenario(ONE)
    scenario.submit(6, rows=1)
    ended = weakref.ref(scenario.submit(50, rows=1)[0].call)
    scenario.submit(20, rows=1)
    lost = errors.ServerLostError("connection termination")
    for _ in range(4):
        scenario.answer(scenario.in_flight[0])
    for _ in range(20):  # some back off
        scenario.fail(scenario.in_flight[-1], lost)
    assert len({attempt.slice.call for attempt in scenario.in_flight}) > 1
    scenario.tell(PoolCore.call_ended, call=ended())
    assert len(scenario.in_flight) + scenario.core.waiting.counts()[KEY] == 22
    scenario.cancelled.clear()
    scenario.cancelled_at.clear()
    gc.collect()
    assert ended() is None
    scenario.wait(10.0)
    scenario.answer_all()
    assert len(scenario.delivered) == 26


def test_hedged_requests_go_elsewhere_and_the_first_response_counts() -> None:
    scenario = Scenario(ONE, TWO, hedge_after_s=0.05, balance="priority")
    (late,) = scenario.submit(1)
    (first,) = scenario.in_flight
    scenario.wait(0.05)
    second = scenario.in_flight[1]
    assert (first.url, second.url) == (ONE, TWO)
    assert second.slice is late
    scenario.answer(second)
    assert scenario.delivered == {late: TWO}
    assert scenario.cancelled == [first]


def test_unsent_hedged_requests_are_tried_again_at_their_pace() -> None:
    scenario = Scenario(ONE, TWO, hedge_after_s=0.1, balance="priority")
    (late,) = scenario.submit(1)
    for _ in range(3):
        scenario.wait(0.1)
        hedge = scenario.at(TWO)[0]
        scenario.in_flight.remove(hedge)
        scenario.tell(
            PoolCore.failed, attempt=hedge, error=errors.RequestError("no memory"), sent=False
        )
        assert not scenario.at(TWO)
    assert late not in scenario.failed
    scenario.answer(scenario.at(ONE)[0])
    assert scenario.delivered == {late: ONE}


def script(text: str) -> list[tuple[str, int]]:
    """Return the actions that a text names, each with its number."""
    words = [line.rsplit(maxsplit=1) for line in text.split(",")]
    return [(action.strip(), int(number)) for action, number in words]


ACTIONS = st.sampled_from(
    ["submit", "answer", "late", "unsent", *FAILURES, "wait", "anew", "quotas", "end", "servers"]
)


@example(  # rows that are given up while an overdue request of theirs is answered
    actions=script("submit 4, undelivered 0, wait 2, wait 9, answer 0, answer 0, no such model 4"),
    lives=False,
    hedge_after_s=0.2,
)
@example(  # the whole is answered after its halves
    actions=script(
        "submit 2, wait 1, answer 1, answer 1, wait 6, wait 6, route timeout 1, wait 2, answer 0"
    ),
    lives=True,
    hedge_after_s=None,
)
@given(
    actions=st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=60),
    lives=st.booleans(),
    hedge_after_s=st.sampled_from([None, 0.2]),
)
def test_every_row_is_delivered_or_failed_once(  # noqa: C901, PLR0912  a table
    actions: list[tuple[str, int]], lives: bool, hedge_after_s: float | None
) -> None:
    scenario = Scenario(
        served=contract(max_rows=64),
        lives=lives or LOST,
        hedge_after_s=hedge_after_s,
        retry_timeout_s=1,
    )
    calls: list[Any] = []
    for action, number in actions:
        attempt = (
            scenario.in_flight[number % len(scenario.in_flight)] if scenario.in_flight else None
        )
        if action == "submit":
            made = scenario.submit(number + 1, rows=8, whole=number % 4 == 3)
            calls.append(made[0].call)
        elif action == "wait":
            scenario.wait(0.1 * number if number < 7 else 2.0 * number)
        elif action == "anew":
            scenario.ask(anew=True)
        elif action == "servers":
            scenario.tell(PoolCore.servers_changed, servers=[[ONE], [TWO], [ONE, TWO]][number % 3])
        elif action == "quotas":
            scenario.tell(PoolCore.quotas_received, quotas={}, lease_s=1.0)
        elif action == "late" and scenario.cancelled:
            scenario.answer(scenario.cancelled[number % len(scenario.cancelled)])
        elif action == "end" and calls:
            call = calls[number % len(calls)]
            call.over = True
            scenario.tell(PoolCore.call_ended, call=call)
            assert not any(attempt.slice.call is call for attempt in scenario.in_flight)
        elif attempt is not None:
            if action == "unsent":
                scenario.in_flight.remove(attempt)
                scenario.tell(
                    PoolCore.failed,
                    attempt=attempt,
                    error=errors.RequestError("no memory"),
                    sent=False,
                )
            elif action in FAILURES:
                scenario.fail(attempt, FAILURES[action])
            else:
                scenario.answer(attempt, rtt_s=0.01 * number)  # 0: within one tick of the clock
    for _ in range(100):
        scenario.answer_all()
        scenario.wait(1)
    assert all(call.over for call in calls)
    assert not scenario.in_flight
    assert all(state.in_flight == 0 for state in scenario.core.states(scenario.now))
    assert all(number == 0 for number in scenario.core.waiting.counts().values())
    (last,) = scenario.submit(1)
    scenario.wait(40)
    scenario.answer_all()
    assert last in scenario.delivered or last in scenario.failed


def test_slow_models_are_not_hedged() -> None:
    scenario = Scenario(lives=True, hedge_after_s=0.05, balance="priority")
    hedges = []
    for _ in range(20):
        scenario.submit(1)
        scenario.wait(0.5)
        scenario.answer(scenario.at(ONE)[0], 0.5)
        hedges.append(scenario.retries)
    assert hedges[10] == hedges[-1]
    (slow,) = scenario.submit(1)
    scenario.wait(1.5)
    assert {attempt.url for attempt in scenario.in_flight if attempt.slice is slow} == {ONE, TWO}


def test_rows_that_hang_wait_on_when_servers_are_asked_what_they_have() -> None:
    scenario = Scenario(ONE, lives=True, max_in_flight_bytes=40)
    scenario.submit(3)
    scenario.wait(0.1)
    first, second = scenario.in_flight
    scenario.answer(second)
    while not first.late:
        scenario.wait(0.1)
    (third,) = [attempt for attempt in scenario.in_flight if attempt is not first]
    for _ in range(2):
        assert scenario.core.waiting.counts() == {KEY: 1}
        assert scenario.ask(anew=True).outcome == contract()
    scenario.answer(third)
    assert [attempt.slice for attempt in scenario.in_flight] == [first.slice] * 2
    scenario.answer_all()
    assert len(scenario.delivered) == 3


def test_quotas_that_expire_before_their_turn_hold_nobody() -> None:
    """The scheduler has fallen silent: the worker goes by its own limit."""
    scenario = Scenario(ONE)
    scenario.ask()
    quota = Quota(max_in_flight=1, interval_s=1000.0, delay_s=900.0)
    scenario.tell(PoolCore.quotas_received, quotas={(ONE, KEY): quota}, lease_s=5.0)
    (paced,) = scenario.submit(1)
    assert not scenario.in_flight
    scenario.wait(5)
    scenario.answer_all()
    assert scenario.delivered == {paced: ONE}


def test_processes_of_a_cluster_hold_back_until_their_first_quotas() -> None:
    scenario = Scenario(ONE, TWO)
    scenario.tell(
        PoolCore.scheduler_joined, starts_at=scenario.now, max_in_flight=2, quotas_within_s=0.5
    )
    scenario.submit(12)
    assert len(scenario.in_flight) == 2
    scenario.answer(scenario.in_flight[0])
    assert len(scenario.in_flight) == 2
    scenario.tell(
        PoolCore.quotas_received, quotas={(ONE, KEY): Quota(max_in_flight=5)}, lease_s=5.0
    )
    assert len(scenario.at(ONE)) == 5


@pytest.mark.parametrize("heard_of", [0, 3])
def test_schedulers_that_fall_silent_are_not_waited_for(heard_of: int) -> None:
    """Counted from the first request, or from the last message without quotas."""
    scenario = Scenario(ONE)
    scenario.tell(
        PoolCore.scheduler_joined, starts_at=scenario.now, max_in_flight=1, quotas_within_s=0.5
    )
    scenario.wait(9.0)
    scenario.submit(12)
    for _ in range(heard_of):
        scenario.wait(0.4)
        scenario.tell(PoolCore.quotas_received, quotas={}, lease_s=0.5)
    scenario.wait(0.4)
    assert len(scenario.in_flight) == 1
    scenario.wait(0.1)
    assert len(scenario.in_flight) == 4
