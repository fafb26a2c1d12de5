"""Waiting slices, by model and share, and slices in back-off."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sonic_coffea.pool._request import ModelKey, RequestSlice
    from sonic_coffea.pool._shares import Share

_Order = tuple[int, int]
_Queue = list[tuple[_Order, "RequestSlice"]]


class WaitingSlices:
    """The slices that wait.

    Those of a share leave in the order in which they came. A slice that is sent again, or is split,
    keeps its place. Shares take turns by weight.
    """

    def __init__(self) -> None:
        self._queues: dict[ModelKey, dict[str, _Queue]] = {}
        self._backing_off: list[tuple[float, _Order, RequestSlice]] = []
        self._numbers = itertools.count()
        self.fair_order = FairOrder()

    @property
    def wakes_at(self) -> float:
        """When the next back-off ends."""
        return self._backing_off[0][0] if self._backing_off else math.inf

    def __bool__(self) -> bool:
        return bool(self._backing_off) or any(self._queues.values())

    def models(self) -> list[ModelKey]:
        return [key for key, queues in self._queues.items() if queues]

    def counts(self) -> dict[ModelKey, int]:
        return {key: sum(map(len, queues.values())) for key, queues in self._queues.items()}

    def first(self, key: ModelKey) -> RequestSlice | None:
        """Return a slice of a model."""
        for queue in self._queues.get(key, {}).values():
            return queue[0][1]
        return None

    def __iter__(self) -> Iterator[RequestSlice]:
        for queues in self._queues.values():
            for queue in queues.values():
                yield from (request for _, request in queue)

    def add(self, request: RequestSlice, now: float) -> None:
        """Put a new slice behind the others of its share."""
        request.order = next(self._numbers), request.start
        request.queued_at = now
        self.put_back(request, now)

    def put_back(self, request: RequestSlice, now: float) -> None:
        """Put a slice in its place in the order, once it has backed off."""
        request.queued = True
        if now < request.retry_at:
            heapq.heappush(self._backing_off, (request.retry_at, request.order, request))
            return
        queues = self._queues.setdefault(request.key, {})
        queue = queues.setdefault(request.call.share.name, [])
        heapq.heappush(queue, (request.order, request))

    def put_back_due(self, now: float) -> None:
        while self._backing_off and self._backing_off[0][0] <= now:
            self.put_back(heapq.heappop(self._backing_off)[2], now)

    def heads(self) -> list[RequestSlice]:
        """Return the first slice of each model and share, in the order in which they may leave."""
        heads = [queue[0][1] for queues in self._queues.values() for queue in queues.values()]
        if len(heads) > 1:
            heads.sort(key=lambda head: (self.fair_order.place(head.call.share), head.order))
        return heads

    def take(self, head: RequestSlice) -> None:
        """Take out the first slice of its model and share."""
        queues = self._queues[head.key]
        name = head.call.share.name
        heapq.heappop(queues[name])
        if not queues[name]:
            del queues[name]
        head.queued = False

    def take_all(self, key: ModelKey) -> list[RequestSlice]:
        """Take out all slices of a model, and return them in their order."""
        return self.take_chosen(key, lambda _: True)

    def take_chosen(
        self, key: ModelKey, chosen: Callable[[RequestSlice], bool]
    ) -> list[RequestSlice]:
        """Take out some slices of a model, and return them in their order."""
        queues = self._queues.pop(key, {})
        waiting = [request for queue in queues.values() for _, request in queue]
        waiting += [request for *_, request in self._backing_off if request.key == key]
        taken = sorted(filter(chosen, waiting), key=lambda request: request.order)
        for request in taken:
            request.queued = False
        kept = {name: [item for item in queue if item[1].queued] for name, queue in queues.items()}
        self._queues[key] = {name: sorted(queue) for name, queue in kept.items() if queue}
        self._backing_off = sorted(item for item in self._backing_off if item[2].queued)
        return taken


class FairOrder:
    """Chooses the share that sends next, by start-time fair queueing: Goyal, Vin and Cheng (1997).

    A share pays for a slice when the slice is sent. So a cancelled slice costs nothing, and an idle
    share saves nothing up.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}

    @property
    def shared(self) -> bool:
        """Whether there has been any share but the default."""
        return any(self._next)

    def place(self, share: Share) -> float:
        """Return the place of a share in the order; the lowest sends next."""
        return max(self._now, self._next.get(share.name, 0.0))

    def leave(self, share: Share) -> None:
        self._now = self.place(share)
        self._next[share.name] = self._now + 1.0 / share.weight
