"""The circuit breaker of an endpoint, with its retry budget and back-off."""

from __future__ import annotations

import math
from random import Random
from typing import Literal

from sonic_coffea.errors import SonicError
from sonic_coffea.pool import _tuning as tuning

Circuit = Literal["closed", "open", "half-open"]
"""Whether requests pass: all, none, or one at a time to test the endpoint."""


class CircuitBreaker:
    """Opens when nothing gets through to an endpoint, and is half-open after a doubling back-off.

    Many servers may be behind an endpoint, so a lost request does not mean a lost endpoint. Losses
    use up a retry budget, which responses fill again.

    ========= ============================================================== =========
    state     what happens                                                   next
    ========= ============================================================== =========
    closed    a loss with no budget left, or 2 s after the first one, if no  open
              other request may still be answered; or a failed probe
    open      the back-off ends                                              half-open
    half-open a response                                                     closed
    half-open the same as in the closed state, with a budget of 4 losses     open
    ========= ============================================================== =========

    Attributes
    ----------
    failing_since : float
        When the endpoint was lost; infinity if it is not.
    retry_at : float
        When the back-off ends.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._budget = tuning.MAX_LOSSES
        self._losing_since = math.inf
        self._back_offs = 0
        self.failing_since = math.inf
        self.retry_at = 0.0
        self.last_error: SonicError | None = None

    def circuit(self, now: float) -> Circuit:
        if now < self.retry_at:
            return "open"
        return "closed" if self.failing_since == math.inf else "half-open"

    def exhausted(self, now: float) -> bool:
        """Whether the retry budget is used up, or nothing has got through for too long."""
        return self._budget <= 0.0 or now - self._losing_since >= tuning.SILENCE_S

    def succeed(self) -> bool:
        """Close the circuit, and return whether it was open or half-open."""
        was_failing = self.failing_since < math.inf
        self._budget = min(self._budget + tuning.LOSSES_PER_ANSWER, tuning.MAX_LOSSES)
        self._back_offs = 0
        self.retry_at = 0.0
        self.failing_since = self._losing_since = math.inf
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
        self._losing_since = min(self._losing_since, now)
        self.spend()
        return hopeless and self.exhausted(now) and self.open(error, now)

    def open(self, error: SonicError, now: float) -> bool:
        """Open the circuit, and return whether the endpoint was not lost before."""
        self.last_error = error
        new = self.failing_since == math.inf
        self.failing_since = min(self.failing_since, self._losing_since, now)
        self._budget, self._losing_since = tuning.MAX_RETRIES, math.inf
        self._back_offs += 1
        self.retry_at = now + back_off_s(self._back_offs, self._rng)
        return new


def back_off_s(number: int, rng: Random, first_s: float = tuning.FIRST_BACK_OFF_S) -> float:
    """Return the length of the n-th back-off in a row.

    It has jitter: many clients lose a server at the same moment, and must not return together.
    """
    longest_s = max(tuning.LAST_BACK_OFF_S, 4 * first_s)
    return min(first_s * 2.0 ** min(number - 1, 10), longest_s) * rng.uniform(0.5, 1.0)
