"""The real core of the pool on virtual time, with servers that answer as a test says."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from tests.pool.scripted import ONE, TWO

from sonic_coffea import errors
from sonic_coffea.pool import ModelKey, Settings
from sonic_coffea.pool import _instructions as do
from sonic_coffea.pool._core import Event, PoolCore
from sonic_coffea.pool._request import Attempt, RequestSlice
from sonic_coffea.transport import Contract, Response, TensorSpec

KEY = ModelKey("m", None)
LOST = errors.ServerLostError("the connection to the server was lost: gone")
LOST.undelivered = True
NEVER = math.inf


def failure(kind: Any, **marks: Any) -> errors.SonicError:
    """Return an error that a server fails a request with."""
    error: errors.SonicError = kind("no", server=ONE)
    for name, mark in marks.items():
        setattr(error, name, mark)
    return error


FAILURES = {
    "route timeout": failure(errors.RouteTimeoutError),
    "overload": failure(errors.OverloadError),
    "push-back": failure(errors.OverloadError, retry_after_s=0.0),
    "no such model": failure(errors.ModelNotFoundError),
    "expired token": failure(errors.TokenExpiredError),
    "lost": failure(errors.ServerLostError),
    "undelivered": LOST,
    "too large": failure(errors.RequestTooLargeError),
    "failed": failure(errors.InferenceError),
}


def contract(*, width: int = 1, **options: Any) -> Contract:
    return Contract(
        model="m",
        version="1",
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(1,)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=(width,)),),
        **{"max_rows": 4, "stacks": True, **options},
    )


@dataclass(eq=False)
class Call:
    """A call that masks what fails; it is over when each row has been delivered or has failed."""

    contract: Contract = field(default_factory=contract)
    key: ModelKey = KEY
    over: bool = False
    missing: set[int] = field(default_factory=set)

    def settle(self, request: RequestSlice) -> None:
        """Take the rows of a slice, each of which is delivered, or fails, once."""
        rows = set(range(request.start, request.stop))
        assert rows <= self.missing, "rows are delivered, or fail, twice"
        self.missing -= rows
        self.over = self.over or not self.missing


@dataclass(eq=False)
class Waiter:
    """A caller that waits for a contract."""

    outcome: Any = None


class Scenario:
    """A pool's engine without threads: it carries out the core's instructions.

    Attributes
    ----------
    served : dict
        Each server's answer for the model: a contract, an error, or None for no answer.
    lives : dict
        Whether each server answers probes; None: never.
    in_flight, cancelled : list of Attempt
        Requests that were sent, and those that were cancelled.
    cancelled_at : dict
        When each of these was.
    packs : bool
        Whether requests are packed, and leave, at once.
    asked : Counter
        How often servers were asked for each model.
    silent : list
        The questions that no server has answered yet; `say` answers them.
    told : dict
        The contract that each server has given last of each model.
    delivered, failed : dict
        By slice: the URL that answered it, or the error.

    Parameters
    ----------
    urls : str
        The servers; by default, both.
    served, lives : object
        What each server has, and whether it lives.
    options
        Of the pool.
    """

    def __init__(self, *urls: str, served: Any = None, lives: Any = LOST, **options: Any) -> None:
        settings = Settings.make(urls or (ONE, TWO), **options)
        self.core = PoolCore(settings, Random(1))
        self.max_in_flight = settings.max_in_flight
        self.max_in_flight_bytes = settings.in_flight_bytes(None)
        self.now = 100.0
        self.served: dict[str, Any] = dict.fromkeys((ONE, TWO), served or contract())
        self.lives: dict[str, Any] = dict.fromkeys((ONE, TWO), lives)
        self.in_flight: list[Attempt] = []
        self.cancelled: list[Attempt] = []
        self.cancelled_at: dict[Attempt, float] = {}
        self.delivered: dict[RequestSlice, str] = {}
        self.failed: dict[RequestSlice, errors.SonicError] = {}
        self.retries = 0
        self.probes = 0
        self.asked: Counter[ModelKey] = Counter()
        self.fallbacks = 0
        self.renewed: list[tuple[str, int]] = []
        self.packs = True
        self.silent: list[tuple[str, ModelKey]] = []
        self.told: dict[tuple[str, ModelKey], Contract] = {}
        self._awaited: list[do.Instruction] = []  # without an event yet that says how they ended

    def tell(self, take: Any = None, **arguments: Any) -> None:
        """Have the core take an event, and carry out instructions, until no events follow.

        An event is one of the core's methods, and its arguments; without one, only time passes.
        """
        events: list[Event] = [] if take is None else [partial(take, **arguments)]
        while True:
            self._hear(events)
            follow = []
            for instruction in self.core.handle(self.now, *events):
                follow += self._carry_out(instruction)
            if not follow:
                break
            events = follow
        if self.core.wanted() and not (self.in_flight or self.silent or self._awaited):
            assert self.core.wakes_at() < NEVER, "what waits is forgotten"

    def wait(self, seconds: float) -> None:
        """Let time pass, and tell the core when it wants to be woken."""
        until = self.now + seconds
        wakes = 0
        while (at := self.core.wakes_at()) <= until:
            assert wakes < 10_000, "the core is woken again and again, and nothing follows"
            wakes += 1
            self.now = max(self.now, at)
            self.tell()
        self.now = until
        self.tell()

    def ask(self, *, anew: bool = False) -> Waiter:
        """Ask what the model takes and gives."""
        waiter: Any = Waiter()
        self.tell(PoolCore.contract_requested, key=KEY, caller=waiter, anew=anew)
        return waiter

    def submit(
        self, slices: int = 1, *, rows: int = 4, nbytes: int = 16, whole: bool = False, **call: Any
    ) -> list[RequestSlice]:
        """Submit a call of some slices."""
        one = Call(**call)
        one.missing = set(range(rows * slices))
        starts = [rows * n for n in range(slices)]
        made = [RequestSlice(one, start, start + rows, nbytes, whole=whole) for start in starts]
        self.tell(PoolCore.submitted, slices=made)
        return made

    def answer(self, attempt: Attempt, rtt_s: float = 0.01) -> None:
        """Answer a request that was sent `rtt_s` ago."""
        self._ended(attempt)
        response = Response(outputs={}, version="1", sent_bytes=0, received_bytes=0)
        sent_at = self.now - rtt_s
        answer = do.Answer(attempt, response, sent_at, sent_at, self.now)
        self.tell(PoolCore.answered, answer=answer)

    def answer_all(self, rounds: int = 1000) -> None:
        """Answer whatever is in flight, and what is sent then."""
        for _ in range(rounds):
            if not self.in_flight:
                return
            self.now += 0.01
            self.answer(self.in_flight[0])

    def fail(self, attempt: Attempt, error: errors.SonicError = LOST, *, sent: bool = True) -> None:
        """Fail a request, which was sent, or could not be."""
        self._ended(attempt)
        self.tell(PoolCore.failed, attempt=attempt, error=error, sent=sent)

    def lose(self, url: str, error: errors.SonicError = LOST, most: int = 1000) -> int:
        """Fail what is in flight to a server, and is sent there again; return how often."""
        for number in range(most):
            if not (attempts := self.at(url)):
                return number
            self.fail(attempts[0], error)
        return most

    def say(self, url: str, outcome: Any, key: ModelKey = KEY) -> None:
        """Have a server answer late that said nothing when it was asked."""
        self.silent.remove((url, key))
        self.tell(PoolCore.validated, url=url, key=key, outcome=outcome)

    def at(self, url: str) -> list[Attempt]:
        """Return what is in flight to a server."""
        return [attempt for attempt in self.in_flight if attempt.url == url]

    def assert_failed(self, slices: list[RequestSlice], kind: type[errors.SonicError]) -> None:
        """Assert that these slices failed with errors of a kind, and no others."""
        assert set(self.failed) == set(slices)
        assert {type(error) for error in self.failed.values()} == {kind}

    def endpoint(self, url: str) -> Any:
        return self.core.endpoints.by_url[url]

    def _ended(self, attempt: Attempt) -> None:
        if attempt in self.in_flight:
            self.in_flight.remove(attempt)

    def _hear(self, events: list[Event]) -> None:
        """Note what servers say of models, as the core does."""
        said = [event.keywords for event in events if event.func is PoolCore.validated]
        contracts = [each for each in said if isinstance(each["outcome"], Contract)]
        self.told |= {(each["url"], each["key"]): each["outcome"] for each in contracts}

    def _leaves(self, attempt: Attempt) -> None:
        """Send a request that somebody waits for, to a server that has room and the model."""
        told, expected = self.told[attempt.url, attempt.key], attempt.slice.call.contract
        assert not attempt.slice.call.over
        assert told.outputs == expected.outputs
        assert told.digest == expected.digest or not (told.digest and expected.digest)
        assert not told.stacks or (told.max_rows or NEVER) >= (expected.max_rows or NEVER)
        others = [a for a in self.in_flight if a in a.slice.attempts]
        nbytes = sum(a.slice.nbytes for a in others)
        assert not nbytes or nbytes + attempt.slice.nbytes <= self.max_in_flight_bytes
        at_once = sum(a.url == attempt.url and not a.late for a in others)
        tests_circuit = self.endpoint(attempt.url).breaker.circuit(self.now) == "half-open"
        assert at_once < (1 if tests_circuit else self.max_in_flight)
        self.in_flight.append(attempt)

    def _settle(self, request: RequestSlice) -> None:
        assert isinstance(request.call, Call)
        request.call.settle(request)

    def _carry_out(self, instruction: do.Instruction) -> list[Event]:  # noqa: C901, PLR0912
        match instruction:
            case do.Send(attempt):
                self._leaves(attempt)
                sent = partial(PoolCore.sent, attempt=attempt, at=self.now)
                return [sent] if self.packs else []
            case do.Cancel(attempt):
                self._ended(attempt)
                self.cancelled.append(attempt)
                self.cancelled_at[attempt] = self.now
                error = errors.CancelledError("cancelled")
                return [partial(PoolCore.failed, attempt=attempt, error=error)]
            case do.Answer() as answer:
                self._settle(answer.attempt.slice)
                self.delivered[answer.attempt.slice] = answer.attempt.url
            case do.Fail(request, error):
                self._settle(request)
                self.failed[request] = error
            case do.Count(retried=retried):
                self.retries += retried
            case do.Probe(url):
                self.probes += 1
                if self.lives[url] is None:
                    self._awaited.append(instruction)
                else:
                    lost = isinstance(self.lives[url], errors.SonicError)
                    outcome = self.lives[url] if lost else None
                    return [partial(PoolCore.probed, url=url, outcome=outcome)]
            case do.Validate(url, key):
                self.asked[key] += 1
                assert self.asked[key] < 1000, "servers are asked without end"
                if (outcome := self.served[url]) is not None:
                    return [partial(PoolCore.validated, url=url, key=key, outcome=outcome)]
                self.silent.append((url, key))
            case do.Resolve(waiter, outcome):
                assert waiter.outcome is None
                waiter.outcome = outcome
            case do.StartFallback():
                self.fallbacks += 1
                self._awaited.append(instruction)
            case do.Reconnect(url, channel):
                assert not any(a in a.slice.attempts for a in self.at(url) if a.channel == channel)
                self.renewed.append((url, channel))
        return []
