"""Many workers and few servers on virtual time: each worker has the real core of a pool."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sonic_coffea.dask._quotas import Allocator
from sonic_coffea.errors import OverloadError
from sonic_coffea.pool import ModelKey, Settings
from sonic_coffea.pool import _instructions as do
from sonic_coffea.pool._core import Event, PoolCore
from sonic_coffea.pool._request import RequestSlice
from sonic_coffea.transport import Contract, Response

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sonic_coffea.pool._request import Attempt

_MODEL = ModelKey("model", None)
_RESPONSE = Response(outputs={}, version="1", sent_bytes=0, received_bytes=0)


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
        Largest relative delay of a batch; delays are evenly distributed.
    max_queue : int or None
        Requests that may wait; the server refuses others.
    """

    launch_s: float = 2e-3
    row_s: float = 5e-6
    max_rows: int = 1024
    instances: int = 1
    noise: float = 0.0
    max_queue: int | None = None

    def batch(self, rows: int) -> int:
        """Return how many requests of `rows` rows make a full batch."""
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
    """The work of one worker.

    Parameters
    ----------
    rows : int
        Rows of a request; a chunk is one request here.
    cpu_s : float
        CPU time of a chunk.
    max_suspended_chunks : int
        Chunks that may wait for scores while the CPU works on others.
    network_s : float
        Time from worker to server, and the same back.
    """

    rows: int = 1024
    cpu_s: float = 0.0
    max_suspended_chunks: int = 4
    network_s: float = 2e-4


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered: its times, and the worker that sent it."""

    worker: int
    made_at: float
    sent_at: float
    at: float
    rows: int


@dataclass(slots=True, eq=False)
class _Call:
    """What the core needs of a call; the model has no tensors."""

    contract: Contract
    key: ModelKey = _MODEL
    over: bool = False


@dataclass(slots=True, eq=False)
class _Server:
    accelerator: Accelerator
    queue: deque[tuple[_Worker, Attempt]] = field(default_factory=deque)
    busy: int = 0
    requests: int = 0  # passed by the proxy, and not answered yet
    computed: int = 0  # requests, by the server's own statistics
    compute_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    core: PoolCore
    call: _Call
    allocator: Allocator | None
    resident: int = 0
    computing: bool = False
    wakes_at: float = math.inf
    gone: bool = False


class Simulation:
    """Workers that send requests to servers, and schedulers that allocate quotas.

    Parameters
    ----------
    servers : sequence of Accelerator
        The servers.
    work : Work
        What each worker repeats.
    schedulers : int
        Schedulers, which know nothing of each other. Without a scheduler, each worker has its own
        adaptive limits.
    max_requests : int or None
        Requests that the proxy before each server lets pass at a time; it refuses others. Envoy's
        default is 1,024.
    statistics : bool
        Whether the servers tell their schedulers how long requests compute.
    seed : int
        Seed of the random numbers.
    """

    def __init__(
        self,
        servers: Sequence[Accelerator],
        work: Work,
        *,
        schedulers: int = 1,
        max_requests: int | None = None,
        statistics: bool = True,
        seed: int = 1,
    ) -> None:
        self._has_statistics = statistics
        self.work = work
        self.answered: list[Answered] = []
        self.refused = 0
        self.now = 0.0
        self._servers = {f"grpc://server{n}:8001": _Server(a) for n, a in enumerate(servers)}
        self._settings = Settings.make(list(self._servers))
        self._contract = Contract(
            model=_MODEL.name, version="1", inputs=(), outputs=(), max_rows=servers[0].max_rows
        )
        self._workers: dict[int, _Worker] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._random = random.Random(seed)
        self._max_requests = math.inf if max_requests is None else max_requests
        self._allocators = [Allocator() for _ in range(schedulers)]
        for number, allocator in enumerate(self._allocators):
            # Schedulers end their rounds at different times.
            self.at(0.1 * number, partial(self._end_round, allocator))

    @property
    def capacity_rows_per_s(self) -> float:
        """Throughput of the saturated servers."""
        return sum(s.accelerator.rows_per_s(self.work.rows) for s in self._servers.values())

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return sum(len(x.attempts) for w in self._workers.values() for x in w.core.endpoints)

    @property
    def limits(self) -> list[int]:
        """The workers' own limits, summed over the servers."""
        return [
            sum(x.limits[_MODEL].value for x in w.core.endpoints) for w in self._workers.values()
        ]

    def join(
        self, number: int, at: float = 0.0, *, within_s: float = 0.0, scheduler: int = 0
    ) -> None:
        """Add workers of a scheduler, at random times within `within_s` after `at`."""
        allocator = self._allocators[scheduler] if self._allocators else None
        for _ in range(number):
            self.at(at + self._random.uniform(0.0, within_s), partial(self._join, allocator))

    def leave(self, number: int, at: float) -> None:
        """Kill workers."""
        self.at(at, partial(self._leave, number))

    def change(self, server: int, accelerator: Accelerator, at: float) -> None:
        """Replace a server."""
        changed = list(self._servers.values())[server]
        self.at(at, partial(setattr, changed, "accelerator", accelerator))

    def run(self, until: float) -> None:
        """Simulate until a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self.now = until

    def rows(self, since: float, until: float = math.inf) -> list[int]:
        """Return the rows of each worker that were scored in an interval."""
        rows = Counter(dict.fromkeys(self._workers, 0))
        for answer in self.answered:
            if since < answer.at <= until:
                rows[answer.worker] += answer.rows
        return list(rows.values())

    def throughput(self, since: float, until: float | None = None) -> float:
        """Return the rows/s of all workers over the rows/s of the saturated servers."""
        until = self.now if until is None else until
        return sum(self.rows(since, until)) / (until - since) / self.capacity_rows_per_s

    def at(self, when: float, happen: Callable[[], Any]) -> None:
        """Schedule a function."""
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _join(self, allocator: Allocator | None) -> None:
        core = PoolCore(self._settings, random.Random(self._random.random()))
        worker = _Worker(next(self._numbers), core, _Call(self._contract), allocator)
        self._workers[worker.number] = worker
        if allocator is not None:
            allocator.join(str(worker.number))
            first, within_s = allocator.first_in_flight, allocator.quotas_within_s
            joined = partial(PoolCore.scheduler_joined, starts_at=self.now, max_in_flight=first)
            self._tell(worker, partial(joined, quotas_within_s=within_s))
            # As the worker plugin does: the first report is early, the others follow in rounds.
            self.at(self.now + 1e-3, partial(self._report, worker))
        self._compute(worker)

    def _leave(self, number: int) -> None:
        for worker in self._random.sample(list(self._workers.values()), number):
            worker.gone = True
            del self._workers[worker.number]
            if worker.allocator is not None:
                worker.allocator.leave(str(worker.number))

    def _compute(self, worker: _Worker) -> None:
        """Start the CPU work of the next chunk, unless too many chunks wait."""
        if worker.computing or worker.gone or worker.resident > self.work.max_suspended_chunks:
            return
        worker.computing = True
        spread = self._random.uniform(0.8, 1.2) if self.work.cpu_s else 1.0
        self.at(self.now + self.work.cpu_s * spread, partial(self._made, worker))

    def _made(self, worker: _Worker) -> None:
        worker.computing = False
        worker.resident += 1
        request = RequestSlice(worker.call, 0, self.work.rows, nbytes=1)
        self._tell(worker, partial(PoolCore.submitted, slices=[request]))
        self._compute(worker)

    def _tell(self, worker: _Worker, *events: Event) -> None:  # noqa: C901  a table
        """Give events to a worker's core, and carry out its instructions."""
        if worker.gone:
            return
        while True:
            follow: list[Event] = []
            for instruction in worker.core.handle(self.now, *events):
                match instruction:
                    case do.Send(attempt):
                        attempt.sent_at = self.now  # the event `sent` would make it slower
                        arrival = partial(self._arrive, worker, attempt)
                        self.at(self.now + self.work.network_s, arrival)
                    case do.Answer() as answer:
                        self._delivered(worker, answer)
                    case do.Validate(url, key):
                        validated = partial(PoolCore.validated, url=url, key=key)
                        follow.append(partial(validated, outcome=self._contract))
                    case do.Probe(url):
                        follow.append(partial(PoolCore.probed, url=url, outcome=None))
                    case do.Count():
                        self.refused += 1
                    case do.Fail(_, error):
                        raise error
            if not follow:
                break
            events = tuple(follow)
        self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        """Schedule the core's next turn at the time that it asks for."""
        wakes_at = worker.core.wakes_at()
        if wakes_at < worker.wakes_at:
            worker.wakes_at = wakes_at

            def wake() -> None:
                if worker.wakes_at == wakes_at:
                    worker.wakes_at = math.inf
                    self._tell(worker)

            self.at(max(wakes_at, self.now), wake)

    def _arrive(self, worker: _Worker, attempt: Attempt) -> None:
        server = self._servers[attempt.url]
        max_queue = server.accelerator.max_queue
        full = max_queue is not None and len(server.queue) >= max_queue
        if full or server.requests >= self._max_requests:
            error = OverloadError("the queue is full")
            refused = partial(PoolCore.failed, attempt=attempt, error=error)
            self.at(self.now + self.work.network_s, partial(self._tell, worker, refused))
            return
        server.requests += 1
        server.queue.append((worker, attempt))
        self._serve(server)

    def _serve(self, server: _Server) -> None:
        accelerator, rows = server.accelerator, self.work.rows
        while server.queue and server.busy < accelerator.instances:
            number = min(accelerator.batch(rows), len(server.queue))
            batch = [server.queue.popleft() for _ in range(number)]
            server.busy += 1
            longer = self._random.uniform(1.0, 1.0 + accelerator.noise)
            took_s = accelerator.service_s(rows * number) * longer
            if self._has_statistics:
                server.computed += number
                server.compute_s += number * took_s
            self.at(self.now + took_s, partial(self._served, server, batch))

    def _served(self, server: _Server, batch: list[tuple[_Worker, Attempt]]) -> None:
        server.busy -= 1
        server.requests -= len(batch)
        at = self.now + self.work.network_s
        for worker, attempt in batch:
            sent_at = attempt.begun_at
            answer = do.Answer(attempt, _RESPONSE, sent_at, sent_at, at)
            answered = partial(PoolCore.answered, answer=answer)
            self.at(at, partial(self._tell, worker, answered))
        self._serve(server)

    def _delivered(self, worker: _Worker, answer: do.Answer) -> None:
        worker.resident -= 1
        request = answer.attempt.slice
        self.answered.append(
            Answered(worker.number, request.queued_at, answer.sent_at, self.now, self.work.rows)
        )
        self._compute(worker)

    # Messages between workers and scheduler

    def _report(self, worker: _Worker) -> None:
        if worker.allocator is None or worker.gone:
            return
        network_s = 2 * self.work.network_s
        telemetry = {
            served: replace(told, network_s=network_s)
            for served, told in worker.core.telemetry().items()
        }
        worker.allocator.report(str(worker.number), telemetry, {}, self.now)
        self.at(self.now + worker.allocator.round_s, partial(self._report, worker))

    def _end_round(self, allocator: Allocator) -> None:
        for url, server in self._servers.items():
            if server.computed:
                allocator.capacities[url, _MODEL].compute_s = server.compute_s / server.computed
        now, lease_s = self.now, allocator.lease_s
        for name, quotas in allocator.end_round(now).items():
            if (worker := self._workers.get(int(name))) is not None:
                received = partial(PoolCore.quotas_received, quotas=quotas, lease_s=lease_s)
                self._tell(worker, received)
        self.at(now + allocator.round_s, partial(self._end_round, allocator))


def fairness(rows: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all numbers are equal.

    Jain, Chiu and Hawe (1984): the squared sum over the number times the sum of squares.
    """
    squares = sum(r * r for r in rows)
    return sum(rows) ** 2 / (len(rows) * squares) if squares else math.nan
