"""What the core makes of one URL with several servers behind it, on virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from tests.pool.scenario import KEY, LOST, NEVER, ONE, Scenario, contract, failure

from sonic_coffea import errors
from sonic_coffea.pool._core import PoolCore
from sonic_coffea.pool._request import Attempt
from sonic_coffea.pool._tuning import (
    FAR_S,
    FULL_BYTES,
    LATE_S,
    MAX_LOSSES,
    MAX_RESETS,
    MAX_RETRIES,
    MIN_IN_FLIGHT,
    SILENCE_S,
    UNKNOWN_S,
)

RTT_S = 0.01
REFUSED = errors.OverloadError("reset reason: overflow", server=ONE)


class Balancer:
    """A URL whose requests take some time and then are answered, fail, or never end.

    Parameters
    ----------
    outcome : callable
        Of an attempt: None to answer it, an error, or `HANGS`.
    servers : int
        How many work at a time, for `RTT_S` each; what is answered waits for one of them.
    """

    def __init__(self, scenario: Scenario, outcome: Callable[[Attempt], Any], servers: int) -> None:
        self.scenario, self.outcome = scenario, outcome
        self.free_at = [scenario.now] * servers
        self.sent: list[Attempt] = []
        self._ends: list[tuple[float, int, Attempt, Any]] = []
        self._numbers = itertools.count()
        self._known: set[Attempt] = set()

    def run(self, seconds: float) -> int:
        """Let time pass, and return how many slices were delivered meanwhile."""
        scenario, before = self.scenario, len(self.scenario.delivered)
        until = scenario.now + seconds
        while True:
            self._take()
            at = self._ends[0][0] if self._ends else math.inf
            step = min(at, scenario.core.wakes_at(), until)
            scenario.now = max(scenario.now, step)
            if step == at:
                _, _, attempt, error = heapq.heappop(self._ends)
                if attempt not in scenario.in_flight:
                    continue
                if error is None:
                    scenario.answer(attempt, scenario.now - attempt.begun_at)
                else:
                    scenario.fail(attempt, error)
            else:
                scenario.tell()
            if scenario.now >= until:
                return len(scenario.delivered) - before

    def _take(self) -> None:
        now = self.scenario.now
        for attempt in [a for a in self.scenario.in_flight if a not in self._known]:
            self._known.add(attempt)
            self.sent.append(attempt)
            outcome = self.outcome(attempt)
            if outcome is HANGS:
                continue
            at = now + 1e-3
            if outcome is None:
                at = max(now, heapq.heappop(self.free_at)) + RTT_S
                heapq.heappush(self.free_at, at)
            heapq.heappush(self._ends, (at, next(self._numbers), attempt, outcome))


HANGS = object()


def behind_one_url(outcome: Callable[[Attempt], Any], servers: int = 1, **options: Any) -> Balancer:
    scenario = Scenario(ONE, lives=True, **options)
    scenario.submit(10_000)
    return Balancer(scenario, outcome, servers)


def test_requests_go_on_at_the_rate_of_those_that_live() -> None:
    """With Envoy's LEAST_REQUEST, one dead server of two gets three of four requests."""
    chance = Random(1)
    balancer = behind_one_url(lambda _: LOST if chance.random() < 3 / 4 else None)
    balancer.run(1.0)
    assert balancer.run(10.0) > 0.95 * 10.0 / RTT_S
    assert balancer.scenario.core.states(balancer.scenario.now)[0].circuit == "closed"
    assert not balancer.scenario.failed


def test_few_requests_are_spent_while_nothing_gets_through() -> None:
    down = False
    balancer = behind_one_url(lambda _: LOST if down else None, retry_timeout_s=60)
    balancer.run(1.0)
    before, down = len(balancer.sent), True
    assert balancer.run(20.0) < 10  # what was in flight
    assert MAX_LOSSES < len(balancer.sent) - before < 5 * MAX_LOSSES
    assert balancer.scenario.core.states(balancer.scenario.now)[0].circuit != "closed"
    down = False
    # The longest back-off is 2 s.
    assert balancer.run(5.0) > 2.5 / RTT_S
    assert not balancer.scenario.failed
    # One connection is led to another server when it breaks; each new one would cost the proxy.
    assert balancer.scenario.renewed == []


def test_hanging_servers_cost_a_second() -> None:
    """Each second request is led to it, for ever; the limit holds what the other one needs."""
    hangs, turns = False, itertools.cycle([HANGS, None])
    balancer = behind_one_url(lambda _: next(turns) if hangs else None, servers=1)
    balancer.run(2.0)
    hangs = True
    balancer.run(2.0)
    assert balancer.run(5.0) > 0.8 * 5.0 / RTT_S
    scenario = balancer.scenario
    assert scenario.endpoint(ONE).breaker.circuit(scenario.now) == "closed"
    again = [a for a in balancer.sent if a.slice.retries and a.slice.attempts]
    assert {attempt.channel for attempt in again} == {0, 1}
    # What was answered in the end is cancelled where it hangs, when it is old.
    assert len(scenario.in_flight) < 100 + SILENCE_S / RTT_S
    # Envoy closes a connection half of whose streams are reset before they are 2 s old.
    balancer.run(1.0)
    young = Counter[int]()
    sent = Counter(attempt.channel for attempt in balancer.sent)
    for attempt in scenario.cancelled:
        young[attempt.channel] += scenario.cancelled_at[attempt] - attempt.begun_at < SILENCE_S
    assert young[0]
    for channel in sent:
        assert young[channel] < MAX_RESETS + 0.4 * sent[channel]
    # What was answered by then has been cancelled.
    assert len(scenario.cancelled) > 0.4 * 5.0 / RTT_S


@pytest.mark.parametrize(
    ("error", "again"), [(LOST, True), (errors.RequestError("rejected"), False)]
)
def test_hanging_requests_are_not_waited_for(error: errors.SonicError, again: bool) -> None:
    """What was sent again for it may fail in its turn."""
    scenario = Scenario(ONE, lives=True)
    (rows,) = scenario.submit(1)
    (hangs,) = scenario.in_flight
    while not hangs.late:
        scenario.wait(0.1)
        scenario.submit(1)
        for attempt in [a for a in scenario.in_flight if a.slice is not rows]:
            scenario.answer(attempt)
    for awaited in [a for a in scenario.in_flight if a.slice is rows and not a.late]:
        scenario.fail(awaited, error)
    scenario.wait(0.5)
    assert bool([a for a in scenario.in_flight if a.slice is rows and not a.late]) == again
    assert (rows in scenario.failed) != again


def test_requests_that_are_packed_for_long_are_not_late() -> None:
    """The code that packs may be compiled first; the server has not been asked yet."""
    scenario = Scenario(ONE, lives=True)
    scenario.packs = False
    scenario.submit(1)
    (attempt,) = scenario.in_flight
    scenario.wait(3 * UNKNOWN_S)
    assert not attempt.late
    scenario.packs = True
    scenario.tell(PoolCore.sent, attempt=attempt, at=scenario.now)
    scenario.wait(UNKNOWN_S / 2)
    assert not attempt.late
    scenario.wait(UNKNOWN_S)
    assert attempt.late


def test_large_requests_are_not_sent_again_while_being_sent() -> None:
    scenario = Scenario(ONE, lives=True, max_in_flight_bytes=4_000_000_000)
    (request,) = scenario.submit(1, nbytes=1_900_000_000)
    scenario.wait(60.0)
    (attempt,) = scenario.in_flight
    assert scenario.retries == 0
    scenario.answer(attempt)
    assert scenario.delivered == {request: ONE}


@pytest.mark.parametrize(("turns", "slices", "least"), [(True, 32, 0.8), (False, 8, 0.45)])
def test_calls_one_after_the_other_do_not_wait_for_their_last_requests(
    turns: bool, slices: int, least: float
) -> None:
    """Of many requests, one is led to the server that hangs again and again; few wait for one."""
    chance, numbers = Random(2), [itertools.count(), itertools.count()]

    def outcome(attempt: Attempt) -> Any:
        hangs = next(numbers[attempt.channel]) % 2 if turns else chance.random() < 1 / 2
        return HANGS if hangs and not well else None

    scenario = Scenario(ONE, lives=True)
    balancer = Balancer(scenario, outcome, 1)
    calls = [scenario.submit(slices), scenario.submit(slices)]
    begun, delivered, well = scenario.now, 0, True
    while scenario.now < begun + 60.0:
        balancer.run(0.01)
        well = well and scenario.now < begun + 1.0
        for number, call in enumerate(calls):
            if all(request in scenario.delivered for request in call):
                calls[number] = scenario.submit(slices)
                delivered += len(call)
    # It takes a moment to notice.
    assert delivered > least * 55.0 / RTT_S


def test_requests_that_are_slow_once_are_not_sent_again() -> None:
    """Late as they are: no other one is answered meanwhile, which would mean that they hang.

    After one that hung, those that are late are sent again sooner, until one of them is answered.
    """
    scenario = Scenario(ONE, lives=True)
    scenario.submit(1)
    scenario.answer_all()
    slow, *_ = scenario.submit(2)
    scenario.wait(1.5 * LATE_S)
    assert scenario.retries == 0
    scenario.answer(scenario.in_flight[1])
    scenario.wait(0.5 * LATE_S)
    scenario.answer(scenario.in_flight[1])
    assert scenario.delivered[slow] == ONE
    for retries in 2, 2:
        scenario.submit(1)
        scenario.wait(0.9 * LATE_S)
        assert scenario.retries == retries
        scenario.answer(scenario.in_flight[0])


def test_the_deadline_of_a_request_is_no_end_while_others_are_answered() -> None:
    scenario = Scenario(ONE)
    scenario.submit(3)
    first, second, third = scenario.in_flight
    scenario.answer(second)
    scenario.fail(first, errors.DeadlineError("the server did not answer in time"))
    assert first.slice not in scenario.failed
    assert scenario.in_flight[-1].slice is first.slice
    # But if nothing sent after it was answered, all requests may take too long.
    scenario.now += 1
    (late,) = scenario.submit(1)
    scenario.fail(scenario.in_flight[-1], errors.DeadlineError("the server did not answer in time"))
    assert late in scenario.failed
    assert third in scenario.in_flight


def test_rows_that_kill_servers_are_sent_ever_more_seldom() -> None:
    poison: list[Any] = []

    def outcome(attempt: Attempt) -> Any:
        poison[:] = poison or [attempt.slice]
        lost = errors.ServerLostError("connection termination")
        return lost if attempt.slice is poison[0] else None

    balancer = behind_one_url(outcome, retry_timeout_s=10)
    balancer.run(30.0)
    times = [a.begun_at for a in balancer.sent if a.slice is poison[0]]
    assert MAX_RETRIES < len(times) < 16
    assert times[-1] - times[-2] > 0.5
    assert list(balancer.scenario.failed) == poison


@pytest.mark.parametrize("capacity", [1, 4])
def test_limits_that_refuse_are_kept_to(capacity: int) -> None:
    """As Envoy's circuit breaker: what is refused comes back at once."""
    accepted: list[Attempt] = []

    def outcome(attempt: Attempt) -> Any:
        accepted[:] = [one for one in accepted if one in balancer.scenario.in_flight]
        if len(accepted) >= capacity:
            return REFUSED
        accepted.append(attempt)
        return None

    balancer = behind_one_url(outcome, servers=50)
    balancer.run(1.0)
    sent = len(balancer.sent)
    answered = balancer.run(10.0)
    assert answered > 0.9 * 10.0 * capacity / RTT_S
    assert len(balancer.sent) - sent - answered < 0.02 * answered + 5


def test_servers_that_refuse_all_are_left_alone_by_their_round_trip() -> None:
    """And for as long as it says."""
    scenario = Scenario(ONE)
    scenario.submit(100)
    for _ in range(30):
        scenario.now += RTT_S
        scenario.answer(scenario.in_flight[0], RTT_S)
    pauses = []
    later = failure(errors.OverloadError, retry_after_s=7.0)
    for error in [failure(errors.OverloadError, retry_after_s=0.0), REFUSED, REFUSED, later]:
        while scenario.in_flight:
            scenario.fail(scenario.in_flight[0], error)
        begun = scenario.now
        while not scenario.in_flight:
            scenario.now = scenario.core.wakes_at()
            scenario.tell()
        pauses.append(scenario.now - begun)
    assert all(RTT_S / 2 <= pause <= 8 * RTT_S for pause in pauses[:3])
    assert pauses[2] > pauses[0]
    assert pauses[3] == pytest.approx(7.0)
    assert scenario.endpoint(ONE).breaker.failing_since == NEVER
    for _ in range(60):  # slow as it is by now, it gets what keeps it busy
        scenario.now += 1
        scenario.answer(scenario.in_flight[0], 1.0)
    assert scenario.endpoint(ONE).limits[KEY].value == MIN_IN_FLIGHT


@pytest.mark.parametrize(
    ("round_trip_s", "nbytes", "options", "expected"),
    [
        (FAR_S, FULL_BYTES, {}, [0, 1, 2, 3]),
        (FAR_S, FULL_BYTES // 2, {}, [0, 0, 1, 1]),
        (FAR_S / 2, FULL_BYTES, {}, [0] * 4),
        (FAR_S, FULL_BYTES, {"channels": 1}, [0] * 4),
    ],
)
def test_large_requests_to_a_far_server_take_several_connections(
    round_trip_s: float, nbytes: int, options: dict[str, Any], expected: list[int]
) -> None:
    scenario = Scenario(ONE, served=contract(round_trip_s=round_trip_s), **options)
    scenario.submit(1)
    scenario.answer_all()
    scenario.submit(4, nbytes=nbytes)
    assert [attempt.channel for attempt in scenario.in_flight] == expected
    scenario.answer_all()
    assert all(channel.nbytes == 0 for channel in scenario.endpoint(ONE).channels)


def test_connections_are_made_anew_after_one_was_lost() -> None:
    """A balancer has led them to the servers that were left."""
    scenario = Scenario(ONE, channels=2)
    scenario.submit(2)
    scenario.fail(scenario.in_flight[0])
    scenario.answer_all()
    lost_at = scenario.now
    for renewals, seconds in enumerate([15, 30, 60, 120, 240, 480, 720, 960]):
        scenario.wait(lost_at + seconds - 1 - scenario.now)
        assert sorted(scenario.renewed) == [(ONE, 0)] * renewals + [(ONE, 1)] * renewals
        scenario.wait(1)


def test_silent_connections_are_made_anew() -> None:
    scenario = Scenario(ONE)
    scenario.submit(1)
    scenario.answer(scenario.in_flight[0])
    scenario.submit(2)
    stuck, other = scenario.in_flight
    scenario.now += RTT_S
    scenario.answer(other)
    scenario.wait(LATE_S + 0.05)
    assert [attempt.channel for attempt in scenario.in_flight] == [0, 1]
    scenario.answer(scenario.in_flight[1])
    assert stuck in scenario.cancelled
    scenario.tell()
    assert scenario.renewed == []
    scenario.wait(2)
    scenario.tell()
    assert scenario.renewed == [(ONE, 0)]
    scenario.served[ONE] = errors.DeadlineError("the server did not answer in time")
    scenario.ask(anew=True)
    assert scenario.renewed == [(ONE, 0)] * 2


def test_slow_start_doubles_the_limit_in_a_round_trip_until_a_refusal() -> None:
    scenario = Scenario(ONE)
    scenario.submit(5000)
    limits = []
    for number in range(30):
        scenario.now += RTT_S
        for attempt in list(scenario.in_flight):
            scenario.answer(attempt, RTT_S)
        limits.append(len(scenario.in_flight))
        if number == 4:
            scenario.fail(scenario.in_flight[0], REFUSED)
    for before, after in itertools.pairwise(limits[:5]):
        assert after > 1.7 * before
    assert limits[-1] < limits[4] + 10
