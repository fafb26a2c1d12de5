"""Many workers and few servers in virtual time, with the limits and shares that run for real."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.dask._allocation import Allowed, Seen, Served, Shares, Trips
from sonic_coffea.pool import AdaptiveLimit, Quota, RttStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """How long a server takes.

    Parameters
    ----------
    launch_s, row_s : float
        Seconds for a batch, and for each of its rows.
    max_rows : int
        Rows that it puts together.
    instances : int
        Batches at a time.
    """

    launch_s: float = 2e-3
    row_s: float = 5e-6
    max_rows: int = 1024
    instances: int = 1

    def service_s(self, rows: int) -> float:
        """Return how long a batch takes."""
        return self.launch_s + self.row_s * rows

    @property
    def rows_per_s(self) -> float:
        """What it does when it is saturated."""
        return self.instances * self.max_rows / self.service_s(self.max_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker does.

    Parameters
    ----------
    rows : int
        Of a request; a chunk is one request here.
    cpu_s : float
        CPU time of a chunk.
    max_suspended_chunks : int
        Chunks that may wait for scores while the CPU works on others.
    network_s : float
        From worker to server, and back again.
    """

    rows: int = 1024
    cpu_s: float = 0.0
    max_suspended_chunks: int = 4
    network_s: float = 2e-4


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that is over: when it was made, left and came back, and whose it was."""

    worker: int
    made_at: float
    sent_at: float
    at: float
    rows: int


@dataclass(slots=True, eq=False)
class _Request:
    worker: _Worker
    made_at: float
    sent_at: float = 0.0
    server: int = 0
    out: int = 0


@dataclass(slots=True, eq=False)
class _Server:
    accelerator: Accelerator
    queue: deque[_Request] = field(default_factory=deque)
    busy: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    limits: list[AdaptiveLimit]
    shares: list[Quota | None]
    seen: list[RttStatistics]
    out: list[int]
    queue: deque[_Request] = field(default_factory=deque)
    computing: bool = False
    wakes_at: float = math.inf
    gone: bool = False


class Simulation:
    """Workers that send requests to servers, and a scheduler that deals out shares.

    Parameters
    ----------
    servers : sequence of Accelerator
        The servers.
    work : Work
        What each worker does, without end.
    shares : bool
        Whether there is a scheduler; without, each worker goes by what it sees itself.
    seed : int
        Of what is left to chance.
    """

    def __init__(
        self, servers: Sequence[Accelerator], work: Work, *, shares: bool = True, seed: int = 1
    ) -> None:
        self.work = work
        self.answered: list[Answered] = []
        self.now = 0.0
        self._servers = [_Server(a) for a in servers]
        self._workers: dict[int, _Worker] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._random = random.Random(seed)
        self._shares = Shares() if shares else None
        if shares:
            self._at(0.0, self._round)

    @property
    def capacity_rows_per_s(self) -> float:
        """What the servers do when they are saturated."""
        return sum(s.accelerator.rows_per_s for s in self._servers)

    @property
    def in_flight(self) -> int:
        """Requests that are out."""
        return sum(sum(w.out) for w in self._workers.values())

    def join(self, number: int, at: float = 0.0, *, within_s: float = 0.0) -> None:
        """Have workers come, at a time or some time after."""
        for _ in range(number):
            self._at(at + self._random.uniform(0.0, within_s), self._join)

    def leave(self, number: int, at: float) -> None:
        """Have workers be killed."""
        self._at(at, lambda: self._leave(number))

    def run(self, until: float) -> None:
        """Go on to a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self.now = until

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _join(self) -> None:
        count = len(self._servers)
        worker = _Worker(
            next(self._numbers),
            limits=[AdaptiveLimit(256) for _ in range(count)],
            shares=[None] * count,
            seen=[RttStatistics() for _ in range(count)],
            out=[0] * count,
        )
        self._workers[worker.number] = worker
        if self._shares is not None:
            self._shares.join(str(worker.number))
            # As its plugin: it reports when it has something to say, then in rounds.
            self._at(self.now + 1e-3, lambda: self._report(worker))
        self._compute(worker)

    def _leave(self, number: int) -> None:
        for worker in self._random.sample(list(self._workers.values()), number):
            worker.gone = True
            del self._workers[worker.number]
            if self._shares is not None:
                self._shares.leave(str(worker.number))

    def _compute(self, worker: _Worker) -> None:
        """Have the CPU make the next request, unless too many chunks wait."""
        resident = len(worker.queue) + sum(worker.out)
        if worker.computing or worker.gone or resident > self.work.max_suspended_chunks:
            return
        worker.computing = True
        spread = self._random.uniform(0.8, 1.2) if self.work.cpu_s else 1.0
        self._at(self.now + self.work.cpu_s * spread, lambda: self._made(worker))

    def _made(self, worker: _Worker) -> None:
        worker.computing = False
        worker.queue.append(_Request(worker, self.now))
        self._send(worker)
        self._compute(worker)

    def _room(self, worker: _Worker, server: int) -> int:
        share = worker.shares[server]
        valid = share is not None and self.now < share.until
        limit = share if valid and share is not None else worker.limits[server]
        return limit.room(worker.out[server], self.now)

    def _send(self, worker: _Worker) -> None:
        """Let leave what may leave, to the server that has the least of what it bears."""
        while worker.queue and not worker.gone:
            able = [i for i in range(len(self._servers)) if self._room(worker, i) > 0]
            if not able:
                self._wake(worker)
                return
            server = min(able, key=lambda i: worker.out[i])
            request = worker.queue.popleft()
            request.server, request.sent_at = server, self.now
            worker.out[server] += 1
            request.out = worker.out[server]
            share = worker.shares[server]
            if share is not None:
                share.sent(self.now)
            self._at(self.now + self.work.network_s, lambda r=request: self._arrive(r))  # type: ignore[misc]

    def _wake(self, worker: _Worker) -> None:
        """Look again when a share lets the next request leave."""
        shares = [s for s in worker.shares if s is not None]
        turn = min((s.wakes_at(self.now) for s in shares), default=math.inf)
        if turn < worker.wakes_at:
            worker.wakes_at = turn

            def wake() -> None:
                worker.wakes_at = math.inf
                self._send(worker)

            self._at(turn, wake)

    def _arrive(self, request: _Request) -> None:
        server = self._servers[request.server]
        server.queue.append(request)
        self._serve(server)

    def _serve(self, server: _Server) -> None:
        while server.queue and server.busy < server.accelerator.instances:
            most = max(server.accelerator.max_rows // self.work.rows, 1)
            batch = [server.queue.popleft() for _ in range(min(most, len(server.queue)))]
            server.busy += 1
            took_s = server.accelerator.service_s(self.work.rows * len(batch))
            self._at(self.now + took_s, lambda b=batch: self._served(server, b))  # type: ignore[misc]

    def _served(self, server: _Server, batch: list[_Request]) -> None:
        server.busy -= 1
        for request in batch:
            self._at(self.now + self.work.network_s, lambda r=request: self._answer(r))  # type: ignore[misc]
        self._serve(server)

    def _answer(self, request: _Request) -> None:
        worker, server = request.worker, request.server
        worker.out[server] -= 1
        if worker.gone:
            return
        trip_s = self.now - request.sent_at
        rows = self.work.rows
        full = self._servers[server].accelerator.max_rows / rows
        worker.limits[server].answered(trip_s, rows, request.out, self.now, full)
        worker.seen[server].answered(trip_s, rows, full)
        self.answered.append(
            Answered(worker.number, request.made_at, request.sent_at, self.now, self.work.rows)
        )
        self._send(worker)
        self._compute(worker)

    # What passes between workers and scheduler.

    def _report(self, worker: _Worker) -> None:
        if self._shares is None or worker.gone:
            return
        seen: dict[Served, Seen] = {}
        for i, one in enumerate(worker.seen):
            trips = {
                size: Trips(number=n, sum_s=sum_s, least_s=least_s)
                for size, (n, sum_s, least_s) in one.trips.items()
            }
            seen[str(i), _MODEL] = Seen(
                out=worker.out[i],
                waiting=len(worker.queue),
                rows=one.rows,
                refused=0,
                full=one.full,
                trips=trips,
            )
            worker.seen[i] = RttStatistics()
        self._shares.report(str(worker.number), seen, {}, self.now)
        self._at(self.now + self._shares.every_s, lambda: self._report(worker))

    def _round(self) -> None:
        if self._shares is None:
            return
        until = self.now + self._shares.lasts_s
        for name, allowed in self._shares.hand_out(self.now).items():
            worker = self._workers.get(int(name))
            if worker is not None:
                self._allow(worker, allowed, until)
        self._at(self.now + self._shares.every_s, self._round)

    def _allow(self, worker: _Worker, allowed: dict[Served, Allowed], until: float) -> None:
        for (server, _), one in allowed.items():
            share = Quota(one.most, one.every_s, self.now + one.first_s, until)
            worker.shares[int(server)] = share.after(worker.shares[int(server)])
        self._send(worker)


def fairness(rows: Sequence[float]) -> float:
    """Return Jain's index of how evenly something is dealt out: 1 if all have the same.

    Jain, Chiu and Hawe (1984): the squared sum over the number times the sum of squares.
    """
    squares = sum(r * r for r in rows)
    return sum(rows) ** 2 / (len(rows) * squares) if squares else math.nan
