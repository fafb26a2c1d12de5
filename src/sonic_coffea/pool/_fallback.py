"""The fallback policy: start while no server has a model, or all of them are lost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._endpoint import EndpointRegistry
    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.pool._settings import Settings


class FallbackPolicy:
    """Whether there is a fallback, whether it is starting, and when it is to be started.

    Attributes
    ----------
    url : str or None
        Where it serves, or has served.
    starting : bool
        Whether it is being started.
    """

    def __init__(self, settings: Settings, endpoints: EndpointRegistry) -> None:
        self._settings = settings.fallback
        self._endpoints = endpoints
        self._started_at = -math.inf
        self._error: SonicError | None = None
        self.url: str | None = None
        self.starting = False

    def due_at(self, key: ModelKey, now: float) -> float:
        """Return when it is to be started for a model; infinity if it is not."""
        if self._settings.source is None or self._error is not None or self.starting:
            return math.inf
        endpoint = None if self.url is None else self._endpoints.get(self.url)
        if endpoint is not None:
            lost_since = endpoint.breaker.lost_since(now)
            # It is there, whatever models it has, or has been started again in vain.
            if lost_since is None or lost_since <= self._started_at:
                return math.inf
        since = self._endpoints.all_lost_since(key, now)
        return math.inf if since is None else since + self._settings.after_s

    def awaited(self, key: ModelKey, now: float) -> bool:
        """Whether rows of a model may still be scored by it."""
        return self.starting or self.due_at(key, now) < math.inf

    def started(self, url: str, now: float) -> None:
        """Record where it serves."""
        self.starting = False
        self.url, self._started_at = url, now

    def fail(self, error: SonicError) -> None:
        """Record that it cannot be used; it is not started again."""
        self.starting = False
        self._error = error
