"""A circuit breaker for each endpoint: what has failed is left alone, then tried with a request."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from sonic_coffea.errors import SonicError

FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 0.1, 2.0
# An endpoint that other clients have lost is left alone for at most so long: it may be their
# network that is lost.
EJECTED_S = 5.0


class Circuit(Enum):
    """Whether requests pass: all, none, or one to see whether the endpoint is back."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Opens when an endpoint fails, and is half-open after a back-off that doubles.

    An endpoint that other clients have lost is ejected: its circuit is open, too, but it counts as
    lost only for as long as they say so.

    Attributes
    ----------
    failing_since : float or None
        When the endpoint was lost, or ejected; None while it is neither.
    ejected : bool
        Whether only other clients have lost it.
    retry_at : float
        When the back-off ends.
    last_error : SonicError or None
        What failed last.
    """

    __slots__ = (
        "_consecutive_failures",
        "_ejected_until",
        "_rng",
        "ejected",
        "failing_since",
        "last_error",
        "retry_at",
    )

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._consecutive_failures = 0
        self._ejected_until = 0.0
        self.failing_since: float | None = None
        self.ejected = False
        self.retry_at = 0.0
        self.last_error: SonicError | None = None

    def circuit(self, now: float) -> Circuit:
        """Return whether requests pass."""
        if now < self.retry_at:
            return Circuit.OPEN
        return Circuit.CLOSED if self.failing_since is None else Circuit.HALF_OPEN

    @property
    def lost(self) -> bool:
        """Whether this process itself has lost the endpoint."""
        return self.failing_since is not None and not self.ejected

    def lost_since(self, now: float) -> float | None:
        """Return since when it is lost, to this process or to those who said so lately."""
        return None if self.ejected and now >= self._ejected_until else self.failing_since

    def succeed(self) -> bool:
        """Close the circuit, and return whether it was not."""
        was_failing = self.failing_since is not None
        self._consecutive_failures = 0
        self.retry_at = 0.0
        self.failing_since, self.ejected = None, False
        return was_failing

    def fail(self, error: SonicError, now: float) -> bool:
        """Open the circuit, and return whether the endpoint was not lost before."""
        self.last_error = error
        new = not self.lost
        if new:
            self.failing_since, self.ejected = now, False
        self._back_off(now)
        return new

    def overload(self, error: SonicError, now: float) -> bool:
        """Back off from an endpoint that is not lost, and return whether it is the first time."""
        self.last_error = error
        first = self._consecutive_failures == 0
        self._back_off(now)
        return first

    def eject(self, error: SonicError, until: float, now: float) -> bool:
        """Leave an endpoint alone that others have lost; return whether it was not lost before."""
        new = self.lost_since(now) is None
        if new:
            self.last_error = error
            self.failing_since, self.ejected = now, True
        self._ejected_until = until
        self.retry_at = min(until, (self.failing_since or now) + EJECTED_S)
        return new

    def readmit(self, now: float) -> None:
        """Take note that others have not lost it any more."""
        if self._ejected_until > now:
            self.retry_at = self._ejected_until = now

    def _back_off(self, now: float) -> None:
        if now < self.retry_at:  # one of several requests that failed together
            return
        self._consecutive_failures += 1
        longest_s = min(FIRST_BACK_OFF_S * 2 ** (self._consecutive_failures - 1), LAST_BACK_OFF_S)
        # Jitter: many clients lose a server at the same moment, and must not return at one.
        self.retry_at = now + longest_s * self._rng.uniform(0.5, 1.0)
