"""Requests in flight to an endpoint, by model, and what bounds their number."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.pool._limits import AdaptiveLimit
from sonic_coffea.pool._request import Attempt

if TYPE_CHECKING:
    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._request import ModelKey, RequestSlice


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
    channels : int
        Connections to the endpoint; a request takes the one with the fewest others.

    Attributes
    ----------
    attempts : dict
        What is in flight, in the order in which it was sent.
    taken : int
        Requests that the endpoint has ever got: equals take turns by it.
    """

    __slots__ = (
        "_answered_from",
        "_by_channel",
        "_by_model",
        "_limits",
        "_max_in_flight",
        "_quotas",
        "_rtt",
        "attempts",
        "taken",
    )

    def __init__(self, max_in_flight: int, channels: int = 1) -> None:
        self._max_in_flight = max_in_flight
        self._by_channel = [0] * channels
        self._by_model: Counter[ModelKey] = Counter()
        self._limits: dict[ModelKey, AdaptiveLimit] = {}
        self._quotas: dict[ModelKey, Quota] = {}
        self._rtt: defaultdict[ModelKey, RttStatistics] = defaultdict(RttStatistics)
        self._answered_from = 0.0
        self.attempts: dict[Attempt, None] = {}
        self.taken = 0

    def __len__(self) -> int:
        return len(self.attempts)

    def limit(self, key: ModelKey) -> AdaptiveLimit:
        """Return the adaptive limit of a model."""
        limit = self._limits.get(key)
        if limit is None:
            limit = self._limits[key] = AdaptiveLimit(self._max_in_flight)
        return limit

    def room(self, key: ModelKey, now: float) -> int:
        """Return how many more requests for a model may be sent now."""
        bound = self._quota(key, now) or self.limit(key)
        return bound.room(self._by_model[key], now)

    def load(self, key: ModelKey) -> float:
        """Return the part of its limit that is in flight."""
        return self._by_model[key] / self.limit(key).value

    def begin(self, request: RequestSlice, url: str, now: float) -> Attempt:
        """Take a slice."""
        key = request.key
        channel = self._by_channel.index(min(self._by_channel))
        self._by_channel[channel] += 1
        self._by_model[key] += 1
        self.taken += 1
        if (quota := self._quota(key, now)) is not None:
            quota.sent(now)
        attempt = Attempt(request, url, channel, now, self._by_model[key])
        self.attempts[attempt] = None
        return attempt

    def settle(self, attempt: Attempt) -> None:
        """End an attempt, however that was."""
        self.attempts.pop(attempt, None)
        self._by_channel[attempt.channel] -= 1
        self._by_model[attempt.key] -= 1

    def answered(self, attempt: Attempt, rtt_s: float, now: float) -> None:
        """Learn from a response."""
        self._answered_from = max(self._answered_from, attempt.begun_at)
        key, rows = attempt.key, attempt.slice.rows
        full = (attempt.slice.call.contract.max_rows or rows) / rows
        self.limit(key).answered(rtt_s, rows, attempt.in_flight, now, full)
        self._rtt[key].answered(rtt_s, rows, full)

    def refused(self, key: ModelKey, now: float) -> None:
        """Learn from a refusal for lack of capacity."""
        self.limit(key).refused(now)
        self._rtt[key].refused += 1

    def overtaken(self, attempt: Attempt) -> bool:
        """Whether a request that was sent later has been answered."""
        return attempt.begun_at < self._answered_from

    def grant(self, key: ModelKey, quota: Quota, now: float) -> None:
        """Take the quota that somebody who sees all clients gives this one."""
        self._quotas[key] = quota.after(self._quota(key, now))

    def wakes_at(self, now: float) -> float:
        """Return when a quota lets the next request leave, or expires."""
        if not self._quotas:
            return math.inf
        return min(quota.wakes_at(now) for quota in self._quotas.values())

    def forget_limits(self) -> None:
        """Start slowly again: another server may answer at the same URL."""
        self._limits.clear()

    def report(self) -> dict[ModelKey, tuple[int, RttStatistics]]:
        """Return what is in flight and the RTT statistics, by model, and begin anew."""
        models = {key: (number, self._rtt[key]) for key, number in self._by_model.items()}
        self._rtt.clear()
        return models

    def _quota(self, key: ModelKey, now: float) -> Quota | None:
        quota = self._quotas.get(key)
        return quota if quota is not None and now < quota.expires_at else None
