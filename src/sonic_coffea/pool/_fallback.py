"""When the fallback is started."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._endpoint import EndpointRegistry
    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.pool._settings import Settings


class FallbackPolicy:
    """Decides when to start the fallback: while no server has a model, or all of them are lost.

    Attributes
    ----------
    url : str or None
        Where it serves, or has served.
    error : SonicError or None
        Why it cannot be used: it is not started again.
    """

    def __init__(self, settings: Settings, endpoints: EndpointRegistry) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._started_at = -math.inf
        self.error: SonicError | None = None
        self.url: str | None = None
        self.starting = False

    def due_at(self, key: ModelKey, now: float) -> float:
        """Return when it is to be started for a model; infinity if it is not."""
        if self._settings.fallback is None or self.error is not None or self.starting:
            return math.inf
        endpoint = None if self.url is None else self._endpoints.by_url.get(self.url)
        if endpoint is not None:
            lost_since = endpoint.breaker.failing_since
            # It runs, with whatever models, or was restarted in vain.
            if lost_since is None or lost_since <= self._started_at:
                return math.inf
        since = self._endpoints.all_lost_since(key, now)
        return math.inf if since is None else since + self._settings.fallback_after_s

    def awaited(self, key: ModelKey, now: float) -> bool:
        """Whether rows of a model may still be scored by it."""
        return self.starting or self.due_at(key, now) < math.inf

    def started(self, url: str | None, error: SonicError | None, now: float) -> None:
        """Record where it serves, or why it does not."""
        self.starting, self.error = False, error or self.error
        if url is not None:
            self.url, self._started_at = url, now
