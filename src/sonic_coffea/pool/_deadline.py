"""The time that a call may take, from its first question to its last answer."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the time that was given is over.

    Parameters
    ----------
    timeout_s : float or None
        The time that was given, which errors name; None if there is no deadline.
    at : float
        When it is over, by the monotonic clock.
    """

    timeout_s: float | None = None
    at: float = math.inf

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """Return the deadline of what begins now."""
        return cls() if timeout_s is None else cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float | None:
        """How long one may wait; None if as long as it takes."""
        return None if self.timeout_s is None else max(0.0, self.at - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.at


NEVER = Deadline()
"""That of what may take as long as it does."""
