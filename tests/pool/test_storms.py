"""Failures that come back at once: few requests are spent on them, and not for ever."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.scenario import LOST, ONE, TWO, Scenario, contract

from sonic_coffea import errors
from sonic_coffea.pool import ModelKey
from sonic_coffea.pool import _events as e

RTT_S = 0.002


def asked(kind: Any, **attributes: Any) -> errors.SonicError:
    error: errors.SonicError = kind("no", server=ONE)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


FAILURES = {
    "route timeout": asked(errors.RouteTimeoutError),
    "overload": asked(errors.OverloadError),
    "push-back": asked(errors.OverloadError, retry_after_s=0.0),
    "no such model": asked(errors.ModelNotFoundError),
    "expired token": asked(errors.TokenExpiredError),
    "lost": asked(errors.ServerLostError),
    "undelivered": LOST,
    "too large": asked(errors.RequestTooLargeError),
    "failed": asked(errors.InferenceError),
}


def failed(
    scenario: Scenario, error: errors.SonicError, seconds: float, rtt_s: float = RTT_S
) -> int:
    """Fail all requests after a round trip, for a time; return how many there were."""
    until, number = scenario.now + seconds, 0
    while scenario.now < until:
        for attempt in list(scenario.in_flight):
            if attempt in scenario.in_flight:
                number += 1
                scenario.fail(attempt, error)
        scenario.wait(rtt_s)
    return number


@pytest.mark.parametrize("urls", [(ONE,), (ONE, TWO)])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", FAILURES)
def test_failures_that_come_at_once_are_no_storm(
    name: str, rows: int, whole: bool, urls: tuple[str, ...]
) -> None:
    scenario = Scenario(*urls, retry_timeout_s=6, request_timeout_s=6)
    scenario.served = dict.fromkeys((ONE, TWO), contract(max_rows=64))
    scenario.submit(rows=rows, nbytes=100 * rows, whole=whole)
    first = failed(scenario, FAILURES[name], 1.0)
    then = failed(scenario, FAILURES[name], 5.0)
    # The retry budget of each server is 32 requests, and a model is missed 16 times at once. Rows
    # may be tried in parts: of 64 rows there are 127.
    assert first <= 2 * rows + 70 * len(urls)
    assert then <= 2 * rows + 5.0 * 16 * len(urls)
    failed(scenario, FAILURES[name], 20.0, 0.1)
    assert scenario.failed
    assert not scenario.delivered


@pytest.mark.parametrize("name", ["overload", "route timeout", "expired token"])
def test_a_server_that_is_back_and_refuses_is_left_alone(name: str) -> None:
    """The one request that tests a server after a loss has a back-off, too."""
    scenario = Scenario(ONE, retry_timeout_s=60)
    scenario.submit(rows=1)
    while scenario.endpoint(ONE).breaker.failing_since is None:
        scenario.lose(ONE)
        scenario.wait(0.01)
    assert failed(scenario, FAILURES[name], 5.0) < 60
    for _ in range(10):
        scenario.wait(2.0)
        scenario.answer_all()
    assert len(scenario.delivered) == 1


def test_a_push_back_of_a_day_is_no_stall() -> None:
    later = asked(errors.OverloadError, retry_after_s=86_400.0)
    scenario = Scenario(ONE, retry_timeout_s=30)
    scenario.submit(1)
    scenario.fail(scenario.in_flight[0], later)
    scenario.wait(29.0)
    assert not scenario.in_flight
    scenario.wait(2.0)
    scenario.answer_all()
    assert len(scenario.delivered) == 1
    scenario.served[ONE] = later
    waiter = scenario.ask(anew=True)
    scenario.wait(70.0)
    assert isinstance(waiter.outcome, errors.OverloadError)


@pytest.mark.parametrize("kind", [errors.InferenceError, errors.AccessError, errors.CancelledError])
def test_a_server_that_cannot_say_what_it_has_is_asked_seldom(kind: Any) -> None:
    """Also while it answers requests for another model, which fill its retry budget."""
    other = ModelKey("other", None)
    scenario = Scenario(ONE)
    scenario.submit(4)
    scenario.submit(1, key=other)
    questions = []
    carry_out = scenario._carry_out

    def counted(instruction: Any) -> Any:
        if isinstance(instruction, e.Validate) and instruction.key == other:
            questions.append(scenario.now)
        return carry_out(instruction)

    scenario._carry_out = counted  # type: ignore[method-assign]
    scenario.endpoint(ONE).signatures.revalidate()
    scenario.served[ONE] = kind("no")
    for _ in range(500):
        scenario.submit(1)
        for attempt in scenario.in_flight[:1]:
            scenario.answer(attempt)
        scenario.wait(0.01)
    assert len(questions) < 20


def test_rows_that_make_servers_hang_are_sent_ever_more_seldom() -> None:
    scenario = Scenario(ONE)
    scenario.lives[ONE] = True
    (poison,) = scenario.submit(1)
    sent = 0
    for _ in range(6000):
        scenario.submit(1)
        scenario.wait(0.01)
        for attempt in list(scenario.in_flight):
            if attempt.slice is not poison:
                scenario.answer(attempt)
        sent = max(sent, sum(attempt.slice is poison for attempt in scenario.in_flight))
    assert sent < 40
