"""The models of servers: which server has a model, and whether it is the right one."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sonic_coffea import errors
from sonic_coffea.errors import SonicError
from sonic_coffea.pool import _events as e
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._signature import merge, serves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sonic_coffea.pool._dispatch import Dispatcher
    from sonic_coffea.pool._endpoint import Endpoint
    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

TRANSIENT = (
    errors.CancelledError,
    errors.DeadlineError,
    errors.InferenceError,
    errors.ModelNotReadyError,
    errors.OverloadError,
    errors.ServerLostError,
    errors.TokenExpiredError,
)
"""Failures after which another try may succeed."""


def passes(error: SonicError) -> bool:
    """Whether another try may succeed."""
    return isinstance(error, TRANSIENT) and not getattr(error, "gone", False)


@dataclass(slots=True)
class Known:
    """What is known of a model.

    Attributes
    ----------
    contract : Contract or None
        What servers said last, at `received_at`; None before that, or if it must be asked again.
    stale : bool
        Whether there has been a reason to doubt it since.
    of_servers : Contract or None
        The last contract that did not come from the fallback alone. It is kept, because a fallback
        must have the model of the servers, however long they have been gone.
    described : bool
        Whether any server has ever described the model.
    compared : bool
        Whether a warning has said that nobody knows if the fallback has the same file.
    """

    contract: Contract | None = None
    received_at: float = -math.inf
    stale: bool = False
    of_servers: Contract | None = None
    described: bool = False
    compared: bool = False


@dataclass(slots=True)
class Discovery:
    """The search for a model's contract: rounds of questions to all servers.

    Attributes
    ----------
    wakes_at : float
        When it continues without an event: with the next round, or without servers that hang.
    awaited : set of str or None
        The servers that have not answered in this round; None between rounds.
    contracts, failures : dict
        By URL: the contracts, with which the last round ends, and each server's last error.
    failing_since : float
        When the first round without a contract ended; infinity before that.
    transient : bool
        Whether a server failed in a way that may pass. A lost server may be back before its model
        is loaded, so later failures do not change this.
    """

    key: ModelKey
    wakes_at: float
    requests: list[e.ContractRequest] = field(default_factory=list)
    awaited: set[str] | None = None
    contracts: dict[str, Contract] = field(default_factory=dict)
    failures: dict[str, SonicError] = field(default_factory=dict)
    failing_since: float = math.inf
    transient: bool = False

    def unavailable(self, servers: Iterable[str]) -> SonicError:
        """Return the error for a model that no server has."""
        name, version = self.key
        told = [*self.failures.values(), errors.ServerLostError("no server has answered")]
        missing = (error for error in told if isinstance(error, errors.ModelNotFoundError))
        error = next(missing, told[0]).at(model=name, version=version)
        if isinstance(error, errors.ServerLostError) and "sonic-coffea check" not in error.message:
            where = error.server or next(iter(servers))
            return error.because(f"sonic-coffea check {where} {name} tries it step by step")
        return error


class ServedModels:
    """The contracts of models, and the discoveries and validations that find them.

    Attributes
    ----------
    starts_at : float
        Before it, no discovery begins.
    answered_at : float
        When a request was answered last.
    """

    def __init__(self, core: Dispatcher) -> None:
        self._core = core
        self._endpoints = core.endpoints
        self._fallback = core.fallback
        self._waiting = core.waiting
        self._instructions = core.instructions
        self._timeout_s = core.settings.retry_timeout_s
        self._known: defaultdict[ModelKey, Known] = defaultdict(Known)
        self.discoveries: dict[ModelKey, Discovery] = {}
        self.answered_at = self.starts_at = -math.inf

    def advance(self, now: float) -> None:
        """Continue the discoveries that are due."""
        for discovery in list(self.discoveries.values()):
            if discovery.awaited is None:
                self._begin_round(discovery, now)
            elif not discovery.awaited or now >= discovery.wakes_at:
                if discovery.contracts:
                    self._conclude(discovery, now)
                else:
                    self._plan_round(discovery, now)

    def requested(self, request: e.ContractRequest, now: float, *, anew: bool) -> None:
        """Give a caller a model's contract, or ask the servers for it."""
        key = request.key
        if anew:
            self.forget(key)
        if (contract := self._valid(key, now)) is not None:
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
        what = f"no server has described the model within {request.timeout_s or 0.0:g} s"
        error: SonicError = errors.DeadlineError(
            what, model=request.key.name, version=request.key.version
        )
        for reason in list(discovery.failures.values())[:1]:
            error = error.because(str(reason))
        self._instructions.append(e.Resolve(request, error))
        if not discovery.requests:
            del self.discoveries[request.key]

    def validate_waiting(self, now: float) -> None:
        """Ask servers for the models of waiting slices, unless they have answered already."""
        for key in self._waiting.models():
            for endpoint in self._endpoints:
                passes = endpoint.breaker.circuit(now) != "open"
                paused = now < endpoint.limits[key].paused_until
                asks = passes and not endpoint.draining and not paused
                if asks and endpoint.signatures[key].due(now):
                    self._validate(endpoint, key)

    def validated(self, event: e.Validated, now: float) -> None:
        """Take a server's contract of a model, or its error."""
        key, url, outcome = event.key, event.url, event.outcome
        known, is_fallback = self._known[key], url == self._fallback.url
        # A fallback must have the model of the servers, even if they are gone.
        expected = known.contract or (known.of_servers if is_fallback else None)
        discovery = self.discoveries.get(key)
        if discovery is not None and discovery.awaited and url in discovery.awaited:
            discovery.awaited.discard(url)
            self._discovered(discovery, event, expected, now)
        if discovery is not None and not is_fallback:
            expected = None  # compared when the others have answered, too
        endpoint = self._endpoints.by_url.get(url)
        if endpoint is None:
            return
        signature = endpoint.signatures[key]
        # A server that answers late must have the model that is known by now.
        expected = signature.expected or expected
        signature.asked, signature.expected = False, None
        if isinstance(outcome, SonicError):
            self._not_told(endpoint, key, outcome, now)
            return
        endpoint.spoke(now)
        endpoint.channels.round_trip_s = event.round_trip_s
        known.described = True
        if expected is not None and not serves(outcome, expected):
            self._reject(endpoint, key, outcome, expected, now)
        elif expected is not None and self._lacks_version(endpoint, key, outcome, expected, now):
            signature.lack(now, self._core.rng)
        else:
            signature.accept(now)
            if is_fallback and not known.compared:
                known.compared = self._warn_if_not_comparable(url, outcome, expected)
            if expected is not None and outcome.digest != expected.digest:
                self.mark_stale()  # the digest of the rows that it gets is unknown

    def fail_unroutable(self, now: float) -> None:
        """Give up slices that no endpoint can take any more."""
        for key in self._waiting.models():
            candidates = self._endpoints.candidates(key, now)
            if not candidates and not self._fallback.awaited(key, now):
                gone = errors.ModelNotFoundError(f"no server has model {key.name!r} any more")
                self._give_up_waiting(key, None, gone, now)

    def forget(self, key: ModelKey) -> None:
        """Have the servers asked for a contract again."""
        if self._known[key].contract is not None:
            self._known[key].contract = None
            self._instructions.append(e.Publish(key, None))

    def mark_stale(self) -> None:
        """Doubt contracts, as a server refused rows, or was lost and may have other models now."""
        for key, known in self._known.items():
            if known.contract is not None and not known.stale:
                known.stale = True
                self._instructions.append(e.Publish(key, None))

    def _valid(self, key: ModelKey, now: float) -> Contract | None:
        """Return a model's contract, unless it is in doubt."""
        known = self._known[key]
        # A lost server is noticed only while rows wait or are in flight.
        used = bool(self._waiting) or any(x.attempts for x in self._endpoints)
        quiet_since = now if used else max(self.answered_at, known.received_at)
        lost = known.stale and now - known.received_at >= tuning.VALID_S
        return None if lost or now - quiet_since >= tuning.QUIET_S else known.contract

    def _validate(self, endpoint: Endpoint, key: ModelKey) -> None:
        request, signature = self._waiting.first(key), endpoint.signatures[key]
        signature.asked = True
        signature.expected = None if request is None else request.call.contract
        self._instructions.append(e.Validate(endpoint.url, key))

    def _not_told(self, endpoint: Endpoint, key: ModelKey, error: SonicError, now: float) -> None:
        """Take the error of a server that was asked for a contract; it is asked again later."""
        rng = self._core.rng
        if isinstance(error, errors.ModelNotFoundError):
            endpoint.spoke(now)
            endpoint.signatures[key].lack(now, rng)
            self._fail_if_lost(key, endpoint.url, error, now)
            return
        if isinstance(error, errors.OverloadError):
            endpoint.spoke(now)
            endpoint.limits[key].pause(now, rng, error.retry_after_s)
            return
        # The retry budget bounds losses, unless requests in flight keep the circuit closed.
        if not isinstance(error, errors.ServerLostError) or endpoint.breaker.exhausted(now):
            endpoint.signatures[key].failed(now, rng)
        if isinstance(error, errors.CancelledError):  # its connection was renewed
            return
        if isinstance(error, errors.DeadlineError):
            endpoint.channels[0].late(now - tuning.LATE_S)
        endpoint.failed(error, now)
        self.mark_stale()
        self._fail_if_lost(key, endpoint.url, error, now)

    def _lacks_version(
        self, endpoint: Endpoint, key: ModelKey, actual: Contract, expected: Contract, now: float
    ) -> bool:
        """Return whether requests for the newest version did not find it at an endpoint.

        If no server has it any more, the version that is there scores the rows that are left.
        """
        newer = key.version is None and actual.version != expected.version
        if not newer or endpoint.signatures[key].missing_since is None:
            return False
        if self._endpoints.all_lost_since(key, now) is None:
            return True
        logger.warning(
            "no server has version %s of model %s any more, which has scored some rows of a call; "
            "version %s scores the others, as its attributes say",
            *(expected.version, key.name, actual.version),
        )
        self.forget(key)
        for call in self._core.calls(key):
            version, digest = actual.version, actual.digest
            call.contract = replace(call.contract, version=version, digest=digest)
        return False

    def _discovered(
        self, discovery: Discovery, event: e.Validated, expected: Contract | None, now: float
    ) -> None:
        """Record a server's answer in a discovery."""
        url, outcome = event.url, event.outcome
        if isinstance(outcome, SonicError):
            discovery.failures[url] = outcome
            discovery.transient |= passes(outcome)
            return
        discovery.wakes_at = min(discovery.wakes_at, now + tuning.LATE_S)
        # A fallback counts only if no contract is known, and if it has the model of the servers.
        new = self._known[discovery.key].contract is None
        fits = expected is None or (new and serves(outcome, expected))
        if fits or url != self._fallback.url:
            discovery.contracts[url] = outcome

    def _begin_round(self, discovery: Discovery, now: float) -> None:
        """Ask the servers if it is time, but wait for a fallback that is starting."""
        key = discovery.key
        self._core.start_fallback(key, now)
        if self._fallback.starting:
            discovery.wakes_at = math.inf
        elif discovery.wakes_at <= now or discovery.wakes_at == math.inf:
            known = self._known[key].contract is not None
            # If no server answers in this time, the known contract is used.
            discovery.wakes_at = now + tuning.LATE_S if known else math.inf
            awaited = {endpoint.url for endpoint in self._endpoints.active}
            discovery.failures = {u: x for u, x in discovery.failures.items() if u in awaited}
            discovery.awaited = awaited
            for endpoint in self._endpoints.active:
                if not endpoint.signatures[key].asked:
                    self._validate(endpoint, key)

    def _conclude(self, discovery: Discovery, now: float) -> None:
        """Merge the contracts of a round; a server that alone has another model gets no rows."""
        key, contracts = discovery.key, discovery.contracts
        for url in discovery.awaited or ():
            logger.warning("%s has not described model %r in time", url, key.name)
        known = self._known[key]
        before = known.contract
        as_before = {u: c for u, c in contracts.items() if before is not None and serves(c, before)}
        fitting = as_before or contracts
        try:
            contract = merge(fitting)
        except errors.ContractError as error:
            self._resolve(discovery, error)
            return
        for url, actual in contracts.items():
            if (endpoint := self._endpoints.by_url.get(url)) is None:
                continue
            if url in fitting:
                endpoint.signatures[key].accept(now)
            else:
                self._reject(endpoint, key, actual, contract, now)
        known.contract, known.received_at, known.stale = contract, now, False
        if set(contracts) != {self._fallback.url}:
            known.of_servers = contract
        self._instructions.append(e.Publish(key, contract))
        # Slices that were packed for a model that has been replaced cannot be sent.
        for request in self._waiting.take_all(key):
            if serves(contract, request.call.contract):
                self._waiting.put_back(request, now)
            else:
                changed = errors.ContractError(
                    f"the servers' model {key.name!r} has changed meanwhile"
                )
                self._core.give_up(request, None, changed, now)
        self._resolve(discovery, contract)

    def _plan_round(self, discovery: Discovery, now: float) -> None:
        """Plan another round, unless no server can have the model."""
        key, discovery.awaited = discovery.key, None
        known, failures = self._known[key], discovery.failures.values()
        lost = bool(failures) and all(
            isinstance(error, errors.ServerLostError) for error in failures
        )
        has_fallback = self._core.settings.fallback is not None
        # Lost servers may come back with another model; a fallback may not have another.
        if known.contract is not None and (has_fallback or not lost):
            self._resolve(discovery, known.contract)
            return
        # A model that was there is being loaded again, or its server is being restarted.
        transient = discovery.transient or known.described
        self._core.start_fallback(key, now, at_once=not transient)
        fallback_at = self._fallback.due_at(key, now)
        discovery.failing_since = min(discovery.failing_since, now)
        lost_since = self._endpoints.all_lost_since(key, now)
        failing_s = now - (discovery.failing_since if lost_since is None else lost_since)
        # A worker may join a cluster while the servers are being restarted.
        joined = self.starts_at > -math.inf
        unreached = all(getattr(error, "unreached", False) for error in failures)
        described = joined or any(other.described for other in self._known.values())
        never = lost and unreached and not described
        patience_s = min(tuning.FIRST_CONTACT_S, self._timeout_s) if never else self._timeout_s
        if self._fallback.starting:
            discovery.wakes_at = math.inf
        elif fallback_at == math.inf and (failing_s >= patience_s or not transient):
            error = discovery.unavailable(self._endpoints.servers)
            self._resolve(discovery, error.because("nothing was ever reached") if never else error)
        else:
            retries = [x.retry_at(key) for x in self._endpoints.candidates(key, now)]
            discovery.wakes_at = min([*retries, fallback_at])

    def _resolve(self, discovery: Discovery, outcome: Contract | SonicError) -> None:
        del self.discoveries[discovery.key]
        self._instructions += [e.Resolve(request, outcome) for request in discovery.requests]

    def _fail_if_lost(self, key: ModelKey, url: str, error: SonicError, now: float) -> None:
        """Fail what waits for a model, if it has had no server for too long."""
        lost_since = self._core.lost_since(key, now)
        missing = isinstance(error, errors.ModelNotFoundError)
        patience_s = self._timeout_s if missing or passes(error) else 0.0
        if lost_since is not None and now - lost_since >= patience_s:
            if missing:
                self.forget(key)
            self._give_up_waiting(key, url, error, now)

    def _give_up_waiting(
        self, key: ModelKey, url: str | None, error: SonicError, now: float
    ) -> None:
        """Give up what waits for a model; a server that has another model is the better reason."""
        if isinstance(error, errors.ModelNotFoundError):
            reasons = [x.signatures[key].rejection(now) for x in self._endpoints.active]
            error = next((reason for reason in reasons if reason is not None), error)
        for request in self._waiting.take_all(key):
            self._core.give_up(request, url, error, now)

    def _reject(
        self, endpoint: Endpoint, key: ModelKey, actual: Contract, expected: Contract, now: float
    ) -> None:
        """Send no rows to an endpoint whose model is not the one that they are packed for."""
        is_fallback = endpoint.url == self._fallback.url
        what = (
            f"the server's model {key.name!r} differs from that of the other servers, so it gets "
            "none of their rows"
        )
        if is_fallback:
            files = f"its files have the digest {actual.digest}, those of the servers"
            other = actual.digest != expected.digest
            what = "the fallback has another model" + f": {files} {expected.digest}" * other
        error = errors.ContractError(what, server=endpoint.url, model=key.name)
        logger.warning("%s", error)
        endpoint.signatures[key].reject(error, now)
        self.forget(key)
        if is_fallback:
            self._fallback.started(None, error, now)
        self._fail_if_lost(key, endpoint.url, error, now)

    @staticmethod
    def _warn_if_not_comparable(url: str, actual: Contract, expected: Contract | None) -> bool:
        """Warn if nobody knows whether the fallback has the servers' file."""
        unknown = expected is None or not (actual.digest and expected.digest)
        if unknown:
            logger.warning(
                "the fallback %s cannot be compared with the servers: not all of them say which "
                "file model %r is",
                *(url, actual.model),
            )
        return unknown
