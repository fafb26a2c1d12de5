"""Signatures: whether an endpoint has a model, and whether it is the right one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from sonic_coffea.errors import ContractError, SonicError
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._breaker import back_off_s
from sonic_coffea.pool._request import RequestSlice
from sonic_coffea.transport import Contract, newest_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Signature:
    """What an endpoint said of a model: described, missing, rejected, or not known yet.

    ========= =============================================== ======================================
    state     what led there                                  asked again
    ========= =============================================== ======================================
    unknown   nothing was said, or the endpoint was lost      at once; after errors, with a back-off
    described a contract; requests that fit it may be sent    when callers wait for a contract
    missing   it has no such model, or 16 requests missed it  with a back-off
    rejected  a contract that differs from the others'        after `RECHECK_S`
    ========= =============================================== ======================================

    If a server lacks a model, others behind the same endpoint may have it, and it may be loaded
    soon.

    Attributes
    ----------
    contract : Contract or None
        The model that it has; None in all states but described.
    outcome : Contract, SonicError or None
        What it said last; None if it has not answered since callers wait.
    asked : bool
        Whether it is being asked for the model.
    rejection : SonicError or None
        Why it was rejected.
    lacking_since : float
        Since when neither requests nor questions have found it; infinity if one has.
    retry_at : float
        Before it, it is not asked again.
    """

    _rng: Random
    contract: Contract | None = None
    outcome: Contract | SonicError | None = None
    asked: bool = False
    rejection: SonicError | None = None
    lacking_since: float = math.inf
    retry_at: float = -math.inf
    _missed_at: float = -math.inf
    _misses: int = 0
    _failures: int = 0

    @property
    def missing_since(self) -> float:
        """Since when the endpoint lacks the model; infinity if it may have it."""
        return self.lacking_since if self.contract is None else math.inf

    def fits(self, request: RequestSlice) -> bool:
        """Whether the endpoint has the model that rows are packed for."""
        return self.contract is not None and serves(self.contract, request.call.contract)

    def failed(self, now: float) -> None:
        """Record that it could not be asked; it is asked again after a back-off."""
        self._failures += 1
        self.retry_at = now + back_off_s(self._failures, self._rng)

    def accept(self, contract: Contract, now: float) -> None:
        """Record the model that it has described."""
        self.contract, self.rejection, self._misses = contract, None, 0
        # A server that confirms the model, but refuses each request for it, still lacks it.
        if now - self._missed_at > tuning.VALID_S:
            self.answered()

    def answered(self) -> None:
        """Record a response: at least one of its servers has the model."""
        self._misses = self._failures = 0
        self.lacking_since = math.inf

    def miss(self, now: float) -> None:
        """Record a request without the model; the next may reach another server, which has it."""
        self._misses += 1
        if self.contract is not None and self._misses >= tuning.MAX_MISSES:
            self.lack(now)

    def lack(self, now: float) -> None:
        """Record that the endpoint does not have the model; it is asked again after a back-off."""
        self.invalidate()
        self._misses, self._missed_at = 0, now
        self.failed(now)
        self.lacking_since = min(self.lacking_since, now)

    def reject(self, error: SonicError, now: float) -> None:
        """Record that the endpoint has another model of this name."""
        self.contract, self.rejection = None, error
        self.retry_at = now + tuning.RECHECK_S

    def invalidate(self) -> None:
        """Have the endpoint asked again before it gets more rows."""
        self.contract = self.outcome = self.rejection = None


def serves(actual: Contract, expected: Contract) -> bool:
    """Return whether a server has the model that requests are packed for."""
    if actual is expected:
        return True
    # A server that does not stack requests is limited by its tensors' shapes alone.
    limit = actual.max_rows if actual.stacks else None
    takes_as_many = (expected.max_rows or math.inf) <= (limit or math.inf)
    return takes_as_many and not _differ(actual, expected)


def merge(contracts: Mapping[str, Contract]) -> Contract:
    """Return the contract of several servers, by URL, with the limits of the strictest.

    It is of the newest version, so that all processes choose the same one. If two servers have
    different models of this name, raise: scores would depend on the server.
    """
    newest = newest_of(c.version for c in contracts.values())

    def unknown(item: tuple[str, Contract]) -> tuple[bool, bool, bool]:
        return not item[1].lists_tensors, item[1].version != newest, not item[1].digest

    # The one that says most is first, as all are compared with it.
    (first, expected), *others = sorted(contracts.items(), key=unknown)
    for url, actual in others:
        if _differ(actual, expected):
            raise ContractError(
                f"{first} and {url} have different models of this name; pin a version, or connect "
                "to one of them",
                model=expected.model,
            )
        if actual.version != expected.version:
            logger.warning(
                "%s has version %r of model %r, %s version %r; rows are scored by version %r, on "
                "the servers that have it",
                *(first, expected.version, expected.model, url, actual.version, expected.version),
            )
    limits = [c.max_rows for c in contracts.values() if c.max_rows is not None]
    preferred = set.intersection(*(set(c.preferred_rows) for c in contracts.values()))
    # A server without a digest may have any file.
    digests = {c.digest for c in contracts.values() if c.version == expected.version}
    merged = replace(
        expected,
        digest=expected.digest if len(digests) == 1 else "",
        max_rows=min(limits, default=None),
        preferred_rows=tuple(sorted(preferred)),
    )
    # The same object is compared in no time, for each request.
    return expected if merged == expected else merged


def _differ(actual: Contract, expected: Contract) -> bool:
    """Whether servers list other tensors, or have other files of one version."""
    pairs = (actual.inputs, expected.inputs), (actual.outputs, expected.outputs)
    if any(ours and theirs and ours != theirs for ours, theirs in pairs):
        return True
    known = actual.version == expected.version and actual.digest and expected.digest
    return bool(known) and actual.digest != expected.digest
