"""Requests in flight to an endpoint, by model; their limits, and late requests."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.pool._breaker import MAX_RETRIES
from sonic_coffea.pool._channels import Channels
from sonic_coffea.pool._limits import AdaptiveLimit
from sonic_coffea.pool._request import Attempt, ModelKey

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._request import RequestSlice
    from sonic_coffea.pool._settings import Settings

# A request without a response is not late before this time. Each hedge that is answered first
# halves it, down to the time for which a thread may wait for a core; each late response doubles it.
LATE_S, MIN_LATE_S = 1.0, 0.05
# Where no request was ever answered: the server may load and warm up the model, and the way to it
# may be as slow as this.
UNKNOWN_S, UNKNOWN_BYTES_PER_S = 10.0, 10e6


@dataclass(slots=True)
class RttStatistics:
    """Round trips of a model's requests to an endpoint since the last report.

    Attributes
    ----------
    rows, refused : int
        Rows that were answered, and requests that were refused for lack of capacity.
    full : float
        Requests like the last one that make a full batch.
    trips : dict
        By size of the request (bits of the number of rows): number, sum and minimum of the RTTs.
    """

    rows: int = 0
    refused: int = 0
    full: float = 1.0
    trips: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    def answered(self, rtt_s: float, rows: int, full: float) -> None:
        self.rows += rows
        self.full = full
        size = rows.bit_length()
        number, sum_s, min_s = self.trips.get(size, (0, 0.0, rtt_s))
        self.trips[size] = (number + 1, sum_s + rtt_s, min(min_s, rtt_s))


class InFlight:
    """The attempts in flight to an endpoint.

    Attributes
    ----------
    attempts : dict
        The attempts in flight, in the order in which they began. A server that hangs may have those
        that are late, so they do not count for limits.
    late_at : float
        When an attempt may be late.
    limits : dict
        The adaptive limit of each model.
    by_model : Counter
        Attempts in flight that are not late.
    taken : int
        Attempts since the start: endpoints with equal load take turns by it.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        self._url = url
        self.channels = Channels(settings.channels)
        self.by_model: Counter[ModelKey] = Counter()
        limits = settings.max_in_flight, settings.retry_timeout_s
        self.limits = defaultdict[ModelKey, AdaptiveLimit](lambda: AdaptiveLimit(*limits))
        self._quotas: dict[ModelKey, Quota] = {}
        self._rtt: defaultdict[ModelKey, RttStatistics] = defaultdict(RttStatistics)
        self._answered_from = 0.0
        self._hedges_at_once = settings.hedge_after_s is not None
        self._most_late_s = self._least_late_s = settings.hedge_after_s or LATE_S
        self.late_at = math.inf
        self.attempts: dict[Attempt, None] = {}
        self.taken = 0

    def __len__(self) -> int:
        return len(self.attempts)

    @property
    def awaited(self) -> int:
        """The number of attempts that are not late."""
        return self.by_model.total()

    def room(self, key: ModelKey, now: float) -> int:
        """Return how many more requests for a model may be sent now."""
        in_flight, limit = self.by_model[key], self.limits[key]
        if (quota := self.quota(key, now)) is None:
            return limit.room(in_flight, now)
        return min(quota.room(in_flight, now), limit.room_beside_refusals(in_flight, now))

    def begin(self, request: RequestSlice, now: float) -> Attempt:
        key, url = request.key, self._url
        used = {attempt.channel for attempt in request.attempts if attempt.url == url}
        channel = self.channels.choose(used, now)
        self.channels.take(channel, request.nbytes)
        self.by_model[key] += 1
        self.taken += 1
        if (quota := self.quota(key, now)) is not None:
            quota.sent(now)
        attempt = Attempt(request, url, channel, now, self.by_model[key])
        self.attempts[attempt] = None
        self.late_at = min(self.late_at, now + self._least_late_s)
        request.attempts.append(attempt)
        return attempt

    def settle(self, attempt: Attempt) -> None:
        self.channels.leave(attempt.channel, attempt.slice.nbytes)
        del self.attempts[attempt]
        if not attempt.late:
            self.by_model[attempt.key] -= 1

    def answered(self, attempt: Attempt, rtt_s: float, now: float) -> None:
        self._answered_from = max(self._answered_from, attempt.begun_at)
        self.channels.answered(attempt.channel)
        if attempt.late:  # it was slow, and did not hang
            self._least_late_s = min(2 * self._least_late_s, self._most_late_s)
        key, rows = attempt.key, attempt.slice.rows
        full = (attempt.slice.call.contract.max_rows or rows) / rows
        self.limits[key].answered(rtt_s, rows, attempt.in_flight, now, full)
        self._rtt[key].answered(rtt_s, rows, full)

    def refused(self, key: ModelKey, now: float, rng: Random, retry_after_s: float | None) -> None:
        self.limits[key].refused(self.by_model[key], now, rng, retry_after_s)
        self._rtt[key].refused += 1

    def overtaken(self, attempt: Attempt) -> bool:
        """Whether a request that was sent later, or at the same time, has been answered."""
        return attempt.begun_at <= self._answered_from

    def hedge_won(self, now: float) -> None:
        """Wait less for the next late response, as this one hung."""
        self._least_late_s = max(self._least_late_s / 2, MIN_LATE_S)
        self.late_at = min(self.late_at, now + self._least_late_s)

    def take_late(self, lives_at: float, now: float) -> list[Attempt]:
        """Take attempts that are late out of the limits, and return them.

        `lives_at` is when a probe was answered last.
        """
        awaited = [attempt for attempt in self.attempts if not attempt.late]
        late = [attempt for attempt in awaited if self._is_late(attempt, lives_at, now)]
        if late and self._least_late_s == self._most_late_s:
            # Until now, the limit has grown by the places that they held.
            for key, places in Counter(attempt.key for attempt in late).items():
                self.limits[key].release(places)
        for attempt in late:
            attempt.late = True
            self.by_model[attempt.key] -= 1
            self.channels.late(attempt.channel, now)
        least_s, self.late_at = self._least_late_s, math.inf
        if oldest := next((attempt for attempt in awaited if not attempt.late), None):
            self.late_at = max(oldest.begun_at + least_s, now + least_s / 4)
        return late

    def _is_late(self, attempt: Attempt, lives_at: float, now: float) -> bool:
        """Whether an attempt has no response after the usual time, while others are answered."""
        attempts = len(attempt.slice.attempts)
        late_s = self.limits[attempt.key].late_s(attempt.slice.rows)
        if late_s is None:
            travels_s = attempt.slice.nbytes / UNKNOWN_BYTES_PER_S
            late_s = 0.0 if self._hedges_at_once else UNKNOWN_S * attempts + travels_s
        back_off = max(1.0, attempts / MAX_RETRIES)
        late_at = attempt.sent_at + back_off * max(late_s, self._least_late_s)
        if now < late_at:
            return False
        hangs = self._hedges_at_once or self._least_late_s < self._most_late_s
        return hangs or self.overtaken(attempt) or lives_at > late_at

    def set_quota(self, key: ModelKey, quota: Quota, now: float) -> None:
        self._quotas[key] = quota.after(self.quota(key, now))

    def wakes_at(self, now: float) -> float:
        """Return when a quota or a back-off lets the next request leave."""
        times = [quota.wakes_at(now) for quota in self._quotas.values()]
        times += [limit.paused_until for limit in self.limits.values()]
        return min((at for at in times if at > now), default=math.inf)

    def report(self, also: Iterable[ModelKey]) -> dict[ModelKey, tuple[int, RttStatistics]]:
        """Return the requests in flight and the RTT statistics, by model; reset the latter."""
        keys = {**self.by_model, **dict.fromkeys(also)}
        models = {key: (self.by_model[key], self._rtt[key]) for key in keys}
        self._rtt.clear()
        return models

    def quota(self, key: ModelKey, now: float) -> Quota | None:
        """Return the quota of a model, unless its lease has ended."""
        quota = self._quotas.get(key)
        return quota if quota is not None and now < quota.expires_at else None
