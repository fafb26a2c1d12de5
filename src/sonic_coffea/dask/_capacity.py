"""The capacity of a server for a model, from the RTTs of all clients: a pure state machine."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from sonic_coffea.pool import MAX_RTT_RATIO, min_in_flight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sonic_coffea.pool import RttStatistics

_INITIAL = 8.0
# The baseline RTT is forgotten whenever the clock shows a multiple of this, as servers change. Then
# all clients keep to a part of the limit, so that some requests find no queue (BBR's ProbeRTT): for
# some rounds after those are answered that are queued already. The clients of other schedulers must
# make room at the same time, which the clock tells them: with their queue in its baseline, this
# scheduler would take more than they.
_BASELINE_S = 60.0
_PROBE_RTT_PART, _PROBE_RTT_ROUNDS = 0.25, 2
# The limit changes by at most this factor at once.
_MAX_STEP = 2.0
# It grows only where it is what holds requests back.
_BINDING_PART = 0.7
# In each round, a part of what keeps a server busy is added, times the weight. Schedulers that know
# nothing of each other see the same RTT ratio, and go down by the same factor: so that their limits
# become as their weights are (as in FAST TCP: Wei, Jin, Low and Hegde, 2006).
_PUSH = 0.05
# With fewer requests than clients, these send at the best rate of so many rounds; at times a bit
# faster, to see whether the server has become faster, and slower, to make up for it.
_RATE_ROUNDS = 16
_PACES = (1.05, 0.93, 0.98, 0.98, 0.98, 0.98, 0.98, 0.98)
# Where that makes no queue, what it is faster by doubles, up to this.
_MAX_FASTER, _NO_QUEUE = 1.0, 1.5
# What is in flight beyond the limit is made up for in so many rounds, but the rate never falls
# below a part of the best.
_RELIEF_ROUNDS, _MIN_PACE = 2, 0.3


class Capacity:
    """The in-flight limit of all clients of a server together, and the rate of paced requests.

    In each round, RTTs are compared with the baseline of their size. The limit goes to where the
    RTT ratio is as a process's own limit has it.
    """

    def __init__(self, now: float) -> None:
        self.limit = _INITIAL
        self.weight = 1.0
        self.phase = 0.0
        self._baseline_rtt_s: dict[int, float] = {}
        self._next_baseline_rtt_s: dict[int, float] = {}
        self._round_at = now
        self._round_s = 1.0
        self._rounds = 0
        self._rates: deque[float] = deque(maxlen=_RATE_ROUNDS)
        self._in_flight = 0.0
        self._pace = 1.0
        self._rtt_s = 0.0
        self._interval_s = self._paced_at = 0.0
        self._probing_rtt = False
        self._probe_begins_at = _next_probe(now)
        self._probe_ends_at = now

    @property
    def rate(self) -> float:
        """Requests a second for the server, if they are paced."""
        best = max(self._rates, default=0.0)
        pace = _PROBE_RTT_PART if self._probing_rtt else self._pace
        excess = max(self._in_flight - self.limit, 0.0) / (self._round_s * _RELIEF_ROUNDS)
        return max(best * pace - excess, best * min(pace, _MIN_PACE))

    def pace(self, interval_s: float, now: float) -> None:
        """Take the time between two turns of a client.

        Turns are where the phase passes that of the client; it runs on as the interval changes.
        """
        if self._interval_s:
            self.phase = (self.phase + (now - self._paced_at) / self._interval_s) % 1.0
        self._interval_s, self._paced_at = interval_s, now

    def end_round(self, rtts: Iterable[RttStatistics], waiting: int, now: float) -> float:
        """Take all RTTs of a round, and return how many requests may be in flight."""
        rtts = list(rtts)
        self._round_s = max(now - self._round_at, 1e-9)
        self._round_at = now
        self._rounds += 1
        answers, sum_s, rtt_ratio = self._compare(rtts)
        if any(rtt.refused for rtt in rtts):
            self.limit = max(self.limit / _MAX_STEP, 1.0)
        elif answers and not self._probing_rtt:
            self._rates.append(answers / self._round_s)
            self._rtt_s = min(sum_s / answers, _BASELINE_S / 4)
            # Little's law: so many were in flight, on average over the round.
            self._in_flight = sum_s / self._round_s
            factor = min(max(MAX_RTT_RATIO / rtt_ratio, 1 / _MAX_STEP), _MAX_STEP)
            least = self.weight * max(min_in_flight(rtt.full) for rtt in rtts)
            binding = waiting and self._in_flight > _BINDING_PART * self.limit
            if factor < 1 or binding:
                # Half of the way, as what is measured lags behind.
                self.limit *= math.sqrt(factor)
            self.limit = max(self.limit + (_PUSH * least if binding else 0.0), least, 1.0)
        self._set_pace(rtt_ratio if answers else math.inf)
        self._probe_rtt(now)
        return self.limit * (_PROBE_RTT_PART if self._probing_rtt else 1.0)

    def _set_pace(self, rtt_ratio: float) -> None:
        """Take the RTT ratio that the last pace had."""
        if self._pace > 1 and rtt_ratio < _NO_QUEUE:
            self._pace = 1 + min(2 * (self._pace - 1), _MAX_FASTER)
        else:
            self._pace = _PACES[self._rounds % len(_PACES)]

    def _compare(self, rtts: Iterable[RttStatistics]) -> tuple[int, float, float]:
        """Return the number and the sum of all RTTs, and their ratio to the baseline."""
        answers, sum_s, baseline_s = 0, 0.0, 0.0
        for rtt in rtts:
            for size, (number, size_sum_s, min_s) in rtt.trips.items():
                for baseline in (self._baseline_rtt_s, self._next_baseline_rtt_s):
                    baseline[size] = min(min_s, baseline.get(size, math.inf))
                answers += number
                sum_s += size_sum_s
                baseline_s += number * self._baseline_rtt_s[size]
        return answers, sum_s, sum_s / baseline_s if baseline_s else 1.0

    def _probe_rtt(self, now: float) -> None:
        """Begin the rounds that measure the baseline RTT anew, or end them."""
        if self._probing_rtt and now >= self._probe_ends_at:
            self._probing_rtt = False
            self._baseline_rtt_s, self._next_baseline_rtt_s = self._next_baseline_rtt_s, {}
        elif now >= self._probe_begins_at:
            self._probing_rtt = True
            self._next_baseline_rtt_s = {}
            self._probe_ends_at = now + self._rtt_s + _PROBE_RTT_ROUNDS * self._round_s
            self._probe_begins_at = _next_probe(self._probe_ends_at)


def _next_probe(now: float) -> float:
    return (now // _BASELINE_S + 1) * _BASELINE_S
