"""The pool: one dispatcher thread that packs and sends while there is room in flight."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.batching import plan
from sonic_coffea.errors import (
    ModelNotFoundError,
    OverloadError,
    RequestError,
    ResponseError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.pool._call import Call, Piece
from sonic_coffea.statistics import Statistics, Tally
from sonic_coffea.transport import Answer, Connection, connect_transport

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from sonic_coffea.contract import Contract
    from sonic_coffea.pool._settings import Settings

logger = logging.getLogger(__name__)

_Wanted = tuple[str, str | None]
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 2.0
_MOST_ATTEMPTS = 4


@dataclass(slots=True, eq=False)
class _Endpoint:
    """A server, as this process sees it at the moment."""

    url: str
    connection: Connection
    out: int = 0
    taken: int = 0
    # Models, with the version asked for, that the server turned out not to have.
    lacks: set[_Wanted] = field(default_factory=set)
    failed_in_a_row: int = 0
    failing_since: float | None = None
    away_until: float = 0.0
    last_error: SonicError | None = None

    def failed(self, error: SonicError, now: float) -> None:
        self.last_error = error
        if self.failing_since is None:
            logger.warning("%s; what was asked of it is asked again", error)
            self.failing_since = now
        if self.away_until > now:  # one of several requests that were lost together
            return
        self.failed_in_a_row += 1
        pause_s = min(_FIRST_BACKOFF_S * 2 ** (self.failed_in_a_row - 1), _LAST_BACKOFF_S)
        self.away_until = now + pause_s

    def succeeded(self) -> None:
        if self.failing_since is not None:
            logger.warning("%s answers again", self.url)
        self.failed_in_a_row = 0
        self.failing_since = None
        self.away_until = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a pool knows of a server at the moment."""

    url: str
    in_flight: int
    usable: bool
    last_error: str | None


class Pool:
    """The shared servers of one process.

    Made by :func:`sonic_coffea.connect`; one is enough for a process. Threads and connections are
    made on first use. Thread-safe; a context manager that closes it.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.statistics = Statistics()
        self._lock = threading.Condition()
        self._queue: list[tuple[int, Piece]] = []
        self._order = itertools.count()
        self._endpoints: list[_Endpoint] = []
        self._contracts: dict[_Wanted, Contract] = {}
        self._contract_lock = threading.Lock()
        self._out_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._name = uuid.uuid4().hex[:8]

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        return f"<Pool {state}servers: {', '.join(self.settings.servers)}>"

    @property
    def closed(self) -> bool:
        """Whether the pool has been closed."""
        return self._closed

    @property
    def servers(self) -> list[ServerState]:
        """What is known of each server."""
        with self._lock:
            now = time.monotonic()
            return [
                ServerState(
                    url=e.url,
                    in_flight=e.out,
                    usable=e.away_until <= now,
                    last_error=str(e.last_error) if e.last_error else None,
                )
                for e in self._endpoints
            ]

    def connections(self) -> list[Connection]:
        """Return a connection for each server."""
        return [e.connection for e in self._open()]

    def contract(self, model: str, version: str | None) -> Contract:
        """Return what a model takes and gives, asked once per process.

        Raises
        ------
        ModelNotFoundError
            If no server has it.
        ServerLostError
            If no server could be reached.
        """
        with self._contract_lock:
            known = self._contracts.get((model, version))
            if known is None:
                known = self._ask_contract(model, version)
                self._contracts[model, version] = known
            return known

    def submit(self, call: Call) -> None:
        """Queue a call; it leaves as soon as there is room."""
        cuts = plan(
            call.inputs.segments,
            max_rows=call.contract.max_rows,
            preferred_rows=call.contract.preferred_rows,
            max_bytes=self.settings.max_request_bytes,
        )
        pieces = [Piece(call, *cut, number) for number, cut in enumerate(cuts)]
        self._open()
        call.expect(len(pieces))
        with self._lock:
            self._refuse_when_closed()
            self.statistics += call.statistics
            for piece in pieces:
                heapq.heappush(self._queue, (next(self._order), piece))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sonic-pool", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def close(self) -> None:
        """Cancel what is out and let go of all servers. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = [piece for _, piece in self._queue]
            self._queue.clear()
            endpoints, self._endpoints = self._endpoints, []
            self._lock.notify_all()
        for piece in waiting:
            piece.call.cancel()
        for endpoint in endpoints:
            endpoint.connection.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise ServerLostError("the pool has been closed; call sonic.connect again")

    def _open(self) -> list[_Endpoint]:
        with self._lock:
            self._refuse_when_closed()
            if not self._endpoints:
                options = self.settings.connection_options()
                self._endpoints = [
                    _Endpoint(url, connect_transport(url, options=options))
                    for url in self.settings.servers
                ]
                # Many processes start at the same time, and must not all turn to the same server.
                random.shuffle(self._endpoints)
            return list(self._endpoints)

    def _ask_contract(self, model: str, version: str | None) -> Contract:
        """Ask every server; if none has the model, those that are lost are asked again."""
        wanted = model, version
        while True:
            failures: list[SonicError] = []
            found: Contract | None = None
            for endpoint in self._open():
                try:
                    contract = endpoint.connection.contract(model, version)
                except ModelNotFoundError as error:
                    endpoint.succeeded()
                    endpoint.lacks.add(wanted)
                    failures.append(error)
                except (ServerLostError, OverloadError) as error:
                    with self._lock:
                        endpoint.failed(error, time.monotonic())
                    failures.append(error)
                except SonicError as error:
                    logger.warning("%s: %s", endpoint.url, error)
                    failures.append(error)
                else:
                    endpoint.succeeded()
                    endpoint.lacks.discard(wanted)
                    found = found or contract
            if found is not None:
                return found
            with self._lock:
                now = time.monotonic()
                lost = [e for e in self._endpoints if e.failing_since is not None]
                lost_since = max((e.failing_since or now for e in lost), default=-math.inf)
                if now - lost_since >= self.settings.retry_for_s:
                    break
                back_at = min(e.away_until for e in lost)
                self._lock.wait_for(lambda: self._closed, max(0.0, back_at - now))
        missing = [f for f in failures if isinstance(f, ModelNotFoundError)]
        raise (missing or failures)[0].at(model=model, version=version)

    # The dispatcher: everything below runs in its thread, or in those of the connections.

    def _run(self) -> None:
        while True:
            with self._lock:
                found = None
                while not self._closed:
                    # One reading of the clock, or a server could come back between two of them.
                    now = time.monotonic()
                    found = self._next(now)
                    if found is not None:
                        break
                    self._lock.wait(self._pause_s(now))
                if found is None:
                    return
                piece, endpoint = found
                endpoint.out += 1
                endpoint.taken += 1
                self._out_bytes += piece.nbytes
            self._send(piece, endpoint)

    def _next(self, now: float) -> tuple[Piece, _Endpoint] | None:
        """Take the next piece that may leave now, and the server for it."""
        free = [
            e for e in self._endpoints if e.away_until <= now and e.out < self.settings.in_flight
        ]
        elsewhere: list[tuple[int, Piece]] = []
        found: tuple[Piece, _Endpoint] | None = None
        while free and self._queue and found is None:
            piece = self._queue[0][1]
            if not piece.call.over and not self._fits(piece):
                break
            entry = heapq.heappop(self._queue)
            if piece.call.over:
                continue
            endpoint = _choose(piece, free)
            if endpoint is not None:
                found = piece, endpoint
            elif all(piece.call.wanted in e.lacks for e in self._endpoints):
                missing = f"no server has model {piece.call.contract.model!r} any more"
                piece.call.fail(ModelNotFoundError(missing), piece)
            else:
                elsewhere.append(entry)
        for entry in elsewhere:
            heapq.heappush(self._queue, entry)
        return found

    def _fits(self, piece: Piece) -> bool:
        # A piece larger than the whole budget travels alone.
        limit = self.settings.in_flight_bytes
        return self._out_bytes == 0 or self._out_bytes + piece.nbytes <= limit

    def _pause_s(self, now: float) -> float | None:
        """Return for how long nothing can change by itself; None if not before an answer."""
        times = [e.away_until for e in self._endpoints if e.away_until > now]
        return min(times) - now if times and self._queue else None

    def _send(self, piece: Piece, endpoint: _Endpoint) -> None:
        call = piece.call
        started = time.monotonic()
        request_id = f"{self._name}-{next(self._order)}"
        try:
            inputs = call.inputs.pack(piece.start, piece.stop)
            packed = time.monotonic()

            def done(outcome: Answer | SonicError) -> None:
                self._done(piece, endpoint, outcome, packed, packed - started)

            exchange = endpoint.connection.infer(
                call.contract,
                inputs,
                call.asked,
                version=call.version,
                request_id=request_id,
                done=done,
            )
        except SonicError as error:
            self._release(piece, endpoint)
            call.fail(error, piece)
        except Exception as error:
            self._release(piece, endpoint)
            logger.debug("a request could not be made", exc_info=True)
            call.fail(RequestError(f"the request could not be made: {error!r}"), piece)
        else:
            call.sent(piece, exchange)

    def _release(self, piece: Piece, endpoint: _Endpoint) -> None:
        with self._lock:
            endpoint.out -= 1
            self._out_bytes -= piece.nbytes
            self._lock.notify_all()

    def _done(
        self,
        piece: Piece,
        endpoint: _Endpoint,
        outcome: Answer | SonicError,
        sent_at: float,
        pack_s: float,
    ) -> None:
        now = time.monotonic()
        if isinstance(outcome, SonicError):
            self._lost(piece, endpoint, outcome, now)
            self._release(piece, endpoint)
            return
        call = piece.call

        def count(tally: Tally) -> None:
            tally.requests += 1
            tally.rows += piece.stop - piece.start
            tally.sent_bytes += outcome.sent_bytes
            tally.received_bytes += outcome.received_bytes
            tally.pack_s += pack_s
            tally.wait_s += max(0.0, sent_at - pack_s - piece.queued_at)
            tally.record_trip(now - sent_at)

        self._record(call, endpoint, count)
        endpoint.succeeded()
        try:
            call.arrived(piece, outcome)
        except SonicError as error:
            call.fail(error.at(server=endpoint.url), piece)
        except Exception as error:
            # The connection would only log it, and the rows would wait for ever.
            logger.debug("an answer could not be taken", exc_info=True)
            message = f"the answer could not be taken: {error!r}"
            call.fail(ResponseError(message, server=endpoint.url), piece)
        self._release(piece, endpoint)
        unpacked_s = time.monotonic() - now
        self._record(call, endpoint, lambda tally: _add_unpack(tally, unpacked_s))

    def _lost(self, piece: Piece, endpoint: _Endpoint, error: SonicError, now: float) -> None:
        """Decide what becomes of rows that did not come back."""
        call = piece.call
        if call.over or self._closed:
            call.cancel()
            return
        with self._lock:
            again = self._tries_again(piece, endpoint, error, now)
            if again:
                piece.attempts += 1
                piece.last_server = endpoint.url
                heapq.heappush(self._queue, (next(self._order), piece))
        if again:
            logger.debug("%s; its rows are sent again", error)
            self._record(call, endpoint, _add_retry)
            return
        self._record(call, endpoint, _add_failure)
        if piece.attempts:
            error = error.because(f"tried {piece.attempts + 1} times")
        call.fail(error, piece)

    def _tries_again(
        self, piece: Piece, endpoint: _Endpoint, error: SonicError, now: float
    ) -> bool:
        wanted = piece.call.wanted
        if isinstance(error, ModelNotFoundError):
            endpoint.lacks.add(wanted)
            # Whoever asks for it next asks the servers anew.
            self._contracts.pop(wanted, None)
            return any(wanted not in e.lacks for e in self._endpoints)
        if not isinstance(error, (ServerLostError, OverloadError)):
            return False
        endpoint.failed(error, now)
        piece.first_failed_at = piece.first_failed_at or now
        since = [e.failing_since for e in self._endpoints if wanted not in e.lacks]
        # With every server gone, the time runs from the loss of the last one, whoever asks: when
        # coffea or dask run the chunk again, it does not begin anew.
        lost_since = None if None in since else max(s for s in since if s is not None)
        if lost_since is not None:
            return now - lost_since < self.settings.retry_for_s
        # Rows that servers lose while they answer others may be what is killing them.
        return (
            piece.attempts < _MOST_ATTEMPTS
            or now - piece.first_failed_at < self.settings.retry_for_s
        )

    def _record(self, call: Call, endpoint: _Endpoint, count: Callable[[Tally], None]) -> None:
        """Write to the call's statistics and to the pool's alike."""
        version = call.version or call.contract.version
        with self._lock:
            for statistics in (call.statistics, self.statistics):
                count(statistics.tally(endpoint.url, call.contract.model, version))


def _choose(piece: Piece, free: list[_Endpoint]) -> _Endpoint | None:
    able = [e for e in free if piece.call.wanted not in e.lacks]
    # One that has just lost these rows is the last to get them again.
    return min(able, key=lambda e: (e.url == piece.last_server, e.out, e.taken), default=None)


def _add_unpack(tally: Tally, seconds: float) -> None:
    tally.unpack_s += seconds


def _add_retry(tally: Tally) -> None:
    tally.retries += 1


def _add_failure(tally: Tally) -> None:
    tally.failures += 1
