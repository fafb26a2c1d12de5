"""The connections to an endpoint: which one a request takes, and when each is renewed."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from sonic_coffea.pool import _tuning as tuning


@dataclass(slots=True)
class Channel:
    """A connection.

    Attributes
    ----------
    silent_since : float
        When a request on it became late, if none was answered since; else infinity.
    renew_at, renew_after_s : float
        When it is due to be renewed, and the time from then to the next renewal.
    resets : float
        How many young requests on it may still be cancelled.
    """

    in_flight: int = 0
    nbytes: int = 0
    silent_since: float = math.inf
    renew_at: float = math.inf
    renew_after_s: float = tuning.FIRST_RENEWAL_S
    resets: float = tuning.MAX_RESETS

    def cost(self, now: float) -> tuple[bool, bool, int]:
        """Return a sort key: a request takes the connection with the lowest."""
        return self.silent_since < math.inf, self.renew_at <= now, self.in_flight

    def answered(self) -> None:
        self.silent_since = math.inf
        self.resets = min(self.resets + tuning.RESETS_PER_ANSWER, tuning.MAX_RESETS)

    def late(self, now: float) -> None:
        self.silent_since = min(self.silent_since, now)

    def reset(self) -> bool:
        """Count a young request that is to be cancelled; False if too many were."""
        if self.resets < 1.0:
            return False
        self.resets -= 1.0
        return True

    def renew(self, now: float) -> bool:
        """Whether it is idle, and is to be renewed now; plan the next renewal."""
        due = self.renew_at <= now
        silent = now - self.silent_since >= tuning.LATE_S
        if self.in_flight or not (due or silent):
            return False
        self.silent_since = math.inf
        if due:
            self.renew_at = now + self.renew_after_s
            self.renew_after_s = min(2 * self.renew_after_s, tuning.LAST_RENEWAL_S)
        return True


class Channels(list[Channel]):
    """The connections to an endpoint: up to a number, or by ``"auto"`` one, and more if it is far.

    One more is opened when a request is sent again. A balancer that knows nothing of requests binds
    a connection to one of several servers, so the second attempt takes another connection.

    Attributes
    ----------
    round_trip_s : float
        The time to the server and back; 0 if it is unknown.
    """

    def __init__(self, channels: int | str) -> None:
        self._is_auto = channels == "auto"
        # Of all requests; one more is for those that are sent again.
        self._regular = 1 if self._is_auto else int(channels)
        self.round_trip_s = 0.0
        super().__init__([Channel()])

    def choose(self, used: Collection[int], now: float) -> int:
        """Return the connection that a request takes: if possible, one that it has not used."""
        far = self.round_trip_s >= tuning.FAR_S and self._regular < tuning.MAX_CHANNELS
        if self._is_auto and far and all(c.nbytes >= tuning.FULL_BYTES for c in self):
            self._regular += 1
        new, number = Channel(), len(self)
        free = [n for n in range(number) if n not in used]
        idle = any(self[n].cost(now) <= new.cost(now) for n in free)
        if (number < self._regular and not idle) or (number == self._regular and not free):
            self.append(new)
            free = [number]
        numbers = free or range(number)
        return min(numbers, key=lambda n: (self[n].cost(now), n == self._regular))

    def plan_renewals(self, now: float) -> None:
        """Plan to renew all connections, as one of the servers behind a balancer was lost.

        The balancer has led its connections to other servers, where they would stay for ever.
        """
        for channel in self if self._regular > 1 else ():
            channel.renew_at = min(channel.renew_at, now + channel.renew_after_s)
