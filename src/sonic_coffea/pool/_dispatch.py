"""Dispatch: which slices leave now, and for which endpoint."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import RequestTooLargeError
from sonic_coffea.pool import _events as e
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._endpoints import EndpointRegistry
from sonic_coffea.pool._waiting import WaitingSlices

if TYPE_CHECKING:
    from random import Random

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.pool._settings import Settings


class Dispatcher:
    """Sends slices as endpoints and the bytes in flight have room for them, and ends slices.

    Attributes
    ----------
    instructions : list
        The instructions that the core returns next.
    """

    def __init__(self, settings: Settings, rng: Random, memory_bytes: float | None) -> None:
        self.settings = settings
        self.rng = rng
        self.endpoints = EndpointRegistry(settings, self.rng)
        self.waiting = WaitingSlices()
        self.instructions: list[e.Instruction] = []
        # Attempts of slices that have ended, and when they are to be cancelled.
        self._to_cancel: deque[tuple[float, Attempt]] = deque()
        self._max_in_flight_bytes = settings.in_flight_bytes(memory_bytes)
        self._in_flight_bytes = 0
        # Until its first quotas come, or until this time, a model may only have so many requests
        # in flight, over all servers. The first chunks of a thousand processes come at once, and
        # by the processes' own limits they would fill the servers' queues.
        self._max_without_quotas, self._quotas_within_s = math.inf, 0.0
        self._held_until: dict[ModelKey, float] = {}

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
            in_flight_bytes = self._in_flight_bytes + request.nbytes
            # A slice larger than the whole limit travels alone.
            if in_flight_bytes > self._max_in_flight_bytes and self._in_flight_bytes:
                return
            if self._holds_back(request.key, now):
                continue
            endpoint = self.endpoints.choose(request, now)
            if endpoint is None:
                self.start_fallback(request.key, now)
                continue
            self.waiting.take(request)
            if request.rows > 1 and not request.whole and not endpoint.takes(request, now):
                self._split(request, now)
            else:
                self._in_flight_bytes = in_flight_bytes
                self.instructions.append(e.Send(endpoint.begin(request, now)))
            heads = self.waiting.heads()

    def _holds_back(self, key: ModelKey, now: float) -> bool:
        """Whether requests of a model wait for its first quotas."""
        if self._max_without_quotas == math.inf:
            return False
        until = self._held_until.setdefault(key, now + self._quotas_within_s)
        in_flight = sum(x.by_model[key] for x in self.endpoints)
        return now < until and in_flight >= self._max_without_quotas

    # The end of attempts and slices

    def _settle(self, attempt: Attempt) -> bool:
        """End an attempt and make room for others; False if it had ended before."""
        if attempt not in attempt.slice.attempts:
            return False
        attempt.slice.attempts.remove(attempt)
        self.endpoints.by_url[attempt.url].settle(attempt)
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
            channel = self.endpoints.by_url[attempt.url].channels[attempt.channel]
            old_at = attempt.begun_at + tuning.SILENCE_S
            if old_at <= now or channel.reset():
                self.instructions.append(e.Cancel(attempt))
            else:
                self._to_cancel.append((old_at, attempt))

    def _split(self, request: RequestSlice, now: float) -> None:
        """Queue a slice as two; answers to the whole come too late."""
        self._end(request, now)
        for part in request.halves():
            self.waiting.put_back(part, now)

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

    def _end_call(self, call: Any, now: float) -> None:
        """End all slices of a call."""
        self.waiting.take_chosen(call.key, lambda request: request.call is call)
        for request in self._in_flight():
            if request.call is call:
                self._end(request, now)

    def calls(self, key: ModelKey) -> set[Any]:
        """Return the calls of a model whose slices wait or are in flight."""
        slices = [*self.waiting.of(key), *self._in_flight()]
        return {request.call for request in slices if request.key == key}

    def _in_flight(self) -> list[RequestSlice]:
        return [attempt.slice for x in self.endpoints for attempt in x.attempts]

    # The fallback

    def start_fallback(self, key: ModelKey, now: float, *, at_once: bool = False) -> None:
        """Start the fallback if it is due for a model; `at_once`: also if it will be due later."""
        due_at = self.endpoints.fallback_due_at(key)
        if due_at <= now or (at_once and due_at < math.inf):
            self.endpoints.fallback_starts = True
            self.instructions.append(e.StartFallback())
