"""The pool's core: a state machine that takes events and returns instructions.

It has no clock, thread or connection: the time comes with the events, and the engine carries out
the instructions. So tests and simulations run it on virtual time. This module decides what
becomes of rows that fail; its base, `Dispatcher`, sends them, and `ServedModels` finds models.
"""

from __future__ import annotations

import logging
import math
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
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._breaker import back_off_s
from sonic_coffea.pool._dispatch import Dispatcher
from sonic_coffea.pool._failures import Decision, classify
from sonic_coffea.pool._models import ServedModels

if TYPE_CHECKING:
    from sonic_coffea.pool._endpoint import Endpoint, ServerState, Telemetry
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.pool._settings import Settings

logger = logging.getLogger(__name__)


class PoolCore(Dispatcher):
    """The state of a pool: waiting slices, attempts in flight, endpoints; and what follows."""

    def __init__(
        self, settings: Settings, rng: Random | None = None, memory_bytes: float | None = None
    ) -> None:
        super().__init__(settings, rng or Random(), memory_bytes)
        self.models = ServedModels(self)
        self._now = -math.inf  # the time of the last turn

    def handle(self, now: float, *events: e.Event) -> list[e.Instruction]:
        """Take events, or none if only time has passed, and return instructions."""
        self._now = now
        for event in events:
            self._take(event, now)
        self._advance(now)
        instructions = self.instructions.copy()
        self.instructions.clear()
        return instructions

    def wakes_at(self) -> float:
        """Return when time alone changes something; infinity if only an event does.

        A time that has passed since the last turn is returned, too.
        """
        times = [at for x in self.endpoints for at in (x.probe_at, x.late_at)]
        times.append(self.waiting.wakes_at)
        if self._to_cancel:
            times.append(self._to_cancel[0][0])
        # What was due at the last turn waits for a response, which makes room.
        due: list[float] = []
        for key in self.models.wanted():
            due += self.endpoints.fallback_due_at(key), self._held_until.get(key, self._now)
            due += self.models.wait_times(key)
            due += [at for x in self.endpoints for at in x.wait_times(key)]
        return min([*times, *(at for at in due if at > self._now)], default=math.inf)

    def states(self, now: float) -> list[ServerState]:
        return [endpoint.state(now) for endpoint in self.endpoints.active]

    def telemetry(self) -> dict[tuple[str, ModelKey], Telemetry]:
        """Return what happened to the requests for each model at each endpoint since last time."""
        counts = self.waiting.counts()
        return {
            (endpoint.url, key): telemetry
            for endpoint in self.endpoints.active
            for key, telemetry in endpoint.telemetry(counts).items()
        }

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
            case e.ContractRequested():
                self.models.requested(event, now)
            case e.ContractWithdrawn():
                self.models.withdrawn(event)
            case e.ResponseRejected(key):
                self.models.forget(key)
            case e.ServersChanged(servers):
                self.endpoints.set_servers(servers)
            case e.FallbackStarted(url, error):
                self._fallback_started(url, error, now)
            case e.QuotasReceived():
                self._receive_quotas(event, now)
            case e.SchedulerJoined(starts_at, max_in_flight, quotas_within_s):
                self.models.starts_at = starts_at
                self._max_without_quotas = max_in_flight
                self._quotas_within_s = quotas_within_s

    # Outcomes of attempts

    def _answered(self, event: e.Answered, now: float) -> None:
        attempt = event.attempt
        if not self._settle(attempt):  # its slice has ended
            return
        # A clock of 15 ms, as that of Windows, stands still meanwhile.
        rtt_s = max(event.received_at - event.sent_at, 1e-6)
        self.endpoints.by_url[attempt.url].answered(attempt, rtt_s, now)
        for other in attempt.slice.attempts:
            if other.late:
                self.endpoints.by_url[other.url].hedge_won(now)
        self.models.answered_at = now
        self._end(attempt.slice, now)
        self.instructions.append(event)

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
            self.models.mark_stale()  # it may have been refused by another model
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

    def _decide(self, attempt: Attempt, error: SonicError, now: float) -> Decision:
        """Take the error of an attempt, and return what becomes of its rows."""
        request, endpoint = attempt.slice, self.endpoints.by_url[attempt.url]
        if request.first_failed_at is None:
            request.first_failed_at = now
        failing_s = now - request.first_failed_at
        overtaken = endpoint.overtaken(attempt)
        decision, for_s = classify(error, attempt, self.settings, overtaken=overtaken)
        if decision is Decision.LOST:
            endpoint.failed(error, now)
            self.models.mark_stale()
            if not getattr(error, "undelivered", False):
                request.losses += 1
                self._back_off(request, request.losses, now)
            # This time goes on when coffea or dask run a chunk again.
            lost_since = self.endpoints.all_lost_since(attempt.key)
            if lost_since is not None and not self.endpoints.awaits_fallback(attempt.key):
                again = now - lost_since < for_s
            else:
                again = request.retries < tuning.MAX_RETRIES or failing_s < for_s
            return Decision.RETRY if again else Decision.FAIL
        endpoint.erred(attempt, error, now, too_large=decision is Decision.SPLIT)
        match error:
            case ModelNotFoundError() if endpoint.signatures[attempt.key].contract is None:
                self.models.forget(attempt.key)
            case RequestTooLargeError() | InferenceError() if decision is Decision.RETRY:
                request.inference_failures += 1
            case RequestTooLargeError():  # it may not be the size
                self._back_off(request, request.splits, now)
        return decision if failing_s < for_s else Decision.FAIL

    def _back_off(self, request: RequestSlice, failures: int, now: float) -> None:
        """Have rows wait that have failed too often to be sent again at once."""
        if failures >= tuning.MAX_RETRIES:
            request.retry_at = now + back_off_s(failures - tuning.MAX_RETRIES + 1, self.rng)

    # Servers, the fallback and quotas

    def _probed(self, url: str, error: SonicError | None, now: float) -> None:
        endpoint = self.endpoints.by_url.get(url)
        if endpoint is None or not endpoint.probed(error, now) or error is None:
            return
        for attempt in list(endpoint.attempts):
            self._failed(attempt, error, now, sent=True)
            self.instructions.append(e.Cancel(attempt))
        # A connection that the network dropped would stay silent.
        self.instructions += [e.Reconnect(url, n) for n in range(len(endpoint.channels))]

    def _fallback_started(self, url: str | None, error: SonicError | None, now: float) -> None:
        if url is None:
            logger.error("no fallback: %s", error)
            self.endpoints.refuse_fallback()
        else:
            logger.warning("rows are scored by the fallback %s until a server is back", url)
            self.endpoints.fallback_started(url, now)

    def _receive_quotas(self, event: e.QuotasReceived, now: float) -> None:
        # A scheduler that is heard of may have quotas for the other models in another lease.
        self._quotas_within_s = max(self._quotas_within_s, event.lease_s)
        for key, until in self._held_until.items():
            if until > -math.inf:
                self._held_until[key] = now + self._quotas_within_s
        for (url, key), quota in event.quotas.items():
            self._held_until[key] = -math.inf
            if (endpoint := self.endpoints.by_url.get(url)) is not None:
                endpoint.set_quota(key, quota, now, event.lease_s)

    # Time

    def _advance(self, now: float) -> None:
        for endpoint in self.endpoints:
            if endpoint.probe_at <= now:
                endpoint.start_probe(now)
                self.instructions.append(e.Probe(endpoint.url))
            if endpoint.late_at <= now:
                self._hedge_late(endpoint, now)
            due = [number for number, x in enumerate(endpoint.channels) if x.renew(now)]
            self.instructions += [e.Reconnect(endpoint.url, number) for number in due]
        self.waiting.put_back_due(now)
        self.models.advance(now)
        self.assign(now)
        # They are in the order of the answers, so some are cancelled a little late.
        while self._to_cancel and self._to_cancel[0][0] <= now:
            self.instructions.append(e.Cancel(self._to_cancel.popleft()[1]))
        self.instructions += [e.Close(url) for url in self.endpoints.remove_drained()]

    def _hedge_late(self, endpoint: Endpoint, now: float) -> None:
        """Send late requests again, elsewhere or over another connection."""
        for attempt in endpoint.take_late(now):
            endpoint.breaker.spend()
            seconds = now - attempt.sent_at
            what = f"no response in {seconds:.3g} s, while others are answered"
            self._send_again(attempt, ServerLostError(what, server=endpoint.url), now)
