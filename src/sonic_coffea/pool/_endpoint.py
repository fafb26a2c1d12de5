"""A server, as this process sees it at the moment."""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.pool._limits import AdaptiveLimit, Quota

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._call import Piece
    from sonic_coffea.transport import Connection, RpcHandle

logger = logging.getLogger(__name__)

ModelKey = tuple[str, str | None]
"""A model, and the version if one is asked for."""

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 2.0
# After so long, a server may have loaded a model that it did not have.
_LACKS_FOR_S = 30.0
# Which model it has, is asked again after so long, if it was lost in between.
_COMPARED_FOR_S = 5.0
# A server that another client has lost is left alone for at most so long.
_SPARED_S = 5.0
# A server that owes answers and has given none for so long is asked whether it lives.
_QUIET_S = 2.0


@dataclass(slots=True)
class RttStatistics:
    """What a server did for a model since someone last asked.

    Attributes
    ----------
    rows, refused : int
        Rows that were answered, and requests that were refused for lack of capacity.
    full : float
        Requests like the last one that make a full batch.
    trips : dict
        By size of the request (bits of the number of rows): number, sum and least of the trips.
    """

    rows: int = 0
    refused: int = 0
    full: float = 1.0
    trips: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    def answered(self, trip_s: float, rows: int, full: float) -> None:
        """Count an answer."""
        self.rows += rows
        self.full = full
        size = rows.bit_length()
        number, sum_s, least_s = self.trips.get(size, (0, 0.0, trip_s))
        self.trips[size] = (number + 1, sum_s + trip_s, min(least_s, trip_s))


@dataclass(slots=True, eq=False)
class Attempt:
    """A piece on its way to a server."""

    piece: Piece
    endpoint: Endpoint
    connection: Connection
    packed_at: float
    out: int
    pack_s: float = 0.0
    exchange: RpcHandle | None = None
    settled: bool = False

    @property
    def wanted(self) -> ModelKey:
        """The model."""
        return self.piece.call.wanted


@dataclass(slots=True, eq=False)
class Endpoint:
    """What is known of a server, from this process's own requests to it.

    Parameters
    ----------
    url : str
        Its address.
    connections : list of Connection
        One, or several for a balancer that leads each of them to another server.
    most : int
        Requests for a model that may ever be out to it at a time.
    rank : int
        It is used while no server of a lower rank can be.
    """

    url: str
    connections: list[Connection]
    most: int
    rank: int = 0
    leaving: bool = False
    attempts: set[Attempt] = field(default_factory=set)
    taken: int = 0
    failing_since: float | None = None
    hearsay: bool = False
    away_until: float = 0.0
    last_error: SonicError | None = None
    heard_at: float = 0.0
    asked: bool = False
    _out: Counter[ModelKey] = field(default_factory=Counter)
    _limits: dict[ModelKey, AdaptiveLimit] = field(default_factory=dict)
    _lacks: dict[ModelKey, float] = field(default_factory=dict)
    _compared: dict[ModelKey, float] = field(default_factory=dict)
    _asking: set[ModelKey] = field(default_factory=set)
    _shares: dict[ModelKey, Quota] = field(default_factory=dict)
    _observed: dict[ModelKey, RttStatistics] = field(default_factory=dict)
    _answered_from: float = 0.0
    _spared_until: float = 0.0
    _failed_in_a_row: int = 0

    @property
    def out(self) -> int:
        """Requests that are out."""
        return len(self.attempts)

    @property
    def models(self) -> list[ModelKey]:
        """The models that it is known to have."""
        return list(self._compared)

    def limit(self, wanted: ModelKey) -> AdaptiveLimit:
        """Return the limit of a model."""
        if wanted not in self._limits:
            self._limits[wanted] = AdaptiveLimit(self.most)
        return self._limits[wanted]

    def lacks(self, wanted: ModelKey, now: float) -> bool:
        """Whether it has turned out not to have a model, not long ago."""
        return self.leaving or self._lacks.get(wanted, 0.0) > now

    def has(self, wanted: ModelKey, now: float, *, there: bool) -> None:
        """Take note of whether it has a model, and the one that is meant."""
        self._lacks[wanted] = 0.0 if there else now + _LACKS_FOR_S
        self._compared.pop(wanted, None)
        if there:
            self._compared[wanted] = now

    def ask(self, wanted: ModelKey, now: float) -> bool:
        """Return whether it has to be asked now what model it has, and take note of it."""
        known = wanted in self._compared or wanted in self._asking or self.lacks(wanted, now)
        if known or self.away_until > now:
            return False
        self._asking.add(wanted)
        return True

    def told(self, wanted: ModelKey) -> None:
        """Take note that the question is answered, or failed."""
        self._asking.discard(wanted)

    def forget_questions(self) -> None:
        """Take note that nobody may be about to answer what it was to be asked."""
        self.asked = False
        self._asking.clear()

    def usable(self, wanted: ModelKey, now: float) -> bool:
        """Whether it may get requests for a model, as far as is known."""
        away = self.away_until > now or self.lacks(wanted, now)
        return not away and wanted in self._compared

    def room(self, wanted: ModelKey, now: float) -> int:
        """Return how many more requests for a model may go out to it now."""
        if not self.usable(wanted, now):
            return 0
        if self.failing_since is not None:
            # One, to see whether it is back.
            return 1 - self.out
        share = self._share(wanted, now)
        limit = self.limit(wanted) if share is None else share
        return limit.room(self._out[wanted], now)

    def _share(self, wanted: ModelKey, now: float) -> Quota | None:
        share = self._shares.get(wanted)
        return share if share is not None and now < share.until else None

    def allow(self, wanted: ModelKey, share: Quota, now: float) -> None:
        """Take what someone who sees all clients lets this one have."""
        self._shares[wanted] = share.after(self._share(wanted, now))

    def next_turn(self, now: float) -> float:
        """Return when a share lets the next request leave, or ends, if nothing else does."""
        return min((s.wakes_at(now) for s in self._shares.values()), default=float("inf"))

    def observe(self) -> dict[ModelKey, tuple[int, RttStatistics]]:
        """Return what is out and what was seen, by model, and begin anew."""
        observed = {w: (self._out[w], self._observed.get(w, RttStatistics())) for w in self._out}
        self._observed = {}
        return observed

    def lost_since(self, now: float) -> float | None:
        """Return since when it is lost; what others say counts for as long as they say it."""
        over = self.hearsay and now >= self._spared_until
        return None if over else self.failing_since

    @property
    def lost(self) -> bool:
        """Whether this process has lost it itself."""
        return self.failing_since is not None and not self.hearsay

    def spare(self, error: SonicError, until: float, now: float) -> None:
        """Leave it alone for a while: another client has lost it.

        Not for ever, as it may be that one's network that is lost.
        """
        if self.lost_since(now) is None:
            self.failed(error, now)
            self.hearsay = True
        self._spared_until = until
        self.away_until = min(until, (self.failing_since or now) + _SPARED_S)

    def try_again(self, now: float) -> None:
        """Take note that others do not think it lost any more."""
        if self._spared_until > now:
            self.away_until = self._spared_until = now

    def load(self, wanted: ModelKey) -> float:
        """Return how much of what it bears is out."""
        return self._out[wanted] / self.limit(wanted).value

    def begin(self, piece: Piece, now: float) -> Attempt:
        """Take a piece."""
        connection = min(
            self.connections,
            key=lambda c: sum(a.connection is c for a in self.attempts),
        )
        if not self.attempts:
            self.heard_at = now
        wanted = piece.call.wanted
        self._out[wanted] += 1
        self.taken += 1
        if (share := self._share(wanted, now)) is not None:
            share.sent(now)
        attempt = Attempt(piece, self, connection, now, self._out[wanted])
        self.attempts.add(attempt)
        piece.begun_at = now
        piece.attempts_out.append(attempt)
        return attempt

    def settle(self, attempt: Attempt) -> bool:
        """End an attempt, however it ended; False if it has been already."""
        if attempt.settled:
            return False
        attempt.settled = True
        self.attempts.discard(attempt)
        attempt.piece.attempts_out.remove(attempt)
        self._out[attempt.wanted] -= 1
        return True

    def answered(self, attempt: Attempt, now: float) -> None:
        """Take note of an answer."""
        self.heard(now)
        self._answered_from = max(self._answered_from, attempt.packed_at)
        rows = attempt.piece.stop - attempt.piece.start
        trip_s = now - attempt.packed_at - attempt.pack_s
        full = (attempt.piece.call.contract.max_rows or rows) / rows
        self.limit(attempt.wanted).answered(trip_s, rows, attempt.out, now, full)
        self._observed.setdefault(attempt.wanted, RttStatistics()).answered(trip_s, rows, full)

    def lives(self, now: float) -> None:
        """Take note of a sign of life, which is no proof that it infers."""
        self.heard_at = now

    def heard(self, now: float) -> None:
        """Take note that it does its work."""
        self.heard_at = now
        self._failed_in_a_row = 0
        self.away_until = 0.0
        if self.failing_since is not None:
            logger.warning("%s answers again", self.url)
            self.failing_since, self.hearsay = None, False

    def partly(self, attempt: Attempt) -> bool:
        """Whether a request is lost while others are not, as by a balancer with a dead server."""
        first = attempt.piece.attempts == 0
        return first and self.failing_since is None and attempt.packed_at < self._answered_from

    def failed(self, error: SonicError, now: float) -> None:
        """Take note of a loss: nothing goes out to it for a while, then one request."""
        self.last_error = error
        if not self.lost:
            logger.warning("%s; what was asked of it is asked again", error)
            self.failing_since, self.hearsay = now, False
            # What comes back may be another server, with another model.
            self._limits.clear()
            self._compared.clear()
        # A balancer that does not know yet who is dead may lead each second request there: what was
        # compared a moment ago need not be again, or nothing else would ever go out.
        old = [wanted for wanted, at in self._compared.items() if now - at > _COMPARED_FOR_S]
        for wanted in old:
            del self._compared[wanted]
        self._pause(now)

    def refused(self, error: SonicError, wanted: ModelKey, now: float) -> None:
        """Take note of a refusal for lack of capacity: it gets less, after a while."""
        self.last_error = error
        self.heard_at = now
        if self._failed_in_a_row == 0:
            logger.warning("%s; it gets fewer requests at a time", error)
        self.limit(wanted).refused(now)
        self._observed.setdefault(wanted, RttStatistics()).refused += 1
        self._pause(now)

    def _pause(self, now: float) -> None:
        if self.away_until > now:  # one of several requests that failed together
            return
        self._failed_in_a_row += 1
        pause_s = min(_FIRST_BACKOFF_S * 2 ** (self._failed_in_a_row - 1), _LAST_BACKOFF_S)
        # Many clients lose a server at the same moment, and must not come back at one.
        self.away_until = now + pause_s * random.uniform(0.5, 1.0)

    def quiet_until(self) -> float:
        """Return when it has to be asked whether it lives, if nothing is heard before."""
        return self.heard_at + _QUIET_S if self.attempts and not self.asked else float("inf")

    def close(self) -> None:
        """Let go of its connections."""
        for connection in self.connections:
            connection.close()


def choose(
    piece: Piece, endpoints: Iterable[Endpoint], now: float, *, but: Collection[Endpoint] = ()
) -> Endpoint | None:
    """Return the server that is to have a piece, if one has room for it."""
    wanted = piece.call.wanted
    usable = [e for e in endpoints if e.usable(wanted, now) and e not in but]
    first = min((e.rank for e in usable), default=0)
    able = [e for e in usable if e.rank == first and e.room(wanted, now) > 0]
    # One that has just lost these rows is the last to get them again.
    by = {e: (e.url == piece.last_server, e.load(wanted), e.taken) for e in able}
    return min(able, key=by.__getitem__, default=None)
