"""Dispatch: which slices leave now, and for which endpoint."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from sonic_coffea.errors import RequestTooLargeError
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._channels import OLD_S
from sonic_coffea.pool._endpoint import EndpointRegistry
from sonic_coffea.pool._limits import Joining
from sonic_coffea.pool._waiting import WaitingSlices

if TYPE_CHECKING:
    from random import Random

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._request import Attempt, ModelKey, Request, RequestSlice
    from sonic_coffea.pool._settings import Settings


class Dispatcher:
    """Sends slices as endpoints and the bytes in flight have room for them.

    Attributes
    ----------
    instructions : list
        The instructions that the core returns next.
    """

    def __init__(self, settings: Settings, rng: Random, memory_bytes: float | None) -> None:
        self.settings = settings
        self.rng = rng
        self.endpoints = EndpointRegistry(settings, self.rng)
        self.fallback = FallbackPolicy(settings, self.endpoints)
        self.waiting = WaitingSlices()
        self._joining = Joining()
        self.instructions: list[e.Instruction] = []
        # Attempts of slices that have ended, and when they are to be cancelled.
        self._to_cancel: deque[tuple[float, Attempt]] = deque()
        self._max_in_flight_bytes = settings.in_flight_bytes(memory_bytes)
        self._in_flight_bytes = 0

    def assign(self, now: float) -> None:
        """Send each slice that has room now, in the order in which they came.

        The first waiting slice of each model is one of these cases:

        1. It exceeds the bytes in flight: nothing leaves, lest smaller slices overtake it for ever.
        2. Its model is held back until quotas come: the next model's turn.
        3. No endpoint can take it: the next model's turn; the fallback starts if it is due.
        4. The endpoint has refused requests of its size: its halves take its place.
        5. It leaves, for the endpoint that is least used.
        """
        heads = self.waiting.heads()
        while heads:
            request = heads.pop(0)
            if not self._fits(request):
                return
            in_flight = sum(x.in_flight.by_model[request.key] for x in self.endpoints)
            if self._joining.holds_back(request.key, in_flight, now):
                continue
            endpoint = self.endpoints.choose(request, now)
            if endpoint is None:
                self.start_fallback(request.key, now)
                continue
            self.waiting.take(request)
            if request.rows > 1 and not request.whole and not endpoint.takes(request, now):
                self._split(request, now)
            else:
                self._in_flight_bytes += request.nbytes
                self.instructions.append(e.Send(endpoint.begin(request, now)))
            heads = self.waiting.heads()

    def _fits(self, request: RequestSlice) -> bool:
        # A slice larger than the whole limit travels alone.
        total_bytes = self._in_flight_bytes + request.nbytes
        return self._in_flight_bytes == 0 or total_bytes <= self._max_in_flight_bytes

    def _split(self, request: RequestSlice, now: float) -> None:
        """Queue a slice as two; answers to the whole come too late."""
        self._end(request, now)
        for part in request.halves():
            self.waiting.put_back(part, now)

    def _settle(self, attempt: Attempt) -> bool:
        """End an attempt and make room for others; False if it had ended before."""
        if attempt.settled:
            return False
        attempt.settled = True
        attempt.slice.attempts.remove(attempt)
        self.endpoints.by_url[attempt.url].in_flight.settle(attempt)
        self._in_flight_bytes -= attempt.slice.nbytes
        return True

    def _end(self, request: RequestSlice, now: float) -> None:
        """End a slice that is answered, given up or split, so that no row counts twice.

        It no longer waits. Its attempts are cancelled at once, or later if too many young attempts
        were cancelled; what they bring changes nothing.
        """
        if request.queued:
            self.waiting.take_chosen(request.key, lambda other: other is request)
        for attempt in list(request.attempts):
            self._settle(attempt)
            channels = self.endpoints.by_url[attempt.url].in_flight.channels
            old_at = attempt.begun_at + OLD_S
            if old_at <= now or channels.resets(attempt.channel):
                self.instructions.append(e.Cancel(attempt))
            else:
                self._to_cancel.append((old_at, attempt))

    def _end_call(self, call: Request, now: float) -> None:
        """End all slices of a call."""
        self.waiting.take_chosen(call.key, lambda request: request.call is call)
        for attempt in [a for x in self.endpoints for a in x.in_flight.attempts]:
            if attempt.slice.call is call:
                self._end(attempt.slice, now)

    def _cancel_due(self, now: float) -> None:
        # They are in the order of the answers, so some are cancelled a little late.
        while self._to_cancel and self._to_cancel[0][0] <= now:
            self.instructions.append(e.Cancel(self._to_cancel.popleft()[1]))

    def give_up(
        self, request: RequestSlice, url: str | None, error: SonicError, now: float
    ) -> None:
        """Fail rows that are not sent again; `url` is the endpoint that failed, if one did."""
        self._end(request, now)
        if isinstance(error, RequestTooLargeError):
            error = error.because(f"a single row of {request.nbytes} bytes")
        if request.retries:
            error = error.because(f"tried {request.retries + 1} times")
        self.instructions.append(e.Fail(request, error, url))

    def start_fallback(self, key: ModelKey, now: float, *, at_once: bool = False) -> None:
        """Start the fallback if it is due for a model; `at_once`: also if it will be due later."""
        due_at = self.fallback.due_at(key, now)
        if due_at <= now or (at_once and due_at < math.inf):
            self.fallback.starting = True
            self.instructions.append(e.StartFallback())

    def lost_since(self, key: ModelKey, now: float) -> float | None:
        """Return since when a model has no server; None if it has one, or a fallback is to come.

        The time goes on when coffea or dask run a chunk again.
        """
        if self.fallback.awaited(key, now):
            return None
        return self.endpoints.all_lost_since(key, now)


class FallbackPolicy:
    """Decides when to start the fallback: while no server has a model, or all of them are lost.

    Attributes
    ----------
    url : str or None
        Where it serves, or has served.
    error : SonicError or None
        Why it cannot be used: it is not started again.
    """

    def __init__(self, settings: Settings, endpoints: EndpointRegistry) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._started_at = -math.inf
        self.error: SonicError | None = None
        self.url: str | None = None
        self.starting = False

    def due_at(self, key: ModelKey, now: float) -> float:
        """Return when it is to be started for a model; infinity if it is not."""
        if self._settings.fallback is None or self.error is not None or self.starting:
            return math.inf
        endpoint = None if self.url is None else self._endpoints.by_url.get(self.url)
        if endpoint is not None:
            lost_since = endpoint.breaker.failing_since
            # It runs, with whatever models, or was restarted in vain.
            if lost_since is None or lost_since <= self._started_at:
                return math.inf
        since = self._endpoints.all_lost_since(key, now)
        return math.inf if since is None else since + self._settings.fallback_after_s

    def awaited(self, key: ModelKey, now: float) -> bool:
        """Whether rows of a model may still be scored by it."""
        return self.starting or self.due_at(key, now) < math.inf

    def started(self, url: str | None, error: SonicError | None, now: float) -> None:
        """Record where it serves, or why it does not."""
        self.starting, self.error = False, error or self.error
        if url is not None:
            self.url, self._started_at = url, now
