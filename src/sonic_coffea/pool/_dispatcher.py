"""The dispatcher: one thread that packs and sends requests while there is room in flight."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import platform
import threading
import time
import uuid
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    ModelNotFoundError,
    OverloadError,
    RequestError,
    ResponseError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.pool._endpoint import Attempt, Endpoint, ModelKey, choose
from sonic_coffea.pool._fleet import CLOSED
from sonic_coffea.reporting import Span, Statistics, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sonic_coffea.pool._call import Call, Piece
    from sonic_coffea.pool._fleet import Fleet
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.transport import Answer

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 4
# After something went wrong here, it is tried again after so long, or when there is more to do.
_AFTER_FAILURE_S = 1.0


class Dispatcher:
    """What waits to be sent, what is out, and what becomes of either.

    Its methods run in its own thread, which starts with the first request, or in those of the
    connections.

    Parameters
    ----------
    fleet : Fleet
        The servers.
    lock : threading.Condition
        Held around whatever it shares with the fleet; notified when something can leave.
    """

    def __init__(self, fleet: Fleet, lock: threading.Condition) -> None:
        self.statistics = Statistics()
        self._fleet, self._lock = fleet, lock
        self._queues: dict[ModelKey, list[tuple[int, Piece]]] = {}
        self._order = itertools.count()
        self._out_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._name = uuid.uuid4().hex[:8]

    @property
    def closed(self) -> bool:
        """Whether nothing is sent any more."""
        return self._closed

    def waiting(self) -> dict[ModelKey, int]:
        """Return how many requests of each model wait; the lock is held."""
        return {wanted: len(queue) for wanted, queue in self._queues.items()}

    def submit(self, call: Call, pieces: Iterable[Piece]) -> None:
        """Queue the requests of a call; they leave as soon as there is room.

        Raises
        ------
        ServerLostError
            If the pool has been closed.
        """
        with self._lock:
            if self._closed:
                raise ServerLostError(CLOSED)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="sonic-pool", daemon=True)
                # If the system has no more threads, the next call tries again.
                thread.start()
                self._thread = thread
            self.statistics += call.statistics
            for piece in pieces:
                piece.order = next(self._order)
                self._queue(piece)
            self._lock.notify_all()

    def stop(self) -> bool:
        """Send nothing more, and cancel what waits; False if that has been done before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            waiting = [piece for queue in self._queues.values() for _, piece in queue]
            self._queues.clear()
            self._lock.notify_all()
        for piece in waiting:
            piece.call.cancel()
        return True

    def join(self) -> None:
        """Wait for its thread to end."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def _settings(self) -> Settings:
        return self._fleet.settings

    def _queue(self, piece: Piece) -> None:
        heapq.heappush(self._queues.setdefault(piece.call.wanted, []), (piece.order, piece))

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception as error:
                # Those who wait would do so for ever, and later calls find no thread.
                logger.exception("requests could not be sent")
                self._fail_all(error)

    def _turn(self) -> None:
        """Wait until there is something to do, and do it."""
        with self._lock:
            while True:
                if self._closed:
                    return
                # One reading of the clock, or a server could come back between two of them.
                now = time.monotonic()
                self._fleet.look(now)
                self._fleet.let_go()
                quiet = [e for e in self._fleet.endpoints if e.quiet_until() <= now]
                strange = self._strange(now)
                attempt = self._next(now) or self._hedge(now)
                homeless = self._homeless(now)
                if attempt is not None or quiet or strange or homeless:
                    break
                self._lock.wait(self._pause_s(now))
            for endpoint in quiet:
                endpoint.asked = True
            if attempt is not None:
                self._out_bytes += attempt.piece.nbytes
        for piece in homeless:
            missing = f"no server has model {piece.call.wanted[0]!r} any more"
            self._fail(piece, ModelNotFoundError(missing))
        for endpoint in quiet:
            self._ask_life(endpoint)
        for endpoint, call in strange:
            self._compare(endpoint, call)
        if attempt is not None:
            self._send(attempt)

    def _fail_all(self, error: Exception) -> None:
        """Fail the calls of all that has not left, for what went wrong here."""
        failure = SonicError(f"requests could not be sent: {error!r}")
        with self._lock:
            left = [piece for queue in self._queues.values() for _, piece in queue]
            self._queues.clear()
            unsent = [a for e in self._fleet.endpoints for a in e.attempts if a.exchange is None]
            for endpoint in self._fleet.endpoints:
                endpoint.forget_questions()
        for attempt in unsent:
            self._settle(attempt)
            left.append(attempt.piece)
        for call in {piece.call for piece in left}:
            call.fail(failure)
        with self._lock:
            # It may go wrong again at once, and must not fill the log.
            if not any(self._queues.values()):
                self._lock.wait(_AFTER_FAILURE_S)

    def _strange(self, now: float) -> list[tuple[Endpoint, Call]]:
        """Return servers that have not said yet whether they have the model of what waits."""
        waiting = {wanted: queue[0][1].call for wanted, queue in self._queues.items() if queue}
        return [
            (endpoint, call)
            for wanted, call in waiting.items()
            for endpoint in self._fleet.endpoints
            if endpoint.ask(wanted, now)
        ]

    def _next(self, now: float) -> Attempt | None:
        """Take the next piece that may leave now, for a server that has room for it."""
        for wanted, queue in sorted(self._queues.items(), key=lambda item: item[1][:1]):
            while queue and queue[0][1].call.over:
                heapq.heappop(queue)
            if not queue:
                continue
            piece = queue[0][1]
            if not self._fits(piece):
                return None
            endpoint = choose(piece, self._fleet.endpoints, now)
            if endpoint is not None:
                heapq.heappop(queue)
                return endpoint.begin(piece, now)
            if self._fleet.falls_back_at(wanted, now) <= now:
                self._fleet.fall_back()
        return None

    def _homeless(self, now: float) -> list[Piece]:
        """Take out what no server can have any more."""
        fleet = self._fleet
        gone = [
            wanted
            for wanted, queue in self._queues.items()
            if queue
            and not fleet.serving(wanted, now)
            and not fleet.waits_for_fallback(wanted, now)
        ]
        return [piece for wanted in gone for _, piece in self._queues.pop(wanted)]

    def _hedge(self, now: float) -> Attempt | None:
        """Send a request that takes long to another server, too."""
        if self._settings.hedge_after_s is None:
            return None
        late = [a for e in self._fleet.endpoints for a in e.attempts if self._hedged_at(a) <= now]
        for attempt in late:
            others = choose(attempt.piece, self._fleet.endpoints, now, but=[attempt.endpoint])
            if others is not None and self._fits(attempt.piece):
                return others.begin(attempt.piece, now)
        return None

    def _hedged_at(self, attempt: Attempt) -> float:
        after_s = self._settings.hedge_after_s
        if after_s is None or len(attempt.piece.attempts_out) > 1:
            return math.inf
        # Not again at once, if the other attempt has failed.
        return attempt.piece.begun_at + after_s

    def _fits(self, piece: Piece) -> bool:
        # A piece larger than the whole budget travels alone.
        limit = self._settings.max_in_flight_bytes
        return self._out_bytes == 0 or self._out_bytes + piece.nbytes <= limit

    def _pause_s(self, now: float) -> float | None:
        """Return for how long nothing can change by itself; None if not before an answer."""
        endpoints = self._fleet.endpoints
        times = [e.quiet_until() for e in endpoints]
        times += [e.next_turn(now) for e in endpoints if any(self._queues.values())]
        if self._settings.hedge_after_s is not None:
            times += [t for e in endpoints for t in map(self._hedged_at, e.attempts) if t > now]
        if any(self._queues.values()):
            times += [e.away_until for e in endpoints if e.away_until > now]
            times.append(self._fleet.looks_at)
            waiting = [wanted for wanted, queue in self._queues.items() if queue]
            # One that is due, and does not fit beside what is out, waits for an answer.
            due = [self._fleet.falls_back_at(wanted, now) for wanted in waiting]
            times += [at for at in due if at > now]
        first = min(times, default=math.inf)
        return None if first == math.inf else max(0.0, first - now)

    def _compare(self, endpoint: Endpoint, call: Call) -> None:
        """Ask a server for the model; without any for too long, fail what waits for it."""
        wanted = call.wanted

        def differs(error: SonicError) -> None:
            with self._lock:
                now = time.monotonic()
                lost_since = self._fleet.lost_since(wanted, now)
                if lost_since is None or now - lost_since < self._patience_s(error):
                    return
                waiting = [piece for _, piece in self._queues.pop(wanted, [])]
            for piece in waiting:
                if not piece.call.over:
                    self._give_up_on(piece, endpoint, error)

        self._fleet.compare(endpoint, call.contract, wanted, differs)

    def _patience_s(self, error: SonicError) -> float:
        passing = isinstance(error, (ServerLostError, OverloadError))
        return self._settings.retry_timeout_s if passing else 0.0

    def _ask_life(self, endpoint: Endpoint) -> None:
        """Ask a server that owes answers whether it lives; one that does not say so is lost."""
        asked_at = time.monotonic()

        def said(error: SonicError | None) -> None:
            with self._lock:
                endpoint.asked = False
                self._lock.notify_all()
                if error is None:
                    endpoint.lives(time.monotonic())
                    return
                # What it has answered meanwhile says more.
                owed = list(endpoint.attempts) if endpoint.heard_at <= asked_at else []
            for attempt in owed:
                self._ended(attempt, error)
                if attempt.exchange is not None:
                    attempt.exchange.cancel()

        endpoint.connections[0].live(said)

    def _send(self, attempt: Attempt) -> None:
        piece = attempt.piece
        call = piece.call
        try:
            inputs = call.inputs.pack(piece.start, piece.stop)
            attempt.pack_s = time.monotonic() - attempt.packed_at
            attempt.exchange = attempt.connection.infer(
                call.contract,
                inputs,
                call.asked,
                version=call.version,
                request_id=f"{self._name}-{next(self._order)}",
                done=lambda outcome: self._ended(attempt, outcome),
            )
        except SonicError as error:
            self._give_up(attempt, error)
        except Exception as error:
            logger.debug("a request could not be made", exc_info=True)
            self._give_up(attempt, RequestError(f"the request could not be made: {error!r}"))
        else:
            if attempt.settled:  # given up before there was anything to cancel
                attempt.exchange.cancel()
            call.sent(piece, attempt.exchange)

    def _give_up(self, attempt: Attempt, error: SonicError) -> None:
        """Fail what cannot be sent, unless it has been sent to another server before."""
        piece = attempt.piece
        with self._lock:
            if not self._settle(attempt):
                return
            elsewhere = piece.answered or bool(piece.attempts_out)
        if elsewhere:
            logger.debug("%s; another server has its rows", error)
            self._record(piece.call, attempt.endpoint, Tally(failures=1))
        elif self._closed:
            piece.call.cancel()
        else:
            self._fail(piece, error)

    def _fail(self, piece: Piece, error: SonicError) -> None:
        self.statistics += Statistics(masked=piece.call.fail(error, piece))

    def _settle(self, attempt: Attempt) -> bool:
        """End an attempt and make room for others; False if it has ended before."""
        with self._lock:
            if not attempt.endpoint.settle(attempt):
                return False
            self._out_bytes -= attempt.piece.nbytes
            self._lock.notify_all()
            return True

    def _ended(self, attempt: Attempt, outcome: Answer | SonicError) -> None:
        try:
            if isinstance(outcome, SonicError):
                self._lost(attempt, outcome)
            else:
                self._answered(attempt, outcome)
        except Exception as error:
            # The connection would only log it, and the rows would wait for ever.
            logger.debug("what came back could not be taken", exc_info=True)
            self._settle(attempt)
            message = f"what came back could not be taken: {error!r}"
            self._fail(attempt.piece, ResponseError(message, server=attempt.endpoint.url))

    def _answered(self, attempt: Attempt, answer: Answer) -> None:
        now = time.monotonic()
        piece, endpoint = attempt.piece, attempt.endpoint
        call = piece.call
        with self._lock:
            if attempt.settled:  # given up meanwhile; its rows are elsewhere
                return
            endpoint.answered(attempt, now)
            piece.answered = True
            # From here on, nobody else decides what becomes of its rows. Others may leave.
            slower = [a for a in piece.attempts_out if a is not attempt]
            for one in (attempt, *slower):
                self._settle(one)
        for other in slower:
            if other.exchange is not None:
                other.exchange.cancel()

        trip_s = now - attempt.packed_at - attempt.pack_s
        tally = Tally(
            requests=1,
            rows=piece.stop - piece.start,
            sent_bytes=answer.sent_bytes,
            received_bytes=answer.received_bytes,
            pack_s=attempt.pack_s,
            wait_s=max(0.0, attempt.packed_at - piece.queued_at),
        )
        tally.record_trip(trip_s)
        span = Span(
            worker=_worker(),
            model=call.contract.model,
            server=endpoint.url,
            begun=time.time() - trip_s,
            seconds=trip_s,
            rows=piece.stop - piece.start,
        )
        self._record(call, endpoint, tally, span)
        try:
            self._fleet.keep(piece, answer, endpoint.url)
            call.arrived(piece, answer)
        except SonicError as error:
            self._fail(piece, error.at(server=endpoint.url))
        unpacked_s = time.monotonic() - now
        self._record(call, endpoint, Tally(unpack_s=unpacked_s))

    def _lost(self, attempt: Attempt, error: SonicError) -> None:
        """Decide what becomes of rows that did not come back."""
        piece, endpoint = attempt.piece, attempt.endpoint
        call = piece.call
        with self._lock:
            if not self._settle(attempt) or piece.answered:
                return
            over = call.over or self._closed
            again = not over and self._tries_again(attempt, error, time.monotonic())
            elsewhere = bool(piece.attempts_out)
            if again and not elsewhere:
                piece.attempts += 1
                piece.last_server = endpoint.url
                self._queue(piece)
        if over:
            call.cancel()
        elif again or elsewhere:
            logger.debug("%s; its rows are sent again", error)
            self._record(call, endpoint, Tally(retries=1))
        else:
            self._give_up_on(piece, endpoint, error)

    def _give_up_on(self, piece: Piece, endpoint: Endpoint, error: SonicError) -> None:
        """Fail a piece for what a server said last."""
        self._record(piece.call, endpoint, Tally(failures=1))
        if piece.attempts:
            error = error.because(f"tried {piece.attempts + 1} times")
        self._fail(piece, error)

    def _tries_again(self, attempt: Attempt, error: SonicError, now: float) -> bool:
        piece, endpoint, wanted = attempt.piece, attempt.endpoint, attempt.wanted
        piece.first_failed_at = piece.first_failed_at or now
        if isinstance(error, ModelNotFoundError):
            endpoint.has(wanted, now, there=False)
            self._fleet.forget(wanted)
            there = bool(self._fleet.serving(wanted, now))
            return there or self._fleet.waits_for_fallback(wanted, now)
        if isinstance(error, OverloadError):
            endpoint.refused(error, wanted, now)
            return now - piece.first_failed_at < self._settings.request_timeout_s
        if not isinstance(error, ServerLostError):
            return False
        if endpoint.partly(attempt):
            return True
        endpoint.failed(error, now)
        lost_since = self._fleet.lost_since(wanted, now)
        if lost_since is not None:
            return now - lost_since < self._settings.retry_timeout_s
        # Rows that servers lose while they answer others may be what is killing them.
        return (
            piece.attempts < _MOST_ATTEMPTS
            or now - piece.first_failed_at < self._settings.retry_timeout_s
        )

    def _record(
        self,
        call: Call,
        endpoint: Endpoint,
        tally: Tally,
        span: Span | None = None,
    ) -> None:
        """Write to the call's statistics and to the pool's alike."""
        version = call.version or call.contract.version
        for statistics in (call.statistics, self.statistics):
            statistics.record(endpoint.url, call.contract.model, version, tally, span)


def _worker() -> str:
    return f"{platform.node()}:{os.getpid()}"
