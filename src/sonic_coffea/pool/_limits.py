"""In-flight limits: by round-trip times, and by a quota of the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._breaker import back_off_s
from sonic_coffea.pool._settings import Settings


def min_in_flight(full: float) -> float:
    """Return how many requests keep a server busy, of which ``full`` make a full batch."""
    return max(tuning.MIN_IN_FLIGHT, min(tuning.MIN_BATCHES * full, tuning.MAX_FULL))


class AdaptiveLimit:
    """The in-flight limit of a model on an endpoint, as one process sees it.

    In a round trip, it grows by one while the RTT ratio is low, and else shrinks by half of the
    excess, and by at least one. In slow start, which ends when the ratio is first too high, it
    doubles. A refusal lowers it to the number that was not refused. RTTs are compared among
    requests of similar size.

    The signal is latency. With throughput as the signal, each client of a shared server would gain
    by having more requests in its queue than the others. The rules are those of TCP Vegas (Brakmo
    and Peterson, 1995) and, for the probes, of BBR (Cardwell et al., 2016).

    Parameters
    ----------
    settings : Settings
        The largest limit is ``max_in_flight``; a server may ask for a back-off of up to
        ``retry_timeout_s``.
    rng : Random
        Gives the jitter.
    """

    def __init__(self, settings: Settings, rng: Random) -> None:
        self._max, self._max_pause_s = float(settings.max_in_flight), settings.retry_timeout_s
        self._rng = rng
        self._value = min(tuning.MIN_IN_FLIGHT, self._max)
        self._slow_start = True
        # By size of the requests.
        self._baseline_rtt_s: dict[int, float] = {}
        self._min_rtt_s: dict[int, float] = {}
        self._rtt_ratio = 1.0
        self._deviation = 0.5  # as in RFC 6298
        self._probe_at = math.inf
        self._ceiling = math.inf
        self._held_until = 0.0
        self._hold_rtts = tuning.HOLD_RTTS
        self._next_refusal_at = 0.0
        self._refusals = 0
        self.paused_until = 0.0

    @property
    def value(self) -> int:
        """The limit, when it is not probing."""
        return int(self._value)

    @property
    def _mean_rtt_s(self) -> float:
        return self._rtt_ratio * min(self._baseline_rtt_s.values(), default=tuning.FIRST_BACK_OFF_S)

    def remaining(self, in_flight: int, now: float, quota: Quota) -> int:
        """Return how many more requests may leave: by the quota if it is valid, and refusals."""
        if now < self.paused_until:
            return 0
        own = (1 if now >= self._probe_at else self.value) - in_flight
        remaining = quota.remaining(in_flight, now) if now < quota.expires_at else own
        ceiling = self._ceiling if now < self._held_until else self._max
        return min(remaining, int(ceiling) - in_flight)

    def late_s(self, rows: int) -> float | None:
        """Return the time after which a response is late; None before the first RTT."""
        if not self._baseline_rtt_s:
            return None
        size = rows.bit_length()
        # Twice the rows take up to twice the time, and fewer rows up to the same time.
        known = min(self._baseline_rtt_s, key=lambda other: abs(other - size))
        baseline_s = self._baseline_rtt_s[known] * 2.0 ** max(size - known, 0)
        return (self._rtt_ratio + tuning.DEVIATIONS * self._deviation) * baseline_s

    def answered(self, rtt_s: float, rows: int, in_flight: int, now: float, full: float) -> None:
        """Record a response.

        ``in_flight`` is the number of requests at its sending, itself included; ``full`` is the
        number of requests of its size in a full batch of the server.
        """
        is_alone = in_flight == 1
        baseline_s = self._baseline(rtt_s, rows.bit_length(), is_alone=is_alone)
        if is_alone or self._probe_at == math.inf:
            self._probe_at = now + max(tuning.RECHECK_S, tuning.PROBE_RTTS * rtt_s)
        error = rtt_s / baseline_s - self._rtt_ratio
        self._rtt_ratio += tuning.SMOOTHING * error
        self._deviation += tuning.SMOOTHING * (abs(error) - self._deviation)
        self._refusals = 0
        min_limit = min_in_flight(full)
        slow = self._rtt_ratio > tuning.MAX_RTT_RATIO
        if slow and self._value > min_limit:
            if self._slow_start:
                # The answered request was sent when the limit was half of this one.
                self._slow_start, shrunk = False, self._value / 2
            else:
                # Within two round trips, the excess is gone.
                excess = self._value * (1 - tuning.MAX_RTT_RATIO / self._rtt_ratio)
                shrunk = self._value - max(excess / 2, 1.0) / self._value
            self._set(max(shrunk, min_limit))
        elif not slow or self._value < min_limit:
            self._grow(in_flight, now)

    def _grow(self, in_flight: int, now: float) -> None:
        """Raise the limit, if it holds requests back."""
        if self._slow_start and 2 * in_flight >= self.value:
            self._set(self._value + 1)
        elif in_flight >= self.value:
            grown = self._value + 1 / self._value
            if now < self._held_until:
                grown = min(grown, self._ceiling)
            elif grown > self._ceiling + 1:  # the refusals have ended
                self._ceiling, self._hold_rtts = math.inf, tuning.HOLD_RTTS
            self._set(grown)

    def refused(self, in_flight: int, now: float, retry_after_s: float | None) -> None:
        """Record a refusal for lack of capacity, while others are in flight.

        ``retry_after_s`` is the back-off that the server asks for.
        """
        self._slow_start = False
        rtt_s = self._mean_rtt_s
        if now >= self._next_refusal_at:  # else it is one of several of the same moment
            self._next_refusal_at = now + rtt_s
            self._held_until = now + self._hold_rtts * rtt_s
            self._hold_rtts = min(2 * self._hold_rtts, tuning.MAX_HOLD_RTTS)
        self._ceiling = max(in_flight, 1)
        self._set(min(self._value, self._ceiling))
        if in_flight == 0 or retry_after_s is not None:
            # No response will show that there is room again.
            self.pause(now, retry_after_s)

    def halve(self, now: float) -> None:
        """Record a request that took too long; several at once count as one."""
        if now >= self._next_refusal_at:
            self._slow_start = False
            self._next_refusal_at = now + self._mean_rtt_s
            self._set(self._value / 2)

    def pause(self, now: float, retry_after_s: float | None = None) -> None:
        """Back off for an RTT, doubling each time, or for the time that the server asks for."""
        pause_s = min(retry_after_s or 0.0, self._max_pause_s)
        if now >= self.paused_until:
            self._refusals += 1
            pause_s = max(pause_s, back_off_s(self._refusals, self._rng, self._mean_rtt_s))
        self.paused_until = max(self.paused_until, now + pause_s)

    def _baseline(self, rtt_s: float, size: int, *, is_alone: bool) -> float:
        """Return the baseline RTT of requests of a size, updated by an RTT."""
        min_s = self._min_rtt_s[size] = min(rtt_s, self._min_rtt_s.get(size, rtt_s))
        baseline_s = min(rtt_s, self._baseline_rtt_s.get(size, rtt_s))
        if is_alone:
            baseline_s = min(rtt_s, baseline_s * tuning.MAX_GROWTH, min_s * tuning.MAX_TOTAL_GROWTH)
        self._baseline_rtt_s[size] = baseline_s
        return baseline_s

    def _set(self, value: float) -> None:
        self._value = min(max(value, 1.0), self._max)


@dataclass(slots=True)
class Quota:
    """The quota of this process at an endpoint, as the scheduler allocates it.

    After its lease, as before its first, the process adapts its own limit.

    Parameters
    ----------
    max_in_flight : int
        Requests that may be in flight.
    interval_s : float
        The time from one turn to the next if requests are paced; else 0.
    delay_s : float
        The time from its arrival to a first turn; the turns of other clients are in between.

    Attributes
    ----------
    expires_at : float
        When the lease ends.
    next_turn_at : float
        No request leaves before it.
    """

    max_in_flight: int = 0
    interval_s: float = 0.0
    delay_s: float = 0.0
    expires_at: float = 0.0
    next_turn_at: float = 0.0
    _turn_at: float = 0.0

    def begin(self, old: Quota, now: float, lease_s: float) -> None:
        """Begin the lease, in place of another quota; a turn that is due is kept."""
        self.expires_at, self._turn_at = now + lease_s, now + self.delay_s
        self.next_turn_at = self._turn_at
        is_due = old.next_turn_at <= self._turn_at - self.interval_s
        if is_due and now < old.expires_at:
            self.next_turn_at = old.next_turn_at

    def remaining(self, in_flight: int, now: float) -> int:
        """Return how many more requests may leave."""
        return self.max_in_flight - in_flight if now >= self.next_turn_at else 0

    def sent(self, now: float) -> None:
        """Have the next request wait for the next turn, as one leaves now."""
        if self.interval_s:
            # A request that left a little late does not use the next turn as well.
            turns = math.ceil((now - self._turn_at) / self.interval_s + 0.5)
            self.next_turn_at = self._turn_at + turns * self.interval_s
