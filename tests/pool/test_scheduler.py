"""The core on virtual time: quotas, bounds and ejections by the scheduler."""

from __future__ import annotations

from tests.pool.scenario import KEY, LOST, ONE, TWO, Scenario

from sonic_coffea.pool import Quota
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._breaker import EJECTED_S


def test_a_quota_that_expires_before_its_turn_holds_nobody() -> None:
    """The scheduler has fallen silent: the worker goes by its own limit."""
    scenario = Scenario(ONE)
    scenario.ask()
    quota = Quota(
        max_in_flight=1,
        interval_s=1000.0,
        turn_at=scenario.now + 900,
        expires_at=scenario.now + 5,
    )
    scenario.tell(e.QuotasReceived({(ONE, KEY): quota}, [], 5.0))
    (paced,) = scenario.submit(1)
    assert not scenario.in_flight
    scenario.wait(5)
    scenario.answer_all()
    assert scenario.delivered == {paced: ONE}


def test_a_process_of_a_cluster_holds_back_until_its_first_quotas() -> None:
    scenario = Scenario(ONE, TWO)
    scenario.tell(e.SchedulerJoined(scenario.now, 2, 0.5))
    scenario.submit(12)
    assert len(scenario.in_flight) == 2
    scenario.answer(scenario.in_flight[0])
    assert len(scenario.in_flight) == 2
    quota = Quota(max_in_flight=5, interval_s=0, turn_at=0, expires_at=scenario.now + 5)
    scenario.tell(e.QuotasReceived({(ONE, KEY): quota}, [], 5.0))
    assert len(scenario.at(ONE)) == 5


def test_a_scheduler_that_sends_no_quotas_is_not_waited_for() -> None:
    scenario = Scenario(ONE)
    scenario.tell(e.SchedulerJoined(scenario.now, 1, 0.5))
    scenario.wait(9.0)  # counted from the first request
    scenario.submit(12)
    scenario.wait(0.4)
    assert len(scenario.in_flight) == 1
    scenario.wait(0.1)
    assert len(scenario.in_flight) == 4


def test_a_scheduler_that_is_heard_of_has_quotas_later() -> None:
    scenario = Scenario(ONE)
    scenario.tell(e.SchedulerJoined(scenario.now, 1, 0.5))
    scenario.submit(12)
    for _ in range(3):
        scenario.wait(0.4)
        scenario.tell(e.QuotasReceived({}, [], 0.5))
    assert len(scenario.in_flight) == 1
    scenario.wait(0.5)
    assert len(scenario.in_flight) == 4


def test_what_others_have_lost_counts_for_as_long_as_they_say_it() -> None:
    """An idle worker would have no patience with the same server an hour later."""
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=50)
    scenario.ask()
    breaker = scenario.endpoint(ONE).breaker
    first = scenario.now
    for _ in range(4):
        scenario.tell(e.QuotasReceived({}, [ONE], 2.0))
        # It is tried after a while, whatever others say.
        assert breaker.retry_at == min(scenario.now + 2, first + EJECTED_S)
        scenario.wait(1.5)
    assert breaker.lost_since(scenario.now) == first
    # What was heard is not told as seen.
    assert not any(report.circuit_open for report in scenario.core.report())
    scenario.wait(1)
    assert breaker.lost_since(scenario.now) is None
    scenario.tell(e.QuotasReceived({}, [ONE], 2.0))
    scenario.tell(e.QuotasReceived({}, [], 2.0))
    assert breaker.lost_since(scenario.now) is None
    breaker.open(LOST, scenario.now)
    assert all(report.circuit_open for report in scenario.core.report())
