"""Liveness probing: a server that owes responses and is silent is asked whether it lives."""

from __future__ import annotations

import math

# A server that owes responses is probed after this time without any.
SILENCE_S = 2.0


class Liveness:
    """When an endpoint was heard last, and whether a probe is under way.

    Attributes
    ----------
    heard_at : float
        When it last answered anything, or was sent a request while it owed no response.
    """

    __slots__ = ("_probed_at", "heard_at")

    def __init__(self) -> None:
        self.heard_at = 0.0
        self._probed_at: float | None = None

    def hear(self, now: float) -> None:
        """Record a sign of life."""
        self.heard_at = now

    def due_at(self, in_flight: int) -> float:
        """Return when the endpoint is to be probed, if nothing is heard before."""
        waits = in_flight and self._probed_at is None
        return self.heard_at + SILENCE_S if waits else math.inf

    def probe(self, now: float) -> None:
        """Record that it is probed."""
        self._probed_at = now

    def end(self, now: float, *, lives: bool) -> bool:
        """Take the probe's result, and return whether the endpoint is silent.

        An answer since the probe began counts more than the probe.
        """
        probed_at, self._probed_at = self._probed_at, None
        if lives:
            self.heard_at = now
            return False
        return probed_at is None or self.heard_at <= probed_at
