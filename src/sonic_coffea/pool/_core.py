"""The pool's core: a state machine that takes events and returns instructions.

It knows no clock, no thread and no connection: the time comes with the events, and its owner
carries out the instructions. So it is tested, and simulated, on virtual time.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, defaultdict, deque
from random import Random
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    CancelledError,
    ContractError,
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
from sonic_coffea.pool._breaker import Circuit, back_off_s
from sonic_coffea.pool._channels import OLD_S, SILENT_S
from sonic_coffea.pool._discovery import OTHERS_S, Discovery
from sonic_coffea.pool._endpoint import EndpointRegistry
from sonic_coffea.pool._fallback import FallbackPolicy
from sonic_coffea.pool._signature import FRESH_S, QUIET_S, VALID_S, merge, serves
from sonic_coffea.pool._waiting import WaitingSlices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sonic_coffea.pool._endpoint import Endpoint, EndpointReport, ServerState
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.pool._shares import Share
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

# Rows that servers lose while they answer other rows may be killing the servers. If each second
# server is dead, one request of 16 is lost four times by chance.
SUSPECT_LOSSES = MAX_RETRIES = 4
# Rows that hung this often may be sent twice at a time.
TWIN_FROM = 2
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
        self._settings = settings
        self._max_in_flight_bytes = settings.limits.in_flight_bytes(memory_bytes)
        self._servers = settings.servers
        self._rng = rng or Random()
        self.endpoints = EndpointRegistry(settings, self._rng)
        self._fallback = FallbackPolicy(settings, self.endpoints)
        self._waiting = WaitingSlices()
        self._to_cancel: deque[tuple[float, Attempt]] = deque()
        self._in_flight_bytes = 0
        self._contracts: dict[ModelKey, Contract] = {}
        # When servers have said so, and for how long it is taken for true.
        self._said: dict[ModelKey, tuple[float, float]] = {}
        self._answered_at: dict[ModelKey, float] = {}
        self._seen: set[ModelKey] = set()
        self._discoveries: dict[ModelKey, Discovery] = {}
        self._starts_at = -math.inf
        self._not_compared: set[str] = set()
        self._instructions: list[e.Instruction] = []
        self.endpoints.set_servers(self._servers, None)

    def handle(self, now: float, *events: e.Event) -> list[e.Instruction]:
        """Take events, or none if only time has passed, and return what is to be done."""
        for event in events:
            self._take(event, now)
        self._advance(now)
        instructions, self._instructions = self._instructions, []
        return instructions

    def wakes_at(self, now: float) -> float:
        """Return when time alone changes something; infinity if only an event does."""
        times = [d.wakes_at for d in self._discoveries.values()]
        for x in self.endpoints:
            times += x.liveness.due_at(len(x.in_flight)), x.in_flight.late_at, x.losses.wakes_at()
        times.append(self._waiting.wakes_at)
        if self._to_cancel:
            times.append(self._to_cancel[0][0])
        waiting = self._waiting.models()
        # What is due already, and does not leave, waits for a response.
        due = [self._fallback.due_at(key, now) for key in waiting]
        if waiting:
            times += [x.in_flight.wakes_at(now) for x in self.endpoints]
            due += [x.breaker.retry_at for x in self.endpoints]
            due += [x.signatures.retry_at(key) for x in self.endpoints for key in waiting]
        if self._settings.retry.hedge_after_s is not None:
            due += [self._hedged_at(attempt) for attempt in self._attempts()]
        times += [at for at in due if at > now]
        return min(times, default=math.inf)

    def waiting(self) -> dict[ModelKey, int]:
        """Return how many slices of each model wait."""
        return self._waiting.counts()

    def shares(self) -> dict[ModelKey, Counter[Share]]:
        """Return how many slices of each model wait or are in flight, by share.

        Nothing as long as there is but one share.
        """
        shares: defaultdict[ModelKey, Counter[Share]] = defaultdict(Counter)
        if self._waiting.shared:
            for request in itertools.chain(self._waiting, (a.slice for a in self._attempts())):
                shares[request.key][request.call.share] += 1
        return shares

    def states(self, now: float) -> list[ServerState]:
        """Return what is known of each server."""
        return [endpoint.state(now) for endpoint in self.endpoints.active]

    def report(self) -> list[EndpointReport]:
        """Return what happened at each endpoint since the last report."""
        return [endpoint.report() for endpoint in self.endpoints.active]

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
                for attempt in self._attempts():
                    if attempt.slice.call is call:
                        self._instructions.append(e.Cancel(attempt))
            case e.Probed(url, error):
                self._probed(url, error, now)
            case e.Validated():
                self._validated(event, now)
            case e.ContractRequested(request, anew):
                self._requested(request, now, anew=anew)
            case e.ContractWithdrawn(request):
                self._withdrawn(request)
            case e.ServersChanged(servers):
                self._servers = tuple(servers)
                self.endpoints.set_servers(self._servers, self._fallback.url)
            case e.QuotasReceived():
                self._granted(event, now)
            case e.FallbackStarted(url, error):
                self._fallback_started(url, error, now)
            case e.StartDelayed(until):
                self._starts_at = until

    def _answered(self, event: e.Answered, now: float) -> None:
        attempt = event.attempt
        request, endpoint = attempt.slice, self.endpoints.get(attempt.url)
        if attempt.settled or endpoint is None:  # given up meanwhile; its rows are elsewhere
            return
        endpoint.answered(attempt, event.received_at - event.sent_at, now)
        self._answered_at[attempt.key] = now
        request.delivered = True
        for other in list(request.attempts):
            self._settle(other)
            if other is not attempt:
                self._cancel(other, now)
        self._instructions.append(e.Deliver(event))

    def _cancel(self, attempt: Attempt, now: float) -> None:
        """Cancel what is answered elsewhere, but not too many that are young."""
        endpoint = self.endpoints.get(attempt.url)
        old_at = attempt.begun_at + OLD_S
        if old_at <= now or endpoint is None or endpoint.in_flight.channels.resets(attempt.channel):
            self._instructions.append(e.Cancel(attempt))
        else:
            self._to_cancel.append((old_at, attempt))

    def _lost(self, attempt: Attempt, error: SonicError, now: float) -> None:
        """Decide what becomes of rows that did not come back."""
        request = attempt.slice
        if not self._settle(attempt) or request.delivered or request.call.over:
            return
        again = self._retries(attempt, error, now)
        # A server that hangs has the others, and is not waited for.
        awaited = any(not other.overdue for other in request.attempts)
        if again and not awaited:
            self._send_again(attempt, error, now)
        elif again or awaited or request.queued:
            self._instructions.append(e.Count(attempt, error, retried=True))
        else:
            self._give_up(request, attempt.url, error)

    def _send_again(self, attempt: Attempt, error: SonicError, now: float) -> None:
        """Queue rows once more, if they do not wait already, and count it."""
        request, endpoint = attempt.slice, self.endpoints.get(attempt.url)
        request.last_url = attempt.url
        if not request.queued:
            request.retries += 1
            if self._splits(attempt, error):
                self._split(request, now)
            else:
                self._waiting.put_back(request, now)
        if endpoint is not None:
            endpoint.losses.count(error, now)
        self._instructions.append(e.Count(attempt, error, retried=True))

    @staticmethod
    def _splits(attempt: Attempt, error: SonicError) -> bool:
        """Whether a request may pass in parts that did not pass as a whole."""
        request = attempt.slice
        if request.whole:
            return False
        if isinstance(error, RouteTimeoutError):
            # Others' requests may be why it took long; then small ones take as long.
            alone = attempt.in_flight == 1
            return request.rows > 1 and (alone or request.splits < MAX_SPLITS)
        return request.rows > 1 and isinstance(error, RequestTooLargeError)

    def _split(self, request: RequestSlice, now: float) -> RequestSlice:
        """Queue a slice as two, and return the first of them."""
        parts = request.halves()
        self._instructions.append(e.Split(request, parts))
        for part in parts:
            self._waiting.put_back(part, now)
        return parts[0]

    def _unsendable(self, attempt: Attempt, error: SonicError) -> None:
        request = attempt.slice
        if not self._settle(attempt) or request.call.over:
            return
        if request.delivered or request.attempts or request.queued:
            self._instructions.append(e.Count(attempt, error, retried=False))
        else:
            self._instructions.append(e.Fail(request, error))

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
            self._instructions.append(e.Cancel(attempt))
        # A connection that the network has forgotten would stay silent.
        channels = range(len(endpoint.in_flight.channels))
        self._instructions += [e.Reconnect(url, channel) for channel in channels]

    def _validated(self, event: e.Validated, now: float) -> None:
        key, outcome = event.key, event.outcome
        known = self._contracts.get(key)
        if (discovery := self._discoveries.get(key)) is not None:
            discovery.take(event.url, outcome, now)
            if known is not None and event.url == self._fallback.url:
                # It is to have the model of the servers, which may be gone.
                discovery.contracts.pop(event.url, None)
            else:
                known = None  # compared when the others have answered, too
        endpoint = self.endpoints.get(event.url)
        if endpoint is None:
            return
        # A server that answers late must have the model that is known by now.
        expected = endpoint.signatures.validating.pop(key, None) or known
        if not isinstance(outcome, SonicError):
            endpoint.in_flight.channels.round_trip_s = event.round_trip_s
            self._seen.add(key)
            endpoint.liveness.hear(now)
            if expected is None or serves(outcome, expected):
                endpoint.signatures.accept(key, now)
                self._compare_files(endpoint, outcome, expected)
            else:
                self._reject(endpoint, key, outcome, expected, now)
        elif isinstance(outcome, ModelNotFoundError):
            endpoint.liveness.hear(now)
            endpoint.signatures.lack(key, now)
            self._give_up_if_hopeless(key, event.url, outcome, now)
        elif isinstance(outcome, OverloadError):
            endpoint.liveness.hear(now)
            endpoint.in_flight.limit(key).pause(now, self._rng, outcome.retry_after_s)
        elif not isinstance(outcome, CancelledError):  # as its connection was made anew
            if isinstance(outcome, DeadlineError):
                endpoint.in_flight.channels.silent(0, now - SILENT_S)
            endpoint.failed(outcome, now)
            self._doubt()
            self._give_up_if_hopeless(key, event.url, outcome, now)

    def _requested(self, request: e.ContractRequest, now: float, *, anew: bool) -> None:
        key = request.key
        if anew:
            self._forget(key)
        if (known := self._contracts.get(key)) is not None and not self._stale(key, now):
            self._instructions.append(e.Resolve(request, known))
            return
        if key not in self._discoveries:
            self._discoveries[key] = Discovery(key, max(now, self._starts_at))
        self._discoveries[key].requests.append(request)

    def _withdrawn(self, request: e.ContractRequest) -> None:
        discovery = self._discoveries.get(request.key)
        if discovery is None or request not in discovery.requests:  # it has just been resolved
            return
        discovery.requests.remove(request)
        error = discovery.too_late(request.timeout_s or 0.0)
        self._instructions.append(e.Resolve(request, error))
        if not discovery.requests:
            del self._discoveries[request.key]

    def _granted(self, event: e.QuotasReceived, now: float) -> None:
        for endpoint in self.endpoints:
            if endpoint.url in event.ejected:
                endpoint.eject(now + event.lease_s, now)
            else:
                endpoint.breaker.readmit(now)
        for (url, key), quota in event.quotas.items():
            if (target := self.endpoints.get(url)) is not None:
                target.in_flight.grant(key, quota, now)

    def _fallback_started(self, url: str | None, error: SonicError | None, now: float) -> None:
        if url is None:
            assert error is not None  # noqa: S101  the event says so
            logger.error("no fallback: %s", error)
            self._fallback.fail(error)
            return
        logger.warning("rows are scored by the fallback %s until a server is back", url)
        self._fallback.started(url, now)
        self.endpoints.set_servers(self._servers, url)

    # What time and room allow

    def _advance(self, now: float) -> None:
        for discovery in list(self._discoveries.values()):
            self._go_on(discovery, now)
        for endpoint in self.endpoints:
            self._attend(endpoint, now)
        self._validate_waiting(now)
        self._waiting.put_back_due(now)
        begun = []
        while (attempt := self._next(now) or self._hedge(now)) is not None:
            self._send(attempt)
            begun.append(attempt)
        for attempt in begun:
            if (twin := self._twin(attempt, now)) is not None:
                self._send(twin)
        # They are in the order in which they were answered, so that some end a little late.
        while self._to_cancel and self._to_cancel[0][0] <= now:
            self._instructions.append(e.Cancel(self._to_cancel.popleft()[1]))
        self._fail_unroutable(now)
        self._instructions += [e.Close(url) for url in self.endpoints.remove_drained()]

    def _attend(self, endpoint: Endpoint, now: float) -> None:
        """Do what is due at an endpoint."""
        if endpoint.liveness.due_at(len(endpoint.in_flight)) <= now:
            endpoint.liveness.probe(now)
            self._instructions.append(e.Probe(endpoint.url))
        if endpoint.in_flight.late_at <= now:
            self._send_late_again(endpoint, now)
        endpoint.losses.tell(now)
        for channel in endpoint.in_flight.channels.take_renewals(now):
            self._instructions.append(e.Reconnect(endpoint.url, channel))

    def _send_late_again(self, endpoint: Endpoint, now: float) -> None:
        """Send again, over another connection, what a server that hangs seems to have."""
        for attempt in endpoint.in_flight.take_overdue(endpoint.liveness.heard_at, now):
            if not attempt.slice.call.over:
                endpoint.breaker.spend()
                seconds = now - attempt.begun_at
                what = f"no response in {seconds:.3g} s, while the server answers others"
                self._send_again(attempt, ServerLostError(what, server=endpoint.url), now)

    def _validate_waiting(self, now: float) -> None:
        """Ask servers for the models of what waits, if they have not said yet."""
        for key in self._waiting.models():
            for endpoint in self.endpoints:
                passes = endpoint.breaker.circuit(now) is not Circuit.OPEN
                waits = not passes or endpoint.draining or endpoint.in_flight.paused(key, now)
                if not waits and endpoint.signatures.due(key, now):
                    self._validate(endpoint, key)

    def _validate(self, endpoint: Endpoint, key: ModelKey) -> None:
        request = self._waiting.first(key)
        endpoint.signatures.validating[key] = None if request is None else request.call.contract
        self._instructions.append(e.Validate(endpoint.url, key))

    def _next(self, now: float) -> Attempt | None:
        """Take the next slice that may be sent now, for an endpoint that has room for it."""
        for head in self._waiting.heads():
            request = head
            if not self._fits(request):
                return None
            endpoint = self.endpoints.choose(request, now, but=self._failed_on(request, now))
            while endpoint is not None:
                self._waiting.take(request)
                if endpoint.takes(request, now) or request.rows == 1 or request.attempts:
                    self._waiting.leave(request)
                    return endpoint.begin(request, now)
                request = self._split(request, now)
            if self._fallback.due_at(head.key, now) <= now:
                self._start_fallback()
        return None

    def _failed_on(self, request: RequestSlice, now: float) -> list[str]:
        """Return the server that failed on these rows, if there is another one for them."""
        url = request.last_url
        if request.inference_failures == 0 or url is None:
            return []
        others = (x for x in self.endpoints if x.url != url and x.usable(request.key, now))
        return [url] if any(others) else []

    def _send(self, attempt: Attempt) -> None:
        self._in_flight_bytes += attempt.slice.nbytes
        self._instructions.append(e.Send(attempt))

    def _twin(self, attempt: Attempt, now: float) -> Attempt | None:
        """Send rows that hung more than once twice at a time, if nothing else waits.

        A balancer that takes turns leads one of the two elsewhere, and no other rows pay for it.
        """
        request, endpoint = attempt.slice, self.endpoints.get(attempt.url)
        hung = sum(other.overdue for other in request.attempts)
        if (
            hung < TWIN_FROM
            or self._waiting.first(request.key) is not None
            or not self._fits(request)
        ):
            return None
        if endpoint is None or endpoint.room(request.key, now) <= 0:
            return None
        endpoint.breaker.spend()
        return endpoint.begin(request, now, attempt.channel)

    def _hedge(self, now: float) -> Attempt | None:
        """Send a request that takes long to another endpoint, too, or over another connection."""
        if self._settings.retry.hedge_after_s is None:
            return None
        for attempt in self._attempts():
            if self._hedged_at(attempt) <= now and self._fits(attempt.slice):
                request = attempt.slice
                other = self.endpoints.choose(request, now, but=[attempt.url])
                other = other or self.endpoints.choose(request, now)
                if other is not None:
                    return other.begin(request, now)
        return None

    def _hedged_at(self, attempt: Attempt) -> float:
        after_s = self._settings.retry.hedge_after_s
        request = attempt.slice
        if after_s is None or len(request.attempts) > 1 or request.queued or request.call.over:
            return math.inf
        # Not again at once, if the other attempt has failed.
        return attempt.slice.begun_at + after_s

    def _fits(self, request: RequestSlice) -> bool:
        # A slice larger than the whole limit travels alone.
        total_bytes = self._in_flight_bytes + request.nbytes
        return self._in_flight_bytes == 0 or total_bytes <= self._max_in_flight_bytes

    def _fail_unroutable(self, now: float) -> None:
        """Give up what no endpoint can take any more."""
        for key in self._waiting.models():
            if not self._may_be_served(key, now):
                gone = ModelNotFoundError(f"no server has model {key.name!r} any more")
                error = self._unroutable(key, now, gone)
                self._instructions += [
                    e.Fail(request, error) for request in self._waiting.take_all(key)
                ]

    def _may_be_served(self, key: ModelKey, now: float) -> bool:
        there = self.endpoints.that_may_have(key, now)
        return bool(there) or self._fallback.awaited(key, now)

    def _unroutable(self, key: ModelKey, now: float, error: SonicError) -> SonicError:
        """Return why no endpoint can take a model: another model counts more than none."""
        reasons = [x.signatures.rejection(key, now) for x in self.endpoints.active]
        return next((reason for reason in reasons if reason is not None), error)

    # Discovery

    def _go_on(self, discovery: Discovery, now: float) -> None:
        """Begin a round, or draw the conclusions of one."""
        key = discovery.key
        if discovery.next_round_at is not None:
            if self._fallback.starting:
                discovery.next_round_at = math.inf
            elif self._fallback.due_at(key, now) <= now:
                self._start_fallback()
                discovery.next_round_at = math.inf
            elif discovery.next_round_at <= now or discovery.next_round_at == math.inf:
                self._begin_round(discovery, now)
        elif discovery.complete(now):
            if discovery.contracts:
                self._conclude(discovery, now)
            else:
                self._ask_again(discovery, now)

    def _begin_round(self, discovery: Discovery, now: float) -> None:
        endpoints = self.endpoints.active
        # What is known already serves, if nobody answers now.
        until = now + OTHERS_S if discovery.key in self._contracts else math.inf
        discovery.begin_round((endpoint.url for endpoint in endpoints), until)
        for endpoint in endpoints:
            if discovery.key not in endpoint.signatures.validating:
                self._validate(endpoint, discovery.key)

    def _conclude(self, discovery: Discovery, now: float) -> None:
        key = discovery.key
        for url in discovery.awaited:
            logger.warning("%s has not said in time what model %r is", url, key.name)
        known, contracts = self._contracts.get(key), discovery.contracts
        as_before = {u: c for u, c in contracts.items() if known is not None and serves(c, known)}
        try:
            contract = merge(as_before or contracts)
        except ContractError as error:
            self._resolve(discovery, error)
            return
        if known is not None and as_before:
            for url in contracts.keys() - as_before.keys():
                if (endpoint := self.endpoints.get(url)) is not None:
                    self._reject(endpoint, key, contracts[url], known, now)
        self._contracts[key] = contract
        self._said[key] = now, FRESH_S
        self._instructions.append(e.Publish(key, contract))
        for url in as_before or contracts:
            if (endpoint := self.endpoints.get(url)) is not None:
                endpoint.signatures.accept(key, now)
        # What was packed for another model, which these servers have replaced, cannot be sent.
        for request in self._waiting.take_all(key):
            if serves(contract, request.call.contract):
                self._waiting.put_back(request, now)
            else:
                changed = ContractError(f"the servers' model {key.name!r} has changed meanwhile")
                self._instructions.append(e.Fail(request, changed))
        self._resolve(discovery, contract)

    def _ask_again(self, discovery: Discovery, now: float) -> None:
        """Plan another round, unless no server can have the model."""
        key = discovery.key
        known, failures = self._contracts.get(key), discovery.failures
        lost = bool(failures) and all(isinstance(error, ServerLostError) for error in failures)
        # Servers that are all lost may come back with another model, and a fallback may not.
        if known is not None and (self._settings.fallback.source is not None or not lost):
            self._resolve(discovery, known)
            return
        if discovery.failing_since is None:
            discovery.failing_since = now
        since = self.endpoints.all_lost_since(key, now)
        if since is None:
            since = discovery.failing_since
        retries = [
            max(
                x.breaker.retry_at,
                x.in_flight.limit(key).paused_until,
                x.signatures.retry_at(key),
            )
            for x in self.endpoints.that_may_have(key, now)
        ]
        # A model that was there is being loaded, or its server was started anew.
        transient = discovery.transient or key in self._seen
        due_at = self._fallback.due_at(key, now)
        if due_at <= now or (due_at < math.inf and not transient):
            self._start_fallback()
        if self._fallback.starting:
            discovery.next_round_at = math.inf
            return
        expired = now - since >= self._settings.retry.timeout_s
        if due_at == math.inf and (expired or not transient):
            self._resolve(discovery, discovery.nobody_has_it(self._servers))
            return
        discovery.next_round_at = min([*retries, due_at], default=now)

    def _resolve(self, discovery: Discovery, outcome: Contract | SonicError) -> None:
        del self._discoveries[discovery.key]
        self._instructions += [e.Resolve(request, outcome) for request in discovery.requests]

    def _forget(self, key: ModelKey) -> None:
        self._said.pop(key, None)
        if self._contracts.pop(key, None) is not None:
            self._instructions.append(e.Publish(key, None))

    def _stale(self, key: ModelKey, now: float) -> bool:
        """Whether servers are asked again what a model is, before it is used."""
        said_at, true_for_s = self._said[key]
        used = self._waiting.first(key) is not None or any(
            attempt.key == key for attempt in self._attempts()
        )
        used = used or now - self._answered_at.get(key, -math.inf) < QUIET_S
        return now - said_at >= (true_for_s if used else QUIET_S)

    def _doubt(self) -> None:
        """Ask again sooner, as the server that was lost may come back with other models."""
        for key, (said_at, true_for_s) in self._said.items():
            if true_for_s > VALID_S:
                self._said[key] = said_at, VALID_S
                self._instructions.append(e.Publish(key, None))

    # Losses

    def _retries(self, attempt: Attempt, error: SonicError, now: float) -> bool:  # noqa: PLR0911  a table
        """Learn from a failed attempt, and return whether its rows are sent again."""
        request, endpoint = attempt.slice, self.endpoints.get(attempt.url)
        if request.first_failed_at is None:
            request.first_failed_at = now
        failing_s = now - request.first_failed_at
        assert endpoint is not None  # noqa: S101  it is removed when nothing is in flight to it
        match error:
            case ModelNotFoundError():
                self._missed(endpoint, attempt.key, now)
                return failing_s < self._settings.retry.timeout_s
            case OverloadError():
                if self._splits(attempt, error):
                    endpoint.too_large(error, request, now)
                endpoint.overloaded(error, attempt.key, now)
                return failing_s < self._settings.timeouts.request_s
            case ServerLostError():
                return self._retries_lost(attempt, endpoint, error, now)
            case DeadlineError() if endpoint.in_flight.overtaken(attempt):
                return self._retries_lost(attempt, endpoint, error, now)
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
                endpoint.in_flight.limit(attempt.key).pause(now, self._rng)
                return failing_s < self._settings.retry.timeout_s
        return False

    def _missed(self, endpoint: Endpoint, key: ModelKey, now: float) -> None:
        """Learn that a server lacks a model: others behind its URL may have it."""
        endpoint.liveness.hear(now)
        endpoint.signatures.miss(key, now)
        if key not in endpoint.signatures.valid:
            self._forget(key)

    def _retries_lost(
        self, attempt: Attempt, endpoint: Endpoint, error: SonicError, now: float
    ) -> bool:
        request, timeout_s = attempt.slice, self._settings.retry.timeout_s
        endpoint.failed(error, now)
        self._doubt()
        if not getattr(error, "undelivered", False):
            request.losses += 1
            if request.losses >= SUSPECT_LOSSES:
                back_offs = request.losses - SUSPECT_LOSSES + 1
                request.retry_at = now + back_off_s(back_offs, self._rng)
        lost_since = self._lost_since(attempt.key, now)
        if lost_since is not None:
            return now - lost_since < timeout_s
        return request.retries < MAX_RETRIES or now - (request.first_failed_at or now) < timeout_s

    def _lost_since(self, key: ModelKey, now: float) -> float | None:
        """Return since when the last server of a model is lost; None if one is there, or to come.

        It does not begin anew when coffea or dask run a chunk again.
        """
        if self._fallback.awaited(key, now):
            return None
        return self.endpoints.all_lost_since(key, now)

    def _give_up_if_hopeless(self, key: ModelKey, url: str, error: SonicError, now: float) -> None:
        """Fail what waits for a model, if it has had no server for too long."""
        lost_since = self._lost_since(key, now)
        passing = isinstance(
            error,
            (ServerLostError, DeadlineError, InferenceError, ModelNotFoundError, TokenExpiredError),
        )
        patience_s = self._settings.retry.timeout_s if passing else 0.0
        if lost_since is not None and now - lost_since >= patience_s:
            if isinstance(error, ModelNotFoundError):
                self._forget(key)
                error = self._unroutable(key, now, error)
            for request in self._waiting.take_all(key):
                self._give_up(request, url, error)

    def _give_up(self, request: RequestSlice, url: str, error: SonicError) -> None:
        if isinstance(error, RequestTooLargeError):
            error = error.because(f"a single row of {request.nbytes} bytes")
        if request.retries:
            error = error.because(f"tried {request.retries + 1} times")
        self._instructions.append(e.Fail(request, error, url))

    def _reject(
        self, endpoint: Endpoint, key: ModelKey, actual: Contract, expected: Contract, now: float
    ) -> None:
        """Send no rows to an endpoint whose model is not the one that they are made for."""
        what = (
            f"the server has a model {key.name!r} that differs from that of the others; it gets "
            "none of the rows that are made for them"
        )
        if endpoint.url == self._fallback.url:
            what = "the fallback is another model"
            if actual.digest != expected.digest:
                what += (
                    f": its files have the digest {actual.digest}, those of the servers "
                    f"{expected.digest}"
                )
        error = ContractError(what, server=endpoint.url, model=key.name)
        logger.warning("%s", error)
        endpoint.signatures.reject(key, error, now)
        self._forget(key)
        if endpoint.url == self._fallback.url:
            self._fallback.fail(error)
        self._give_up_if_hopeless(key, endpoint.url, error, now)

    def _compare_files(
        self, endpoint: Endpoint, actual: Contract, expected: Contract | None
    ) -> None:
        """Warn once of a fallback of which nobody knows whether it has the servers' file."""
        if endpoint.url != self._fallback.url or actual.model in self._not_compared:
            return
        if expected is None or not (actual.digest and expected.digest):
            self._not_compared.add(actual.model)
            logger.warning(
                "the fallback %s cannot be compared with the servers: not all of them say which "
                "file model %r is",
                endpoint.url,
                actual.model,
            )

    def _start_fallback(self) -> None:
        self._fallback.starting = True
        self._instructions.append(e.StartFallback())

    def _settle(self, attempt: Attempt) -> bool:
        """End an attempt and make room for others; False if it has ended before."""
        endpoint = self.endpoints.get(attempt.url)
        if endpoint is None or not endpoint.settle(attempt):
            return False
        self._in_flight_bytes -= attempt.slice.nbytes
        return True

    def _attempts(self) -> Iterator[Attempt]:
        return itertools.chain.from_iterable(
            [endpoint.in_flight.all() for endpoint in self.endpoints]
        )
