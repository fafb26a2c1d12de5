"""The endpoints of a pool: which one gets a slice, and when the fallback starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

from sonic_coffea.pool._endpoint import Endpoint
from sonic_coffea.pool._request import ModelKey, RequestSlice
from sonic_coffea.pool._settings import Settings


class EndpointRegistry:
    """The endpoints of a pool, by URL; one of them may be the fallback.

    The fallback is started while no server has a model, or all of them are lost.

    Attributes
    ----------
    by_url : dict
        The endpoints. A draining one stays until its last attempt has ended.
    servers : tuple of str
        The URLs of the servers, without the fallback's.
    fallback : str or None
        Where the fallback serves, or has served.
    fallback_starts, fallback_fails : bool
        Whether it is being started, and whether it cannot be used.
    """

    def __init__(self, settings: Settings, rng: Random) -> None:
        self._settings = settings
        self._rng = rng
        self.by_url: dict[str, Endpoint] = {}
        self.fallback: str | None = None
        self.fallback_starts = self.fallback_fails = False
        self._fallback_started_at = -math.inf
        self.set_servers(settings.servers)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.by_url.values())

    @property
    def active(self) -> list[Endpoint]:
        """The endpoints that are not draining."""
        return [endpoint for endpoint in self if not endpoint.draining]

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the tensors that are in flight."""
        return sum(channel.nbytes for endpoint in self for channel in endpoint.channels)

    def set_servers(self, servers: Sequence[str]) -> None:
        """Add and drain endpoints, so that these, and the fallback, are the active ones."""
        self.servers, ordered = tuple(servers), self._settings.balance == "priority"
        priorities: dict[str, float] = {} if self.fallback is None else {self.fallback: math.inf}
        priorities |= {url: number if ordered else 0 for number, url in enumerate(servers)}
        new = [url for url in priorities if url not in self.by_url]
        # Many processes start at the same time, and must not all begin with the same server.
        self._rng.shuffle(new)
        for url in new:
            self.by_url[url] = Endpoint(url, self._settings, self._rng)
        for url, endpoint in self.by_url.items():
            endpoint.draining = url not in priorities
            endpoint.priority = priorities.get(url, 0)

    def in_flight(self) -> list[RequestSlice]:
        """Return the slices in flight, once for each attempt."""
        return [attempt.slice for endpoint in self for attempt in endpoint.attempts]

    def candidates(self, key: ModelKey) -> list[Endpoint]:
        """Return the endpoints that may have a model, as they were not rejected for it."""
        return [e for e in self.active if e.signatures[key].rejection is None]

    def all_lost_since(self, key: ModelKey) -> float:
        """Return when the last endpoint of a model was lost; infinity if one is left.

        An endpoint without the model counts as lost.
        """
        return max((e.lost_since(key) for e in self.candidates(key)), default=-math.inf)

    def choose(self, request: RequestSlice, now: float) -> Endpoint | None:
        """Return the least used endpoint that has room for a slice; None if there is none."""
        key = request.key
        usable = [e for e in self if e.usable(request, now)]
        if request.inference_failures:  # the endpoint that failed on these rows comes last
            usable = [e for e in usable if e.url != request.last_url] or usable
        late = {attempt.url for attempt in request.attempts}
        elsewhere = [e for e in usable if e.url not in late]
        for group in (elsewhere, usable) if late else (usable,):
            highest = min((e.priority for e in group), default=0)
            first = [e for e in group if e.priority == highest]
            # An endpoint without a quota, beside others that have one, will soon have one, too.
            allocated = [e for e in first if now < e.quotas[key].expires_at] or first
            if able := [e for e in allocated if e.remaining(key, now) > 0]:
                # The endpoint that has just lost these rows is the last to get them again.
                return min(able, key=lambda e: (e.url == request.last_url, e.load(key)))
        return None

    # The fallback

    def fallback_due_at(self, key: ModelKey) -> float:
        """Return when to start it for a model; infinity if never."""
        if self._settings.fallback is None or self.fallback_fails or self.fallback_starts:
            return math.inf
        endpoint = self.by_url.get(self.fallback or "")
        # It runs, with or without the model, or a restart did not help.
        if endpoint and not self._fallback_started_at < endpoint.breaker.failing_since < math.inf:
            return math.inf
        return self.all_lost_since(key) + self._settings.fallback_after_s

    def awaits_fallback(self, key: ModelKey) -> bool:
        """Whether rows of a model may still be scored by it."""
        return self.fallback_starts or self.fallback_due_at(key) < math.inf

    def fallback_started(self, url: str, now: float) -> None:
        """Add the endpoint where it serves."""
        self.fallback, self._fallback_started_at, self.fallback_starts = url, now, False
        self.set_servers(self.servers)

    def refuse_fallback(self) -> None:
        """Never start it again, as it cannot be used."""
        self.fallback_starts, self.fallback_fails = False, True
