"""The models of servers: what each server has, whether it is the one meant, and who asks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    CancelledError,
    ContractError,
    DeadlineError,
    InferenceError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._breaker import Circuit
from sonic_coffea.pool._channels import SILENT_S
from sonic_coffea.pool._signature import FRESH_S, QUIET_S, VALID_S, merge, serves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sonic_coffea.pool._dispatch import Dispatcher
    from sonic_coffea.pool._endpoint import Endpoint
    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

# After the first answer, the other servers have this time: one that hangs must not delay a call.
OTHERS_S = 1.0
# If no server was ever reached, its URL is wrong or it does not run: it is not one that restarts.
FIRST_CONTACT_S = 3.0
TRANSIENT = (
    CancelledError,
    DeadlineError,
    InferenceError,
    ModelNotReadyError,
    OverloadError,
    ServerLostError,
    TokenExpiredError,
)
"""Failures after which another try may succeed."""


def passes(error: SonicError) -> bool:
    """Whether another try may succeed."""
    return isinstance(error, TRANSIENT) and not getattr(error, "gone", False)


@dataclass(slots=True)
class KnownContract:
    """A contract, and when servers gave it; stale if a server was lost since."""

    contract: Contract
    received_at: float
    stale: bool = False


@dataclass(slots=True)
class Discovery:
    """The search for a model's contract: rounds of questions to all servers.

    Attributes
    ----------
    wakes_at : float
        When it goes on without an event: with the next round, or without servers that hang.
    in_round : bool
        Whether the servers are being asked.
    contracts, failures : dict
        By URL: the contracts of this round, and each server's last error.
    failing_since : float or None
        When the first round without a contract ended.
    transient : bool
        Whether a server failed in a way that may pass. A lost server may be back before its model
        is, so later failures do not change this.
    """

    key: ModelKey
    wakes_at: float
    in_round: bool = False
    requests: list[e.ContractRequest] = field(default_factory=list)
    awaited: set[str] = field(default_factory=set)
    contracts: dict[str, Contract] = field(default_factory=dict)
    failures: dict[str, SonicError] = field(default_factory=dict)
    failing_since: float | None = None
    transient: bool = False

    def begin_round(self, urls: Iterable[str], until: float) -> None:
        self.in_round, self.wakes_at = True, until
        self.awaited, self.contracts = set(urls), {}
        self.failures = {url: error for url, error in self.failures.items() if url in self.awaited}

    def take(self, url: str, outcome: Contract | SonicError, now: float) -> None:
        """Take a server's answer."""
        if url not in self.awaited:
            return
        self.awaited.discard(url)
        if isinstance(outcome, SonicError):
            self.failures[url] = outcome
            self.transient |= passes(outcome)
        else:
            self.contracts[url] = outcome
            self.wakes_at = min(self.wakes_at, now + OTHERS_S)

    def unavailable(self, servers: Iterable[str]) -> SonicError:
        """Return the error for a model that no server has."""
        name, version = self.key
        errors = [*self.failures.values(), ServerLostError("no server has answered")]
        missing = (error for error in errors if isinstance(error, ModelNotFoundError))
        error = next(missing, errors[0]).at(model=name, version=version)
        if isinstance(error, ServerLostError) and "sonic-coffea check" not in error.message:
            where = error.server or next(iter(servers))
            return error.because(f"sonic-coffea check {where} {name} tries it step by step")
        return error

    def deadline_passed(self, timeout_s: float) -> SonicError:
        """Return the error for a caller whose deadline has passed."""
        name, version = self.key
        what = f"no server has described the model within {timeout_s:g} s"
        error: SonicError = DeadlineError(what, model=name, version=version)
        reason = next(iter(self.failures.values()), None)
        return error if reason is None else error.because(str(reason))


class ServedModels:
    """The contracts of models, and the discoveries and validations that find them.

    Attributes
    ----------
    starts_at : float
        Before it, no discovery begins.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._endpoints = dispatcher.endpoints
        self._fallback = dispatcher.fallback
        self._waiting = dispatcher.waiting
        self._instructions = dispatcher.instructions
        self._timeout_s = dispatcher.settings.retry_timeout_s
        self._known: dict[ModelKey, KnownContract] = {}
        # Not forgotten: a fallback must have the model of the servers, however long they are gone.
        self._of_servers: dict[ModelKey, Contract] = {}
        self._answered_at: dict[ModelKey, float] = {}
        self._seen: set[ModelKey] = set()
        self.discoveries: dict[ModelKey, Discovery] = {}
        self._not_compared: set[str] = set()
        self.starts_at = -math.inf

    def advance(self, now: float) -> None:
        """Go on with the discoveries that are due."""
        for discovery in list(self.discoveries.values()):
            if not discovery.in_round:
                self._begin_round(discovery, now)
            elif not discovery.awaited or now >= discovery.wakes_at:
                if discovery.contracts:
                    self._conclude(discovery, now)
                else:
                    self._plan_round(discovery, now)

    def _recent(self, key: ModelKey, now: float) -> Contract | None:
        """Return a model's contract if servers gave it recently."""
        if (known := self._known.get(key)) is None:
            return None
        # Only while rows wait or are in flight, a lost server is noticed.
        in_use = bool(self._waiting) or any(x.in_flight for x in self._endpoints)
        if not in_use and now - self._answered_at.get(key, -math.inf) >= QUIET_S:
            valid_s = QUIET_S
        else:
            valid_s = VALID_S if known.stale else FRESH_S
        return known.contract if now - known.received_at < valid_s else None

    def answered(self, key: ModelKey, version: str, now: float) -> None:
        """Take the version of a response; if it is a new one, servers are asked anew."""
        self._answered_at[key] = now
        known = self._contract(key)
        if known is None or key.version is not None:
            return
        if len({version, known.version} - {""}) > 1:  # some servers name no version
            self.forget(key)

    def requested(self, request: e.ContractRequest, now: float, *, anew: bool) -> None:
        """Give a caller a model's contract, or ask the servers for it."""
        key = request.key
        if anew:
            self.forget(key)
        if (contract := self._recent(key, now)) is not None:
            self._instructions.append(e.Resolve(request, contract))
            return
        if key not in self.discoveries:
            self.discoveries[key] = Discovery(key, max(now, self.starts_at))
        self.discoveries[key].requests.append(request)

    def withdrawn(self, request: e.ContractRequest) -> None:
        """Give an error to a caller whose deadline has passed."""
        discovery = self.discoveries.get(request.key)
        if discovery is None or request not in discovery.requests:  # it has just been resolved
            return
        discovery.requests.remove(request)
        error = discovery.deadline_passed(request.timeout_s or 0.0)
        self._instructions.append(e.Resolve(request, error))
        if not discovery.requests:
            del self.discoveries[request.key]

    def validated(self, event: e.Validated, now: float) -> None:
        """Take a server's contract of a model, or its error."""
        key, outcome = event.key, event.outcome
        known = self._contract(key)
        if (discovery := self.discoveries.get(key)) is not None:
            known = self._discovered(discovery, event, now)
        endpoint = self._endpoints.by_url.get(event.url)
        if endpoint is None:
            return
        # A server that answers late must have the model that is known by now.
        expected = endpoint.signatures.validating.pop(key, None) or known
        if not isinstance(outcome, SonicError):
            endpoint.liveness.answered(now)
            endpoint.in_flight.channels.round_trip_s = event.round_trip_s
            self._seen.add(key)
            if expected is None or serves(outcome, expected):
                endpoint.signatures.accept(key, now)
                self._compare_files(endpoint, outcome, expected)
                if expected is not None and outcome.digest != expected.digest:
                    self.mark_stale()  # the digest of the rows that it gets is unknown
            else:
                self._reject(endpoint, key, outcome, expected, now)
        else:
            self._not_told(endpoint, key, outcome, now)

    def _not_told(self, endpoint: Endpoint, key: ModelKey, error: SonicError, now: float) -> None:
        """Take the error of a server that was asked for a contract; it is asked again later."""
        if isinstance(error, ModelNotFoundError):
            endpoint.liveness.answered(now)
            endpoint.signatures.lack(key, now)
            self._fail_if_lost(key, endpoint.url, error, now)
            return
        if isinstance(error, OverloadError):
            endpoint.liveness.answered(now)
            endpoint.in_flight.limits[key].pause(now, self._dispatcher.rng, error.retry_after_s)
            return
        if not isinstance(error, ServerLostError):  # the retry budget bounds losses
            endpoint.signatures.failed(key, now)
        if isinstance(error, CancelledError):  # its connection was renewed
            return
        if isinstance(error, DeadlineError):
            endpoint.in_flight.channels.late(0, now - SILENT_S)
        endpoint.failed(error, now)
        self.mark_stale()
        self._fail_if_lost(key, endpoint.url, error, now)

    def _discovered(self, discovery: Discovery, event: e.Validated, now: float) -> Contract | None:
        """Have a discovery take an answer, and return the contract that it must agree with."""
        discovery.take(event.url, event.outcome, now)
        if event.url != self._fallback.url:
            return None  # compared when the others have answered, too
        # The fallback must have the model of the servers, even if they are gone.
        known = self._contract(event.key)
        expected = known or self._of_servers.get(event.key)
        answer = discovery.contracts.get(event.url)
        differs = answer is not None and expected is not None and not serves(answer, expected)
        if known is not None or differs:
            discovery.contracts.pop(event.url, None)
        return expected

    def validate_waiting(self, now: float) -> None:
        """Ask servers for the models of waiting slices, unless they have answered already."""
        for key in self._waiting.models():
            for endpoint in self._endpoints:
                passes = endpoint.breaker.circuit(now) is not Circuit.OPEN
                paused = now < endpoint.in_flight.limits[key].paused_until
                asks = passes and not endpoint.draining and not paused
                if asks and endpoint.signatures.due(key, now):
                    self._validate(endpoint, key)

    def _validate(self, endpoint: Endpoint, key: ModelKey) -> None:
        request = self._waiting.first(key)
        endpoint.signatures.validating[key] = None if request is None else request.call.contract
        self._instructions.append(e.Validate(endpoint.url, key))

    def fail_unroutable(self, now: float) -> None:
        """Give up slices that no endpoint can take any more."""
        for key in self._waiting.models():
            candidates = self._endpoints.candidates(key, now)
            if not candidates and not self._fallback.awaited(key, now):
                gone = ModelNotFoundError(f"no server has model {key.name!r} any more")
                error = self._unroutable(key, now, gone)
                for request in self._waiting.take_all(key):
                    self._dispatcher.give_up(request, None, error, now)

    def _unroutable(self, key: ModelKey, now: float, error: SonicError) -> SonicError:
        """Return why no endpoint can take a model: another model counts more than none."""
        reasons = [x.signatures.rejection(key, now) for x in self._endpoints.active]
        return next((reason for reason in reasons if reason is not None), error)

    def _begin_round(self, discovery: Discovery, now: float) -> None:
        """Ask the servers, if it is time; a fallback that starts is waited for."""
        key = discovery.key
        self._dispatcher.start_fallback(key, now)
        if self._fallback.starting:
            discovery.wakes_at = math.inf
        elif discovery.wakes_at <= now or discovery.wakes_at == math.inf:
            endpoints = self._endpoints.active
            # If no server answers now, the contract that is known serves.
            until = now + OTHERS_S if key in self._known else math.inf
            discovery.begin_round((endpoint.url for endpoint in endpoints), until)
            for endpoint in endpoints:
                if key not in endpoint.signatures.validating:
                    self._validate(endpoint, key)

    def _conclude(self, discovery: Discovery, now: float) -> None:
        key = discovery.key
        for url in discovery.awaited:
            logger.warning("%s has not described model %r in time", url, key.name)
        known, contracts = self._contract(key), discovery.contracts
        as_before = {u: c for u, c in contracts.items() if known is not None and serves(c, known)}
        try:
            contract = merge(as_before or contracts)
        except ContractError as error:
            self._resolve(discovery, error)
            return
        for url, actual in contracts.items():
            if (endpoint := self._endpoints.by_url.get(url)) is None:
                continue
            if url in (as_before or contracts):
                endpoint.signatures.accept(key, now)
            else:
                self._reject(endpoint, key, actual, known or contract, now)
        self._known[key] = KnownContract(contract, now)
        if set(contracts) != {self._fallback.url}:
            self._of_servers[key] = contract
        self._instructions.append(e.Publish(key, contract))
        # Slices that were packed for a model that the servers have replaced cannot be sent.
        for request in self._waiting.take_all(key):
            if serves(contract, request.call.contract):
                self._waiting.put_back(request, now)
            else:
                changed = ContractError(f"the servers' model {key.name!r} has changed meanwhile")
                self._dispatcher.give_up(request, None, changed, now)
        self._resolve(discovery, contract)

    def _plan_round(self, discovery: Discovery, now: float) -> None:
        """Plan another round, unless no server can have the model."""
        key, discovery.in_round = discovery.key, False
        known, failures = self._contract(key), discovery.failures.values()
        lost = bool(failures) and all(isinstance(error, ServerLostError) for error in failures)
        has_fallback = self._dispatcher.settings.fallback is not None
        # Servers that are all lost may come back with another model, and a fallback may not.
        if known is not None and (has_fallback or not lost):
            self._resolve(discovery, known)
            return
        if discovery.failing_since is None:
            discovery.failing_since = now
        since = self._endpoints.all_lost_since(key, now)
        if since is None:
            since = discovery.failing_since
        retries = [x.retry_at(key) for x in self._endpoints.candidates(key, now)]
        # A model that was there is being loaded, or its server was started anew.
        transient = discovery.transient or key in self._seen
        self._dispatcher.start_fallback(key, now, at_once=not transient)
        due_at = self._fallback.due_at(key, now)
        # A worker that joins a cluster may come while the servers of the others are restarted.
        never = lost and not self._seen and self.starts_at == -math.inf
        never = never and all(getattr(error, "unreached", False) for error in failures)
        expired = now - since >= (
            min(FIRST_CONTACT_S, self._timeout_s) if never else self._timeout_s
        )
        if self._fallback.starting:
            discovery.wakes_at = math.inf
        elif due_at == math.inf and (expired or not transient):
            error = discovery.unavailable(self._endpoints.servers)
            self._resolve(discovery, error.because("nothing was ever reached") if never else error)
        else:
            discovery.wakes_at = min([*retries, due_at], default=now)

    def _resolve(self, discovery: Discovery, outcome: Contract | SonicError) -> None:
        del self.discoveries[discovery.key]
        self._instructions += [e.Resolve(request, outcome) for request in discovery.requests]

    def forget(self, key: ModelKey) -> None:
        """Have the servers asked for a contract anew."""
        if self._known.pop(key, None) is not None:
            self._instructions.append(e.Publish(key, None))

    def _contract(self, key: ModelKey) -> Contract | None:
        """Return the contract that servers gave last, however old it is."""
        return self._known[key].contract if key in self._known else None

    def mark_stale(self) -> None:
        """Have contracts expire sooner, as the lost server may come back with other models."""
        for key, known in self._known.items():
            if not known.stale:
                known.stale = True
                self._instructions.append(e.Publish(key, None))

    def _fail_if_lost(self, key: ModelKey, url: str, error: SonicError, now: float) -> None:
        """Fail what waits for a model, if it has had no server for too long."""
        lost_since = self._dispatcher.lost_since(key, now)
        passing = passes(error) or isinstance(error, ModelNotFoundError)
        patience_s = self._timeout_s if passing else 0.0
        if lost_since is not None and now - lost_since >= patience_s:
            if isinstance(error, ModelNotFoundError):
                self.forget(key)
                error = self._unroutable(key, now, error)
            for request in self._waiting.take_all(key):
                self._dispatcher.give_up(request, url, error, now)

    def _reject(
        self, endpoint: Endpoint, key: ModelKey, actual: Contract, expected: Contract, now: float
    ) -> None:
        """Send no rows to an endpoint whose model is not the one that they are packed for."""
        what = (
            f"the server's model {key.name!r} differs from that of the other servers, so it gets "
            "none of their rows"
        )
        if endpoint.url == self._fallback.url:
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
        if endpoint.url == self._fallback.url:
            self._fallback.started(None, error, now)
        self._fail_if_lost(key, endpoint.url, error, now)

    def _compare_files(
        self, endpoint: Endpoint, actual: Contract, expected: Contract | None
    ) -> None:
        """Warn once if nobody knows whether the fallback has the servers' file."""
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
