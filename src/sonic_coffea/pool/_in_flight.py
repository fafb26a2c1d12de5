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

# A request is overdue if its response is late and a request that was sent later has been answered,
# as in RACK for segments of TCP (RFC 8985). The first time, it must be much later: a server may be
# slow for once.
HANGS_S, HANGS_TIMES = 1.0, 4.0
# For this time after an overdue request, each late request is overdue. If late requests are
# answered all the same, the next must be later.
HANGING_S = 10.0
# Where no request was sent later, a response is overdue after twice the time.
UNTOLD_TIMES = 2.0
# After this number of attempts, rows are sent again later and later.
MANY_SENT = 4
# Where no request of like size was ever answered: the server may load and warm up the model.
UNKNOWN_S = 10.0
# How often to look for what is overdue.
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
        By size of the request (bits of the number of rows): number, sum and least of the RTTs.
    """

    rows: int = 0
    refused: int = 0
    full: float = 1.0
    trips: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    def answered(self, rtt_s: float, rows: int, full: float) -> None:
        """Count a response."""
        self.rows += rows
        self.full = full
        size = rows.bit_length()
        number, sum_s, least_s = self.trips.get(size, (0, 0.0, rtt_s))
        self.trips[size] = (number + 1, sum_s + rtt_s, min(least_s, rtt_s))


class InFlight:
    """What is in flight to an endpoint.

    Parameters
    ----------
    max_in_flight : int
        Requests for a model that may ever be in flight.
    channels : int or "auto"
        Connections to the endpoint.

    Attributes
    ----------
    attempts : dict
        What is in flight, in the order in which it was sent, but for what is overdue.
    overdue : dict
        Attempts that later ones have overtaken long ago: a server that hangs may have them. They
        do not count for limits.
    late_at : float
        When an attempt may be overdue.
    by_model : Counter
        How many requests for a model are in flight, without overdue ones.
    taken : int
        Requests since the start: endpoints with equal load take turns by it.
    """

    def __init__(self, max_in_flight: int, channels: int | str = "auto") -> None:
        self.channels = Channels(channels)
        self.by_model: Counter[ModelKey] = Counter()
        self._limits = defaultdict[ModelKey, AdaptiveLimit](lambda: AdaptiveLimit(max_in_flight))
        self._quotas: dict[ModelKey, Quota] = {}
        self._rtt: defaultdict[ModelKey, RttStatistics] = defaultdict(RttStatistics)
        self._answered_from = 0.0
        self._caution = 1.0
        self._patient_s = math.inf
        self._hangs_until = 0.0
        self.late_at = math.inf
        self._looked_at = 0.0
        self.attempts: dict[Attempt, None] = {}
        self.overdue: dict[Attempt, None] = {}
        self.taken = 0

    def __len__(self) -> int:
        return len(self.attempts) + len(self.overdue)

    def all(self) -> list[Attempt]:
        """Return what is in flight."""
        return [*self.overdue, *self.attempts]

    def limit(self, key: ModelKey) -> AdaptiveLimit:
        """Return the adaptive limit of a model."""
        return self._limits[key]

    def room(self, key: ModelKey, now: float) -> int:
        """Return how many more requests for a model may be sent now."""
        in_flight, limit = self.by_model[key], self.limit(key)
        if (quota := self.quota(key, now)) is None:
            return limit.room(in_flight, now)
        return min(quota.room(in_flight, now), limit.room_beside_refusals(in_flight, now))

    def load(self, key: ModelKey) -> float:
        """Return the part of its limit that is in flight."""
        return self.by_model[key] / self.limit(key).value

    def begin(
        self, request: RequestSlice, url: str, now: float, channel: int | None = None
    ) -> Attempt:
        """Begin an attempt to send a slice, over connection `channel` unless that is None."""
        key = request.key
        used = {attempt.channel for attempt in request.attempts if attempt.url == url}
        channel = self.channels.take(used, now, request.nbytes, channel)
        self.by_model[key] += 1
        self.taken += 1
        if (quota := self.quota(key, now)) is not None:
            quota.sent(now)
        attempt = Attempt(request, url, channel, now, self.by_model[key], sent_at=now)
        self.attempts[attempt] = None
        self.late_at = min(self.late_at, now + self._least_patience_s(now))
        return attempt

    def settle(self, attempt: Attempt) -> None:
        """End an attempt, however that was."""
        self.channels.leave(attempt.channel, attempt.slice.nbytes)
        if attempt in self.overdue:
            del self.overdue[attempt]
        else:
            del self.attempts[attempt]
            self.by_model[attempt.key] -= 1

    def answered(self, attempt: Attempt, rtt_s: float, now: float) -> None:
        """Learn from a response."""
        if attempt.begun_at > self._answered_from:
            self._answered_from = attempt.begun_at
            # What it has overtaken may be overdue.
            oldest_at = next(iter(self.attempts), attempt).begun_at
            late_at = max(oldest_at + self._least_patience_s(now), self._looked_at + SCAN_S)
            self.late_at = min(self.late_at, late_at)
        self.channels.answered(attempt.channel)
        if attempt in self.overdue:  # it was slow, and did not hang
            self._caution = min(self._caution * 1.5, HANGS_TIMES)
        key, rows = attempt.key, attempt.slice.rows
        full = (attempt.slice.call.contract.max_rows or rows) / rows
        self.limit(key).answered(rtt_s, rows, attempt.in_flight, now, full)
        self._rtt[key].answered(rtt_s, rows, full)

    def refused(
        self, key: ModelKey, now: float, rng: Random, retry_after_s: float | None = None
    ) -> None:
        """Learn from a refusal for lack of capacity."""
        self.limit(key).refused(self.by_model[key], now, rng, retry_after_s)
        self._rtt[key].refused += 1

    def overtaken(self, attempt: Attempt) -> bool:
        """Whether a request that was sent later, or at the same time, has been answered."""
        return attempt.begun_at <= self._answered_from

    # Overdue responses

    def _patience_s(self, attempt: Attempt, now: float) -> float:
        """Return after how long an attempt is overdue."""
        late_s = self.limit(attempt.key).late_s(attempt.slice.rows)
        overtaken, sent = self.overtaken(attempt), len(attempt.slice.attempts)
        if late_s is None:
            return UNKNOWN_S * 2.0 ** (sent - 1)
        if now < self._hangs_until:
            late_s = min(late_s * self._caution, self._patient_s)
            untold = UNTOLD_TIMES * 2.0 ** (max(0, sent - MANY_SENT) / 2)
            return late_s if overtaken else untold * late_s
        late_s = max(HANGS_S, HANGS_TIMES * late_s)
        return late_s if overtaken else UNTOLD_TIMES * late_s * 2.0 ** (sent - 1)

    def _least_patience_s(self, now: float) -> float:
        return MIN_LATE_S if now < self._hangs_until else HANGS_S

    def take_overdue(self, heard_at: float, now: float) -> list[Attempt]:
        """Return attempts that have become overdue: they count no more, and are sent again.

        The endpoint must have answered meanwhile, else all requests would be overdue.
        """
        overdue, self.late_at, self._looked_at = [], math.inf, now
        least_s = self._least_patience_s(now)
        if now < self._hangs_until:
            heard_at += HANGING_S  # of late is enough
        for attempt in self.attempts:
            if attempt.begun_at + least_s > now:  # as those after it
                self.late_at = min(self.late_at, attempt.begun_at + least_s)
                break
            if attempt.sent_at > now:
                self.late_at = min(self.late_at, now + least_s)
                continue
            at = attempt.sent_at + self._patience_s(attempt, now)
            heard = heard_at > attempt.sent_at
            if at <= now and heard:
                overdue.append(attempt)
            else:
                wait_s = SCAN_S if heard else HANGS_S
                self.late_at = min(self.late_at, max(at, now + wait_s))
        if overdue and now >= self._hangs_until:
            # They have held places, and the limit has grown by them.
            self._patient_s = max(now - attempt.sent_at for attempt in overdue)
            for key in {attempt.key for attempt in overdue}:
                self.limit(key).restart()
        for attempt in overdue:
            attempt.overdue = True
            del self.attempts[attempt]
            self.overdue[attempt] = None
            self.by_model[attempt.key] -= 1
            self.channels.silent(attempt.channel, now)
            self._hangs_until = now + HANGING_S
            self._caution = max(self._caution * 0.95, 1.0)
        return overdue

    def grant(self, key: ModelKey, quota: Quota, now: float) -> None:
        """Take the quota that the scheduler allocates to this process."""
        self._quotas[key] = quota.after(self.quota(key, now))

    def wakes_at(self, now: float) -> float:
        """Return when a quota or a back-off lets the next request leave."""
        times = [quota.wakes_at(now) for quota in self._quotas.values()]
        times += [limit.paused_until for limit in self._limits.values()]
        return min((at for at in times if at > now), default=math.inf)

    def forget_limits(self) -> None:
        """Start slowly again: another server may answer at the same URL."""
        self._limits.clear()

    def report(self, also: Iterable[ModelKey]) -> dict[ModelKey, tuple[int, RttStatistics]]:
        """Return what is in flight and the RTT statistics, by model, and begin anew."""
        keys = {**self.by_model, **dict.fromkeys(also)}
        models = {key: (self.by_model[key], self._rtt[key]) for key in keys}
        self._rtt.clear()
        return models

    def quota(self, key: ModelKey, now: float) -> Quota | None:
        """Return the quota of a model, unless its lease has ended."""
        quota = self._quotas.get(key)
        return quota if quota is not None and now < quota.expires_at else None
