"""The pool's core: a state machine that takes events and returns instructions.

It knows no clock, no thread and no connection: the time comes with the events, and its owner
carries out the instructions. So it is tested, and simulated, on virtual time. It decides about
retries itself; its parts know models, and send slices.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    DeadlineError,
    InferenceError,
    ModelNotFoundError,
    OverloadError,
    RequestTooLargeError,
    RouteTimeoutError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._breaker import back_off_s
from sonic_coffea.pool._channels import OLD_S
from sonic_coffea.pool._dispatch import Dispatcher
from sonic_coffea.pool._models import ServedModels

if TYPE_CHECKING:
    from random import Random

    from sonic_coffea.pool._endpoint import Endpoint, EndpointReport, ServerState
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.pool._shares import Share

logger = logging.getLogger(__name__)

# Rows that servers lose while they answer other rows may be killing the servers. If each second
# server is dead, one request of 16 is lost four times by chance.
SUSPECT_LOSSES = MAX_RETRIES = 4
# A request that a route cuts is split into eighths, while others are in flight beside it.
MAX_SPLITS = 3


class PoolCore:
    """The state of a pool: waiting slices, attempts in flight, endpoints; and what follows."""

    def __init__(
        self,
        settings: Settings,
        rng: Random | None = None,
        *,
        memory_bytes: float | None = None,
    ) -> None:
        self._dispatcher = Dispatcher(settings, rng, memory_bytes)
        self._timeout_s = settings.retry.timeout_s
        self.endpoints = self._dispatcher.endpoints
        self.models = ServedModels(self._dispatcher)
        self._waiting = self._dispatcher.waiting
        self._fallback = self._dispatcher.fallback
        self._instructions = self._dispatcher.instructions
        self._to_cancel: deque[tuple[float, Attempt]] = deque()

    def handle(self, now: float, *events: e.Event) -> list[e.Instruction]:
        """Take events, or none if only time has passed, and return what is to be done."""
        for event in events:
            self._take(event, now)
        self._advance(now)
        instructions = self._instructions.copy()
        self._instructions.clear()
        return instructions

    def wakes_at(self, now: float) -> float:
        """Return when time alone changes something; infinity if only an event does."""
        dispatcher = self._dispatcher
        times = [*self.models.wakes_at(), self._waiting.wakes_at]
        for x in self.endpoints:
            times += x.liveness.due_at(len(x.in_flight)), x.in_flight.late_at, x.losses.wakes_at()
        if self._to_cancel:
            times.append(self._to_cancel[0][0])
        waiting = self._waiting.models()
        # What is due already, and has not left, waits for a response.
        due = [self._fallback.due_at(key, now) for key in waiting]
        due += [dispatcher.joining.until(key, now) for key in waiting]
        if waiting:
            times += [x.in_flight.wakes_at(now) for x in self.endpoints]
            due += [x.breaker.retry_at for x in self.endpoints]
            due += [x.signatures.retry_at(key) for x in self.endpoints for key in waiting]
        if dispatcher.settings.retry.hedge_after_s is not None:
            due += [dispatcher.hedged_at(attempt, now) for attempt in dispatcher.attempts()]
        times += [at for at in due if at > now]
        return min(times, default=math.inf)

    def waiting(self) -> dict[ModelKey, int]:
        """Return how many slices of each model wait."""
        return self._waiting.counts()

    def shares(self) -> dict[ModelKey, Counter[Share]]:
        """Return how many slices of each model wait or are in flight, by share.

        Empty while there is only one share.
        """
        shares: defaultdict[ModelKey, Counter[Share]] = defaultdict(Counter)
        if self._waiting.fair_order.shared:
            in_flight = (attempt.slice for attempt in self._dispatcher.attempts())
            for request in itertools.chain(self._waiting, in_flight):
                shares[request.key][request.call.share] += 1
        return shares

    def states(self, now: float) -> list[ServerState]:
        """Return what is known of each server."""
        return [endpoint.state(now) for endpoint in self.endpoints.active]

    def report(self) -> list[EndpointReport]:
        """Return what happened at each endpoint since the last report."""
        models = {key for endpoint in self.endpoints for key in endpoint.in_flight.by_model}
        return [endpoint.report(models) for endpoint in self.endpoints.active]

    # Events

    def _take(self, event: e.Event, now: float) -> None:  # noqa: C901, PLR0912  a table
        match event:
            case e.Answered():
                self._answered(event, now)
            case e.Submitted(slices):
                for request in slices:
                    self._waiting.add(request, now)
            case e.Failed(attempt, error):
                self._lost(attempt, error, now)
            case e.Unsendable(attempt, error):
                self._unsendable(attempt, error)
            case e.CallEnded(call):
                for attempt in self._dispatcher.attempts():
                    if attempt.slice.call is call:
                        self._instructions.append(e.Cancel(attempt))
            case e.Probed(url, error):
                self._probed(url, error, now)
            case e.Validated():
                self.models.validated(event, now)
            case e.ContractRequested(request, anew):
                self.models.requested(request, now, anew=anew)
            case e.ContractWithdrawn(request):
                self.models.withdrawn(request)
            case e.ServersChanged(servers):
                self.endpoints.set_servers(servers, self._fallback.url)
            case e.QuotasReceived():
                self._granted(event, now)
            case e.FallbackStarted(url, error):
                self._fallback.started(url, error, now)
                if url is None:
                    logger.error("no fallback: %s", error)
                else:
                    logger.warning("rows are scored by the fallback %s until a server is back", url)
                    self.endpoints.set_servers(self.endpoints.servers, url)
            case e.SchedulerJoined(starts_at, max_in_flight, quotas_within_s):
                self.models.starts_at = starts_at
                self._dispatcher.joining.join(max_in_flight, quotas_within_s)

    def _answered(self, event: e.Answered, now: float) -> None:
        attempt = event.attempt
        request = attempt.slice
        if attempt.settled:  # given up meanwhile; its rows are elsewhere
            return
        self.endpoints[attempt.url].answered(attempt, event.received_at - event.sent_at, now)
        self.models.answered_at[attempt.key] = now
        request.delivered = True
        self._dispatcher.settle(attempt)
        self._drop_attempts(request, now)
        self._instructions.append(e.Deliver(event))

    def _drop_attempts(self, request: RequestSlice, now: float) -> None:
        """End the other attempts of rows that are over: a late response changes nothing.

        They are cancelled at once or, if too many young ones were, when they are older.
        """
        for attempt in list(request.attempts):
            self._dispatcher.settle(attempt)
            channels = self.endpoints[attempt.url].in_flight.channels
            old_at = attempt.begun_at + OLD_S
            if old_at <= now or channels.resets(attempt.channel):
                self._instructions.append(e.Cancel(attempt))
            else:
                self._to_cancel.append((old_at, attempt))

    def _lost(self, attempt: Attempt, error: SonicError, now: float) -> None:
        """Decide what becomes of rows that did not come back."""
        request = attempt.slice
        if not self._dispatcher.settle(attempt) or request.delivered or request.call.over:
            return
        again = self._retries(attempt, error, now)
        # Overdue attempts are on a server that hangs, which nobody waits for.
        awaited = any(not other.overdue for other in request.attempts)
        if again and not awaited:
            self._send_again(attempt, error, now)
        elif again or awaited or request.queued:
            self._instructions.append(e.Count(attempt, error, retried=True))
        else:
            self._drop_attempts(request, now)
            self._dispatcher.give_up(request, attempt.url, error)

    def _send_again(self, attempt: Attempt, error: SonicError, now: float) -> None:
        """Queue rows once more, if they do not wait already, and count it."""
        request = attempt.slice
        request.last_url = attempt.url
        if not request.queued:
            request.retries += 1
            if _splits(attempt, error):
                self._dispatcher.split(request, now)
            else:
                self._waiting.put_back(request, now)
        self.endpoints[attempt.url].losses.count(error, now)
        self._instructions.append(e.Count(attempt, error, retried=True))

    def _unsendable(self, attempt: Attempt, error: SonicError) -> None:
        request = attempt.slice
        if not self._dispatcher.settle(attempt) or request.call.over:
            return
        if request.delivered or request.attempts or request.queued:
            self._instructions.append(e.Count(attempt, error, retried=False))
        else:
            self._instructions.append(e.Fail(request, error))

    def _probed(self, url: str, error: SonicError | None, now: float) -> None:
        endpoint = self.endpoints.get(url)
        if endpoint is None or not endpoint.probed(error, now) or error is None:
            return
        for attempt in endpoint.in_flight.all():
            self._lost(attempt, error, now)
            self._instructions.append(e.Cancel(attempt))
        # A connection that the network has forgotten would stay silent.
        channels = range(len(endpoint.in_flight.channels))
        self._instructions += [e.Reconnect(url, channel) for channel in channels]

    def _granted(self, event: e.QuotasReceived, now: float) -> None:
        for endpoint in self.endpoints:
            if endpoint.url in event.ejected:
                endpoint.eject(now + event.lease_s, now)
            else:
                endpoint.breaker.readmit(now)
        self._dispatcher.joining.hear((key for _, key in event.quotas), event.lease_s, now)
        for (url, key), quota in event.quotas.items():
            if (target := self.endpoints.get(url)) is not None:
                target.in_flight.grant(key, quota, now)

    # Retries

    def _retries(self, attempt: Attempt, error: SonicError, now: float) -> bool:  # noqa: C901, PLR0911  a table
        """Learn from a failed attempt, and return whether its rows are sent again."""
        request, endpoint = attempt.slice, self.endpoints[attempt.url]
        if request.first_failed_at is None:
            request.first_failed_at = now
        failing_s = now - request.first_failed_at
        match error:
            case ModelNotFoundError():
                endpoint.liveness.hear(now)
                endpoint.signatures.miss(attempt.key, now)
                if attempt.key not in endpoint.signatures.valid:
                    self.models.forget(attempt.key)
                return failing_s < self._timeout_s
            case OverloadError():
                if _splits(attempt, error):
                    endpoint.too_large(error, request, now)
                endpoint.overloaded(error, attempt.key, now)
                return failing_s < self._dispatcher.settings.timeouts.request_s
            case ServerLostError():
                return self._retries_lost(attempt, endpoint, error, failing_s, now)
            case DeadlineError() if endpoint.in_flight.overtaken(attempt):
                return self._retries_lost(attempt, endpoint, error, failing_s, now)
            case RequestTooLargeError() if request.rows > 1:
                endpoint.liveness.hear(now)
                endpoint.too_large(error, request, now)
                return True
            case RequestTooLargeError() | InferenceError():
                endpoint.liveness.hear(now)
                request.inference_failures += 1
                return request.inference_failures == 1
            case TokenExpiredError():
                endpoint.liveness.hear(now)
                endpoint.in_flight.limit(attempt.key).pause(now, self._dispatcher.rng)
                return failing_s < self._timeout_s
        return False

    def _retries_lost(
        self, attempt: Attempt, endpoint: Endpoint, error: SonicError, failing_s: float, now: float
    ) -> bool:
        request = attempt.slice
        endpoint.failed(error, now)
        self.models.doubt()
        if not getattr(error, "undelivered", False):
            request.losses += 1
            if request.losses >= SUSPECT_LOSSES:
                back_offs = request.losses - SUSPECT_LOSSES + 1
                request.retry_at = now + back_off_s(back_offs, self._dispatcher.rng)
        lost_since = self._dispatcher.lost_since(attempt.key, now)
        if lost_since is not None:
            return now - lost_since < self._timeout_s
        return request.retries < MAX_RETRIES or failing_s < self._timeout_s

    # What time and room allow

    def _advance(self, now: float) -> None:
        self.models.advance(now)
        for endpoint in self.endpoints:
            if endpoint.liveness.due_at(len(endpoint.in_flight)) <= now:
                endpoint.liveness.probe(now)
                self._instructions.append(e.Probe(endpoint.url))
            if endpoint.in_flight.late_at <= now:
                self._send_late_again(endpoint, now)
            endpoint.losses.tell(now)
            for channel in endpoint.in_flight.channels.take_renewals(now):
                self._instructions.append(e.Reconnect(endpoint.url, channel))
        self.models.validate_waiting(now)
        self._waiting.put_back_due(now)
        self._dispatcher.send_all(now)
        # They are in the order of the answers, not of their times: some are cancelled a bit late.
        while self._to_cancel and self._to_cancel[0][0] <= now:
            self._instructions.append(e.Cancel(self._to_cancel.popleft()[1]))
        self.models.fail_unroutable(now)
        self._instructions += [e.Close(url) for url in self.endpoints.remove_drained()]

    def _send_late_again(self, endpoint: Endpoint, now: float) -> None:
        """Send again, over another connection, what a server that hangs seems to have."""
        for attempt in endpoint.in_flight.take_overdue(endpoint.liveness.heard_at, now):
            if not attempt.slice.call.over:
                endpoint.breaker.spend()
                seconds = now - attempt.sent_at
                what = f"no response in {seconds:.3g} s, while the server answers others"
                self._send_again(attempt, ServerLostError(what, server=endpoint.url), now)


def _splits(attempt: Attempt, error: SonicError) -> bool:
    """Return whether a request may pass in parts that did not pass as a whole."""
    request = attempt.slice
    if request.whole or request.rows == 1:
        return False
    if isinstance(error, RouteTimeoutError):
        # Others' requests may be why it took long; then small ones take as long.
        return attempt.in_flight == 1 or request.splits < MAX_SPLITS
    return isinstance(error, RequestTooLargeError)
