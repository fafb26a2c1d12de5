"""The core on virtual time: how it finds models, and what it does when servers lack them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.pool.scenario import KEY, LOST, NEVER, ONE, TWO, Scenario, contract

from sonic_coffea import errors
from sonic_coffea.pool._core import PoolCore
from sonic_coffea.pool._tuning import LATE_S

UNLOADED = errors.ModelNotFoundError("unloaded")


def miss_all(scenario: Scenario) -> None:
    """Fail what is in flight, and what is sent then, as servers do that lack the model."""
    for _ in range(1000):
        if not scenario.in_flight:
            return
        scenario.fail(scenario.in_flight[0], UNLOADED)


def test_all_servers_are_asked_and_the_strictest_sets_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scenario = Scenario()
    scenario.served = {ONE: contract(max_rows=7), TWO: contract(max_rows=3)}
    waiter = scenario.ask()
    assert waiter.outcome.max_rows == 3
    assert scenario.ask().outcome is waiter.outcome
    assert not caplog.records
    # One that is asked again after a failure is waited for, too.
    scenario.served = {ONE: LOST, TWO: None}
    waiter = scenario.ask(anew=True)
    scenario.served[ONE] = None
    scenario.wait(0.2)
    scenario.say(TWO, contract(max_rows=7))
    assert waiter.outcome is None
    scenario.say(ONE, contract(max_rows=3))
    assert waiter.outcome.max_rows == 3


@pytest.mark.parametrize(
    "models",
    [
        [{}, {"width": 2}],
        [{"digest": "a"}, {"digest": "b"}],
        # Beside a server that tells no digest.
        [{}, {"digest": "a"}, {"digest": "b"}],
        [{"digest": "a"}, {}, {"digest": "b"}],
        [{"digest": "a"}, {"digest": "b"}, {}],
    ],
    ids=str,
)
def test_different_models_of_a_name_are_refused(models: list[dict[str, Any]]) -> None:
    urls = [ONE, TWO, "grpc://s3:8001"][: len(models)]
    scenario = Scenario(*urls)
    scenario.served = {url: contract(**m) for url, m in zip(urls, models, strict=True)}
    assert isinstance(scenario.ask().outcome, errors.ContractError)


def test_the_first_question_is_asked_again_until_the_retry_timeout_or_a_deadline() -> None:
    scenario = Scenario(ONE, served=LOST, retry_timeout_s=5)
    waiter = scenario.ask()
    scenario.now += 2  # the time to ask again comes while the pool is busy
    assert scenario.core.wakes_at() < scenario.now
    scenario.served[ONE] = contract()
    scenario.wait(0)
    assert waiter.outcome == contract()
    scenario.served[ONE] = LOST
    impatient, second = scenario.ask(anew=True), scenario.ask()
    scenario.wait(2)
    scenario.tell(PoolCore.contract_withdrawn, key=KEY, caller=impatient, timeout_s=2.0)
    assert isinstance(impatient.outcome, errors.DeadlineError)
    assert "within 2 s" in str(impatient.outcome)
    assert "gone" in str(impatient.outcome)
    scenario.wait(8)
    assert isinstance(second.outcome, errors.ServerLostError)
    assert "sonic-coffea check" in str(second.outcome)
    assert scenario.core.wakes_at() == NEVER
    # Ctrl-C, without a deadline; and a deadline that passes as the outcome comes.
    scenario.served[ONE] = None
    for interrupted in scenario.ask(anew=True), second:
        scenario.tell(PoolCore.contract_withdrawn, key=KEY, caller=interrupted, timeout_s=None)
        assert isinstance(interrupted.outcome, errors.SonicError)


UNREACHED = errors.ServerLostError("nothing listens at this port of the host")
UNREACHED.unreached = True


@pytest.mark.parametrize("known_by", ["this process", "the cluster"])
def test_servers_that_restart_are_waited_for(known_by: str) -> None:
    scenario = Scenario(ONE)
    if known_by == "this process":
        scenario.served[ONE] = contract()
        assert scenario.ask().outcome == contract()
    else:
        scenario.tell(
            PoolCore.scheduler_joined, starts_at=scenario.now, max_in_flight=8, quotas_within_s=0.0
        )
    scenario.served[ONE] = UNREACHED
    waiter = scenario.ask(anew=True)
    scenario.wait(20)
    assert waiter.outcome is None
    scenario.served[ONE] = contract()
    scenario.wait(5)
    assert waiter.outcome == contract()


def test_wrong_models_are_named_rather_than_missing_ones() -> None:
    """Rows that may become None must not, where a server has another model of the name."""
    scenario = Scenario(ONE, TWO, retry_timeout_s=9)
    slices = scenario.submit(20)
    scenario.served = {ONE: contract(width=2), TWO: UNLOADED}
    miss_all(scenario)
    scenario.wait(11)
    scenario.assert_failed(slices, errors.ContractError)
    assert all("call again" in str(error) for error in scenario.failed.values())


def test_rows_fail_when_no_server_has_their_model_any_more() -> None:
    scenario = Scenario(ONE, retry_timeout_s=10)
    slices = scenario.submit(1000)
    scenario.served[ONE] = UNLOADED
    miss_all(scenario)
    scenario.wait(9.8)
    assert not scenario.failed
    scenario.wait(2.1)
    scenario.assert_failed(slices, errors.ModelNotFoundError)
    # A runner that tries again learns at once that it is still gone, and at once that it is back.
    again = scenario.ask()
    assert isinstance(again.outcome, errors.ModelNotFoundError)
    scenario.served[ONE] = contract()
    assert scenario.ask().outcome == contract()


def test_servers_behind_a_url_that_lack_the_model_cost_no_time() -> None:
    """Rows that it refused are sent again at once, and find one that has it."""
    scenario = Scenario(ONE)
    slices = scenario.submit(200)
    began, number = scenario.now, 0
    while scenario.in_flight:
        number += 1
        attempt = scenario.in_flight[0]
        if number % 4:
            scenario.fail(attempt, UNLOADED)
        else:
            scenario.answer(attempt, rtt_s=0.001)
    assert set(scenario.delivered) == set(slices)
    assert scenario.now == began


@pytest.mark.parametrize("at_once", [1, 100])
def test_calls_keep_their_version_while_a_server_has_it(at_once: int) -> None:
    """Also of rows that wait, as few are answered at once."""
    scenario = Scenario(ONE, TWO)
    slices = scenario.submit(200)
    scenario.served[ONE] = replace(contract(), version="2")
    while scenario.in_flight:
        for attempt in scenario.at(ONE):
            scenario.fail(attempt, UNLOADED)
        for attempt in scenario.at(TWO)[:at_once]:
            scenario.answer(attempt)
        scenario.wait(0.1)
    assert set(scenario.delivered.values()) == {TWO}
    assert set(scenario.delivered) == set(slices)
    assert {one.call.contract.version for one in slices} == {"1"}


def test_servers_that_load_the_model_again_get_rows_beside_others() -> None:
    scenario = Scenario(lives=True)
    scenario.submit(100)
    scenario.served[ONE] = UNLOADED
    scenario.lose(ONE, UNLOADED)
    scenario.served[ONE] = contract()
    scenario.wait(3)
    assert scenario.at(ONE)


def test_refusals_of_a_returning_server_are_raised() -> None:
    scenario = Scenario(ONE, retry_timeout_s=60)
    slices = scenario.submit(10)
    scenario.served[ONE] = errors.AccessError("another token, please")
    scenario.lose(ONE)
    scenario.wait(0.2)
    scenario.assert_failed(slices, errors.AccessError)


@pytest.mark.parametrize(("one", "two"), [(contract(width=2), LOST), (UNLOADED, UNLOADED)])
def test_wrong_and_missing_models_wait_for_servers_that_may_return(one: Any, two: Any) -> None:
    scenario = Scenario(ONE, TWO, retry_timeout_s=22.5)
    slices = scenario.submit(20)
    scenario.served = {ONE: one, TWO: two}
    scenario.lose(ONE, two)
    scenario.lose(TWO, two)
    scenario.wait(20)
    scenario.served[TWO], scenario.lives[TWO] = contract(), True
    scenario.wait(5)
    scenario.answer_all()
    assert set(scenario.delivered) == set(slices)


@pytest.mark.parametrize(
    "passing", [LOST, errors.ModelNotReadyError("loading"), errors.OverloadError("busy")]
)
def test_servers_may_come_back_before_their_model(passing: errors.SonicError) -> None:
    scenario = Scenario(ONE, served=passing)
    waiter = scenario.ask()
    scenario.wait(3)
    scenario.served[ONE] = UNLOADED
    scenario.wait(3)
    assert waiter.outcome is None
    scenario.served[ONE] = contract()
    scenario.wait(2.1)
    assert waiter.outcome == contract()
    # Once rows are answered, back-offs begin anew.
    scenario.submit()
    scenario.answer_all()
    scenario.served[ONE], asked = UNLOADED, scenario.asked[KEY]
    scenario.ask(anew=True)
    scenario.wait(1)
    assert scenario.asked[KEY] - asked > 3


def test_rows_for_a_model_that_one_server_has_replaced_fail_while_another_is_silent() -> None:
    scenario = Scenario(ONE, TWO, max_in_flight=1)
    scenario.ask()
    old = scenario.submit(5)
    scenario.served = {ONE: contract(width=2), TWO: None}
    waiter = scenario.ask(anew=True)
    assert scenario.failed == {}
    scenario.wait(LATE_S)
    assert waiter.outcome == contract(width=2)
    scenario.assert_failed(old[2:], errors.ContractError)
