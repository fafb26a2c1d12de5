"""A bound on requests in flight for a process that has joined a cluster and has no quotas yet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sonic_coffea.pool._request import ModelKey


class Joining:
    """The bound on a model's requests, over all servers, until its first quotas come.

    The first chunks of a thousand processes come at once. By their own limits, they would fill the
    servers' queues for longer than a request is waited for.
    """

    __slots__ = ("_allocated", "_begun_at", "_max_in_flight", "_patience_s")

    def __init__(self) -> None:
        self._max_in_flight, self._patience_s = math.inf, 0.0
        self._begun_at: dict[ModelKey, float] = {}
        self._allocated: set[ModelKey] = set()

    def join(self, max_in_flight: int, patience_s: float) -> None:
        """Take what the scheduler says; a model's quotas come within some time of its requests."""
        self._max_in_flight, self._patience_s = max_in_flight, patience_s

    def hear(self, models: Iterable[ModelKey], lease_s: float, now: float) -> None:
        """Take note of models that have quotas; those of the others will come."""
        self._allocated.update(models)
        self._patience_s = max(self._patience_s, lease_s)
        self._begun_at = dict.fromkeys(self._begun_at, now)

    def until(self, key: ModelKey, now: float) -> float:
        """Return how long the bound holds for a model that has requests now."""
        if key in self._allocated or self._max_in_flight == math.inf:
            return -math.inf
        return self._begun_at.setdefault(key, now) + self._patience_s

    def holds_back(self, key: ModelKey, in_flight: int, now: float) -> bool:
        """Whether no other request of a model may leave."""
        return in_flight >= self._max_in_flight and now < self.until(key, now)
