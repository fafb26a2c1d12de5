"""The models of servers: what each server has, whether it is the one meant, and who asks."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    CancelledError,
    ContractError,
    DeadlineError,
    ModelNotFoundError,
    OverloadError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._breaker import Circuit
from sonic_coffea.pool._channels import SILENT_S
from sonic_coffea.pool._discovery import OTHERS_S, TRANSIENT, Discovery
from sonic_coffea.pool._signature import FRESH_S, QUIET_S, VALID_S, merge, serves

if TYPE_CHECKING:
    from sonic_coffea.pool._endpoint import Endpoint
    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.pool._state import CoreState
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)


class ServedModels:
    """The contracts of models, and the discoveries and validations that find them.

    Attributes
    ----------
    starts_at : float
        Before it, no discovery begins.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._contracts: dict[ModelKey, Contract] = {}
        # When servers gave each contract, and for how long it is valid.
        self._said: dict[ModelKey, tuple[float, float]] = {}
        self._answered_at: dict[ModelKey, float] = {}
        self._seen: set[ModelKey] = set()
        self._discoveries: dict[ModelKey, Discovery] = {}
        self._not_compared: set[str] = set()
        self.starts_at = -math.inf

    def wakes_at(self) -> list[float]:
        """Return when discoveries go on without an event."""
        return [discovery.wakes_at for discovery in self._discoveries.values()]

    def advance(self, now: float) -> None:
        """Go on with the discoveries that are due."""
        for discovery in list(self._discoveries.values()):
            self._go_on(discovery, now)

    def answered(self, key: ModelKey, now: float) -> None:
        """Record that rows of a model have been scored."""
        self._answered_at[key] = now

    def requested(self, request: e.ContractRequest, now: float, *, anew: bool) -> None:
        """Give a caller a model's contract, or ask the servers for it."""
        key = request.key
        if anew:
            self.forget(key)
        if (known := self._contracts.get(key)) is not None and not self._stale(key, now):
            self._state.instructions.append(e.Resolve(request, known))
            return
        if key not in self._discoveries:
            self._discoveries[key] = Discovery(key, max(now, self.starts_at))
        self._discoveries[key].requests.append(request)

    def withdrawn(self, request: e.ContractRequest) -> None:
        """Give an error to a caller whose deadline has passed."""
        discovery = self._discoveries.get(request.key)
        if discovery is None or request not in discovery.requests:  # it has just been resolved
            return
        discovery.requests.remove(request)
        error = discovery.too_late(request.timeout_s or 0.0)
        self._state.instructions.append(e.Resolve(request, error))
        if not discovery.requests:
            del self._discoveries[request.key]

    def validated(self, event: e.Validated, now: float) -> None:
        """Take a server's contract of a model, or its error."""
        key, outcome = event.key, event.outcome
        known = self._contracts.get(key)
        if (discovery := self._discoveries.get(key)) is not None:
            discovery.take(event.url, outcome, now)
            if known is not None and event.url == self._state.fallback.url:
                # The fallback must have the model of the servers, even if they are gone.
                discovery.contracts.pop(event.url, None)
            else:
                known = None  # compared when the others have answered, too
        endpoint = self._state.endpoints.get(event.url)
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
            endpoint.in_flight.limit(key).pause(now, self._state.rng, outcome.retry_after_s)
        elif not isinstance(outcome, CancelledError):  # as its connection was made anew
            if isinstance(outcome, DeadlineError):
                endpoint.in_flight.channels.silent(0, now - SILENT_S)
            endpoint.failed(outcome, now)
            self.doubt()
            self._give_up_if_hopeless(key, event.url, outcome, now)

    def validate_waiting(self, now: float) -> None:
        """Ask servers for the models of waiting slices, unless they have answered already."""
        for key in self._state.waiting.models():
            for endpoint in self._state.endpoints:
                passes = endpoint.breaker.circuit(now) is not Circuit.OPEN
                paused = now < endpoint.in_flight.limit(key).paused_until
                asks = passes and not endpoint.draining and not paused
                if asks and endpoint.signatures.due(key, now):
                    self._validate(endpoint, key)

    def _validate(self, endpoint: Endpoint, key: ModelKey) -> None:
        request = self._state.waiting.first(key)
        endpoint.signatures.validating[key] = None if request is None else request.call.contract
        self._state.instructions.append(e.Validate(endpoint.url, key))

    def fail_unroutable(self, now: float) -> None:
        """Give up what no endpoint can take any more."""
        for key in self._state.waiting.models():
            there = self._state.endpoints.that_may_have(key, now)
            if not there and not self._state.fallback.awaited(key, now):
                gone = ModelNotFoundError(f"no server has model {key.name!r} any more")
                error = self._unroutable(key, now, gone)
                self._state.instructions += [
                    e.Fail(request, error) for request in self._state.waiting.take_all(key)
                ]

    def _unroutable(self, key: ModelKey, now: float, error: SonicError) -> SonicError:
        """Return why no endpoint can take a model: another model counts more than none."""
        reasons = [x.signatures.rejection(key, now) for x in self._state.endpoints.active]
        return next((reason for reason in reasons if reason is not None), error)

    def _go_on(self, discovery: Discovery, now: float) -> None:
        """Begin a round, or draw the conclusions of one."""
        key = discovery.key
        if discovery.next_round_at is not None:
            if self._state.fallback.due_at(key, now) <= now:
                self._state.start_fallback()
            if self._state.fallback.starting:
                discovery.next_round_at = math.inf
            elif discovery.next_round_at <= now or discovery.next_round_at == math.inf:
                self._begin_round(discovery, now)
        elif discovery.complete(now):
            if discovery.contracts:
                self._conclude(discovery, now)
            else:
                self._ask_again(discovery, now)

    def _begin_round(self, discovery: Discovery, now: float) -> None:
        endpoints = self._state.endpoints.active
        # A contract that is known serves, if no server answers now.
        until = now + OTHERS_S if discovery.key in self._contracts else math.inf
        discovery.begin_round((endpoint.url for endpoint in endpoints), until)
        for endpoint in endpoints:
            if discovery.key not in endpoint.signatures.validating:
                self._validate(endpoint, discovery.key)

    def _conclude(self, discovery: Discovery, now: float) -> None:
        key = discovery.key
        for url in discovery.awaited:
            logger.warning("%s has not described model %r in time", url, key.name)
        known, contracts = self._contracts.get(key), discovery.contracts
        as_before = {u: c for u, c in contracts.items() if known is not None and serves(c, known)}
        try:
            contract = merge(as_before or contracts)
        except ContractError as error:
            self._resolve(discovery, error)
            return
        if known is not None and as_before:
            for url in contracts.keys() - as_before.keys():
                if (endpoint := self._state.endpoints.get(url)) is not None:
                    self._reject(endpoint, key, contracts[url], known, now)
        self._contracts[key] = contract
        self._said[key] = now, FRESH_S
        self._state.instructions.append(e.Publish(key, contract))
        for url in as_before or contracts:
            if (endpoint := self._state.endpoints.get(url)) is not None:
                endpoint.signatures.accept(key, now)
        # What was packed for another model, which these servers have replaced, cannot be sent.
        for request in self._state.waiting.take_all(key):
            if serves(contract, request.call.contract):
                self._state.waiting.put_back(request, now)
            else:
                changed = ContractError(f"the servers' model {key.name!r} has changed meanwhile")
                self._state.instructions.append(e.Fail(request, changed))
        self._resolve(discovery, contract)

    def _ask_again(self, discovery: Discovery, now: float) -> None:
        """Plan another round, unless no server can have the model."""
        key = discovery.key
        known, failures = self._contracts.get(key), discovery.failures
        lost = bool(failures) and all(isinstance(error, ServerLostError) for error in failures)
        # Servers that are all lost may come back with another model, and a fallback may not.
        if known is not None and (self._state.settings.fallback.source is not None or not lost):
            self._resolve(discovery, known)
            return
        if discovery.failing_since is None:
            discovery.failing_since = now
        since = self._state.endpoints.all_lost_since(key, now)
        if since is None:
            since = discovery.failing_since
        retries = [
            max(
                x.breaker.retry_at,
                x.in_flight.limit(key).paused_until,
                x.signatures.retry_at(key),
            )
            for x in self._state.endpoints.that_may_have(key, now)
        ]
        # A model that was there is being loaded, or its server was started anew.
        transient = discovery.transient or key in self._seen
        due_at = self._state.fallback.due_at(key, now)
        if due_at <= now or (due_at < math.inf and not transient):
            self._state.start_fallback()
        if self._state.fallback.starting:
            discovery.next_round_at = math.inf
            return
        expired = now - since >= self._state.settings.retry.timeout_s
        if due_at == math.inf and (expired or not transient):
            self._resolve(discovery, discovery.nobody_has_it(self._state.servers))
            return
        discovery.next_round_at = min([*retries, due_at], default=now)

    def _resolve(self, discovery: Discovery, outcome: Contract | SonicError) -> None:
        del self._discoveries[discovery.key]
        self._state.instructions += [e.Resolve(request, outcome) for request in discovery.requests]

    def forget(self, key: ModelKey) -> None:
        """Have the servers asked for a contract anew."""
        self._said.pop(key, None)
        if self._contracts.pop(key, None) is not None:
            self._state.instructions.append(e.Publish(key, None))

    def _stale(self, key: ModelKey, now: float) -> bool:
        """Whether a contract is so old that servers are asked again."""
        said_at, true_for_s = self._said[key]
        used = self._state.waiting.first(key) is not None or any(
            attempt.key == key for attempt in self._state.attempts()
        )
        used = used or now - self._answered_at.get(key, -math.inf) < QUIET_S
        return now - said_at >= (true_for_s if used else QUIET_S)

    def doubt(self) -> None:
        """Ask again sooner, as the server that was lost may come back with other models."""
        for key, (said_at, true_for_s) in self._said.items():
            if true_for_s > VALID_S:
                self._said[key] = said_at, VALID_S
                self._state.instructions.append(e.Publish(key, None))

    def _give_up_if_hopeless(self, key: ModelKey, url: str, error: SonicError, now: float) -> None:
        """Fail what waits for a model, if it has had no server for too long."""
        lost_since = self._state.lost_since(key, now)
        passing = isinstance(error, (*TRANSIENT, ModelNotFoundError))
        patience_s = self._state.settings.retry.timeout_s if passing else 0.0
        if lost_since is not None and now - lost_since >= patience_s:
            if isinstance(error, ModelNotFoundError):
                self.forget(key)
                error = self._unroutable(key, now, error)
            for request in self._state.waiting.take_all(key):
                self._state.give_up(request, url, error)

    def _reject(
        self, endpoint: Endpoint, key: ModelKey, actual: Contract, expected: Contract, now: float
    ) -> None:
        """Send no rows to an endpoint whose model is not the one that they are packed for."""
        what = (
            f"the server's model {key.name!r} differs from that of the other servers, so it gets "
            "none of their rows"
        )
        if endpoint.url == self._state.fallback.url:
            what = "the fallback has another model"
            if actual.digest != expected.digest:
                what += (
                    f": its files have the digest {actual.digest}, those of the servers "
                    f"{expected.digest}"
                )
        error = ContractError(what, server=endpoint.url, model=key.name)
        logger.warning("%s", error)
        endpoint.signatures.reject(key, error, now)
        self.forget(key)
        if endpoint.url == self._state.fallback.url:
            self._state.fallback.fail(error)
        self._give_up_if_hopeless(key, endpoint.url, error, now)

    def _compare_files(
        self, endpoint: Endpoint, actual: Contract, expected: Contract | None
    ) -> None:
        """Warn once if nobody knows whether the fallback has the servers' file."""
        if endpoint.url != self._state.fallback.url or actual.model in self._not_compared:
            return
        if expected is None or not (actual.digest and expected.digest):
            self._not_compared.add(actual.model)
            logger.warning(
                "the fallback %s cannot be compared with the servers: not all of them say which "
                "file model %r is",
                endpoint.url,
                actual.model,
            )
