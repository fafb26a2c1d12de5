"""What a slice becomes that is too large, takes too long, or is failed on: on virtual time."""

from __future__ import annotations

import pytest
from tests.pool.scenario import LOST, ONE, TWO, Scenario, contract

from sonic_coffea import errors

TOO_LARGE = errors.RequestTooLargeError("too large: Payload Too Large", server=ONE)
CUT = errors.RouteTimeoutError("cut: upstream request timeout", server=ONE)
FAILED = errors.InferenceError("the server failed: CUDA error", server=ONE)
EXPIRED = errors.TokenExpiredError("the token has expired: Jwt is expired", server=ONE)


def rows_of(scenario: Scenario) -> list[tuple[int, int]]:
    return sorted((part.start, part.stop) for part in scenario.delivered)


@pytest.mark.parametrize("error", [TOO_LARGE, CUT])
def test_a_request_that_is_too_large_is_split(error: errors.SonicError) -> None:
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
    assert scenario.failed == {}


def test_what_is_known_to_be_too_large_is_not_sent_whole_until_some_time_has_passed() -> None:
    scenario = Scenario(ONE, TWO)
    scenario.served = dict.fromkeys((ONE, TWO), contract(max_rows=64))
    scenario.submit(rows=8, nbytes=800)
    (attempt,) = scenario.in_flight
    scenario.fail(attempt, TOO_LARGE)
    scenario.answer_all()
    for _ in range(2):  # one at each server: the other may take it
        scenario.submit(rows=8, nbytes=800)
        scenario.submit(rows=4, nbytes=400)
        sizes = {url: sorted(a.slice.nbytes for a in scenario.at(url)) for url in (ONE, TWO)}
        assert 800 not in sizes[attempt.url]
        scenario.answer_all()
    scenario.wait(61.0)
    scenario.submit(2, rows=8, nbytes=800)
    assert [a.slice.nbytes for a in scenario.at(attempt.url)] == [800]


def test_what_an_overloaded_route_cuts_is_not_split_without_end() -> None:
    """Others' requests are why it takes long, and small ones take as long."""
    scenario = Scenario(ONE)
    scenario.served = dict.fromkeys((ONE, TWO), contract(max_rows=64))
    scenario.lives = dict.fromkeys((ONE, TWO), True)
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


def test_a_single_row_that_is_too_large_is_an_error_that_says_so() -> None:
    scenario = Scenario(ONE)
    (request,) = scenario.submit(rows=1, nbytes=100)
    for _ in range(2):  # a server that has no memory left may have some then
        scenario.fail(scenario.in_flight[0], TOO_LARGE)
    assert isinstance(scenario.failed[request], errors.RequestTooLargeError)
    assert "a single row of 100 bytes" in str(scenario.failed[request])
    scenario.submit(rows=1, nbytes=100)
    scenario.answer_all()
    assert len(scenario.delivered) == 1


def test_rows_that_belong_together_are_not_split() -> None:
    scenario = Scenario(ONE)
    scenario.served[ONE] = contract(max_rows=64)
    (alone,) = scenario.submit(rows=8, nbytes=800)
    scenario.fail(scenario.in_flight[0], TOO_LARGE)
    for whole in (True, False):
        (request,) = scenario.submit(rows=8, nbytes=800, whole=whole)
        scenario.answer_all()
        assert (request in scenario.delivered) is whole
    assert alone not in scenario.delivered


def test_parts_keep_the_place_of_the_whole() -> None:
    scenario = Scenario(ONE, max_in_flight=1)
    scenario.submit(3, rows=4, nbytes=400)
    scenario.fail(scenario.in_flight[0], TOO_LARGE)
    order = []
    while scenario.in_flight:
        order.append(scenario.in_flight[0].slice.start)
        scenario.answer(scenario.in_flight[0])
    assert order == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("error", [FAILED, TOO_LARGE])
def test_what_a_server_failed_on_is_tried_once_more_elsewhere(error: errors.SonicError) -> None:
    scenario = Scenario()
    (request,) = scenario.submit(rows=1)
    (first,) = scenario.in_flight
    scenario.fail(first, error)
    (second,) = scenario.in_flight
    assert {first.url, second.url} == {ONE, TWO}
    scenario.fail(second, error)
    assert isinstance(scenario.failed[request], type(error))
    assert "tried 2 times" in str(scenario.failed[request])
    assert scenario.endpoint(ONE).breaker.failing_since is None


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


@pytest.mark.parametrize("late", ["answer", "lose", "cut", "refuse"])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_rows_are_placed_once_though_the_whole_ends_after_its_parts(late: str, parts: int) -> None:
    """The first sending hangs, the second is split, and then the first one ends all the same."""
    scenario = Scenario(ONE)
    scenario.lives[ONE] = True
    scenario.submit(3, rows=8)
    first, *others = scenario.in_flight
    for attempt in others:
        scenario.answer(attempt)
    while scenario.in_flight == [first]:
        scenario.wait(0.1)
    first, again = scenario.in_flight
    assert again.slice is first.slice
    scenario.fail(again, CUT)
    scenario.wait(1.0)
    halves = [attempt for attempt in scenario.in_flight if attempt.slice is not first.slice]
    for attempt in halves[:parts]:
        scenario.answer(attempt)
    if late == "answer":
        scenario.answer(first)
    else:
        refused = errors.RequestError("no")
        scenario.fail(first, {"lose": LOST, "cut": CUT, "refuse": refused}[late])
    for _ in range(10):
        scenario.answer_all()
        scenario.wait(1.0)
    assert sorted(row for part in scenario.delivered for row in range(part.start, part.stop)) == [
        *range(24)
    ]
    assert scenario.failed == {}
