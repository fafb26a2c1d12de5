"""Failures cost few requests; those that are too large or take too long are split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pool.scenario import FAILURES, KEY, LOST, NEVER, ONE, TWO, Scenario, contract, failure

from sonic_coffea import errors
from sonic_coffea.layouts import Segment
from sonic_coffea.pool import ModelKey
from sonic_coffea.pool._batching import UNLIMITED_ROWS, plan, rows_per_request
from sonic_coffea.pool._tuning import MAX_LOSSES, RECHECK_S

RTT_S = 0.002


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


@pytest.mark.parametrize(
    ("rows", "whole", "urls"), [(1, False, (ONE,)), (64, False, (ONE, TWO)), (64, True, (ONE,))]
)
@pytest.mark.parametrize("name", FAILURES)
def test_failures_that_come_at_once_are_no_storm(
    name: str, rows: int, whole: bool, urls: tuple[str, ...]
) -> None:
    served = contract(max_rows=64)
    scenario = Scenario(*urls, served=served, retry_timeout_s=6, request_timeout_s=6)
    scenario.submit(rows=rows, nbytes=100 * rows, whole=whole)
    first = failed(scenario, FAILURES[name], 1.0)
    then = failed(scenario, FAILURES[name], 2.0)
    # The retry budget of each server is 32 requests, and a model is missed 16 times at once. Rows
    # may be tried in parts: of 64 rows there are 127.
    assert first <= 2 * rows + 70 * len(urls)
    assert then <= 2 * rows + 2.0 * 16 * len(urls)
    failed(scenario, FAILURES[name], 20.0, 0.1)
    assert scenario.failed
    assert not scenario.delivered


def test_push_backs_of_a_day_are_no_stall() -> None:
    later = failure(errors.OverloadError, retry_after_s=86_400.0)
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
    assert scenario.asked[KEY] < 6


OTHER = ModelKey("other", None)


@pytest.mark.parametrize("kind", [errors.InferenceError, errors.AccessError, errors.CancelledError])
def test_servers_that_cannot_describe_a_model_are_asked_seldom(kind: Any) -> None:
    """Also while it answers requests for another model, which fill its retry budget."""
    scenario = Scenario(ONE)
    scenario.submit(4)
    scenario.submit(1, key=OTHER)
    scenario.endpoint(ONE).revalidate()
    scenario.served[ONE] = kind("no")
    for _ in range(500):
        scenario.submit(1)
        for attempt in scenario.in_flight[:1]:
            scenario.answer(attempt)
        scenario.wait(0.01)
    assert scenario.asked[OTHER] < 20


def test_questions_that_are_lost_while_requests_are_in_flight_are_no_storm() -> None:
    """The circuit stays closed, as these requests may still be answered."""
    scenario = Scenario(ONE, lives=None)
    scenario.submit(2)
    scenario.served[ONE] = LOST
    scenario.submit(1, key=OTHER)
    scenario.wait(5.0)
    assert scenario.asked[OTHER] < MAX_LOSSES + 10


def test_rows_that_make_servers_hang_are_sent_ever_more_seldom() -> None:
    scenario = Scenario(ONE, lives=True)
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


TOO_LARGE = errors.RequestTooLargeError("too large: Payload Too Large", server=ONE)
CUT = errors.RouteTimeoutError("cut: upstream request timeout", server=ONE)
FAILED = errors.InferenceError("the server failed: CUDA error", server=ONE)


def rows_of(scenario: Scenario) -> list[tuple[int, int]]:
    return sorted((part.start, part.stop) for part in scenario.delivered)


@pytest.mark.parametrize("error", [TOO_LARGE, CUT])
def test_requests_that_are_too_large_are_split(
    error: errors.SonicError, caplog: pytest.LogCaptureFixture
) -> None:
    scenario = Scenario(ONE)
    scenario.submit(rows=8, nbytes=801)
    (attempt,) = scenario.in_flight
    scenario.fail(attempt, error)
    scenario.wait(1.0)
    first, second = scenario.in_flight
    assert [a.slice.nbytes for a in (first, second)] == [400, 401]
    scenario.fail(second, error)
    scenario.wait(3.0)
    scenario.answer_all()
    assert rows_of(scenario) == [(0, 4), (4, 6), (6, 8)]
    assert caplog.text.count("bytes are split") == 1
    assert scenario.failed == {}


def test_rows_that_an_overloaded_route_cuts_are_not_split_without_end() -> None:
    """Others' requests are why it takes long, and small ones take as long."""
    scenario = Scenario(ONE, served=contract(max_rows=64), lives=True)
    scenario.submit(rows=64, nbytes=6400)

    def cut(rows: int, in_flight: int) -> None:
        """Cut a request of so many rows, when it is there."""
        while not (sent := [a for a in scenario.in_flight if a.slice.rows == rows]):
            scenario.wait(0.01)
        sent[0].in_flight = in_flight
        scenario.fail(sent[0], CUT)

    for rows in (64, 32, 16, 8, 8, 8):
        cut(rows, 2)
    cut(8, 1)
    for _ in range(10):
        scenario.answer_all()
        scenario.wait(2.0)
    assert min(part.rows for part in scenario.delivered) == 4
    assert sum(part.rows for part in scenario.delivered) == 64


def test_rows_that_belong_together_are_not_split() -> None:
    scenario = Scenario(ONE, served=contract(max_rows=64))
    alone, _ = (scenario.submit(rows=8, nbytes=nbytes)[0] for nbytes in (800, 1600))
    for attempt in list(scenario.in_flight):
        scenario.fail(attempt, TOO_LARGE)
    for whole in (True, False):
        (request,) = scenario.submit(rows=8, nbytes=800, whole=whole)
        scenario.answer_all()
        assert (request in scenario.delivered) is whole
    assert alone not in scenario.delivered
    scenario.wait(RECHECK_S)  # the server may have more memory then
    (request,) = scenario.submit(rows=8, nbytes=800)
    scenario.answer_all()
    assert request in scenario.delivered


@pytest.mark.parametrize("error", [FAILED, TOO_LARGE])
def test_rows_that_a_server_failed_on_are_tried_once_more_elsewhere(
    error: errors.SonicError,
) -> None:
    scenario = Scenario()
    (request,) = scenario.submit(rows=1, nbytes=100)
    (first,) = scenario.in_flight
    scenario.fail(first, error)
    (second,) = scenario.in_flight
    assert {first.url, second.url} == {ONE, TWO}
    scenario.fail(second, error)
    assert isinstance(scenario.failed[request], type(error))
    assert "tried 2 times" in str(scenario.failed[request])
    assert ("a single row of 100 bytes" in str(scenario.failed[request])) is (error is TOO_LARGE)
    assert scenario.endpoint(ONE).breaker.failing_since == NEVER


def test_the_other_server_is_waited_for_with_what_one_failed_on() -> None:
    scenario = Scenario(max_in_flight=1)
    scenario.submit(2, rows=1)
    (failed,), (other,) = scenario.at(ONE), scenario.at(TWO)
    scenario.fail(failed, FAILED)
    assert scenario.in_flight == [other]
    scenario.answer(other)
    assert scenario.at(TWO)[0].slice is failed.slice
    scenario.answer_all()
    assert len(scenario.delivered) == 2


@given(
    st.integers(0, 300),
    st.integers(1, 50),
    st.none() | st.integers(1, 40),
    st.lists(st.integers(-60, 60), max_size=4),
    st.integers(50, 5000),
)
def test_plans_cover_every_row_once_by_the_largest_preferred_batch_that_fits(
    rows: int, row_bytes: int, max_rows: int | None, preferred: list[int], max_bytes: int
) -> None:
    limits: Any = {"max_rows": max_rows, "max_bytes": max_bytes}
    most, allowed = rows_per_request(row_bytes, **limits), max_rows or UNLIMITED_ROWS
    assert 1 <= most <= allowed
    assert most * row_bytes <= max_bytes
    assert most == allowed or (most + 1) * row_bytes > max_bytes
    limits["preferred_rows"] = tuple(preferred)
    taken = rows_per_request(row_bytes, **limits)
    assert taken == max([p for p in preferred if 0 < p <= most], default=most)
    pieces = list(plan([Segment(0, rows, row_bytes)], **limits))
    assert [r for start, stop, _ in pieces for r in range(start, stop)] == list(range(rows))
    for start, stop, nbytes in pieces:
        assert nbytes == (stop - start) * row_bytes <= max_bytes
        assert max_rows is None or stop - start <= max_rows


def test_rows_that_are_too_large_are_refused_and_requests_of_small_ones_are_bounded() -> None:
    for row_bytes in (0, 1):
        most = rows_per_request(row_bytes, max_rows=None, max_bytes=10**9)
        assert most == UNLIMITED_ROWS
    with pytest.raises(errors.ConfigError, match="raise max_request_bytes"):
        rows_per_request(101, max_rows=None, max_bytes=100)
    weights = Segment(0, 2, np.asarray([5, 101], np.int64))
    with pytest.raises(errors.ConfigError, match=r"101 bytes, more than .* \(100\)"):
        list(plan([weights], max_rows=None, max_bytes=100))
