"""Dispatch: which slices leave now, for which endpoint, and whether twice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sonic_coffea.pool import _events as e

if TYPE_CHECKING:
    from sonic_coffea.pool._request import Attempt, RequestSlice
    from sonic_coffea.pool._state import CoreState

# Rows that hung this often may be sent twice at a time.
TWIN_FROM = 2


class Dispatcher:
    """Sends slices as endpoints and bytes in flight have room for them."""

    def __init__(self, state: CoreState, memory_bytes: float | None) -> None:
        self._state = state
        self._max_in_flight_bytes = state.settings.limits.in_flight_bytes(memory_bytes)
        self._in_flight_bytes = 0

    def send_all(self, now: float) -> None:
        """Send what may be sent now."""
        begun = []
        while (attempt := self._next(now) or self._hedge(now)) is not None:
            self._send(attempt)
            begun.append(attempt)
        for attempt in begun:
            if (twin := self._twin(attempt, now)) is not None:
                self._send(twin)

    def _next(self, now: float) -> Attempt | None:
        """Take the next slice that may be sent now, for an endpoint that has room for it."""
        for head in self._state.waiting.heads():
            request = head
            if not self._fits(request):
                return None
            in_flight = sum(x.in_flight.number(request.key) for x in self._state.endpoints)
            if self._state.joining.holds_back(request.key, in_flight, now):
                continue
            endpoint = self._state.endpoints.choose(request, now, but=self._failed_on(request, now))
            while endpoint is not None:
                self._state.waiting.take(request)
                if endpoint.takes(request, now) or request.rows == 1 or request.attempts:
                    self._state.waiting.leave(request)
                    return endpoint.begin(request, now)
                request = self.split(request, now)
            if self._state.fallback.due_at(head.key, now) <= now:
                self._state.start_fallback()
        return None

    def _failed_on(self, request: RequestSlice, now: float) -> list[str]:
        """Return the server that failed on these rows, if there is another one for them."""
        url = request.last_url
        if request.inference_failures == 0 or url is None:
            return []
        others = (x for x in self._state.endpoints if x.url != url and x.usable(request.key, now))
        return [url] if any(others) else []

    def _send(self, attempt: Attempt) -> None:
        self._in_flight_bytes += attempt.slice.nbytes
        self._state.instructions.append(e.Send(attempt))

    def _twin(self, attempt: Attempt, now: float) -> Attempt | None:
        """Send rows that hung more than once twice at a time, if nothing else waits.

        A round-robin balancer leads one of the two to another server; no other rows pay for it.
        """
        request, endpoint = attempt.slice, self._state.endpoints.get(attempt.url)
        hung = sum(other.overdue for other in request.attempts)
        if (
            hung < TWIN_FROM
            or self._state.waiting.first(request.key) is not None
            or not self._fits(request)
        ):
            return None
        if endpoint is None or endpoint.room(request.key, now) <= 0:
            return None
        endpoint.breaker.spend()
        return endpoint.begin(request, now, attempt.channel)

    def _hedge(self, now: float) -> Attempt | None:
        """Send a request that takes long to another endpoint, too, or over another connection."""
        if self._state.settings.retry.hedge_after_s is None:
            return None
        for attempt in self._state.attempts():
            if self.hedged_at(attempt, now) <= now and self._fits(attempt.slice):
                request = attempt.slice
                other = self._state.endpoints.choose(request, now, but=[attempt.url])
                other = other or self._state.endpoints.choose(request, now)
                if other is not None:
                    return other.begin(request, now)
        return None

    def hedged_at(self, attempt: Attempt, now: float) -> float:
        """Return when a request is sent to another endpoint, too; infinity if it is not.

        One that is still being packed has not left: its time is looked at again.
        """
        after_s = self._state.settings.retry.hedge_after_s
        request = attempt.slice
        if after_s is None or len(request.attempts) > 1 or request.queued or request.call.over:
            return math.inf
        # Not again at once, if the other attempt has failed.
        left_at = max(min(attempt.sent_at, now), request.begun_at)
        return left_at + after_s

    def _fits(self, request: RequestSlice) -> bool:
        # A slice larger than the whole limit travels alone.
        total_bytes = self._in_flight_bytes + request.nbytes
        return self._in_flight_bytes == 0 or total_bytes <= self._max_in_flight_bytes

    def split(self, request: RequestSlice, now: float) -> RequestSlice:
        """Queue a slice as two, and return the first of them."""
        parts = request.halves()
        self._state.instructions.append(e.Split(request, parts))
        for part in parts:
            self._state.waiting.put_back(part, now)
        return parts[0]

    def settle(self, attempt: Attempt) -> bool:
        """End an attempt and make room for others; False if it has ended before."""
        endpoint = self._state.endpoints.get(attempt.url)
        if endpoint is None or not endpoint.settle(attempt):
            return False
        self._in_flight_bytes -= attempt.slice.nbytes
        return True
