"""Who may have how much of a server: pure state machines, told of time and of what workers see."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

Served = tuple[str, str]
"""A server, and a model with its version."""

# As long as a worker's own limit: enough for a batch that is computed, the next one and another on
# its way.
_TOLERANCE = 3.0
_FIRST = 8.0
_LEAST = 4.0
_BATCHES, _MOST_FULL = 2, 64.0
# What is believed to be the time of a request that meets no other is forgotten after so long, as
# servers change. If no request met so few meanwhile, all make way for a moment.
_MEMORY_S = 60.0
_DRAINED = 0.25
# A limit is moved by so much at once.
_STEP = 2.0
# It is raised only where it is what holds requests back.
_BINDING = 0.7
# With fewer requests than workers, these send at the rate that was the best in so many rounds; at
# times a bit faster, to see whether the server has become faster, and slower, to make up for it.
_RATE_ROUNDS = 16
_PACES = (1.05, 0.93, 0.98, 0.98, 0.98, 0.98, 0.98, 0.98)
# What is out beyond the limit is made up for in so many rounds, but the rate never falls below a
# part of the best.
_RELIEF_ROUNDS, _SLOWEST = 2, 0.3
# The fractional parts of its multiples are spread evenly (Weyl; Knuth, volume 3, 6.4).
_GOLDEN = (math.sqrt(5) - 1) / 2
# A share lasts for so many rounds; then a worker goes by what it sees itself.
_LASTS = 4


class Trips(TypedDict):
    """Answers of a server to requests of like size."""

    number: int
    sum_s: float
    least_s: float


class Seen(TypedDict):
    """What a worker saw of a model on a server since its last report."""

    out: int
    waiting: int
    rows: int
    refused: int
    full: float
    trips: dict[int, Trips]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a worker may have of a server.

    Attributes
    ----------
    most : int
        Requests at a time.
    every_s, first_s : float
        The time from one turn to the next, and to the first, if there is less than one request at
        a time for each worker.
    """

    most: int
    every_s: float
    first_s: float


class Capacity:
    """How many requests a server bears, and how fast they may follow each other.

    In each round, answers are compared with the shortest of their size in the last minute. The
    limit goes to where they take `_TOLERANCE` times as long, but not below two full batches.
    """

    def __init__(self, now: float) -> None:
        self.value = _FIRST
        self.slowness = 1.0
        self._least_s: dict[int, float] = {}
        self._fresh_s: dict[int, float] = {}
        self._since = now
        self._at = now
        self._rates: deque[float] = deque(maxlen=_RATE_ROUNDS)
        self._rounds = 0
        self._round_s = 1.0
        self._out = 0.0
        self.phase = 0.0
        self._every_s = self._paced_at = 0.0
        self._draining = False

    @property
    def rate(self) -> float:
        """Requests a second for the server, if fewer may be out than there are workers."""
        best = max(self._rates, default=0.0)
        pace = _DRAINED if self._draining else _PACES[self._rounds % len(_PACES)]
        excess = max(self._out - self.value, 0.0) / (self._round_s * _RELIEF_ROUNDS)
        return max(best * pace - excess, best * min(pace, _SLOWEST))

    def paced(self, every_s: float, now: float) -> float:
        """Take the time between two turns of a worker, and return it.

        Turns are where the phase passes that of the worker; it runs on as their distance changes.
        """
        if self._every_s:
            self.phase = (self.phase + (now - self._paced_at) / self._every_s) % 1.0
        self._every_s, self._paced_at = every_s, now
        return every_s

    def round(self, seen: list[Seen], now: float) -> float:
        """Take note of a round's reports, and return how many requests may be out."""
        passed_s = self._round_s = max(now - self._at, 1e-9)
        self._at = now
        self._rounds += 1
        answers = self._learn(seen)
        number = sum(t["number"] for t in answers)
        least = max([_LEAST, *(min(_BATCHES * s["full"], _MOST_FULL) for s in seen)])
        if any(s["refused"] for s in seen):
            self.value = max(self.value / _STEP, 1.0)
        elif number and not self._draining:
            self._rates.append(number / passed_s)
            # Little's law: so many were out, on average over the round.
            self._out = sum(t["sum_s"] for t in answers) / passed_s
            self._follow(sum(s["waiting"] for s in seen), least)
        return self._drained(now)

    def _learn(self, seen: list[Seen]) -> list[Trips]:
        """Learn how long requests take at the least, and how much longer they took."""
        answers, alone_s = [], 0.0
        for one in seen:
            for size, trips in one["trips"].items():
                if trips["number"]:
                    answers.append(trips)
                    for least in (self._least_s, self._fresh_s):
                        least[size] = min(trips["least_s"], least.get(size, math.inf))
                    alone_s += trips["number"] * self._least_s[size]
        if alone_s:
            self.slowness = sum(t["sum_s"] for t in answers) / alone_s
        return answers

    def _follow(self, waiting: int, least: float) -> None:
        factor = min(max(_TOLERANCE / self.slowness, 1 / _STEP), _STEP)
        if factor < 1 or (waiting and self._out > _BINDING * self.value):
            # Half of the way, as what is measured lags behind.
            self.value *= math.sqrt(factor)
        self.value = max(self.value, least)

    def _drained(self, now: float) -> float:
        """Once in a while, let few requests out, to see again how long they take then."""
        if self._draining:
            self._draining = False
            self._least_s, self._fresh_s = self._fresh_s, {}
            self._since = now
        elif now - self._since > _MEMORY_S:
            self._draining = True
            self._fresh_s = {}
        return self.value * (_DRAINED if self._draining else 1.0)


@dataclass(slots=True)
class _Worker:
    """What is known of a worker."""

    at: float = -math.inf
    phase: float = 0.0
    seen: dict[Served, Seen] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    answered: dict[str, float] = field(default_factory=dict)


class Shares:
    """Deals out what servers bear among the workers that want it.

    Workers report what they saw; `hand_out` ends a round and says what each may have. All of it is
    coarse and expires, so that nothing depends on a message.

    Parameters
    ----------
    now : float
        Time of any clock that does not go back, as in all methods.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._capacities: dict[Served, Capacity] = {}
        self._turn = 0
        self._joined = 0

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    @property
    def capacities(self) -> Mapping[Served, Capacity]:
        """What each server bears of each model."""
        return self._capacities

    def demand(self, served: Served) -> tuple[int, int]:
        """Return the requests that are out, and that wait, over all workers."""
        seen = [w.seen[served] for w in self._workers.values() if served in w.seen]
        return sum(s["out"] for s in seen), sum(s["waiting"] for s in seen)

    @property
    def every_s(self) -> float:
        """How long a round is: the more workers, the longer, to spare the scheduler."""
        return max(0.5, len(self._workers) / 500)

    @property
    def lasts_s(self) -> float:
        """How long shares are valid."""
        return _LASTS * self.every_s

    def join(self, worker: str) -> None:
        """Take in a worker."""
        self._known(worker)

    def _known(self, worker: str) -> _Worker:
        if worker not in self._workers:
            # However many there are, their turns are spread evenly.
            self._joined += 1
            self._workers[worker] = _Worker(phase=self._joined * _GOLDEN % 1.0)
        return self._workers[worker]

    def leave(self, worker: str) -> None:
        """Forget a worker: what it had is for the others."""
        self._workers.pop(worker, None)

    def report(
        self, worker: str, seen: Mapping[Served, Seen], lost: Mapping[str, bool], now: float
    ) -> None:
        """Take note of what a worker saw since its last report.

        Parameters
        ----------
        worker : str
            Its address.
        seen : mapping
            By server and model.
        lost : mapping
            Server to whether the worker has lost it.
        """
        known = self._known(worker)
        known.at = now
        for served, one in seen.items():
            known.seen[served] = _joined(known.seen.get(served), one)
            if any(t["number"] for t in one["trips"].values()):
                known.answered[served[0]] = now
        for server, is_lost in lost.items():
            if not is_lost:
                known.lost.pop(server, None)
            else:
                known.lost.setdefault(server, now)

    def hand_out(self, now: float) -> dict[str, dict[Served, Allowed]]:
        """End a round: return for each worker what it may have until the next."""
        self._turn += 1
        shares: dict[str, dict[Served, Allowed]] = {name: {} for name in self._workers}
        for served in {s for w in self._workers.values() for s in w.seen}:
            capacity = self._capacities.setdefault(served, Capacity(now))
            reports = {n: w.seen[served] for n, w in self._workers.items() if served in w.seen}
            total = capacity.round(list(reports.values()), now)
            wants = {n: s["out"] + s["waiting"] for n, s in reports.items()}
            active = sum(want > 0 for want in wants.values())
            paced = total < active and capacity.rate > 0
            every_s = capacity.paced(active / capacity.rate, now) if paced else 0.0
            for name, most in deal(total, wants, self._turn).items():
                first_s = (self._workers[name].phase - capacity.phase) % 1.0 * every_s
                shares[name][served] = Allowed(most, every_s, first_s)
        for worker in self._workers.values():
            if now - worker.at > self.lasts_s:  # it is idle, or hangs
                worker.seen.clear()
            worker.seen = {served: _blank(one) for served, one in worker.seen.items()}
        return shares

    def lost_servers(self) -> dict[str, list[str]]:
        """Return servers that nobody has an answer from since they were lost, and who tries them.

        One of those that lost it, and one that did not: the first may have lost the network.
        """
        lost: dict[str, list[str]] = {}
        for server in {s for w in self._workers.values() for s in w.lost}:
            by = {n: w.lost[server] for n, w in self._workers.items() if server in w.lost}
            first = min(by.values())
            if any(w.answered.get(server, -math.inf) > first for w in self._workers.values()):
                continue
            others = [name for name in self._workers if name not in by]
            turn = self._turn // _LASTS
            lost[server] = [min(by, key=by.__getitem__)]
            lost[server] += [others[turn % len(others)]] if others else []
        return lost


def deal(total: float, wants: Mapping[str, int], turn: int) -> dict[str, int]:
    """Deal out requests: to each what it wants, or as many as to the others (max-min fairness).

    Each has one at the least; who wants none has it for when it does.

    Parameters
    ----------
    total : float
        Requests that may be out.
    wants : mapping
        What each worker has out, or has waiting.
    turn : int
        Counts the rounds: what cannot be dealt out evenly goes to others each time.
    """
    active = [name for name, want in wants.items() if want]
    dealt = dict.fromkeys(wants, 1)
    left = int(total) - len(active)
    # First what they want, then what is left: they may want it before the next round.
    for hungry in ([name for name in active if wants[name] > 1], active):
        left = _deal_evenly(left, hungry, dealt, wants if hungry is not active else {}, turn)
    return dealt


def _deal_evenly(
    left: int, hungry: list[str], dealt: dict[str, int], wants: Mapping[str, int], turn: int
) -> int:
    """Deal out what is left until nobody wants more, and return what is left then."""
    while left > 0 and hungry:
        each = left // len(hungry)
        if each == 0:
            first = turn * left % len(hungry)
            for name in (hungry + hungry)[first : first + left]:
                dealt[name] += 1
            return 0
        for name in hungry:
            given = min(each, wants.get(name, dealt[name] + each) - dealt[name])
            dealt[name] += given
            left -= given
        hungry = [name for name in hungry if dealt[name] < wants.get(name, dealt[name] + 1)]
    return left


def _blank(seen: Seen) -> Seen:
    return {**seen, "rows": 0, "refused": 0, "trips": {}}


def _joined(old: Seen | None, new: Seen) -> Seen:
    """Return what was seen in two reports of one round."""
    if old is None:
        return new
    trips = dict(old["trips"])
    for size, one in new["trips"].items():
        before = trips.get(size, Trips(number=0, sum_s=0.0, least_s=math.inf))
        trips[size] = Trips(
            number=before["number"] + one["number"],
            sum_s=before["sum_s"] + one["sum_s"],
            least_s=min(before["least_s"], one["least_s"]),
        )
    return {
        "out": new["out"],
        "waiting": new["waiting"],
        "rows": old["rows"] + new["rows"],
        "refused": old["refused"] + new["refused"],
        "full": new["full"],
        "trips": trips,
    }
