"""Signatures: which models an endpoint has, and whether they are the declared ones."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sonic_coffea.errors import ContractError
from sonic_coffea.pool._breaker import back_off_s

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

# After this time, a server may have loaded the model that is meant in the place of another one.
REJECTED_S = 30.0
# The endpoint lacks a model after this number of requests in a row that did not find the model. If
# one of four servers behind it has the model, 16 requests find this server in 99 % of the cases.
MAX_MISSES = 16
# Losses have an endpoint's models validated again at most once in this time. A balancer that does
# not know yet which server is dead may lead each second request there, and the endpoint would only
# be validated.
VALID_S = 5.0
# If nothing was answered for this time, a server may have been restarted with other models.
QUIET_S = 1.0


@dataclass(slots=True)
class Missing:
    """A model that an endpoint lacks, `since` a time, or that it could not be asked for."""

    since: float | None = None
    at: float = -math.inf
    times: int = 0
    retry_at: float = -math.inf


class Signatures:
    """An endpoint's models: valid, missing, rejected, or not known yet.

    If a server lacks a model, others behind the same endpoint may have it, and it may be loaded
    soon. An endpoint that has another model of the name is left alone for `REJECTED_S`.

    Attributes
    ----------
    valid : set
        The models that the endpoint has.
    validating : dict
        The models that it is being asked for, with the contract that is expected.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._misses: dict[ModelKey, int] = {}
        self._missing: dict[ModelKey, Missing] = {}
        self.valid: set[ModelKey] = set()
        self._rejected: dict[ModelKey, tuple[float, SonicError]] = {}
        self.validating: dict[ModelKey, Contract | None] = {}

    def rejection(self, key: ModelKey, now: float) -> SonicError | None:
        """Return the error of a model that was rejected lately; None otherwise."""
        until, error = self._rejected.get(key, (0.0, None))
        return error if now < until else None

    def due(self, key: ModelKey, now: float) -> bool:
        """Whether the endpoint has to be asked for a model."""
        known = key in self.valid or key in self.validating or now < self.retry_at(key)
        return not known and self.rejection(key, now) is None

    def retry_at(self, key: ModelKey) -> float:
        """Return when the endpoint may be asked again for a model."""
        return self._missing[key].retry_at if key in self._missing else -math.inf

    def failed(self, key: ModelKey, now: float) -> Missing:
        """Record that it could not be asked; it is asked again after a back-off."""
        missing = self._missing.setdefault(key, Missing())
        missing.times += 1
        missing.retry_at = now + back_off_s(missing.times, self._rng)
        return missing

    def missing_since(self, key: ModelKey) -> float | None:
        """Return since when the endpoint lacks a model; None if it may have the model."""
        if key in self.valid or key not in self._missing:
            return None
        return self._missing[key].since

    def accept(self, key: ModelKey, now: float) -> None:
        self._rejected.pop(key, None)
        self._misses.pop(key, None)
        self.valid.add(key)
        # A server that confirms the model, and refuses each request for it, still lacks it.
        if key in self._missing and now - self._missing[key].at > VALID_S:
            del self._missing[key]

    def answered(self, key: ModelKey) -> None:
        """Record a response: at least one of its servers has the model."""
        self._misses.pop(key, None)
        self._missing.pop(key, None)

    def miss(self, key: ModelKey, now: float) -> None:
        """Record a request without the model; the next may reach another server, which has it."""
        self._misses[key] = self._misses.get(key, 0) + 1
        if key in self.valid and self._misses[key] >= MAX_MISSES:
            self.lack(key, now)

    def lack(self, key: ModelKey, now: float) -> None:
        """Record that the endpoint does not have the model; it is asked again after a back-off."""
        self.valid.discard(key)
        self._misses.pop(key, None)
        missing = self.failed(key, now)
        missing.at, missing.since = now, now if missing.since is None else missing.since

    def reject(self, key: ModelKey, error: SonicError, now: float) -> None:
        """Record that the endpoint has another model of this name."""
        self.valid.discard(key)
        self._rejected[key] = now + REJECTED_S, error

    def revalidate(self) -> None:
        """Have models validated again, as another server may come back at this URL."""
        self.valid.clear()


def serves(actual: Contract, expected: Contract) -> bool:
    """Return whether a server has the model that requests are packed for."""
    if _differ(actual, expected):
        return False
    if actual.max_rows is None:
        return True
    return expected.max_rows is not None and expected.max_rows <= actual.max_rows


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
                "%s has version %r of model %r, %s version %r; scores may depend on the server, "
                "pin a version to avoid it",
                first,
                expected.version,
                expected.model,
                url,
                actual.version,
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
