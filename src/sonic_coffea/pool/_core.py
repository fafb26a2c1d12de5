"""The pool's core: a state machine that takes events and returns instructions.

It knows no clock, no thread and no connection: the time comes with the events, and its owner
carries out the instructions. So it is tested, and simulated, on virtual time. Its parts share its
state: they know models, send slices, and decide about retries.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING

from sonic_coffea.errors import ServerLostError, SonicError
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._channels import OLD_S
from sonic_coffea.pool._dispatch import Dispatcher
from sonic_coffea.pool._models import ServedModels
from sonic_coffea.pool._retry import RetryPolicy, splits
from sonic_coffea.pool._state import CoreState

if TYPE_CHECKING:
    from random import Random

    from sonic_coffea.pool._endpoint import Endpoint, EndpointReport, ServerState
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.pool._shares import Share

logger = logging.getLogger(__name__)


class PoolCore:
    """The state of a pool: waiting slices, attempts in flight, endpoints; and what follows."""

    def __init__(
        self,
        settings: Settings,
        rng: Random | None = None,
        *,
        memory_bytes: float | None = None,
    ) -> None:
        self._state = CoreState(settings, rng)
        self.endpoints = self._state.endpoints
        self._models = ServedModels(self._state)
        self._dispatcher = Dispatcher(self._state, memory_bytes)
        self._retries = RetryPolicy(self._state, self._models)
        self._to_cancel: deque[tuple[float, Attempt]] = deque()

    def handle(self, now: float, *events: e.Event) -> list[e.Instruction]:
        """Take events, or none if only time has passed, and return what is to be done."""
        for event in events:
            self._take(event, now)
        self._advance(now)
        instructions, self._state.instructions = self._state.instructions, []
        return instructions

    def wakes_at(self, now: float) -> float:
        """Return when time alone changes something; infinity if only an event does."""
        times = self._models.wakes_at()
        for x in self.endpoints:
            times += x.liveness.due_at(len(x.in_flight)), x.in_flight.late_at, x.losses.wakes_at()
        times.append(self._state.waiting.wakes_at)
        if self._to_cancel:
            times.append(self._to_cancel[0][0])
        waiting = self._state.waiting.models()
        # What is due already, and has not left, waits for a response.
        due = [self._state.fallback.due_at(key, now) for key in waiting]
        due += [self._state.joining.until(key, now) for key in waiting]
        if waiting:
            times += [x.in_flight.wakes_at(now) for x in self.endpoints]
            due += [x.breaker.retry_at for x in self.endpoints]
            due += [x.signatures.retry_at(key) for x in self.endpoints for key in waiting]
        if self._state.settings.retry.hedge_after_s is not None:
            due += [self._dispatcher.hedged_at(attempt, now) for attempt in self._state.attempts()]
        times += [at for at in due if at > now]
        return min(times, default=math.inf)

    def waiting(self) -> dict[ModelKey, int]:
        """Return how many slices of each model wait."""
        return self._state.waiting.counts()

    def shares(self) -> dict[ModelKey, Counter[Share]]:
        """Return how many slices of each model wait or are in flight, by share.

        Empty while there is only one share.
        """
        shares: defaultdict[ModelKey, Counter[Share]] = defaultdict(Counter)
        if self._state.waiting.shared:
            for request in itertools.chain(
                self._state.waiting, (a.slice for a in self._state.attempts())
            ):
                shares[request.key][request.call.share] += 1
        return shares

    def states(self, now: float) -> list[ServerState]:
        """Return what is known of each server."""
        return [endpoint.state(now) for endpoint in self.endpoints.active]

    def report(self) -> list[EndpointReport]:
        """Return what happened at each endpoint since the last report."""
        models = {key for endpoint in self.endpoints for key in endpoint.in_flight.models()}
        return [endpoint.report(models) for endpoint in self.endpoints.active]

    # Events

    def _take(self, event: e.Event, now: float) -> None:  # noqa: C901, PLR0912  a table
        match event:
            case e.Answered():
                self._answered(event, now)
            case e.Submitted(slices):
                for request in slices:
                    self._state.waiting.add(request, now)
            case e.Failed(attempt, error):
                self._lost(attempt, error, now)
            case e.Unsendable(attempt, error):
                self._unsendable(attempt, error)
            case e.CallEnded(call):
                for attempt in self._state.attempts():
                    if attempt.slice.call is call:
                        self._state.instructions.append(e.Cancel(attempt))
            case e.Probed(url, error):
                self._probed(url, error, now)
            case e.Validated():
                self._models.validated(event, now)
            case e.ContractRequested(request, anew):
                self._models.requested(request, now, anew=anew)
            case e.ContractWithdrawn(request):
                self._models.withdrawn(request)
            case e.ServersChanged(servers):
                self._state.servers = tuple(servers)
                self.endpoints.set_servers(self._state.servers, self._state.fallback.url)
            case e.QuotasReceived():
                self._granted(event, now)
            case e.FallbackStarted(url, error):
                self._fallback_started(url, error, now)
            case e.SchedulerJoined(starts_at, max_in_flight, quotas_within_s):
                self._models.starts_at = starts_at
                self._state.joining.join(max_in_flight, quotas_within_s)

    def _answered(self, event: e.Answered, now: float) -> None:
        attempt = event.attempt
        request, endpoint = attempt.slice, self.endpoints.get(attempt.url)
        if attempt.settled or endpoint is None:  # given up meanwhile; its rows are elsewhere
            return
        endpoint.answered(attempt, event.received_at - event.sent_at, now)
        self._models.answered(attempt.key, now)
        request.delivered = True
        self._dispatcher.settle(attempt)
        self._drop_attempts(request, now)
        self._state.instructions.append(e.Deliver(event))

    def _drop_attempts(self, request: RequestSlice, now: float) -> None:
        """End the other attempts of rows that are over: a late response changes nothing."""
        for other in list(request.attempts):
            self._dispatcher.settle(other)
            self._cancel(other, now)

    def _cancel(self, attempt: Attempt, now: float) -> None:
        """Cancel an attempt, at once or, if too many young ones were, when it is older."""
        endpoint = self.endpoints.get(attempt.url)
        old_at = attempt.begun_at + OLD_S
        if old_at <= now or endpoint is None or endpoint.in_flight.channels.resets(attempt.channel):
            self._state.instructions.append(e.Cancel(attempt))
        else:
            self._to_cancel.append((old_at, attempt))

    def _lost(self, attempt: Attempt, error: SonicError, now: float) -> None:
        """Decide what becomes of rows that did not come back."""
        request = attempt.slice
        if not self._dispatcher.settle(attempt) or request.delivered or request.call.over:
            return
        again = self._retries.again(attempt, error, now)
        # Overdue attempts are on a server that hangs, which nobody waits for.
        awaited = any(not other.overdue for other in request.attempts)
        if again and not awaited:
            self._send_again(attempt, error, now)
        elif again or awaited or request.queued:
            self._state.instructions.append(e.Count(attempt, error, retried=True))
        else:
            self._drop_attempts(request, now)
            self._state.give_up(request, attempt.url, error)

    def _send_again(self, attempt: Attempt, error: SonicError, now: float) -> None:
        """Queue rows once more, if they do not wait already, and count it."""
        request, endpoint = attempt.slice, self.endpoints.get(attempt.url)
        request.last_url = attempt.url
        if not request.queued:
            request.retries += 1
            if splits(attempt, error):
                self._dispatcher.split(request, now)
            else:
                self._state.waiting.put_back(request, now)
        if endpoint is not None:
            endpoint.losses.count(error, now)
        self._state.instructions.append(e.Count(attempt, error, retried=True))

    def _unsendable(self, attempt: Attempt, error: SonicError) -> None:
        request = attempt.slice
        if not self._dispatcher.settle(attempt) or request.call.over:
            return
        if request.delivered or request.attempts or request.queued:
            self._state.instructions.append(e.Count(attempt, error, retried=False))
        else:
            self._state.instructions.append(e.Fail(request, error))

    def _probed(self, url: str, error: SonicError | None, now: float) -> None:
        endpoint = self.endpoints.get(url)
        if endpoint is None:
            return
        if not endpoint.liveness.end(now, lives=error is None):
            return
        assert error is not None  # noqa: S101  silent endpoints have one
        endpoint.silent(error, now)
        for attempt in endpoint.in_flight.all():
            self._lost(attempt, error, now)
            self._state.instructions.append(e.Cancel(attempt))
        # A connection that the network has forgotten would stay silent.
        channels = range(len(endpoint.in_flight.channels))
        self._state.instructions += [e.Reconnect(url, channel) for channel in channels]

    def _granted(self, event: e.QuotasReceived, now: float) -> None:
        for endpoint in self.endpoints:
            if endpoint.url in event.ejected:
                endpoint.eject(now + event.lease_s, now)
            else:
                endpoint.breaker.readmit(now)
        self._state.joining.hear((key for _, key in event.quotas), event.lease_s, now)
        for (url, key), quota in event.quotas.items():
            if (target := self.endpoints.get(url)) is not None:
                target.in_flight.grant(key, quota, now)

    def _fallback_started(self, url: str | None, error: SonicError | None, now: float) -> None:
        if url is None:
            assert error is not None  # noqa: S101  the event says so
            logger.error("no fallback: %s", error)
            self._state.fallback.fail(error)
            return
        logger.warning("rows are scored by the fallback %s until a server is back", url)
        self._state.fallback.started(url, now)
        self.endpoints.set_servers(self._state.servers, url)

    # What time and room allow

    def _advance(self, now: float) -> None:
        self._models.advance(now)
        for endpoint in self.endpoints:
            self._attend(endpoint, now)
        self._models.validate_waiting(now)
        self._state.waiting.put_back_due(now)
        self._dispatcher.send_all(now)
        # They are in the order of the answers, not of their times: some are cancelled a bit late.
        while self._to_cancel and self._to_cancel[0][0] <= now:
            self._state.instructions.append(e.Cancel(self._to_cancel.popleft()[1]))
        self._models.fail_unroutable(now)
        self._state.instructions += [e.Close(url) for url in self.endpoints.remove_drained()]

    def _attend(self, endpoint: Endpoint, now: float) -> None:
        """Do what is due at an endpoint."""
        if endpoint.liveness.due_at(len(endpoint.in_flight)) <= now:
            endpoint.liveness.probe(now)
            self._state.instructions.append(e.Probe(endpoint.url))
        if endpoint.in_flight.late_at <= now:
            self._send_late_again(endpoint, now)
        endpoint.losses.tell(now)
        for channel in endpoint.in_flight.channels.take_renewals(now):
            self._state.instructions.append(e.Reconnect(endpoint.url, channel))

    def _send_late_again(self, endpoint: Endpoint, now: float) -> None:
        """Send again, over another connection, what a server that hangs seems to have."""
        for attempt in endpoint.in_flight.take_overdue(endpoint.liveness.heard_at, now):
            if not attempt.slice.call.over:
                endpoint.breaker.spend()
                seconds = now - attempt.sent_at
                what = f"no response in {seconds:.3g} s, while the server answers others"
                self._send_again(attempt, ServerLostError(what, server=endpoint.url), now)
