"""Many workers and few servers in virtual time, with the limits and quotas that run for real."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sonic_coffea.dask._allocator import Allocator, Grant, ServedModel, Telemetry
from sonic_coffea.pool import AdaptiveLimit, Quota, RttStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MODEL = "model", None
# A request that was refused is tried again after about so long.
_BACKOFF_S = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A server.

    Parameters
    ----------
    launch_s, row_s : float
        Seconds for a batch, and for each of its rows.
    max_rows : int
        Rows of a batch.
    instances : int
        Batches at a time.
    noise : float
        By what part a batch may take longer, evenly distributed.
    max_queue : int or None
        Requests that wait, before others are refused.
    """

    launch_s: float = 2e-3
    row_s: float = 5e-6
    max_rows: int = 1024
    instances: int = 1
    noise: float = 0.0
    max_queue: int | None = None

    def batch(self, rows: int) -> int:
        """Return how many requests of so many rows are a full batch."""
        return max(self.max_rows // rows, 1)

    def service_s(self, rows: int) -> float:
        """Return how long a batch takes at the least."""
        return self.launch_s + self.row_s * rows

    def rows_per_s(self, rows: int) -> float:
        """Return the throughput of the saturated server, by the rows of a request."""
        together = self.batch(rows) * rows
        return self.instances * together / self.service_s(together) / (1 + self.noise / 2)


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
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Server:
    accelerator: Accelerator
    queue: deque[_Request] = field(default_factory=deque)
    busy: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    limits: list[AdaptiveLimit]
    quotas: list[Quota | None]
    rtts: list[RttStatistics]
    in_flight: list[int]
    queue: deque[_Request] = field(default_factory=deque)
    computing: bool = False
    wakes_at: float = math.inf
    gone: bool = False


class Simulation:
    """Workers that send requests to servers, and a scheduler that allocates quotas.

    Parameters
    ----------
    servers : sequence of Accelerator
        The servers.
    work : Work
        What each worker does, without end.
    quotas : bool
        Whether there is a scheduler; without, each worker goes by its own limits.
    seed : int
        Of what is left to chance.
    """

    def __init__(
        self, servers: Sequence[Accelerator], work: Work, *, quotas: bool = True, seed: int = 1
    ) -> None:
        self.work = work
        self.answered: list[Answered] = []
        self.refused = 0
        self.now = 0.0
        self._servers = [_Server(a) for a in servers]
        self._workers: dict[int, _Worker] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._random = random.Random(seed)
        self._allocator = Allocator() if quotas else None
        if quotas:
            self.at(0.0, self._end_round)

    @property
    def capacity_rows_per_s(self) -> float:
        """Throughput of the saturated servers."""
        return sum(s.accelerator.rows_per_s(self.work.rows) for s in self._servers)

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return sum(sum(w.in_flight) for w in self._workers.values())

    @property
    def limits(self) -> list[int]:
        """The workers' own limits, summed over the servers."""
        return [sum(limit.value for limit in w.limits) for w in self._workers.values()]

    def join(self, number: int, at: float = 0.0, *, within_s: float = 0.0) -> None:
        """Have workers come, at a time or some time after."""
        for _ in range(number):
            self.at(at + self._random.uniform(0.0, within_s), self._join)

    def leave(self, number: int, at: float) -> None:
        """Have workers be killed."""
        self.at(at, partial(self._leave, number))

    def change(self, server: int, accelerator: Accelerator, at: float) -> None:
        """Have a server become another."""
        self.at(at, partial(setattr, self._servers[server], "accelerator", accelerator))

    def run(self, until: float) -> None:
        """Go on to a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self.now = until

    def rows(self, since: float, until: float = math.inf) -> list[int]:
        """Return the rows of each worker that came back in some time."""
        rows = Counter(dict.fromkeys(self._workers, 0))
        for answer in self.answered:
            if since < answer.at <= until:
                rows[answer.worker] += answer.rows
        return list(rows.values())

    def throughput(self, since: float, until: float | None = None) -> float:
        """Return the rows/s of all, over those of the saturated servers."""
        until = self.now if until is None else until
        return sum(self.rows(since, until)) / (until - since) / self.capacity_rows_per_s

    def at(self, when: float, happen: Callable[[], Any]) -> None:
        """Have something happen at a time."""
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _join(self) -> None:
        count = len(self._servers)
        worker = _Worker(
            next(self._numbers),
            limits=[AdaptiveLimit(256) for _ in range(count)],
            quotas=[None] * count,
            rtts=[RttStatistics() for _ in range(count)],
            in_flight=[0] * count,
        )
        self._workers[worker.number] = worker
        if self._allocator is not None:
            self._allocator.join(str(worker.number))
            # As its plugin: it reports when it has something to say, then in rounds.
            self.at(self.now + 1e-3, partial(self._report, worker))
        self._compute(worker)

    def _leave(self, number: int) -> None:
        for worker in self._random.sample(list(self._workers.values()), number):
            worker.gone = True
            del self._workers[worker.number]
            if self._allocator is not None:
                self._allocator.leave(str(worker.number))

    def _compute(self, worker: _Worker) -> None:
        """Have the CPU make the next request, unless too many chunks wait."""
        resident = len(worker.queue) + sum(worker.in_flight)
        if worker.computing or worker.gone or resident > self.work.max_suspended_chunks:
            return
        worker.computing = True
        spread = self._random.uniform(0.8, 1.2) if self.work.cpu_s else 1.0
        self.at(self.now + self.work.cpu_s * spread, partial(self._made, worker))

    def _made(self, worker: _Worker) -> None:
        worker.computing = False
        worker.queue.append(_Request(worker, self.now))
        self._send(worker)
        self._compute(worker)

    def _room(self, worker: _Worker, server: int) -> int:
        quota = worker.quotas[server]
        leased = quota is not None and self.now < quota.expires_at
        limit = quota if leased and quota is not None else worker.limits[server]
        return limit.room(worker.in_flight[server], self.now)

    def _send(self, worker: _Worker) -> None:
        """Send what may leave, to the server with the fewest requests in flight."""
        while worker.queue and not worker.gone:
            able = [i for i in range(len(self._servers)) if self._room(worker, i) > 0]
            if not able:
                self._wake(worker)
                return
            server = min(able, key=lambda i: worker.in_flight[i])
            request = worker.queue.popleft()
            request.server, request.sent_at = server, self.now
            worker.in_flight[server] += 1
            request.in_flight = worker.in_flight[server]
            quota = worker.quotas[server]
            if quota is not None:
                quota.sent(self.now)
            self.at(self.now + self.work.network_s, partial(self._arrive, request))

    def _wake(self, worker: _Worker) -> None:
        """Look again when a quota lets the next request leave."""
        quotas = [q for q in worker.quotas if q is not None]
        turn = min((q.wakes_at(self.now) for q in quotas), default=math.inf)
        if turn < worker.wakes_at:
            worker.wakes_at = turn

            def wake() -> None:
                worker.wakes_at = math.inf
                self._send(worker)

            self.at(turn, wake)

    def _arrive(self, request: _Request) -> None:
        server = self._servers[request.server]
        max_queue = server.accelerator.max_queue
        if max_queue is not None and len(server.queue) >= max_queue:
            self.at(self.now + self.work.network_s, partial(self._refuse, request))
            return
        server.queue.append(request)
        self._serve(server)

    def _serve(self, server: _Server) -> None:
        accelerator, rows = server.accelerator, self.work.rows
        while server.queue and server.busy < accelerator.instances:
            number = min(accelerator.batch(rows), len(server.queue))
            batch = [server.queue.popleft() for _ in range(number)]
            server.busy += 1
            longer = self._random.uniform(1.0, 1.0 + accelerator.noise)
            took_s = accelerator.service_s(rows * number) * longer
            self.at(self.now + took_s, partial(self._served, server, batch))

    def _served(self, server: _Server, batch: list[_Request]) -> None:
        server.busy -= 1
        for request in batch:
            self.at(self.now + self.work.network_s, partial(self._answer, request))
        self._serve(server)

    def _answer(self, request: _Request) -> None:
        worker, server = request.worker, request.server
        worker.in_flight[server] -= 1
        if worker.gone:
            return
        rtt_s, rows = self.now - request.sent_at, self.work.rows
        full = self._servers[server].accelerator.max_rows / rows
        worker.limits[server].answered(rtt_s, rows, request.in_flight, self.now, full)
        worker.rtts[server].answered(rtt_s, rows, full)
        self.answered.append(
            Answered(worker.number, request.made_at, request.sent_at, self.now, rows)
        )
        self._send(worker)
        self._compute(worker)

    def _refuse(self, request: _Request) -> None:
        worker, server = request.worker, request.server
        worker.in_flight[server] -= 1
        worker.limits[server].refused(self.now)
        worker.rtts[server].refused += 1
        worker.queue.appendleft(request)
        self.refused += 1
        backoff_s = self._random.uniform(0.5, 1.5) * _BACKOFF_S
        self.at(self.now + backoff_s, partial(self._send, worker))

    # What passes between workers and scheduler.

    def _report(self, worker: _Worker) -> None:
        if self._allocator is None or worker.gone:
            return
        telemetry = {
            (str(i), _MODEL): Telemetry(worker.in_flight[i], len(worker.queue), rtt)
            for i, rtt in enumerate(worker.rtts)
        }
        worker.rtts = [RttStatistics() for _ in worker.rtts]
        self._allocator.report(str(worker.number), telemetry, {}, self.now)
        self.at(self.now + self._allocator.round_s, partial(self._report, worker))

    def _end_round(self) -> None:
        if self._allocator is None:
            return
        expires_at = self.now + self._allocator.lease_s
        for name, grants in self._allocator.allocate(self.now).items():
            worker = self._workers.get(int(name))
            if worker is not None:
                self._set_quotas(worker, grants, expires_at)
        self.at(self.now + self._allocator.round_s, self._end_round)

    def _set_quotas(
        self, worker: _Worker, grants: dict[ServedModel, Grant], expires_at: float
    ) -> None:
        for (server, _), (max_in_flight, interval_s, delay_s) in grants.items():
            quota = Quota(max_in_flight, interval_s, self.now + delay_s, expires_at)
            worker.quotas[int(server)] = quota.after(worker.quotas[int(server)])
        self._send(worker)


def fairness(rows: Sequence[float]) -> float:
    """Return Jain's index of how evenly something is distributed: 1 if all have the same.

    Jain, Chiu and Hawe (1984): the squared sum over the number times the sum of squares.
    """
    squares = sum(r * r for r in rows)
    return sum(rows) ** 2 / (len(rows) * squares) if squares else math.nan
