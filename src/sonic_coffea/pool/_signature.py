"""Signatures: whether an endpoint has a model, and whether it is the right one."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sonic_coffea.errors import ContractError
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._breaker import back_off_s

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from sonic_coffea.errors import SonicError
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Signature:
    """A model at an endpoint: valid, missing, rejected, or not known yet.

    If a server lacks a model, others behind the same endpoint may have it, and it may be loaded
    soon. An endpoint that has another model of the name is left alone for some time.

    Attributes
    ----------
    valid : bool
        Whether requests for the model may be sent to it.
    asked : bool
        Whether it is being asked for the model.
    expected : Contract or None
        The contract that the answer must fit.
    lacking_since : float or None
        Since when neither requests nor questions have found it.
    retry_at : float
        Before it, it is not asked again.
    """

    valid: bool = False
    asked: bool = False
    expected: Contract | None = None
    lacking_since: float | None = None
    retry_at: float = -math.inf
    _missed_at: float = -math.inf
    _misses: int = 0
    _failures: int = 0
    _rejection: SonicError | None = None
    _rejected_until: float = -math.inf

    @property
    def missing_since(self) -> float | None:
        """Since when the endpoint lacks the model; None if it may have it."""
        return None if self.valid else self.lacking_since

    def rejection(self, now: float) -> SonicError | None:
        """Return why it was rejected lately; None if it was not."""
        return self._rejection if now < self._rejected_until else None

    def due(self, now: float) -> bool:
        """Whether the endpoint has to be asked for the model."""
        waits = self.valid or self.asked or now < self.retry_at
        return not waits and self.rejection(now) is None

    def failed(self, now: float, rng: Random) -> None:
        """Record that it could not be asked; it is asked again after a back-off."""
        self._failures += 1
        self.retry_at = now + back_off_s(self._failures, rng)

    def accept(self, now: float) -> None:
        """Record that it has described the right model."""
        self.valid, self._misses, self._rejection = True, 0, None
        # A server that confirms the model, but refuses each request for it, still lacks it.
        if now - self._missed_at > tuning.VALID_S:
            self.answered()

    def answered(self) -> None:
        """Record a response: at least one of its servers has the model."""
        self._misses = self._failures = 0
        self.lacking_since, self.retry_at = None, -math.inf

    def miss(self, now: float, rng: Random) -> None:
        """Record a request without the model; the next may reach another server, which has it."""
        self._misses += 1
        if self.valid and self._misses >= tuning.MAX_MISSES:
            self.lack(now, rng)

    def lack(self, now: float, rng: Random) -> None:
        """Record that the endpoint does not have the model; it is asked again after a back-off."""
        self.valid, self._misses, self._missed_at = False, 0, now
        self.failed(now, rng)
        if self.lacking_since is None:
            self.lacking_since = now

    def reject(self, error: SonicError, now: float) -> None:
        """Record that the endpoint has another model of this name."""
        self.valid = False
        self._rejection, self._rejected_until = error, now + tuning.RECHECK_S


def serves(actual: Contract, expected: Contract) -> bool:
    """Return whether a server has the model that requests are packed for."""
    takes_as_many = (expected.max_rows or math.inf) <= (actual.max_rows or math.inf)
    return takes_as_many and not _differ(actual, expected)


def merge(contracts: Mapping[str, Contract]) -> Contract:
    """Return the contract of several servers, by URL, with the limits of the strictest.

    If two have different models of this name, raise: scores would depend on the server.
    """
    # A contract that lists its tensors comes before those without.
    ordered = sorted(contracts.items(), key=lambda item: not item[1].lists_tensors)
    (first, expected), *others = ordered
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
    digests = {c.digest for c in contracts.values()}
    return replace(
        expected,
        digest=expected.digest if len(digests) == 1 else "",
        max_rows=min(limits, default=None),
        preferred_rows=tuple(sorted(preferred)),
    )


def _differ(actual: Contract, expected: Contract) -> bool:
    """Whether servers list other tensors, or have other files of one version."""
    pairs = (actual.inputs, expected.inputs), (actual.outputs, expected.outputs)
    if any(ours and theirs and ours != theirs for ours, theirs in pairs):
        return True
    known = actual.version == expected.version and actual.digest and expected.digest
    return bool(known) and actual.digest != expected.digest
