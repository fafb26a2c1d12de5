"""The core on virtual time: when the fallback starts, and which rows it gets."""

from __future__ import annotations

from tests.pool.scenario import LOST, ONE, TWO, Scenario, contract

from sonic_coffea import errors
from sonic_coffea.pool import _events as e


def test_the_fallback_is_started_when_all_servers_are_lost_and_left_when_one_is_back() -> None:
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=5, retry_timeout_s=60)
    scenario.ask()
    scenario.submit(10)
    scenario.lose(ONE)
    scenario.served[ONE] = LOST
    scenario.wait(4)
    assert scenario.fallbacks == 0
    scenario.wait(2)
    assert scenario.fallbacks == 1
    scenario.tell(e.FallbackStarted(TWO))
    assert scenario.at(TWO)
    scenario.served[ONE] = contract()
    scenario.wait(2)
    scenario.answer_all()
    assert len(scenario.delivered) == 10
    (back,) = scenario.submit(1)
    scenario.answer_all()
    assert scenario.delivered[back] == ONE


def test_a_fallback_with_another_file_gets_no_rows() -> None:
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=1, retry_timeout_s=3)
    scenario.served = {ONE: contract(digest="aa"), TWO: contract(digest="bb")}
    scenario.ask()
    (lost,) = scenario.submit(1, contract=contract(digest="aa"))
    scenario.lose(ONE)
    scenario.served[ONE] = LOST
    scenario.wait(2)
    scenario.tell(e.FallbackStarted(TWO))
    scenario.wait(5)
    assert not scenario.at(TWO)
    assert isinstance(scenario.failed[lost], errors.SonicError)
    assert scenario.fallbacks == 1


def test_a_fallback_with_another_file_is_refused_while_servers_are_asked_anew() -> None:
    """A call with a cache always asks anew; what servers gave before counts for the fallback."""
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=1, retry_timeout_s=3)
    scenario.served = {ONE: contract(digest="aa"), TWO: contract(digest="bb")}
    scenario.ask()
    scenario.served[ONE] = LOST
    waiter = scenario.ask(anew=True)
    scenario.wait(2)
    scenario.tell(e.FallbackStarted(TWO))
    scenario.wait(5)
    assert isinstance(waiter.outcome, errors.SonicError)
    # One with the same file serves.
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=1, retry_timeout_s=3)
    scenario.served = dict.fromkeys((ONE, TWO), contract(digest="aa"))
    scenario.ask()
    scenario.served[ONE] = LOST
    waiter = scenario.ask(anew=True)
    scenario.wait(2)
    scenario.tell(e.FallbackStarted(TWO))
    scenario.wait(5)
    assert waiter.outcome == contract(digest="aa")


def test_what_is_due_for_a_fallback_and_has_no_room_waits_for_an_answer() -> None:
    """The engine would go round and round."""
    scenario = Scenario(ONE, max_in_flight_bytes=16, fallback="repository", fallback_after_s=1)
    scenario.submit(2)
    scenario.lives[ONE] = None
    scenario.endpoint(ONE).breaker.open(LOST, scenario.now)
    scenario.now += 2
    scenario.tell()
    assert scenario.fallbacks == 0
    assert scenario.core.wakes_at(scenario.now) > scenario.now
