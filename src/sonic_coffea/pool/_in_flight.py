"""Requests in flight to an endpoint, by model; their limits, and overdue requests."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.pool._channels import Channels
from sonic_coffea.pool._limits import MIN_LATE_S, AdaptiveLimit
from sonic_coffea.pool._request import Attempt, ModelKey

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._request import RequestSlice
    from sonic_coffea.pool._settings import Settings

# A request is overdue if its response is late and a request that was sent later has been answered,
# as in RACK for segments of TCP (RFC 8985). The first time, it must be much later: a server may be
# slow for once.
HANGS_S, HANGS_TIMES = 1.0, 4.0
# For this time after an overdue request, each late request is overdue. If late requests are
# answered all the same, the next must be later.
HANGING_S = 10.0
# Where no later request was answered, a response is overdue after twice the time.
NOT_OVERTAKEN_TIMES = 2.0
# After this number of attempts, rows are sent again later and later.
MANY_SENT = 4
# Where no request was ever answered: the server may load and warm up the model.
UNKNOWN_S = 10.0
# How often to look for overdue attempts.
SCAN_S = 0.02


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
        The attempts in flight that are not overdue, in the order in which they began.
    overdue : dict
        Attempts that later attempts have overtaken long ago: a server that hangs may have them.
        They do not count for limits.
    late_at : float
        When an attempt may be overdue.
    limits : dict
        The adaptive limit of each model.
    by_model : Counter
        Attempts in flight that are not overdue.
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
        self._caution = 1.0
        self._last_overdue_s = math.inf
        self._hangs_until = 0.0
        self.late_at = math.inf
        self._scanned_at = 0.0
        self.attempts: dict[Attempt, None] = {}
        self.overdue: dict[Attempt, None] = {}
        self.taken = 0

    def __len__(self) -> int:
        return len(self.attempts) + len(self.overdue)

    def all(self) -> list[Attempt]:
        return [*self.overdue, *self.attempts]

    def room(self, key: ModelKey, now: float) -> int:
        """Return how many more requests for a model may be sent now."""
        in_flight, limit = self.by_model[key], self.limits[key]
        if (quota := self.quota(key, now)) is None:
            return limit.room(in_flight, now)
        return min(quota.room(in_flight, now), limit.room_beside_refusals(in_flight, now))

    def begin(self, request: RequestSlice, now: float, channel: int | None) -> Attempt:
        key, url = request.key, self._url
        used = {attempt.channel for attempt in request.attempts if attempt.url == url}
        if channel is None:
            channel = self.channels.choose(used, now)
        self.channels.take(channel, request.nbytes)
        self.by_model[key] += 1
        self.taken += 1
        if (quota := self.quota(key, now)) is not None:
            quota.sent(now)
        attempt = Attempt(request, url, channel, now, self.by_model[key], sent_at=now)
        self.attempts[attempt] = None
        self.late_at = min(self.late_at, now + self._min_late_s(now))
        request.begun_at = now
        request.attempts.append(attempt)
        return attempt

    def settle(self, attempt: Attempt) -> None:
        self.channels.leave(attempt.channel, attempt.slice.nbytes)
        if attempt in self.overdue:
            del self.overdue[attempt]
        else:
            del self.attempts[attempt]
            self.by_model[attempt.key] -= 1

    def answered(self, attempt: Attempt, rtt_s: float, now: float) -> None:
        if attempt.begun_at > self._answered_from:
            self._answered_from = attempt.begun_at
            # The attempts that it has overtaken may be overdue.
            oldest_at = next(iter(self.attempts), attempt).begun_at
            late_at = max(oldest_at + self._min_late_s(now), self._scanned_at + SCAN_S)
            self.late_at = min(self.late_at, late_at)
        self.channels.answered(attempt.channel)
        if attempt in self.overdue:  # it was slow, and did not hang
            self._caution = min(self._caution * 1.5, HANGS_TIMES)
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

    def _overdue_after_s(self, attempt: Attempt, now: float) -> float:
        """Return after how long an attempt is overdue."""
        late_s = self.limits[attempt.key].late_s(attempt.slice.rows)
        sent = len(attempt.slice.attempts)
        back_off: float
        if late_s is None:
            return UNKNOWN_S * 2.0 ** (sent - 1)
        if now < self._hangs_until:
            late_s = min(late_s * self._caution, self._last_overdue_s)
            back_off = 2.0 ** (max(0, sent - MANY_SENT) / 2)
        else:
            late_s = max(HANGS_S, HANGS_TIMES * late_s)
            back_off = 2.0 ** (sent - 1)
        if self.overtaken(attempt):
            # Some rows hang again and again by chance; others make each server hang.
            back_off = 2.0 ** max(0.0, sent / 2 - MANY_SENT)
        else:
            back_off *= NOT_OVERTAKEN_TIMES
        return back_off * late_s

    def _min_late_s(self, now: float) -> float:
        return MIN_LATE_S if now < self._hangs_until else HANGS_S

    def take_overdue(self, active_at: float, now: float) -> list[Attempt]:
        """Move attempts that have become overdue out of the limits, and return them.

        The endpoint must have been active since, else all requests would be overdue.
        """
        overdue, self.late_at, self._scanned_at = [], math.inf, now
        min_late_s = self._min_late_s(now)
        if now < self._hangs_until:
            active_at += HANGING_S  # recent activity is enough
        for attempt in self.attempts:
            if attempt.begun_at + min_late_s > now:  # the attempts after it began later
                self.late_at = min(self.late_at, attempt.begun_at + min_late_s)
                break
            if attempt.sent_at > now:
                self.late_at = min(self.late_at, now + min_late_s)
                continue
            at = attempt.sent_at + self._overdue_after_s(attempt, now)
            active = active_at > attempt.sent_at
            if at <= now and active:
                overdue.append(attempt)
            else:
                wait_s = SCAN_S if active else HANGS_S
                self.late_at = min(self.late_at, max(at, now + wait_s))
        if overdue and now >= self._hangs_until:
            # The limit has grown by the places that they held.
            self._last_overdue_s = max(now - attempt.sent_at for attempt in overdue)
            for key in {attempt.key for attempt in overdue}:
                self.limits[key].restart()
        for attempt in overdue:
            attempt.overdue = True
            del self.attempts[attempt]
            self.overdue[attempt] = None
            self.by_model[attempt.key] -= 1
            self.channels.overdue(attempt.channel, now)
            self._hangs_until = now + HANGING_S
            self._caution = max(self._caution * 0.95, 1.0)
        return overdue

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
