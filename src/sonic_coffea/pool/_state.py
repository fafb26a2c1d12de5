"""What the parts of the pool's core share: endpoints, waiting slices, and instructions."""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING

from sonic_coffea.errors import RequestTooLargeError
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._endpoint import EndpointRegistry
from sonic_coffea.pool._fallback import FallbackPolicy
from sonic_coffea.pool._joining import Joining
from sonic_coffea.pool._waiting import WaitingSlices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.pool._settings import Settings


class CoreState:
    """The state that several parts of the core read and change.

    Attributes
    ----------
    servers : tuple of str
        Their URLs, without the fallback's.
    instructions : list
        What the core's owner is to do after the events that are being handled.
    """

    def __init__(self, settings: Settings, rng: Random | None) -> None:
        self.settings = settings
        self.servers = settings.servers
        self.rng = rng or Random()
        self.endpoints = EndpointRegistry(settings, self.rng)
        self.fallback = FallbackPolicy(settings, self.endpoints)
        self.waiting = WaitingSlices()
        self.joining = Joining()
        self.instructions: list[e.Instruction] = []
        self.endpoints.set_servers(self.servers, None)

    def lost_since(self, key: ModelKey, now: float) -> float | None:
        """Return since when the last server of a model is lost; None if one is there, or to come.

        It does not begin anew when coffea or dask run a chunk again.
        """
        if self.fallback.awaited(key, now):
            return None
        return self.endpoints.all_lost_since(key, now)

    def give_up(self, request: RequestSlice, url: str, error: SonicError) -> None:
        """Fail rows that are not sent again."""
        if isinstance(error, RequestTooLargeError):
            error = error.because(f"a single row of {request.nbytes} bytes")
        if request.retries:
            error = error.because(f"tried {request.retries + 1} times")
        self.instructions.append(e.Fail(request, error, url))

    def start_fallback(self) -> None:
        """Have the fallback started."""
        self.fallback.starting = True
        self.instructions.append(e.StartFallback())

    def attempts(self) -> Iterator[Attempt]:
        """Yield what is in flight."""
        return itertools.chain.from_iterable(
            [endpoint.in_flight.all() for endpoint in self.endpoints]
        )
