"""Discovery of a model: asks all servers, until one has it or all have been given up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    CancelledError,
    DeadlineError,
    InferenceError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sonic_coffea.pool._events import ContractRequest
    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.transport import Contract

# After the first answer, the other servers have this time: one that hangs must not delay a call.
OTHERS_S = 1.0
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


@dataclass(slots=True)
class Discovery:
    """What is known so far of a model that a caller asks for.

    Attributes
    ----------
    requests : list of ContractRequest
        The callers that wait for it.
    next_round_at : float or None
        When the servers are asked (again); None while they are.
    contracts : dict
        The servers' answers in this round, by URL.
    failing_since : float or None
        When a round has ended without a contract for the first time.
    awaited : set of str
        The servers that have not answered in this round.
    """

    key: ModelKey
    next_round_at: float | None
    requests: list[ContractRequest] = field(default_factory=list)
    contracts: dict[str, Contract] = field(default_factory=dict)
    failing_since: float | None = None
    awaited: set[str] = field(default_factory=set)
    _failures: list[SonicError] = field(default_factory=list)
    _failures_before: list[SonicError] = field(default_factory=list)
    _passing: bool = False
    _grace_until: float = math.inf

    def begin_round(self, urls: Iterable[str], until: float) -> None:
        """Record that these servers are asked, and until when they have to answer."""
        self.next_round_at = None
        self.awaited = set(urls)
        self._passing = self.transient
        self._failures_before, self._failures = self.failures, []
        self.contracts, self._grace_until = {}, until

    def take(self, url: str, outcome: Contract | SonicError, now: float) -> None:
        """Take a server's answer."""
        if url not in self.awaited:
            return
        self.awaited.discard(url)
        if isinstance(outcome, SonicError):
            self._failures.append(outcome)
        else:
            self.contracts[url] = outcome
            self._grace_until = min(self._grace_until, now + OTHERS_S)

    def complete(self, now: float) -> bool:
        """Whether the round has ended."""
        asked = self.next_round_at is None
        return asked and (not self.awaited or now >= self._grace_until)

    @property
    def wakes_at(self) -> float:
        """When it goes on without an event."""
        return self._grace_until if self.next_round_at is None else self.next_round_at

    @property
    def failures(self) -> list[SonicError]:
        """The servers' errors of this round, or of the last one if there are none yet."""
        return self._failures or self._failures_before

    @property
    def transient(self) -> bool:
        """Whether another round of questions may find a server that has the model.

        So it is also one round after a server was lost: it may be back before its model is.
        """
        return self._passing or any(isinstance(failure, TRANSIENT) for failure in self.failures)

    def nobody_has_it(self, servers: Iterable[str]) -> SonicError:
        """Return the error for a model that no server has."""
        name, version = self.key
        missing = [f for f in self.failures if isinstance(f, ModelNotFoundError)]
        silent = ServerLostError("no server has answered")
        error = [*missing, *self.failures, silent][0].at(model=name, version=version)
        if isinstance(error, ServerLostError) and "sonic-coffea check" not in error.message:
            where = error.server or next(iter(servers))
            return error.because(f"sonic-coffea check {where} {name} tries it step by step")
        return error

    def too_late(self, timeout_s: float) -> SonicError:
        """Return the error for a caller whose deadline has passed."""
        name, version = self.key
        error: SonicError = DeadlineError(
            f"no server has described the model within {timeout_s:g} s",
            model=name,
            version=version,
        )
        return error.because(str(self.failures[0])) if self.failures else error
