"""The core on virtual time: quotas and bounds by the scheduler."""

from __future__ import annotations

from tests.pool.scenario import KEY, ONE, TWO, Scenario

from sonic_coffea.pool import Quota
from sonic_coffea.pool import _events as e


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
    scenario.tell(e.QuotasReceived({(ONE, KEY): quota}, 5.0))
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
    scenario.tell(e.QuotasReceived({(ONE, KEY): quota}, 5.0))
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
        scenario.tell(e.QuotasReceived({}, 0.5))
    assert len(scenario.in_flight) == 1
    scenario.wait(0.5)
    assert len(scenario.in_flight) == 4
