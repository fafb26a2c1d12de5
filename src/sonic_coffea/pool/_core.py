"""The pool's core: a state machine that takes events and returns instructions.

It has no clock, thread or connection: the time comes with the events, and the engine carries out
the instructions. So tests and simulations run it on virtual time. An event is a method of the core
with its arguments by name, ``partial(PoolCore.failed, attempt=..., error=...)``. This module sends
rows, and decides what becomes of those that fail; its base `ServedModels` finds models.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from sonic_coffea import errors
from sonic_coffea.errors import SonicError
from sonic_coffea.pool import _instructions as do
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._breaker import back_off_s
from sonic_coffea.pool._endpoint import Endpoint, ServerState, Telemetry
from sonic_coffea.pool._failures import Decision, classify
from sonic_coffea.pool._limits import Quota
from sonic_coffea.pool._models import ServedModels
from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
from sonic_coffea.pool._settings import Settings

logger = logging.getLogger(__name__)

Event = partial[None]
"""Anything that the core has to know: one of its methods, with the arguments."""


class PoolCore(ServedModels):
    """The state of a pool: waiting slices, attempts in flight, endpoints; and what follows."""

    def __init__(self, settings: Settings, rng: Random) -> None:
        super().__init__(settings, rng)
        self._rng = rng
        # Attempts of slices that have ended, and when they are to be cancelled.
        self._to_cancel: deque[tuple[float, Attempt]] = deque()
        self._max_in_flight_bytes = settings.in_flight_bytes(None)
        # Until its first quotas come, or until this time, a model may only have so many requests
        # in flight, over all servers. The first chunks of a thousand processes come at once, and
        # by the processes' own limits they would fill the servers' queues.
        self._max_without_quotas, self._quotas_within_s = math.inf, 0.0
        self._held_until: dict[ModelKey, float] = {}

    def handle(self, now: float, *events: Event) -> list[do.Instruction]:
        """Take events, or none if only time has passed, and return instructions."""
        self.now = now
        for event in events:
            event(self)
        self._advance()
        instructions, self._instructions = self._instructions, []
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
        for key in self.wanted():
            due += self.endpoints.fallback_due_at(key), self._held_until.get(key, self.now)
            if self._known[key].callers:
                due += self._known[key].late_at, self.starts_at
            due += [at for x in self.endpoints for at in x.wait_times(key)]
        return min([*times, *(at for at in due if at > self.now)], default=math.inf)

    def states(self, now: float) -> list[ServerState]:
        return [endpoint.state(now) for endpoint in self.endpoints.active]

    def telemetry(self) -> dict[tuple[str, ModelKey], Telemetry]:
        """Return what happened to the requests for each model at each endpoint since last time."""
        return {
            (endpoint.url, key): endpoint.telemetry(key, waiting)
            for key, waiting in self.waiting.counts().items()
            for endpoint in self.endpoints.active
            if key in endpoint.by_model or key in endpoint.contracts
        }

    # Calls

    def submitted(self, slices: Sequence[RequestSlice]) -> None:
        """Take the slices that a call has to send."""
        for request in slices:
            self.waiting.add(request, self.now)

    def call_ended(self, call: Any) -> None:
        """End all slices of a call that is over."""
        self.waiting.take_chosen(call.key, lambda request: request.call is call)
        for request in self.endpoints.in_flight():
            if request.call is call:
                self._end(request)

    # Which slices leave

    def assign(self) -> None:
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
            in_flight_bytes = self.endpoints.in_flight_bytes
            # A slice larger than the whole limit travels alone.
            if in_flight_bytes and in_flight_bytes + request.nbytes > self._max_in_flight_bytes:
                return
            if self._holds_back(request.key):
                continue
            endpoint = self.endpoints.choose(request, self.now)
            if endpoint is None:
                self._start_fallback(request.key)
                continue
            self.waiting.take(request)
            if (
                request.rows > 1
                and not request.whole
                and not endpoint.accepts_size(request, self.now)
            ):
                self._split(request)
            else:
                self._instructions.append(do.Send(endpoint.begin(request, self.now)))
            heads = self.waiting.heads()

    def _holds_back(self, key: ModelKey) -> bool:
        """Whether requests of a model wait for its first quotas."""
        if self._max_without_quotas == math.inf:
            return False
        until = self._held_until.setdefault(key, self.now + self._quotas_within_s)
        in_flight = sum(x.by_model[key] for x in self.endpoints)
        return self.now < until and in_flight >= self._max_without_quotas

    # Attempts and their outcomes

    def sent(self, attempt: Attempt, at: float) -> None:
        """Note when the rows of an attempt were packed, and left this process."""
        attempt.sent_at = at

    def answered(self, answer: do.Answer) -> None:
        """Take a response, and return it if it is the one that counts."""
        attempt = answer.attempt
        if not self._settle(attempt):  # its slice has ended
            return
        # A clock of 15 ms, as that of Windows, stands still meanwhile.
        rtt_s = max(answer.received_at - answer.sent_at, 1e-6)
        self.endpoints.by_url[attempt.url].answered(attempt, rtt_s, self.now)
        for other in attempt.slice.attempts:
            if other.late:
                self.endpoints.by_url[other.url].hedge_won(self.now)
        self.answered_at = self.now
        self._end(attempt.slice)
        self._instructions.append(answer)

    def failed(self, attempt: Attempt, error: SonicError, *, sent: bool = True) -> None:
        """Send rows again, or give them up, unless another attempt may still be answered.

        If the attempt was not `sent`, no other endpoint helps. An attempt that was answered fails,
        too, if its response does not fit the contract.
        """
        request = attempt.slice
        # The server of such a response may have another model.
        if isinstance(error, errors.ResponseError | errors.ContractError):
            self._forget(attempt.key)
        if not self._settle(attempt):  # its slice has ended
            return
        decision = self._decide(attempt, error) if sent else "fail"
        again = decision != "fail"
        # A late attempt is not waited for, as its server seems to hang.
        awaited = any(not other.late for other in request.attempts)
        # The servers of the attempts that are left seem to hang, and a copy could not be made.
        if not sent and request.attempts and not request.queued:
            request.retry_at = self.now + back_off_s(1, self._rng)
            self.waiting.put_back(request, self.now)
        if again and not awaited:
            self._send_again(attempt, error, split=decision == "split")
        elif again or awaited or request.queued:
            self._instructions.append(do.Count(attempt, error, retried=sent))
        else:
            self._mark_stale()  # it may have been refused by another model
            self._give_up(request, error.at(server=attempt.url) if sent else error)

    def _send_again(self, attempt: Attempt, error: SonicError, *, split: bool = False) -> None:
        """Queue rows once more, unless they wait already, and count the retry."""
        request = attempt.slice
        request.last_url = attempt.url
        if not request.queued:
            request.retries += 1
            if split:
                self._split(request)
            else:
                self.waiting.put_back(request, self.now)
        self.endpoints.by_url[attempt.url].retried(error, self.now)
        self._instructions.append(do.Count(attempt, error, retried=True))

    def _decide(self, attempt: Attempt, error: SonicError) -> Decision:
        """Take the error of an attempt, and return what becomes of its rows."""
        request, endpoint = attempt.slice, self.endpoints.by_url[attempt.url]
        request.first_failed_at = min(request.first_failed_at, self.now)
        failing_s = self.now - request.first_failed_at
        overtaken = endpoint.overtaken(attempt)
        decision, for_s = classify(error, attempt, self._settings, overtaken=overtaken)
        if decision == "lost":
            endpoint.failed(error, self.now)
            self._mark_stale()
            if not (isinstance(error, errors.ServerLostError) and error.undelivered):
                request.losses += 1
                self._back_off(request, request.losses)
            # This time goes on when coffea or dask run a chunk again.
            lost_since = self.endpoints.all_lost_since(attempt.key)
            if lost_since < math.inf and not self.endpoints.awaits_fallback(attempt.key):
                again = self.now - lost_since < for_s
            else:
                again = request.retries < tuning.MAX_RETRIES or failing_s < for_s
            return "retry" if again else "fail"
        endpoint.erred(attempt, error, self.now, too_large=decision == "split")
        match error:
            case errors.ModelNotFoundError() if endpoint.signatures[attempt.key].contract is None:
                self._forget(attempt.key)
            case errors.RequestTooLargeError() | errors.InferenceError() if decision == "retry":
                request.inference_failures += 1
            case errors.RequestTooLargeError():  # it may not be the size
                self._back_off(request, request.splits)
        return decision if failing_s < for_s else "fail"

    def _back_off(self, request: RequestSlice, failures: int) -> None:
        """Have rows wait that have failed too often to be sent again at once."""
        if failures >= tuning.MAX_RETRIES:
            request.retry_at = self.now + back_off_s(failures - tuning.MAX_RETRIES + 1, self._rng)

    # The end of attempts and slices

    def _settle(self, attempt: Attempt) -> bool:
        """End an attempt and make room for others; False if it had ended before."""
        if attempt not in attempt.slice.attempts:
            return False
        attempt.slice.attempts.remove(attempt)
        self.endpoints.by_url[attempt.url].settle(attempt)
        return True

    def _end(self, request: RequestSlice) -> None:
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
            if old_at <= self.now or channel.reset():
                self._instructions.append(do.Cancel(attempt))
            else:
                self._to_cancel.append((old_at, attempt))

    def _split(self, request: RequestSlice) -> None:
        """Queue a slice as two; answers to the whole come too late."""
        self._end(request)
        for part in request.halves():
            self.waiting.put_back(part, self.now)

    def _give_up(self, request: RequestSlice, error: SonicError) -> None:
        self._end(request)
        if isinstance(error, errors.RequestTooLargeError):
            error = error.because(f"a single row of {request.nbytes} bytes")
        if request.retries:
            error = error.because(f"tried {request.retries + 1} times")
        self._instructions.append(do.Fail(request, error))

    # Servers, the fallback and quotas

    def servers_changed(self, servers: Sequence[str]) -> None:
        """Take the servers that there are from now on."""
        self.endpoints.set_servers(servers)

    def probed(self, url: str, outcome: SonicError | None) -> None:
        """Take the outcome of a liveness probe: an error if the server does not live."""
        endpoint = self.endpoints.by_url.get(url)
        if endpoint is None or not endpoint.probed(outcome, self.now) or outcome is None:
            return
        for attempt in list(endpoint.attempts):
            self.failed(attempt, outcome)
            self._instructions.append(do.Cancel(attempt))
        # A connection that the network dropped would stay silent.
        self._instructions += [do.Reconnect(url, n) for n in range(len(endpoint.channels))]

    def scheduler_joined(
        self, starts_at: float, max_in_flight: int, quotas_within_s: float
    ) -> None:
        """Take what the scheduler says of the start.

        Before ``starts_at``, no server is contacted. Until a model's quotas come, within
        ``quotas_within_s``, at most ``max_in_flight`` of its requests may be in flight.
        """
        self.starts_at = starts_at
        self._max_without_quotas, self._quotas_within_s = max_in_flight, quotas_within_s

    def quotas_received(self, quotas: Mapping[tuple[str, ModelKey], Quota], lease_s: float) -> None:
        """Take the quotas that the scheduler allocates, for the length of a lease."""
        # A scheduler that is heard of may have quotas for the other models in another lease.
        self._quotas_within_s = max(self._quotas_within_s, lease_s)
        for key, until in self._held_until.items():
            if until > -math.inf:
                self._held_until[key] = self.now + self._quotas_within_s
        for (url, key), quota in quotas.items():
            self._held_until[key] = -math.inf
            if (endpoint := self.endpoints.by_url.get(url)) is not None:
                quota.begin(endpoint.quotas[key], self.now, lease_s)
                endpoint.quotas[key] = quota

    # Time

    def _advance(self) -> None:
        for endpoint in self.endpoints:
            if endpoint.probe_at <= self.now:
                endpoint.probed_at = self.now
                self._instructions.append(do.Probe(endpoint.url))
            if endpoint.late_at <= self.now:
                self._hedge_late(endpoint)
            due = [number for number, x in enumerate(endpoint.channels) if x.renew(self.now)]
            self._instructions += [do.Reconnect(endpoint.url, number) for number in due]
        self.waiting.put_back_due(self.now)
        self._ask_servers()
        self.assign()
        # They are in the order of the answers, so some are cancelled a little late.
        while self._to_cancel and self._to_cancel[0][0] <= self.now:
            self._instructions.append(do.Cancel(self._to_cancel.popleft()[1]))
        for url in [x.url for x in self.endpoints if x.draining and not x.attempts]:
            del self.endpoints.by_url[url]
            self._instructions.append(do.Close(url))

    def _hedge_late(self, endpoint: Endpoint) -> None:
        """Send late requests again, elsewhere or over another connection."""
        for attempt in endpoint.take_late(self.now):
            failing_s = self.now - attempt.slice.first_failed_at
            if failing_s >= self._settings.retry_timeout_s:
                continue  # else rows of a server that hangs, but lives, would never fail
            endpoint.breaker.spend()
            seconds = self.now - attempt.sent_at
            what = f"no response in {seconds:.3g} s, while others are answered"
            self._send_again(attempt, errors.ServerLostError(what, server=endpoint.url))
