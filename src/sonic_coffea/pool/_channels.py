"""The connections to an endpoint: which one a request takes, and when it is renewed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

# A connection whose requests are all overdue may be led to a server that hangs.
SILENT_S = 1.0
# A pod takes from ten seconds to some minutes to be there again.
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
    in_flight, nbytes : int
        Requests that it carries, and the bytes of their tensors.
    silent_since : float or None
        Since when requests on it are overdue, and none is answered.
    renew_at, renew_after_s : float
        When it is to be made anew, and how long after that once more.
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
        """Return a sort key: a request takes the connection of the lowest."""
        return self.silent_since is not None, self.renew_at <= now, self.in_flight

    def renews(self, now: float) -> bool:
        """Whether it is to be made anew now."""
        silent = self.silent_since is not None and now - self.silent_since >= SILENT_S
        return self.in_flight == 0 and (silent or self.renew_at <= now)


class Channels:
    """As many connections as are wanted, and one more while requests are sent again.

    A connection may be bound to one of several servers, by a balancer that knows nothing of
    requests. So a request that is sent again takes another one.

    Parameters
    ----------
    wanted : int or "auto"
        ``"auto"``: one, and more to a server that is far away.

    Attributes
    ----------
    round_trip_s : float
        How far the server is; 0 as long as that is not known.
    """

    def __init__(self, wanted: int | str) -> None:
        self._chooses = wanted == "auto"
        self._wanted = 1 if self._chooses else int(wanted)
        self._to_renew = False
        self._all = [Channel() for _ in range(self._wanted)]
        self.round_trip_s = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def take(
        self, used: Collection[int], now: float, nbytes: int = 0, number: int | None = None
    ) -> int:
        """Return the connection that a request takes: if possible, one that it has not used."""
        if number is None:
            number = self._choose(used, now)
        self._all[number].in_flight += 1
        self._all[number].nbytes += nbytes
        return number

    def _choose(self, used: Collection[int], now: float) -> int:
        far = self.round_trip_s >= FAR_S and self._wanted < MAX_CHANNELS
        if self._chooses and far and all(c.nbytes >= FULL_BYTES for c in self._all):
            self._wanted += 1
            if len(self._all) < self._wanted:
                self._all.append(Channel())
        free = [n for n in range(len(self._all)) if n not in used]
        if not free and len(self._all) == self._wanted:
            free = [self._wanted]
            self._all.append(Channel())
        channels = self._all
        return min(
            free or range(len(channels)), key=lambda n: (channels[n].cost(now), n == self._wanted)
        )

    def leave(self, number: int, nbytes: int = 0) -> None:
        """Record that a request has ended."""
        self._all[number].in_flight -= 1
        self._all[number].nbytes -= nbytes

    def answered(self, number: int) -> None:
        """Record a response."""
        channel = self._all[number]
        channel.silent_since = None
        channel.resets = min(channel.resets + RESETS_PER_ANSWER, MAX_RESETS)

    def resets(self, number: int) -> bool:
        """Whether one more young request may be cancelled; count it."""
        channel = self._all[number]
        if channel.resets < 1.0:
            return False
        channel.resets -= 1.0
        return True

    def silent(self, number: int, now: float) -> None:
        """Record that a request is overdue."""
        if self._all[number].silent_since is None:
            self._all[number].silent_since, self._to_renew = now, True

    def plan_renewals(self, now: float) -> None:
        """Plan to make all anew, as one of the servers behind a balancer was lost.

        Connections to it were led to others, and would stay there when it is back.
        """
        for channel in self._all if self._wanted > 1 else ():
            if channel.renew_at == math.inf:
                channel.renew_at, self._to_renew = now + channel.renew_after_s, True

    def take_renewals(self, now: float) -> list[int]:
        """Return the connections that are to be made anew now; they carry nothing."""
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
