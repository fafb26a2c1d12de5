"""Log lines about lost requests: at once, then at most every 10 s, with their number."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonic_coffea.errors import SonicError

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class LossLog:
    """Logs how many of an endpoint's requests are sent again."""

    __slots__ = ("_due_at", "_last_error", "_number", "_retry_timeout_s", "_told_lost")

    def __init__(self, retry_timeout_s: float) -> None:
        self._retry_timeout_s = retry_timeout_s
        self._number = 0
        self._last_error: SonicError | None = None
        self._due_at = -math.inf
        self._told_lost = False

    def count(self, error: SonicError, now: float) -> None:
        """Count a request that is sent again."""
        self._number += 1
        self._last_error = error
        self.tell(now)

    def tell(self, now: float) -> None:
        """Log how many there were, unless the last line is younger than `INTERVAL_S`."""
        if self._number and now >= self._due_at:
            requests = "1 request is" if self._number == 1 else f"{self._number} requests are"
            logger.warning("%s; %s sent again", self._last_error, requests)
            self._number, self._due_at = 0, now + INTERVAL_S

    def wakes_at(self) -> float:
        """Return when there is something to log."""
        return self._due_at if self._number else math.inf

    def lost(self, error: SonicError, now: float) -> None:
        """Log that nothing gets through to the endpoint any more."""
        if now >= self._due_at:
            logger.warning(
                "%s; nothing gets through, and requests are sent again for up to %g s",
                error,
                self._retry_timeout_s,
            )
            self._told_lost, self._due_at = True, now + INTERVAL_S

    def found(self, url: str) -> None:
        """Log that it answers again, if its loss was logged."""
        if self._told_lost:
            self._told_lost = False
            logger.warning("%s answers again", url)
