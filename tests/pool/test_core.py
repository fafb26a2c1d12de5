"""Each row is delivered or failed once, on virtual time, whatever servers and schedulers do."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.pool.scenario import FAILURES, KEY, LOST, NEVER, ONE, TWO, Scenario, contract, failure

from sonic_coffea import errors, pool
from sonic_coffea.pool import Quota
from sonic_coffea.pool import _instructions as do
from sonic_coffea.pool._core import PoolCore
from sonic_coffea.pool._tuning import MAX_LOSSES, RECHECK_S, SILENCE_S

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


def test_rows_of_a_lost_server_go_to_another() -> None:
    scenario = Scenario()
    slices = scenario.submit(8)
    losses = scenario.lose(ONE)
    # Those that were in flight when the last chance was lost, too.
    assert MAX_LOSSES <= losses <= MAX_LOSSES + 4
    assert scenario.endpoint(ONE).breaker.failing_since < NEVER
    scenario.answer_all()
    assert set(scenario.delivered) == set(slices)
    assert set(scenario.delivered.values()) == {TWO}
    assert scenario.retries == losses


def test_the_log_says_how_many_requests_are_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    scenario = Scenario()
    scenario.submit(8)
    losses = scenario.lose(ONE)
    assert "gone; 1 request is sent again" in caplog.text
    scenario.answer_all()
    scenario.wait(RECHECK_S)
    scenario.submit(8)
    scenario.lose(ONE)
    assert f"gone; {losses} requests are sent again" in caplog.text


def test_servers_with_equal_load_take_turns() -> None:
    scenario = Scenario()
    for _ in range(6):
        scenario.submit(1)
        scenario.answer_all()
    assert sorted(scenario.delivered.values()) == [ONE] * 3 + [TWO] * 3


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
    assert scenario.endpoint(ONE).breaker.failing_since == NEVER
    assert scenario.endpoint(ONE).state(scenario.now).last_error == str(LOST)
    assert first.slice in [attempt.slice for attempt in scenario.at(TWO)]


def test_servers_that_only_lose_are_lost_soon_and_given_up_after_the_retry_timeout() -> None:
    """Since the first loss, from which their time to come back counts, however little is sent."""
    scenario = Scenario(ONE, retry_timeout_s=5)
    (lost,) = scenario.submit(1)
    begun, breaker = scenario.now, scenario.endpoint(ONE).breaker
    while breaker.failing_since == NEVER:
        scenario.wait(0.4)
        scenario.lose(ONE, most=1)
        assert scenario.now - begun < SILENCE_S + 1
    assert breaker.failing_since == begun + 0.4
    while not scenario.failed:
        scenario.lose(ONE)
        scenario.wait(0.1)
    assert 5 <= scenario.now - breaker.failing_since <= 7.5
    assert isinstance(scenario.failed[lost], errors.ServerLostError)
    assert "tried" in str(scenario.failed[lost])
    # Who tries the same chunk again hears it after one more try.
    (again,) = scenario.submit(1)
    scenario.wait(2)
    scenario.lose(ONE)
    assert again in scenario.failed


def test_silent_servers_are_probed_and_their_rows_go_elsewhere() -> None:
    scenario = Scenario(ONE, TWO, balance="priority")
    scenario.submit(1)
    scenario.wait(0.1)
    slices = scenario.submit(2)
    scenario.answer(scenario.in_flight[0])
    scenario.wait(1)  # it owes responses since its last one, whatever is sent meanwhile
    slices += scenario.submit(1)
    sent = scenario.at(ONE)
    assert len(sent) == 3
    scenario.wait(SILENCE_S - 1)
    assert scenario.cancelled == sent
    assert scenario.renewed == [(ONE, 0)]
    assert [attempt.slice for attempt in scenario.at(TWO)] == slices
    # A response that comes all the same changes nothing.
    scenario.tell(PoolCore.failed, attempt=sent[0], error=LOST)
    scenario.answer_all()
    assert set(scenario.delivered.values()) == {ONE, TWO}


def test_silent_servers_are_probed_though_calls_end_sooner() -> None:
    scenario = Scenario(ONE, lives=True)
    for _ in range(3):
        (given_up,) = scenario.submit(1)
        scenario.wait(0.9 * SILENCE_S)
        given_up.call.over = True
        scenario.tell(PoolCore.call_ended, call=given_up.call)
    assert scenario.probes == 1


def test_servers_that_are_lost_and_answer_again_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scenario = Scenario(ONE, lives=LOST)
    for _ in range(2):
        scenario.submit(1)
        scenario.fail(scenario.in_flight[0])  # which is logged, too
        scenario.wait(SILENCE_S)
        assert scenario.core.states(scenario.now)[0].circuit == "open"
        scenario.wait(0.1)
        assert scenario.core.states(scenario.now)[0].circuit == "half-open"
        scenario.answer_all()
        assert scenario.core.states(scenario.now)[0].circuit == "closed"
    lost = "nothing gets through, and requests are sent again for up to 60 s"
    for message in lost, f"{ONE} answers again":
        assert caplog.text.count(message) == 1


def test_slow_servers_that_live_are_waited_for() -> None:
    scenario = Scenario(ONE, lives=True)
    (slow,) = scenario.submit(1)
    scenario.wait(20 * SILENCE_S)
    assert scenario.probes >= 10
    # Another server behind the URL may be what lives.
    assert scenario.retries == 2
    scenario.answer(scenario.in_flight[0])
    assert scenario.delivered == {slow: ONE}
    scenario.wait(SILENCE_S)
    assert (ONE, 0) not in scenario.renewed


def test_servers_that_answer_while_probed_are_not_lost() -> None:
    scenario = Scenario(ONE, lives=None)
    scenario.submit(2)
    first, second = scenario.in_flight
    scenario.wait(SILENCE_S + 0.1)
    scenario.answer(first)
    scenario.tell(PoolCore.probed, url=ONE, outcome=LOST)
    assert second in scenario.in_flight
    assert scenario.endpoint(ONE).breaker.failing_since == NEVER


def test_rows_of_a_cancelled_call_are_let_go_while_others_wait() -> None:
    scenario = Scenario(ONE)
    scenario.submit(6, rows=1)
    ended = weakref.ref(scenario.submit(50, rows=1)[0].call)
    for _ in range(20):  # some back off
        scenario.fail(scenario.in_flight[-1], errors.ServerLostError("connection termination"))
    scenario.tell(PoolCore.call_ended, call=ended())
    scenario.cancelled.clear()
    scenario.cancelled_at.clear()
    gc.collect()
    assert ended() is None


def test_hedged_requests_go_elsewhere_and_the_first_response_counts() -> None:
    """Those that could not be sent are tried again at their pace."""
    scenario = Scenario(ONE, TWO, hedge_after_s=0.1, balance="priority")
    (late,) = scenario.submit(1)
    (first,) = scenario.at(ONE)
    for _ in range(3):
        scenario.wait(0.1)
        assert [attempt.channel for attempt in scenario.at(TWO)] == [0]
        scenario.fail(scenario.at(TWO)[0], NO_MEMORY, sent=False)
        assert scenario.in_flight == [first]
    scenario.wait(0.1)
    scenario.answer(scenario.at(TWO)[0])
    assert scenario.delivered == {late: TWO}
    assert scenario.cancelled == [first]


NO_MEMORY = errors.RequestError("no memory")
OTHERS = [contract(max_rows=64, width=2), contract(max_rows=64, digest="b"), contract(max_rows=2)]
MODEL = contract(max_rows=64, digest="a")
BUSY = failure(errors.OverloadError, retry_after_s=0.1)
FAULTS = [LOST, errors.ModelNotFoundError("unloaded"), BUSY]
ACTIONS = (
    *("submit", "answer", "late", "unsent", *FAILURES, "wait", "anew", "quotas", "join"),
    *("end", "servers", "serve", "say", "live", "down", "fallback"),
)
STAND_IN = "grpc://stand-in:8001"


def script(text: str) -> list[tuple[str, int]]:
    """Return the actions that a text names, each with its number."""
    words = [line.rsplit(maxsplit=1) for line in text.split(",")]
    return [(action.strip(), int(number)) for action, number in words]


class Story(Scenario):
    """Servers, callers and a scheduler that do anything at any time."""

    def __init__(self, actions: list[tuple[str, int]], **options: Any) -> None:
        super().__init__(served=MODEL, retry_timeout_s=1, fallback_after_s=0.3, **options)
        self.served[STAND_IN], self.lives[STAND_IN] = MODEL, True
        self.said = [MODEL, *OTHERS, *FAULTS]
        self.calls: list[Any] = []

    @property
    def starting(self) -> bool:
        """Whether the fallback is being started."""
        return do.StartFallback() in self._awaited

    def open_fallback(self, outcome: Any) -> None:
        """Say where the fallback serves, or why it cannot be opened."""
        self._awaited.remove(do.StartFallback())
        self.tell(PoolCore.fallback_started, outcome=outcome)

    def act(self, action: str, number: int) -> None:  # noqa: C901, PLR0912  a table
        """Do what an action says to one of what it is about, if there is any."""

        def one(several: list[Any]) -> Any:
            return several[number % len(several)] if several else None

        url = one([ONE, TWO, STAND_IN])
        match action:
            case "submit":
                # One that is larger than the limit travels alone.
                options = {"whole": number % 4 == 3, "nbytes": one([16, 100])}
                made = self.submit(number + 1, rows=8, contract=MODEL, **options)
                self.calls.append(made[0].call)
            case "wait":
                self.wait(0.1 * number if number < 7 else 2.0 * number)
            case "anew":
                self.ask(anew=True)
            case "servers":
                self.tell(PoolCore.servers_changed, servers=one([[ONE], [TWO], [ONE, TWO]]))
            case "serve":
                self.served[url] = [*self.said, None][number // 3 % (len(self.said) + 1)]
            case "say" if self.silent:
                self.say(one(self.silent)[0], one(self.said))
            case "down":
                self.served |= {ONE: LOST, TWO: LOST}
                self.lives |= {ONE: LOST, TWO: LOST}
                for url in (ONE, TWO):
                    self.lose(url)
                self.wait(0.5)
                if self.starting and number % 2:
                    self.open_fallback(STAND_IN)
                    self.answer_all(number)
            case "fallback" if self.starting:
                self.open_fallback(one([STAND_IN, STAND_IN, errors.ConfigError("no repository")]))
            case "live":
                self.lives[url] = [True, LOST][number // 3 % 2]
            case "quotas":
                quota = Quota(number, interval_s=0.1 * (number % 3), delay_s=0.1 * (number % 2))
                quotas = {(ONE, KEY): quota} if number else {}
                self.tell(PoolCore.quotas_received, quotas=quotas, lease_s=1.0)
            case "join":
                until = {"starts_at": self.now + 0.1 * number, "quotas_within_s": 0.5}
                self.tell(PoolCore.scheduler_joined, max_in_flight=2, **until)
            case "late" if self.cancelled:
                self.answer(one(self.cancelled))
            case "end" if self.calls:
                one(self.calls).over = True
                self.tell(PoolCore.call_ended, call=one(self.calls))
                assert not any(attempt.slice.call is one(self.calls) for attempt in self.in_flight)
            case "answer" if self.in_flight:  # 0: within one tick of the clock
                self.answer(one(self.in_flight), rtt_s=0.01 * number)
            case "unsent" if self.in_flight:
                self.fail(one(self.in_flight), NO_MEMORY, sent=False)
            case _ if action in FAILURES and self.in_flight:
                self.fail(one(self.in_flight), FAILURES[action])

    def end_well(self) -> None:
        """Have servers answer everything from now on."""
        self.served = dict.fromkeys(self.served, MODEL)
        self.lives = dict.fromkeys(self.lives, True)
        if self.starting:
            self.open_fallback(STAND_IN)
        for url, _ in list(self.silent):
            self.say(url, MODEL)
        for _ in range(100):
            self.answer_all()
            self.wait(1)


@settings(max_examples=3 * settings.default.max_examples)
@example(  # rows that are given up while an overdue request of theirs is answered
    actions=script("submit 4, undelivered 0, wait 2, wait 9, answer 0, answer 0, no such model 4"),
    lives=False,
    options={"hedge_after_s": 0.2},
)
@example(  # the whole is answered after its halves
    actions=script(
        "submit 2, wait 1, answer 1, answer 1, wait 6, wait 6, route timeout 1, wait 2, answer 0"
    ),
    lives=True,
    options={},
)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 15)), min_size=20, max_size=80
    ),
    lives=st.booleans(),
    options=st.sampled_from(
        [
            *({}, {"hedge_after_s": 0.2}, {"max_in_flight": 2}, {"max_in_flight_bytes": 40}),
            *[{"fallback": "repository"}] * 2,
        ]
    ),
)
def test_every_row_is_delivered_or_failed_once(
    actions: list[tuple[str, int]], lives: bool, options: dict[str, Any]
) -> None:
    story = Story(actions, lives=lives or LOST, **options)
    for action, number in actions:
        story.act(action, number)
    story.end_well()
    assert all(call.over for call in story.calls)
    assert not story.in_flight
    assert all(state.in_flight == 0 for state in story.core.states(story.now))
    assert all(number == 0 for number in story.core.waiting.counts().values())
    (last,) = story.submit(contract=story.ask(anew=True).outcome)
    story.answer_all()
    assert last in story.delivered


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
    first, refused, *_ = sent = scenario.at(ONE)
    assert len(sent) == 5
    scenario.answer(first, 0.03)
    scenario.fail(refused, FAILURES["overload"])
    assert len(scenario.at(ONE)) == 4  # quotas are no permission to ask a server that refuses
    scenario.fail(scenario.at(ONE)[0], BUSY)
    scenario.answer(scenario.at(ONE)[0], 0.005)
    assert len(scenario.at(ONE)) == 2
    scenario.answer_all()
    telemetry = scenario.core.telemetry()[ONE, KEY]
    assert telemetry.refused == 2
    # Of requests of four rows: their number, sum and minimum.
    assert telemetry.rtts[3] == pytest.approx((4, 0.055, 0.005))
    # If the scheduler falls silent before the next turn, the worker goes by its own limit.
    quota = Quota(max_in_flight=1, interval_s=1000.0, delay_s=900.0)
    scenario.tell(PoolCore.quotas_received, quotas={(ONE, KEY): quota}, lease_s=5.0)
    scenario.submit(1)
    assert not scenario.in_flight
    scenario.wait(5)
    assert scenario.in_flight


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
