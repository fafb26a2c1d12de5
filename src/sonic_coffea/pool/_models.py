"""The models of servers: which server has a model, and whether it is the right one.

Each endpoint keeps what it said last of each model, its `Signature`. Callers that wait for a
contract and rows that wait for a server have the same questions asked, and a caller's contract
follows from the signatures:

=============================================== ====================================================
signatures since the first caller waits         what callers get
=============================================== ====================================================
one has not answered, or is asked again         nothing yet; after `LATE_S`, what the others said
contracts, of one model                         their merged contract
contracts, of several models                    those that fit the last contract, or an error
errors, and the last contract is known          the last contract, unless all servers are lost
errors that may pass                            nothing, until `retry_timeout_s`; then an error
other errors                                    an error
=============================================== ====================================================
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from sonic_coffea import errors
from sonic_coffea.errors import SonicError
from sonic_coffea.pool import _instructions as do
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._endpoint import Endpoint
from sonic_coffea.pool._endpoints import EndpointRegistry
from sonic_coffea.pool._request import ModelKey, RequestSlice
from sonic_coffea.pool._settings import Settings
from sonic_coffea.pool._signature import merge, serves
from sonic_coffea.pool._waiting import WaitingSlices
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


_DIFFERS = (
    "the server has another model {!r} than the other servers, or than before, so it gets no rows "
    "that were meant for that one; call again, and give each file a version of its own"
)


def is_transient(error: SonicError) -> bool:
    """Whether another try may succeed."""
    gone = isinstance(error, errors.ServerLostError) and error.gone
    return isinstance(error, TRANSIENT) and not gone


@dataclass(slots=True)
class Known:
    """What is known of a model, and the callers that wait for its contract.

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
    callers : list
        The callers that wait.
    late_at : float
        When they wait no longer for servers that do not answer.
    failing_since : float
        When all servers had first answered without a contract; infinity before that.
    transient : bool
        Whether a server failed in a way that may pass. A lost server may be back before its model
        is loaded, so later failures do not change this.
    """

    contract: Contract | None = None
    received_at: float = -math.inf
    stale: bool = False
    of_servers: Contract | None = None
    described: bool = False
    compared: bool = False
    callers: list[Any] = field(default_factory=list)
    late_at: float = math.inf
    failing_since: float = math.inf
    transient: bool = False


class ServedModels(ABC):
    """The part of the core that knows contracts, and asks servers to find and validate models.

    Attributes
    ----------
    endpoints, waiting
        The servers, and the slices that wait for them.
    starts_at : float
        Before it, no server is asked for the sake of callers.
    answered_at : float
        When a request was answered last.
    """

    def __init__(self, settings: Settings, rng: Random) -> None:
        self._settings = settings
        self.endpoints = EndpointRegistry(settings, rng)
        self.waiting = WaitingSlices()
        self._instructions: list[do.Instruction] = []
        self._known: defaultdict[ModelKey, Known] = defaultdict(Known)
        self._not_described: set[ModelKey] = set()  # with this turn's events
        self.now = -math.inf  # the time of this turn, or of the last one
        self._is_used = False  # rows waited, or were in flight, at the end of the last turn
        self.answered_at = self.starts_at = -math.inf

    @abstractmethod
    def _give_up(self, request: RequestSlice, error: SonicError) -> None:
        """Fail rows that are not sent again; the error names the endpoint, if one failed."""

    def wanted(self) -> list[ModelKey]:
        """Return the models that rows or callers wait for."""
        asked = [key for key, known in self._known.items() if known.callers]
        return list(dict.fromkeys([*self.waiting.models(), *asked]))

    def _ask_servers(self) -> None:
        """Ask servers for the models that are wanted, and give callers what servers said."""
        for key in self.wanted():
            self._give_up_replaced(key)
            callers = self._known[key].callers
            # If callers wait, servers are compared when all have answered.
            first = None if callers else self.waiting.first(key)
            for endpoint in self.endpoints.active:
                signature = endpoint.signatures[key]
                if first and signature.contract is not None and not signature.fits(first):
                    self._reject(endpoint, key, _DIFFERS.format(key.name))
                elif self._due(endpoint, key):
                    signature.asked = True
                    self._instructions.append(do.Validate(endpoint.url, key))
            if callers:
                self._answer(key)
                self._give_up_replaced(key)  # callers may have been told of another model
            # After a question: a server may have returned since the last one.
            if key in self._not_described or not self.endpoints.candidates(key):
                self._give_up_if_lost(key)
        self._not_described.clear()
        self._is_used = bool(self.waiting) or any(x.attempts for x in self.endpoints)

    def contract_requested(self, key: ModelKey, caller: Any, *, anew: bool = False) -> None:
        """Give a caller a model's contract, or ask the servers for it.

        `caller` is what the engine knows it by, and `Resolve` names; `anew`: the servers are asked
        even if a contract is known.
        """
        if anew:
            self._forget(key)
        if (contract := self.valid_contract(key, self.now)) is not None:
            self._instructions.append(do.Resolve(caller, contract))
            return
        known = self._known[key]
        if not known.callers:
            for endpoint in self.endpoints:
                endpoint.signatures[key].outcome = None
            # If no server answers in this time, the known contract is used.
            latest = max(self.now, self.starts_at) + tuning.LATE_S
            known.late_at = math.inf if known.contract is None else latest
            known.failing_since, known.transient = math.inf, False
        known.callers.append(caller)

    def contract_withdrawn(self, key: ModelKey, caller: Any, timeout_s: float | None) -> None:
        """Give an error to a caller whose deadline, which the error names, has passed."""
        callers = self._known[key].callers
        if caller not in callers:  # it has just been resolved
            return
        callers.remove(caller)
        what = f"no server has described the model within {timeout_s or 0.0:g} s"
        error: SonicError = errors.DeadlineError(what, model=key.name, version=key.version)
        for reason in self._reasons(key)[:1]:
            error = error.because(str(reason))
        self._instructions.append(do.Resolve(caller, error))

    def validated(self, url: str, key: ModelKey, outcome: Contract | SonicError) -> None:
        """Take a server's contract of a model, or its error."""
        known, endpoint = self._known[key], self.endpoints.by_url.get(url)
        if endpoint is None:
            return
        signature = endpoint.signatures[key]
        signature.asked = False
        if isinstance(outcome, SonicError):
            self._not_described.add(key)
            known.transient |= is_transient(outcome)
            self._take_error(endpoint, key, outcome)
        else:
            known.described = True
            known.late_at = min(known.late_at, self.now + tuning.LATE_S)
            endpoint.channels.round_trip_s = outcome.round_trip_s
            self._accept(endpoint, key, outcome)
        signature.outcome = outcome

    def _forget(self, key: ModelKey) -> None:
        """Have the servers asked for a contract again."""
        self._known[key].contract = None

    def _mark_stale(self) -> None:
        """Doubt contracts, as a server refused rows, or was lost and may have other models now."""
        for known in self._known.values():
            known.stale = True

    def last_contract(self, key: ModelKey, now: float) -> tuple[float, Contract | None]:
        """Return the age of a model's contract, and it; None if there is a reason to doubt it.

        Any thread may call this. The age is read first: the contract may be younger, never older.
        """
        known = self._known.get(key, Known())
        return now - known.received_at, None if known.stale else known.contract

    def valid_contract(self, key: ModelKey, now: float) -> Contract | None:
        """Return a model's contract, unless it is in doubt. Any thread may call this."""
        if (known := self._known.get(key)) is None:
            return None
        # A lost server is noticed only while rows wait or are in flight.
        quiet_since = now if self._is_used else max(self.answered_at, known.received_at)
        lost = known.stale and now - known.received_at >= tuning.VALID_S
        return None if lost or now - quiet_since >= tuning.QUIET_S else known.contract

    # Questions

    def _due(self, endpoint: Endpoint, key: ModelKey) -> bool:
        """Whether to ask an endpoint for a model that is wanted."""
        signature, callers = endpoint.signatures[key], bool(self._known[key].callers)
        if signature.asked:
            return False
        if callers and signature.outcome is None:
            return self.now >= self.starts_at
        failed = callers and isinstance(signature.outcome, SonicError)
        return (failed or signature.contract is None) and self.now >= max(endpoint.back_offs(key))

    def _accept(self, endpoint: Endpoint, key: ModelKey, contract: Contract) -> None:
        """Take the contract of a server that was asked for it, unless requests did not find it."""
        endpoint.mark_alive(self.now)
        if self._lacks_version(endpoint, key, contract):
            endpoint.signatures[key].lack(self.now)
            return
        endpoint.signatures[key].accept(contract, self.now)
        known, first = self._known[key], self.waiting.first(key)
        expected = known.contract if first is None else first.call.contract
        if expected is not None and contract.digest != expected.digest:
            self._mark_stale()  # the digest of the rows that it gets is unknown
        if endpoint.url == self.endpoints.fallback:
            self._compare_fallback(endpoint, key, contract, expected or known.of_servers)

    def _take_error(self, endpoint: Endpoint, key: ModelKey, error: SonicError) -> None:
        """Take the error of a server that was asked for a contract; it is asked again later."""
        if isinstance(error, errors.ModelNotFoundError):
            endpoint.mark_alive(self.now)
            endpoint.signatures[key].lack(self.now)
            return
        if isinstance(error, errors.OverloadError):
            endpoint.mark_alive(self.now)
            endpoint.limits[key].pause(self.now, error.retry_after_s)
            return
        # The retry budget bounds losses, unless requests in flight keep the circuit closed.
        if not isinstance(error, errors.ServerLostError) or endpoint.breaker.exhausted(self.now):
            endpoint.signatures[key].failed(self.now)
        if isinstance(error, errors.CancelledError):  # its connection was renewed
            return
        if isinstance(error, errors.DeadlineError):
            endpoint.channels[0].late(self.now - tuning.LATE_S)
        endpoint.failed(error, self.now)
        self._mark_stale()

    def _lacks_version(self, endpoint: Endpoint, key: ModelKey, actual: Contract) -> bool:
        """Return whether requests for the newest version did not find it at an endpoint.

        If no server has it any more, the version that is there scores the rows that are left.
        """
        first = self.waiting.first(key)
        if first is None or endpoint.signatures[key].missing_since == math.inf:
            return False
        expected = first.call.contract
        newer = key.version is None and actual.version != expected.version
        if not newer or not serves(actual, expected):
            return False
        if self.endpoints.all_lost_since(key) == math.inf:
            return True
        logger.warning(
            "no server has version %r of model %r any more, which has scored some rows of a call; "
            "version %r scores the others, as its attributes say",
            *(expected.version, key.name, actual.version),
        )
        self._forget(key)
        slices = [*self.waiting.of(key), *self.endpoints.in_flight()]
        for call in {request.call for request in slices if request.key == key}:
            version, digest = actual.version, actual.digest
            call.contract = replace(call.contract, version=version, digest=digest)
        return False

    # What callers get

    def _answer(self, key: ModelKey) -> None:
        """Give callers the contract that follows from what servers said, or wait."""
        self._start_fallback(key)
        known = self._known[key]
        signatures = {x.url: x.signatures[key] for x in self.endpoints.active}
        awaited = [url for url, x in signatures.items() if x.asked or x.outcome is None]
        if awaited and self.now < known.late_at:
            return
        contracts = {
            url: x.contract
            for url, x in signatures.items()
            if x.contract is not None and x.contract is x.outcome
        }
        servers = {url: c for url, c in contracts.items() if url != self.endpoints.fallback}
        if servers or (contracts and known.contract is None):  # the fallback counts only alone
            for url in awaited:
                logger.warning("%s has not described model %r in time", url, key.name)
            self._conclude(key, servers or contracts)
        elif not self.endpoints.fallback_starts:
            known.failing_since = min(known.failing_since, self.now)
            # Lost servers may come back with another model; a fallback may not have another.
            reasons, fallback = self._reasons(key), self._settings.fallback
            lost = reasons and all(isinstance(x, errors.ServerLostError) for x in reasons)
            if known.contract is not None and (fallback is not None or not lost):
                self._resolve(known, known.contract)

    def _conclude(self, key: ModelKey, contracts: dict[str, Contract]) -> None:
        """Merge contracts; a server that alone has another model gets no rows."""
        known = self._known[key]
        before = known.contract
        as_before = {u: c for u, c in contracts.items() if before is not None and serves(c, before)}
        fitting = as_before or contracts
        try:
            contract = merge(fitting)
        except errors.ContractError as error:
            self._resolve(known, error)
            return
        for url in contracts.keys() - fitting.keys():
            self._reject(self.endpoints.by_url[url], key, _DIFFERS.format(key.name))
        known.contract, known.received_at, known.stale = contract, self.now, False
        if set(contracts) != {self.endpoints.fallback}:
            known.of_servers = contract
        self._resolve(known, contract)

    def _resolve(self, known: Known, outcome: Contract | SonicError) -> None:
        self._instructions += [do.Resolve(caller, outcome) for caller in known.callers]
        known.callers.clear()

    # Models that no server has

    def _reasons(self, key: ModelKey) -> list[SonicError]:
        """Return why endpoints do not score a model; the best reason is the first."""
        reasons: list[SonicError] = []
        for endpoint in self.endpoints.active:
            signature, breaker = endpoint.signatures[key], endpoint.breaker
            reason = signature.rejection or signature.outcome
            if not isinstance(reason, SonicError) and breaker.failing_since < math.inf:
                reason = breaker.last_error
            reasons += [reason] if isinstance(reason, SonicError) else []
        # A server that has another model is a better reason than one that has none.
        for kind in errors.ModelNotFoundError, errors.ContractError:
            reasons.sort(key=lambda reason: not isinstance(reason, kind))
        return reasons

    def _give_up_if_lost(self, key: ModelKey) -> None:
        """Fail the callers and the rows of a model that has had no server for too long."""
        known, lost_since = self._known[key], self.endpoints.all_lost_since(key)
        answered_at = known.failing_since if known.callers else math.inf
        failing_since = lost_since if lost_since < math.inf else answered_at
        if failing_since == math.inf:
            return
        reasons = self._reasons(key)
        missing = any(isinstance(error, errors.ModelNotFoundError) for error in reasons)
        # A model that was there is being loaded again, or its server is being restarted.
        returns = missing and (known.transient or known.described)
        transient = returns or any(map(is_transient, reasons))
        self._start_fallback(key, at_once=not transient)
        patience_s, never = self._settings.retry_timeout_s, self._is_never_reached(key, reasons)
        if never:
            patience_s = min(tuning.SILENCE_S, patience_s)
        patient = transient and self.now - failing_since < patience_s
        if patient or self.endpoints.awaits_fallback(key):
            return
        error = self._unavailable(key, reasons)
        if answered_at < math.inf:
            self._resolve(known, error.because("nothing was ever reached") if never else error)
        if lost_since < math.inf:
            self._forget(key)
            for request in self.waiting.take_chosen(key, lambda _: True):
                self._give_up(request, error)

    def _is_never_reached(self, key: ModelKey, reasons: Sequence[SonicError]) -> bool:
        """Whether nothing was ever at the servers' addresses."""
        # A worker may join a cluster while servers are restarted; a fallback may load its model.
        joined = self.starts_at > -math.inf
        fallback = self.endpoints.by_url.get(self.endpoints.fallback or "")
        loading = fallback is not None and fallback.signatures[key].asked
        reached = joined or loading or any(known.described for known in self._known.values())
        lost = all(isinstance(x, errors.ServerLostError) and x.unreached for x in reasons)
        return lost and not reached

    def _unavailable(self, key: ModelKey, reasons: Sequence[SonicError]) -> SonicError:
        """Return the error for a model that no server has."""
        error = reasons[0] if reasons else errors.ServerLostError("no server has answered")
        error = error.at(model=key.name, version=key.version)
        if isinstance(error, errors.ServerLostError) and "sonic-coffea check" not in error.message:
            where = error.server or self.endpoints.servers[0]
            return error.because(f"sonic-coffea check {where} {key.name} tries it step by step")
        return error

    def _give_up_replaced(self, key: ModelKey) -> None:
        """Give up slices that were packed for a model that has been replaced."""
        contract, first = self._known[key].contract, self.waiting.first(key)
        if contract is None or first is None or serves(contract, first.call.contract):
            return
        changed = errors.ContractError(f"the servers' model {key.name!r} has changed meanwhile")
        for request in self.waiting.take_chosen(
            key, lambda request: not serves(contract, request.call.contract)
        ):
            self._give_up(request, changed)

    def _reject(self, endpoint: Endpoint, key: ModelKey, what: str) -> None:
        """Send no rows to an endpoint that has another model."""
        error = errors.ContractError(what, server=endpoint.url, model=key.name)
        logger.warning("%s", error)
        endpoint.signatures[key].reject(error, self.now)
        self._forget(key)
        if endpoint.url == self.endpoints.fallback:
            self.endpoints.refuse_fallback()

    # The fallback

    def _start_fallback(self, key: ModelKey, *, at_once: bool = False) -> None:
        """Start the fallback if it is due for a model; `at_once`: also if it will be due later."""
        due_at = self.endpoints.fallback_due_at(key)
        if due_at <= self.now or (at_once and due_at < math.inf):
            self.endpoints.fallback_starts = True
            self._instructions.append(do.StartFallback())

    def fallback_started(self, outcome: str | SonicError) -> None:
        """Use the fallback, which serves at a URL, unless an error says why it cannot be used."""
        if isinstance(outcome, SonicError):
            logger.error("no fallback: %s", outcome)
            self.endpoints.refuse_fallback()
        else:
            logger.warning("rows are scored by the fallback %s until a server is back", outcome)
            self.endpoints.fallback_started(outcome, self.now)

    def _compare_fallback(
        self, endpoint: Endpoint, key: ModelKey, actual: Contract, expected: Contract | None
    ) -> None:
        """Reject a fallback that has not the model of the servers, even if they are gone."""
        known = self._known[key]
        if expected is not None and not serves(actual, expected):
            what = "the fallback has another model"
            if actual.digest != expected.digest:
                files = f"its files have the digest {actual.digest}, those of the servers"
                what = f"{what}: {files} {expected.digest}"
            self._reject(endpoint, key, what)
        elif not known.compared and not (expected and actual.digest and expected.digest):
            known.compared = True
            logger.warning(
                "the fallback %s cannot be compared with the servers: not all of them say which "
                "file model %r is",
                *(endpoint.url, actual.model),
            )
