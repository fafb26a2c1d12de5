"""Waiting slices, by model, and slices in back-off."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from sonic_coffea.pool._request import ModelKey, RequestSlice

_Order = tuple[int, int]


class WaitingSlices:
    """The slices that wait: those of a model leave in the order in which they came.

    A slice that is sent again, or is split, keeps its place.
    """

    def __init__(self) -> None:
        self._queues: dict[ModelKey, list[tuple[_Order, RequestSlice]]] = {}
        self._backing_off: list[tuple[float, _Order, RequestSlice]] = []
        self._numbers = itertools.count()

    @property
    def wakes_at(self) -> float:
        """When the next back-off ends."""
        return self._backing_off[0][0] if self._backing_off else math.inf

    def __bool__(self) -> bool:
        return bool(self._backing_off) or any(self._queues.values())

    def models(self) -> list[ModelKey]:
        return [key for key, queue in self._queues.items() if queue]

    def counts(self) -> dict[ModelKey, int]:
        return {key: len(queue) for key, queue in self._queues.items()}

    def add(self, request: RequestSlice, now: float) -> None:
        """Put a new slice behind the others."""
        request.order = next(self._numbers), request.start
        request.queued_at = now
        self.put_back(request, now)

    def put_back(self, request: RequestSlice, now: float) -> None:
        """Put a slice in its place in the order, once it has backed off."""
        request.queued = True
        if now < request.retry_at:
            heapq.heappush(self._backing_off, (request.retry_at, request.order, request))
        else:
            heapq.heappush(self._queues.setdefault(request.key, []), (request.order, request))

    def put_back_due(self, now: float) -> None:
        while self.wakes_at <= now:
            self.put_back(heapq.heappop(self._backing_off)[2], now)

    def heads(self) -> list[RequestSlice]:
        """Return the first slice of each model, in the order in which they came."""
        heads = sorted(queue[0] for queue in self._queues.values() if queue)
        return [request for _, request in heads]

    def first(self, key: ModelKey) -> RequestSlice | None:
        """Return the first slice of a model."""
        queue = self._queues.get(key)
        return queue[0][1] if queue else None

    def of(self, key: ModelKey) -> list[RequestSlice]:
        """Return all slices of a model, in their order."""
        waiting = [request for _, request in self._queues.get(key, [])]
        waiting += [request for *_, request in self._backing_off if request.key == key]
        return sorted(waiting, key=lambda request: request.order)

    def take(self, head: RequestSlice) -> None:
        """Take out the first slice of its model."""
        heapq.heappop(self._queues[head.key])
        head.queued = False

    def take_chosen(
        self, key: ModelKey, chosen: Callable[[RequestSlice], bool]
    ) -> list[RequestSlice]:
        """Take out some slices of a model, and return them in their order."""
        taken = list(filter(chosen, self.of(key)))
        for request in taken:
            request.queued = False
        self._queues[key] = sorted(x for x in self._queues.get(key, []) if x[1].queued)
        self._backing_off = sorted(x for x in self._backing_off if x[2].queued)
        return taken
