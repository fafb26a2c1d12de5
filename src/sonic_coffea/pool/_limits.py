"""How many requests a server bears: a pure state machine, told of answers and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass

_FIRST = 4.0
# An answer may take so many times as long as one to a request that was alone. Enough to keep a
# server busy that works on one batch at a time, while the next waits and another is on its way.
_TOLERANCE = 3.0
_SMOOTHING = 0.2
# How often a request goes out alone, to learn anew how long that takes: at most once in so many
# seconds, or so many of these times.
_PROBE_S = 30.0
_PROBE_TRIPS = 100
# What a lone request takes may have grown since the last one, or other clients may have more in the
# queue. Not to outbid each other without end, clients believe the former only so far.
_MOST_GROWTH = 1.25
_MOST_GROWTH_EVER = 4.0
# So many keep a server busy, however slow it has become; only refusals go below. They are two full
# batches, where requests are small and the server puts them together.
_LEAST = 4.0
_BATCHES, _MOST_FULL = 2, 64.0


# A request that left a little late does not take the next turn as well.
_HALF_A_TURN = 0.5


class AdaptiveLimit:
    """The number of requests for a model that may be out to a server at a time.

    It doubles with each round trip until answers take longer than they should, then follows them:
    one more in a round trip while they are in time, one less while they are not. A refusal halves
    it. Requests of like size are compared with each other.

    Parameters
    ----------
    most : int
        The number that is never exceeded.

    Notes
    -----
    Latency is the signal rather than throughput, since of many clients that share a server, all
    would gain by having more requests in its queue than the others. Rules of this kind are known
    from TCP Vegas (Brakmo and Peterson, 1995) and, for the probes, BBR (Cardwell et al., 2016).
    """

    def __init__(self, most: int) -> None:
        self._most = float(most)
        self._value = min(_FIRST, self._most)
        self._starting = True
        # By size of the requests: what one takes alone, as believed now, and at the least ever.
        self._alone_s: dict[int, float] = {}
        self._least_s: dict[int, float] = {}
        self._slowness = 1.0
        self._probe_at = float("inf")
        self._spared_until = 0.0

    @property
    def value(self) -> int:
        """The limit, when it is not probing."""
        return int(self._value)

    def room(self, out: int, now: float) -> int:
        """Return how many more may leave, with `out` of them out."""
        return (1 if now >= self._probe_at else int(self._value)) - out

    def answered(self, trip_s: float, rows: int, out: int, now: float, full: float = 1.0) -> None:
        """Take note of an answer.

        Parameters
        ----------
        trip_s : float
            From the send to the answer.
        rows : int
            Of the request.
        out : int
            How many were out when it was sent, itself included.
        now : float
            Time of any clock that does not go back.
        full : float
            Requests of this size that make a full batch of the server.
        """
        alone_s = self._alone(trip_s, rows.bit_length(), now if out == 1 else None)
        if self._probe_at == float("inf"):
            self._probe_at = now + max(_PROBE_S, _PROBE_TRIPS * alone_s)
        self._slowness += _SMOOTHING * (trip_s / alone_s - self._slowness)
        least = max(_LEAST, min(_BATCHES * full, _MOST_FULL))
        if self._slowness > _TOLERANCE and self._value > least:
            self._starting = False
            self._set(max(self._value - 1 / self._value, least))
        elif out >= int(self._value) and (self._slowness <= _TOLERANCE or self._value < least):
            self._set(self._value + (1 if self._starting else 1 / self._value))

    def refused(self, now: float) -> None:
        """Take note of a refusal for lack of capacity; those of one moment count as one."""
        if now >= self._spared_until:
            self._starting = False
            self._set(self._value / 2)
            self._spared_until = now + max(self._alone_s.values(), default=0.01)

    def lost(self) -> None:
        """Begin anew, with what may be another server behind the same address."""
        self.__init__(int(self._most))  # type: ignore[misc]

    def _alone(self, trip_s: float, size: int, probed_at: float | None) -> float:
        """Return what a request of this size takes alone, given another trip."""
        least_s = self._least_s[size] = min(trip_s, self._least_s.get(size, trip_s))
        alone_s = min(trip_s, self._alone_s.get(size, trip_s))
        if probed_at is not None:
            believed_s = min(alone_s * _MOST_GROWTH, least_s * _MOST_GROWTH_EVER)
            alone_s = min(trip_s, believed_s)
            self._probe_at = probed_at + max(_PROBE_S, _PROBE_TRIPS * trip_s)
        self._alone_s[size] = alone_s
        return alone_s

    def _set(self, value: float) -> None:
        self._value = min(max(value, 1.0), self._most)


@dataclass(slots=True)
class Quota:
    """What this process may have of a server for a while, if someone sees all of its clients.

    Parameters
    ----------
    most : int
        Requests that may be out at a time.
    every_s : float
        The time from one turn to the next, if there is less than one request for each client at a
        time.
    turn_at : float
        When one of the turns is; those of other clients are in between.
    until : float
        When it ends.
    """

    most: int
    every_s: float
    turn_at: float
    until: float
    next_at: float = 0.0

    def room(self, out: int, now: float) -> int:
        """Return how many more may leave, with `out` of them out."""
        return self.most - out if now >= self.next_at else 0

    def sent(self, now: float) -> None:
        """Take note that one leaves: the next has to wait for its turn."""
        if self.every_s:
            turns = math.ceil((now - self.turn_at) / self.every_s + _HALF_A_TURN)
            self.next_at = self.turn_at + turns * self.every_s

    def wakes_at(self, now: float) -> float:
        """Return when it lets the next request leave, or ends and does not hold it any more."""
        waits = now < self.next_at and now < self.until
        return min(self.next_at, self.until) if waits else math.inf

    def after(self, old: Quota | None) -> Quota:
        """Return this share, as it goes on from another: a turn that is due is not lost."""
        due = old is not None and old.next_at <= self.turn_at - self.every_s
        self.next_at = old.next_at if due and old is not None else self.turn_at
        return self
