"""In-flight limits: by round-trip times, by a quota of the scheduler, and until quotas come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonic_coffea.pool._breaker import back_off_s

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from sonic_coffea.pool._request import ModelKey

# Mean RTT over baseline RTT. At this ratio a server is busy: it works on one batch, the next waits,
# and another is on its way.
MAX_RTT_RATIO = 3.0
# The limit never shrinks below this number of requests, which keeps any server busy; only refusals
# go below. If a server makes batches of small requests, the number is two full batches.
_MIN_IN_FLIGHT = 4.0
_MIN_BATCHES, _MAX_FULL = 2, 64.0

_SMOOTHING = 0.2
# A response is late after the mean RTT and four mean deviations, as in TCP (RFC 6298).
_DEVIATIONS = 4.0
# After a refusal, the limit stays at the number that was not refused for 16 round trips, then grows
# again. After each further refusal it stays for twice as many, up to 512. With a limit of 4, one
# request of 100 is refused at first, and one of 2,000 in the end.
_HOLD_RTTS, _MAX_HOLD_RTTS = 16.0, 512.0
# A client that was refused leaves some room for the others.
_REFUSED_PART = 0.9
# Back-off of a server that refuses every request before its first response.
_UNKNOWN_RTT_S = 0.02
# The baseline RTT is measured anew by a single request, at most once in 30 s or 100 RTTs.
_PROBE_S = 30.0
_PROBE_RTTS = 100
# If the RTT has grown since the last probe, the baseline may have grown, or other clients have more
# requests in the queue. A new baseline grows at most by these factors, so that clients do not
# outbid each other without end.
_MAX_GROWTH = 1.25
_MAX_TOTAL_GROWTH = 4.0


def min_in_flight(full: float) -> float:
    """Return how many requests keep a server busy, of which ``full`` make a full batch."""
    return max(_MIN_IN_FLIGHT, min(_MIN_BATCHES * full, _MAX_FULL))


class AdaptiveLimit:
    """The in-flight limit of a model on an endpoint, as one process sees it.

    It grows by one in a round trip while the RTT ratio is low, and else shrinks by one. In slow
    start, which ends when the ratio is first too high, it doubles. A refusal lowers it to the
    number that was not refused. RTTs of requests of like size are compared.

    The signal is latency: with throughput, each client of a shared server would gain by having more
    requests in its queue than the others. Such rules are known from TCP Vegas (Brakmo and Peterson,
    1995) and, for the probes, BBR (Cardwell et al., 2016).

    Parameters
    ----------
    max_in_flight : int
        What it never exceeds.
    max_pause_s : float
        The longest back-off that a server may ask for.
    """

    def __init__(self, max_in_flight: int, max_pause_s: float = math.inf) -> None:
        self._max, self._max_pause_s = float(max_in_flight), max_pause_s
        self._value = min(_MIN_IN_FLIGHT, self._max)
        self._slow_start = True
        # By size of the requests.
        self._baseline_rtt_s: dict[int, float] = {}
        self._min_rtt_s: dict[int, float] = {}
        self._rtt_ratio = 1.0
        self._deviation = 0.5  # as in RFC 6298
        self._probe_at = math.inf
        self._ceiling = math.inf
        self._held_until = 0.0
        self._hold_rtts = _HOLD_RTTS
        self._next_refusal_at = 0.0
        self._refusals = 0
        self.paused_until = 0.0

    @property
    def value(self) -> int:
        """The limit, when it is not probing."""
        return int(self._value)

    @property
    def _mean_rtt_s(self) -> float:
        return self._rtt_ratio * min(self._baseline_rtt_s.values(), default=_UNKNOWN_RTT_S)

    def room(self, in_flight: int, now: float) -> int:
        """Return how many more requests may leave."""
        limit = 1 if now >= self._probe_at else int(self._value)
        return min(limit - in_flight, self.room_beside_refusals(in_flight, now))

    def room_beside_refusals(self, in_flight: int, now: float) -> int:
        """Return how many more requests may leave, by refusals alone."""
        if now < self.paused_until:
            return 0
        return int(self._ceiling if now < self._held_until else self._max) - in_flight

    def late_s(self, rows: int) -> float | None:
        """Return the time after which a response is late; None before the first RTT."""
        if not self._baseline_rtt_s:
            return None
        size = rows.bit_length()
        # Twice the rows take up to twice the time, and fewer rows up to the same time.
        known = min(self._baseline_rtt_s, key=lambda other: abs(other - size))
        baseline_s = self._baseline_rtt_s[known] * 2.0 ** max(size - known, 0)
        return (self._rtt_ratio + _DEVIATIONS * self._deviation) * baseline_s

    def answered(
        self, rtt_s: float, rows: int, in_flight: int, now: float, full: float = 1.0
    ) -> None:
        """Record a response.

        ``in_flight`` is the number of requests at its sending, itself included; ``full`` is the
        number of requests of its size in a full batch of the server.
        """
        baseline_s = self._baseline(rtt_s, rows.bit_length(), now if in_flight == 1 else None)
        if self._probe_at == math.inf:
            self._probe_at = now + max(_PROBE_S, _PROBE_RTTS * baseline_s)
        error = rtt_s / baseline_s - self._rtt_ratio
        self._rtt_ratio += _SMOOTHING * error
        self._deviation += _SMOOTHING * (abs(error) - self._deviation)
        self._refusals = 0
        least = min_in_flight(full)
        slow = self._rtt_ratio > MAX_RTT_RATIO
        if slow and self._value > least:
            if self._slow_start:
                # The answered request was sent when the limit was half of this one.
                self._slow_start, shrunk = False, self._value / 2
            else:
                # Within two round trips, the excess is gone.
                excess = self._value * (1 - MAX_RTT_RATIO / self._rtt_ratio)
                shrunk = self._value - max(excess / 2, 1.0) / self._value
            self._set(max(shrunk, least))
        elif not slow or self._value < least:
            self._grow(in_flight, now)

    def _grow(self, in_flight: int, now: float) -> None:
        """Raise the limit, if it holds requests back."""
        if self._slow_start and 2 * in_flight >= int(self._value):
            self._set(self._value + 1)
        elif in_flight >= int(self._value):
            grown = self._value + 1 / self._value
            if now < self._held_until:
                grown = min(grown, self._ceiling)
            elif grown > self._ceiling + 1:  # the refusals have ended
                self._ceiling, self._hold_rtts = math.inf, _HOLD_RTTS
            self._set(grown)

    def refused(
        self, in_flight: int, now: float, rng: Random, retry_after_s: float | None = None
    ) -> None:
        """Record a refusal for lack of capacity, with a number of others in flight.

        ``rng`` is for the jitter of back-offs; ``retry_after_s`` is the server's own back-off.
        """
        self._slow_start = False
        rtt_s = self._mean_rtt_s
        if now >= self._next_refusal_at:  # else it is one of several of the same moment
            self._next_refusal_at = now + rtt_s
            self._held_until = now + self._hold_rtts * rtt_s
            self._hold_rtts = min(2 * self._hold_rtts, _MAX_HOLD_RTTS)
            self._ceiling = self._value
        self._ceiling = min(self._ceiling, max(in_flight, 1))
        self._set(min(self._value, _REFUSED_PART * self._ceiling))
        if in_flight == 0 or retry_after_s is not None:
            # No response will show that there is room again.
            self.pause(now, rng, retry_after_s)

    def release(self, places: float) -> None:
        """Shrink by the places of requests that hung, by which it had grown."""
        self._slow_start = False
        self._set(min(self._value, max(self._value - places, _MIN_IN_FLIGHT)))

    def halve(self, now: float) -> None:
        """Record a request that took too long; several of one moment count as one."""
        if now >= self._next_refusal_at:
            self._slow_start = False
            self._next_refusal_at = now + self._mean_rtt_s
            self._set(self._value / 2)

    def pause(self, now: float, rng: Random, retry_after_s: float | None = None) -> None:
        """Back off by the RTT, doubling each time, or for the server's own time if it is longer."""
        pause_s = min(retry_after_s or 0.0, self._max_pause_s)
        if now >= self.paused_until:
            self._refusals += 1
            pause_s = max(pause_s, back_off_s(self._refusals, rng, self._mean_rtt_s))
        self.paused_until = max(self.paused_until, now + pause_s)

    def _baseline(self, rtt_s: float, size: int, probed_at: float | None) -> float:
        """Return the baseline RTT of requests of a size, updated by an RTT."""
        min_s = self._min_rtt_s[size] = min(rtt_s, self._min_rtt_s.get(size, rtt_s))
        baseline_s = min(rtt_s, self._baseline_rtt_s.get(size, rtt_s))
        if probed_at is not None:
            baseline_s = min(rtt_s, baseline_s * _MAX_GROWTH, min_s * _MAX_TOTAL_GROWTH)
            self._probe_at = probed_at + max(_PROBE_S, _PROBE_RTTS * rtt_s)
        self._baseline_rtt_s[size] = baseline_s
        return baseline_s

    def _set(self, value: float) -> None:
        self._value = min(max(value, 1.0), self._max)


@dataclass(slots=True)
class Quota:
    """The quota of this process at an endpoint, as the scheduler allocates it.

    Parameters
    ----------
    max_in_flight : int
        Requests that may be in flight.
    interval_s : float
        The time from one turn to the next, if requests are paced; else 0.
    turn_at : float
        The time of one of the turns; other clients have theirs in between.
    expires_at : float
        When the lease ends.
    next_turn_at : float
        Before that, nothing leaves.
    """

    max_in_flight: int
    interval_s: float
    turn_at: float
    expires_at: float
    next_turn_at: float = 0.0

    def room(self, in_flight: int, now: float) -> int:
        """Return how many more requests may leave."""
        return self.max_in_flight - in_flight if now >= self.next_turn_at else 0

    def sent(self, now: float) -> None:
        """Have the next request wait for its turn, as one leaves now."""
        if self.interval_s:
            # A request that left a little late does not use the next turn as well.
            turns = math.ceil((now - self.turn_at) / self.interval_s + 0.5)
            self.next_turn_at = self.turn_at + turns * self.interval_s

    def wakes_at(self, now: float) -> float:
        """Return when the next request may leave, or the lease ends; inf if nothing is held."""
        holds = now < self.next_turn_at and now < self.expires_at
        return min(self.next_turn_at, self.expires_at) if holds else math.inf

    def after(self, old: Quota | None) -> Quota:
        """Return this quota in place of another; a turn that is due is kept."""
        due = old is not None and old.next_turn_at <= self.turn_at - self.interval_s
        self.next_turn_at = old.next_turn_at if due and old is not None else self.turn_at
        return self


class Joining:
    """The bound on a model's requests, over all servers, until its first quotas come.

    The first chunks of a thousand processes come at once. By their own limits, they would fill the
    servers' queues beyond the request timeout.
    """

    def __init__(self) -> None:
        self._max_in_flight, self._quotas_within_s = math.inf, 0.0
        self._begun_at: dict[ModelKey, float] = {}
        self._allocated: set[ModelKey] = set()

    def join(self, max_in_flight: int, quotas_within_s: float) -> None:
        self._max_in_flight, self._quotas_within_s = max_in_flight, quotas_within_s

    def receive_quotas(self, models: Iterable[ModelKey], lease_s: float, now: float) -> None:
        """Lift the bound for models with quotas; for the others, wait for another lease."""
        self._allocated.update(models)
        self._quotas_within_s = max(self._quotas_within_s, lease_s)
        self._begun_at = dict.fromkeys(self._begun_at, now)

    def until(self, key: ModelKey, now: float) -> float:
        """Return how long the bound holds for a model that has requests now."""
        if key in self._allocated or self._max_in_flight == math.inf:
            return -math.inf
        return self._begun_at.setdefault(key, now) + self._quotas_within_s

    def holds_back(self, key: ModelKey, in_flight: int, now: float) -> bool:
        return now < self.until(key, now) and in_flight >= self._max_in_flight
