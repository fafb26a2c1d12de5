"""The pool's core: a state machine that takes events and returns instructions.

It has no clock, thread or connection: the time comes with the events, and the engine carries out
the instructions. So tests and simulations run it on virtual time. This module decides what is
sent where and when, and what becomes of rows that fail; `ServedModels` finds models.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from random import Random
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    InferenceError,
    ModelNotFoundError,
    RequestTooLargeError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._breaker import MAX_RETRIES, back_off_s
from sonic_coffea.pool._channels import OLD_S
from sonic_coffea.pool._endpoint import EndpointRegistry
from sonic_coffea.pool._failures import MAX_SPLITS, Decision, classify
from sonic_coffea.pool._fallback import FallbackPolicy
from sonic_coffea.pool._limits import Joining
from sonic_coffea.pool._models import ServedModels
from sonic_coffea.pool._waiting import WaitingSlices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sonic_coffea.pool._endpoint import Endpoint, EndpointReport, ServerState
    from sonic_coffea.pool._request import Attempt, ModelKey, Request, RequestSlice
    from sonic_coffea.pool._settings import Settings

logger = logging.getLogger(__name__)


class PoolCore:
    """The state of a pool: waiting slices, attempts in flight, endpoints; and what follows.

    Attributes
    ----------
    instructions : list
        The instructions that `handle` returns next.
    """

    def __init__(
        self, settings: Settings, rng: Random | None = None, memory_bytes: float | None = None
    ) -> None:
        self.settings = settings
        self.rng = rng or Random()
        self.endpoints = EndpointRegistry(settings, self.rng)
        self.fallback = FallbackPolicy(settings, self.endpoints)
        self.waiting = WaitingSlices()
        self._joining = Joining()
        self.instructions: list[e.Instruction] = []
        # Attempts of slices that have ended, and when they are to be cancelled.
        self._to_cancel: deque[tuple[float, Attempt]] = deque()
        self._max_in_flight_bytes = settings.in_flight_bytes(memory_bytes)
        self._in_flight_bytes = 0
        self.models = ServedModels(self)

    def handle(self, now: float, *events: e.Event) -> list[e.Instruction]:
        """Take events, or none if only time has passed, and return instructions."""
        for event in events:
            self._take(event, now)
        self._advance(now)
        instructions = self.instructions.copy()
        self.instructions.clear()
        return instructions

    def wakes_at(self, now: float) -> float:
        """Return when time alone changes something; infinity if only an event does."""
        times = [discovery.wakes_at for discovery in self.models.discoveries.values()]
        times.append(self.waiting.wakes_at)
        for x in self.endpoints:
            times += x.liveness.due_at(len(x.in_flight)), x.in_flight.late_at
        if self._to_cancel:
            times.append(self._to_cancel[0][0])
        waiting = self.waiting.models()
        # A time that has passed waits for a response, which makes room.
        due = [self.fallback.due_at(key, now) for key in waiting]
        due += [self._joining.until(key, now) for key in waiting]
        if waiting:
            times += [x.in_flight.wakes_at(now) for x in self.endpoints]
            due += [x.breaker.retry_at for x in self.endpoints]
            due += [x.signatures.retry_at(key) for x in self.endpoints for key in waiting]
        times += [at for at in due if at > now]
        return min(times, default=math.inf)

    def states(self, now: float) -> list[ServerState]:
        return [endpoint.state(now) for endpoint in self.endpoints.active]

    def report(self) -> list[EndpointReport]:
        """Return the events at each endpoint since the last report."""
        models = {key for endpoint in self.endpoints for key in endpoint.in_flight.by_model}
        return [endpoint.report(models) for endpoint in self.endpoints.active]

    def _take(self, event: e.Event, now: float) -> None:  # noqa: C901, PLR0912  a table
        match event:
            case e.Answered():
                self._answered(event, now)
            case e.Sent(attempt, at):
                attempt.sent_at = at
            case e.Submitted(slices):
                for request in slices:
                    self.waiting.add(request, now)
            case e.Failed(attempt, error, sent):
                self._failed(attempt, error, now, sent=sent)
            case e.CallEnded(call):
                self._end_call(call, now)
            case e.Probed(url, error):
                self._probed(url, error, now)
            case e.Validated():
                self.models.validated(event, now)
            case e.ContractRequested(request, anew):
                self.models.requested(request, now, anew=anew)
            case e.ContractWithdrawn(request):
                self.models.withdrawn(request)
            case e.ServersChanged(servers):
                self.endpoints.set_servers(servers, self.fallback.url)
            case e.QuotasReceived():
                self._receive_quotas(event, now)
            case e.FallbackStarted(url, error):
                self.fallback.started(url, error, now)
                if url is None:
                    logger.error("no fallback: %s", error)
                else:
                    logger.warning("rows are scored by the fallback %s until a server is back", url)
                    self.endpoints.set_servers(self.endpoints.servers, url)
            case e.SchedulerJoined(starts_at, max_in_flight, quotas_within_s):
                self.models.starts_at = starts_at
                self._joining.join(max_in_flight, quotas_within_s)

    def _answered(self, event: e.Answered, now: float) -> None:
        attempt = event.attempt
        if not self._settle(attempt):  # its slice has ended
            return
        self.endpoints.by_url[attempt.url].answered(attempt, event.received_at - event.sent_at, now)
        for other in attempt.slice.attempts:
            if other.late:
                self.endpoints.by_url[other.url].in_flight.hedge_won(now)
        self.models.answered(attempt.key, event.response.version, now)
        self._end(attempt.slice, now)
        self.instructions.append(e.Deliver(event))

    def _failed(self, attempt: Attempt, error: SonicError, now: float, *, sent: bool) -> None:
        """Send rows again, or give them up, unless another attempt may still be answered."""
        request = attempt.slice
        if not self._settle(attempt):  # its slice has ended
            return
        decision = self._decide(attempt, error, now) if sent else Decision.FAIL
        again = decision is not Decision.FAIL
        # A late attempt is not waited for, as its server seems to hang.
        awaited = any(not other.late for other in request.attempts)
        if not sent and request.attempts and not request.queued:
            request.retry_at = now + back_off_s(1, self.rng)
            self.waiting.put_back(request, now)
        if again and not awaited:
            self._send_again(attempt, error, now, split=decision is Decision.SPLIT)
        elif again or awaited or request.queued:
            self.instructions.append(e.Count(attempt, error, retried=sent))
        else:
            self.give_up(request, attempt.url if sent else None, error, now)

    def _send_again(
        self, attempt: Attempt, error: SonicError, now: float, *, split: bool = False
    ) -> None:
        """Queue rows once more, unless they wait already, and count the retry."""
        request = attempt.slice
        request.last_url = attempt.url
        if not request.queued:
            request.retries += 1
            if split:
                self._split(request, now)
            else:
                self.waiting.put_back(request, now)
        self.endpoints.by_url[attempt.url].retried(error, now)
        self.instructions.append(e.Count(attempt, error, retried=True))

    def _probed(self, url: str, error: SonicError | None, now: float) -> None:
        endpoint = self.endpoints.by_url.get(url)
        if endpoint is None or not endpoint.probed(error, now) or error is None:
            return
        for attempt in endpoint.in_flight.all():
            self._failed(attempt, error, now, sent=True)
            self.instructions.append(e.Cancel(attempt))
        # A connection that the network dropped would stay silent.
        channels = range(len(endpoint.in_flight.channels))
        self.instructions += [e.Reconnect(url, channel) for channel in channels]

    def _receive_quotas(self, event: e.QuotasReceived, now: float) -> None:
        keys = [key for _, key in event.quotas]
        self._joining.receive_quotas(keys, event.lease_s, now)
        for (url, key), quota in event.quotas.items():
            if (target := self.endpoints.by_url.get(url)) is not None:
                target.in_flight.set_quota(key, quota, now)

    def _decide(self, attempt: Attempt, error: SonicError, now: float) -> Decision:
        """Take the error of an attempt, and return what becomes of its rows."""
        request, endpoint = attempt.slice, self.endpoints.by_url[attempt.url]
        if request.first_failed_at is None:
            request.first_failed_at = now
        failing_s = now - request.first_failed_at
        overtaken = endpoint.in_flight.overtaken(attempt)
        decision, for_s = classify(error, attempt, self.settings, overtaken=overtaken)
        if decision is Decision.LOST:
            retried = self._lost(attempt, error, failing_s, now)
            return Decision.RETRY if retried else Decision.FAIL
        endpoint.erred(attempt, error, now, too_large=decision is Decision.SPLIT)
        match error:
            case ModelNotFoundError() if attempt.key not in endpoint.signatures.valid:
                self.models.forget(attempt.key)
            case RequestTooLargeError() | InferenceError() if decision is Decision.RETRY:
                request.inference_failures += 1
            case RequestTooLargeError() if (back_offs := request.splits - MAX_SPLITS) > 0:
                # It may not be the size.
                request.retry_at = now + back_off_s(back_offs, self.rng)
        return decision if failing_s < for_s else Decision.FAIL

    def _lost(self, attempt: Attempt, error: SonicError, failing_s: float, now: float) -> bool:
        """Take the loss of an attempt, and return whether its rows are sent again."""
        request = attempt.slice
        self.endpoints.by_url[attempt.url].failed(error, now)
        self.models.mark_stale()
        if not getattr(error, "undelivered", False):
            request.losses += 1
            if request.losses >= MAX_RETRIES:
                back_offs = request.losses - MAX_RETRIES + 1
                request.retry_at = now + back_off_s(back_offs, self.rng)
        lost_since = self.lost_since(attempt.key, now)
        if lost_since is not None:
            return now - lost_since < self.settings.retry_timeout_s
        return request.retries < MAX_RETRIES or failing_s < self.settings.retry_timeout_s

    def _advance(self, now: float) -> None:
        self.models.advance(now)
        for endpoint in self.endpoints:
            if endpoint.liveness.due_at(len(endpoint.in_flight)) <= now:
                endpoint.liveness.start_probe(now)
                self.instructions.append(e.Probe(endpoint.url))
            if endpoint.in_flight.late_at <= now:
                self._hedge_late(endpoint, now)
            for channel in endpoint.in_flight.channels.take_renewals(now):
                self.instructions.append(e.Reconnect(endpoint.url, channel))
        self.models.validate_waiting(now)
        self.waiting.put_back_due(now)
        self.assign(now)
        self._cancel_due(now)
        self.models.fail_unroutable(now)
        self.instructions += [e.Close(url) for url in self.endpoints.remove_drained()]

    def _hedge_late(self, endpoint: Endpoint, now: float) -> None:
        """Send late requests again, elsewhere or over another connection."""
        for attempt in endpoint.in_flight.take_late(endpoint.liveness.lives_at, now):
            endpoint.breaker.spend()
            seconds = now - attempt.sent_at
            what = f"no response in {seconds:.3g} s, while others are answered"
            self._send_again(attempt, ServerLostError(what, server=endpoint.url), now)

    def _attempts(self) -> Iterator[Attempt]:
        return itertools.chain.from_iterable([x.in_flight.all() for x in self.endpoints])

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
        for attempt in self._attempts():
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
