"""The circuit breaker of an endpoint, with its retry budget and back-off."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from sonic_coffea.errors import SonicError

FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 0.1, 2.0
# The retry budget. Behind a balancer, some servers may be dead and others well. If three of four
# requests are lost, as with Envoy's LEAST_REQUEST and one of two servers dead, 32 losses in a row
# happen once in 10,000 cases. Each answer adds ten losses to the budget, so requests are retried at
# once while at least one of eleven is answered.
MAX_LOSSES = 32.0
LOSSES_PER_ANSWER = 10.0
# Rows that are lost while others are answered may kill the servers, or make them hang; from then on
# they are sent again more and more slowly. If each second server is dead, or hangs, one request of
# 16 is lost four times by chance.
MAX_RETRIES = 4
# Losses that open a half-open circuit again.
HALF_OPEN_LOSSES = 4.0
# A run of losses that lasts this long opens the circuit, however few they are.
MAX_RUN_S = 2.0


class Circuit(Enum):
    """Whether requests pass: all, none, or one at a time to test the endpoint."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Opens when nothing gets through to an endpoint, and is half-open after a doubling back-off.

    A lost request is no lost endpoint, as many servers may be behind it. So losses use up a retry
    budget, which responses fill again, and only an empty budget opens the circuit.

    Attributes
    ----------
    failing_since : float or None
        When the endpoint was lost; else None.
    retry_at : float
        When the back-off ends.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._budget = MAX_LOSSES
        self._losing_since: float | None = None
        self._back_offs = 0
        self.failing_since: float | None = None
        self.retry_at = 0.0
        self.last_error: SonicError | None = None

    def circuit(self, now: float) -> Circuit:
        if now < self.retry_at:
            return Circuit.OPEN
        return Circuit.CLOSED if self.failing_since is None else Circuit.HALF_OPEN

    def exhausted(self, now: float) -> bool:
        """Whether the retry budget is used up, or nothing has got through for too long."""
        since = self._losing_since
        return self._budget <= 0.0 or (since is not None and now - since >= MAX_RUN_S)

    def succeed(self) -> bool:
        """Close the circuit, and return whether it was open or half-open."""
        was_failing = self.failing_since is not None
        self._budget = min(self._budget + LOSSES_PER_ANSWER, MAX_LOSSES)
        self._back_offs = 0
        self.retry_at = 0.0
        self.failing_since = self._losing_since = None
        return was_failing

    def spend(self) -> None:
        """Take a retry out of the budget."""
        self._budget = max(self._budget - 1.0, 0.0)

    def fail(self, error: SonicError, now: float, *, hopeless: bool = True) -> bool:
        """Record a loss, and return whether the endpoint is lost by it.

        `hopeless`: no other request in flight may still be answered.
        """
        self.last_error = error
        if now < self.retry_at:  # one of several losses of the same moment
            return False
        if self._losing_since is None:
            self._losing_since = now
        self.spend()
        return hopeless and self.exhausted(now) and self.open(error, now)

    def open(self, error: SonicError, now: float) -> bool:
        """Open the circuit, and return whether the endpoint was not lost before."""
        self.last_error = error
        new = self.failing_since is None
        if new:
            self.failing_since = self._losing_since or now
        self._budget, self._losing_since = HALF_OPEN_LOSSES, None
        self._back_offs += 1
        self.retry_at = now + back_off_s(self._back_offs, self._rng)
        return new


def back_off_s(number: int, rng: Random, first_s: float = FIRST_BACK_OFF_S) -> float:
    """Return the length of the n-th back-off in a row.

    It has jitter: many clients lose a server at the same moment, and must not return together.
    """
    longest_s: float = min(first_s * 2 ** min(number - 1, 10), max(LAST_BACK_OFF_S, 4 * first_s))
    return longest_s * rng.uniform(0.5, 1.0)
