"""Signatures: which models an endpoint has, and whether they are the ones that are meant."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from sonic_coffea.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

# After so long, a server may have loaded a model that it did not have.
REJECTED_S = 30.0
# A balancer that does not know yet which server is dead may lead each second request there: what
# was validated this recently need not be again, or nothing else would ever be sent.
VALID_S = 5.0


class Signatures:
    """What an endpoint has said of its models: valid, rejected, or not known yet.

    Attributes
    ----------
    valid : dict
        When the endpoint was last known to have each model that it has.
    validating : dict
        What is expected of each model that it is being asked for, and since when it is.
    """

    __slots__ = ("_rejected", "valid", "validating")

    def __init__(self) -> None:
        self.valid: dict[ModelKey, float] = {}
        self._rejected: dict[ModelKey, tuple[float, SonicError]] = {}
        self.validating: dict[ModelKey, tuple[Contract | None, float]] = {}

    def rejection(self, key: ModelKey, now: float) -> SonicError | None:
        """Return why the endpoint cannot serve a model, if that was found lately."""
        until, error = self._rejected.get(key, (0.0, None))
        return error if now < until else None

    def due(self, key: ModelKey, now: float) -> bool:
        """Whether the endpoint has to be asked for a model."""
        known = key in self.valid or key in self.validating
        return not known and self.rejection(key, now) is None

    def accept(self, key: ModelKey, now: float) -> None:
        """Take note that the endpoint has the model."""
        self._rejected.pop(key, None)
        self.valid[key] = now

    def reject(self, key: ModelKey, error: SonicError, now: float) -> None:
        """Take note that the endpoint does not have the model, or another one of this name."""
        self.valid.pop(key, None)
        self._rejected[key] = now + REJECTED_S, error

    def doubt(self, now: float, *, all_of_them: bool) -> None:
        """Have models validated again, as the endpoint failed: it may come back as another one."""
        for key, at in list(self.valid.items()):
            if all_of_them or now - at > VALID_S:
                del self.valid[key]


def serves(actual: Contract, expected: Contract) -> bool:
    """Return whether a server has the model that requests are made for."""
    tensors = (actual.inputs, actual.outputs) == (expected.inputs, expected.outputs)
    if not tensors or _other_file(actual, expected):
        return False
    if actual.max_rows is None:
        return True
    return expected.max_rows is not None and expected.max_rows <= actual.max_rows


def merge(contracts: Mapping[str, Contract]) -> Contract:
    """Return what several servers, by URL, say of a model, with the limits of the strictest.

    Raises
    ------
    ContractError
        If two servers have different models of this name: scores would depend on the server.
    """
    (first, expected), *others = contracts.items()
    for url, actual in others:
        same = (actual.inputs, actual.outputs) == (expected.inputs, expected.outputs)
        if not same or _other_file(actual, expected):
            raise ContractError(
                f"{first} and {url} have different models of this name; pin a version, or connect "
                "to one of them",
                model=expected.model,
            )
        if actual.version != expected.version:
            logger.warning(
                "%s has version %s of model %s, %s version %s; scores may depend on the server, "
                "pin a version to avoid it",
                first,
                expected.version,
                expected.model,
                url,
                actual.version,
            )
    limits = [c.max_rows for c in contracts.values() if c.max_rows is not None]
    preferred = set.intersection(*(set(c.preferred_rows) for c in contracts.values()))
    # Only what all say: of a server that does not, nobody knows which file it has.
    digests = {c.digest for c in contracts.values()}
    return replace(
        expected,
        digest=expected.digest if len(digests) == 1 else "",
        max_rows=min(limits, default=None),
        preferred_rows=tuple(sorted(preferred)),
    )


def _other_file(actual: Contract, expected: Contract) -> bool:
    """Whether two servers say that they have other files of the same version."""
    known = actual.version == expected.version and actual.digest and expected.digest
    return bool(known) and actual.digest != expected.digest
