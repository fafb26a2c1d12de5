"""The connections to an endpoint: which of them a request takes, and when each is renewed."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

# A connection whose requests are all late may be led to a server that hangs.
SILENT_S = 1.0
# A pod restarts within ten seconds to some minutes.
FIRST_RENEWAL_S, LAST_RENEWAL_S = 15.0, 240.0
# Envoy counts resets of streams that are younger than this. If half of a connection's streams end
# so, and at least 250, it suspects an attack and closes the connection (CVE-2023-44487). So at most
# a third do, and the others are reset when they are older.
OLD_S = 2.0
MAX_RESETS, RESETS_PER_ANSWER = 50.0, 0.5
# TCP carries no more in a round trip than the buffers of both ends hold, 4 MB by Linux's default:
# 3 Gbit/s at 10 ms. Over such a distance, a request takes a new connection, up to four in all, if
# each of the others carries a megabyte.
FAR_S, FULL_BYTES, MAX_CHANNELS = 0.01, 1_000_000, 4


@dataclass(slots=True)
class Channel:
    """A connection.

    Attributes
    ----------
    silent_since : float or None
        Since when requests on it are late, and none is answered.
    renew_at, renew_after_s : float
        When it is to be renewed, and the time until the next renewal.
    resets : float
        Young requests on it that may be cancelled.
    """

    in_flight: int = 0
    nbytes: int = 0
    silent_since: float | None = None
    renew_at: float = math.inf
    renew_after_s: float = FIRST_RENEWAL_S
    resets: float = MAX_RESETS

    def cost(self, now: float) -> tuple[bool, bool, int]:
        """Return a sort key: a request takes the connection with the lowest."""
        return self.silent_since is not None, self.renew_at <= now, self.in_flight

    def renews(self, now: float) -> bool:
        silent = self.silent_since is not None and now - self.silent_since >= SILENT_S
        return self.in_flight == 0 and (silent or self.renew_at <= now)


class Channels:
    """The connections to an endpoint: a number of them, or by ``"auto"`` more to a distant server.

    There is one more while requests are sent again. A balancer that knows nothing of requests may
    bind a connection to one of several servers, so a request that is sent again takes another one.

    Attributes
    ----------
    round_trip_s : float
        The time to the server and back; 0 if it is unknown.
    """

    def __init__(self, wanted: int | str) -> None:
        self._chooses = wanted == "auto"
        self._wanted = 1 if self._chooses else int(wanted)
        self._to_renew = False
        self._all = [Channel() for _ in range(self._wanted)]
        self.round_trip_s = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def take(self, number: int, nbytes: int) -> None:
        self._all[number].in_flight += 1
        self._all[number].nbytes += nbytes

    def choose(self, used: Collection[int], now: float) -> int:
        """Return the connection that a request takes: if possible, one that it has not used."""
        far = self.round_trip_s >= FAR_S and self._wanted < MAX_CHANNELS
        if self._chooses and far and all(c.nbytes >= FULL_BYTES for c in self._all):
            self._wanted += 1
            if len(self._all) < self._wanted:
                self._all.append(Channel())
        channels = self._all
        free = [n for n in range(len(channels)) if n not in used]
        if not free and len(channels) == self._wanted:
            free = [self._wanted]
            channels.append(Channel())
        numbers = free or range(len(channels))
        return min(numbers, key=lambda n: (channels[n].cost(now), n == self._wanted))

    def leave(self, number: int, nbytes: int) -> None:
        self._all[number].in_flight -= 1
        self._all[number].nbytes -= nbytes

    def answered(self, number: int) -> None:
        channel = self._all[number]
        channel.silent_since = None
        channel.resets = min(channel.resets + RESETS_PER_ANSWER, MAX_RESETS)

    def resets(self, number: int) -> bool:
        """Count a young request that is to be cancelled; False if too many were."""
        channel = self._all[number]
        if channel.resets < 1.0:
            return False
        channel.resets -= 1.0
        return True

    def late(self, number: int, now: float) -> None:
        if self._all[number].silent_since is None:
            self._all[number].silent_since, self._to_renew = now, True

    def plan_renewals(self, now: float) -> None:
        """Plan to renew all, as one of the servers behind a balancer was lost.

        Its connections were led to other servers, and would stay there when it is back.
        """
        for channel in self._all if self._wanted > 1 else ():
            if channel.renew_at == math.inf:
                channel.renew_at, self._to_renew = now + channel.renew_after_s, True

    def take_renewals(self, now: float) -> list[int]:
        """Return the idle connections that are to be renewed now."""
        if not self._to_renew:
            return []
        due = [n for n, channel in enumerate(self._all) if channel.renews(now)]
        for number in due:
            channel = self._all[number]
            channel.silent_since = None
            if channel.renew_at <= now:
                channel.renew_at = now + channel.renew_after_s
                channel.renew_after_s = min(2 * channel.renew_after_s, LAST_RENEWAL_S)
        return due
