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
# The baseline RTT is forgotten after so long, as servers change. Then all clients keep to a part of
# the limit for a round, so that some requests find no queue (BBR's ProbeRTT).
_BASELINE_S = 60.0
_PROBE_RTT_PART = 0.25
# The limit changes by at most this factor at once.
_MAX_STEP = 2.0
# It grows only where it is what holds requests back.
_BINDING_PART = 0.7
# With fewer requests than clients, these send at the best rate of so many rounds; at times a bit
# faster, to see whether the server has become faster, and slower, to make up for it.
_RATE_ROUNDS = 16
_PACES = (1.05, 0.93, 0.98, 0.98, 0.98, 0.98, 0.98, 0.98)
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
        self.phase = 0.0
        self._baseline_rtt_s: dict[int, float] = {}
        self._next_baseline_rtt_s: dict[int, float] = {}
        self._baseline_at = self._round_at = now
        self._round_s = 1.0
        self._rounds = 0
        self._rates: deque[float] = deque(maxlen=_RATE_ROUNDS)
        self._in_flight = 0.0
        self._interval_s = self._paced_at = 0.0
        self._probing_rtt = False

    @property
    def rate(self) -> float:
        """Requests a second for the server, if they are paced."""
        best = max(self._rates, default=0.0)
        pace = _PROBE_RTT_PART if self._probing_rtt else _PACES[self._rounds % len(_PACES)]
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
            # Little's law: so many were in flight, on average over the round.
            self._in_flight = sum_s / self._round_s
            factor = min(max(MAX_RTT_RATIO / rtt_ratio, 1 / _MAX_STEP), _MAX_STEP)
            if factor < 1 or (waiting and self._in_flight > _BINDING_PART * self.limit):
                # Half of the way, as what is measured lags behind.
                self.limit *= math.sqrt(factor)
            self.limit = max(self.limit, *(min_in_flight(rtt.full) for rtt in rtts))
        self._probe_rtt(now)
        return self.limit * (_PROBE_RTT_PART if self._probing_rtt else 1.0)

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
        """Begin a round that measures the baseline RTT anew, or end it."""
        if self._probing_rtt:
            self._probing_rtt = False
            self._baseline_rtt_s, self._next_baseline_rtt_s = self._next_baseline_rtt_s, {}
            self._baseline_at = now
        elif now - self._baseline_at > _BASELINE_S:
            self._probing_rtt = True
            self._next_baseline_rtt_s = {}
