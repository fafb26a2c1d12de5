"""The limit against simulated servers, in virtual time."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from sonic_coffea.pool._limits import AdaptiveLimit, Quota

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Server:
    """Batches what waits, on `instances` accelerators of 2 ms and 5 µs a row."""

    instances: int = 1
    launch_s: float = 2e-3
    row_s: float = 5e-6
    network_s: float = 2e-4
    most_rows: int = 1024
    queue: int | None = None
    noise: float = 0.05
    waiting: deque[Any] = field(default_factory=deque)
    busy: int = 0

    def batch(self) -> list[Any]:
        taken: list[Any] = []
        rows = 0
        while self.waiting and rows + self.waiting[0][1] <= self.most_rows:
            taken.append(self.waiting.popleft())
            rows += taken[-1][1]
        return taken

    def saturation(self, rows: int) -> float:
        """Rows a second, with as much in its queue as it could wish."""
        together = max(1, self.most_rows // rows) * rows
        return self.instances * together / (self.launch_s + self.row_s * together)


@dataclass
class Client:
    limit: AdaptiveLimit
    rows: int
    out: int = 0
    done: int = 0
    refusals: int = 0
    trips: list[float] = field(default_factory=list)


class Simulation:
    """Clients that always have more to send, and a server."""

    def __init__(self, server: Server, clients: list[Client], seed: int) -> None:
        self.server = server
        self.now = 0.0
        self._rng = random.Random(seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        for client in clients:
            self.after(self._rng.uniform(0, 0.01), self.send, client)

    def after(self, seconds: float, what: Callable[..., None], *data: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what, data))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, what, data = heapq.heappop(self._events)
            what(*data)

    def send(self, client: Client) -> None:
        while client.limit.room(client.out, self.now) > 0:
            client.out += 1
            request = (client, client.rows, self.now, client.out)
            self.after(self.server.network_s, self.arrive, request)

    def arrive(self, request: Any) -> None:
        if self.server.queue is not None and len(self.server.waiting) >= self.server.queue:
            self.after(self.server.network_s, self.refuse, request)
        else:
            self.server.waiting.append(request)
            self.work()

    def work(self) -> None:
        server = self.server
        while server.busy < server.instances and server.waiting:
            batch = server.batch()
            rows = sum(request[1] for request in batch)
            lasts_s = server.launch_s + server.row_s * rows
            server.busy += 1
            self.after(lasts_s * self._rng.uniform(1, 1 + server.noise), self.finish, batch)

    def finish(self, batch: list[Any]) -> None:
        self.server.busy -= 1
        for request in batch:
            self.after(self.server.network_s, self.answer, request)
        self.work()

    def answer(self, request: Any) -> None:
        client, rows, sent, out = request
        client.out -= 1
        client.done += rows
        client.trips.append(self.now - sent)
        client.limit.answered(self.now - sent, rows, out, self.now)
        self.send(client)

    def refuse(self, request: Any) -> None:
        client = request[0]
        client.out -= 1
        client.refusals += 1
        client.limit.refused(self.now)
        self.after(self._rng.uniform(0.5, 1.5) * 1e-2, self.send, client)


def simulate(
    server: Server,
    clients: list[Client],
    until_s: float,
    changes: dict[float, Callable[[Server], None]] | None = None,
) -> None:
    simulation = Simulation(server, clients, seed=1)
    for when, change in (changes or {}).items():
        simulation.after(when, change, server)
    simulation.run(until_s)


SERVERS = {
    "one accelerator": Server(),
    "eight accelerators": Server(instances=8),
    "far away": Server(network_s=0.03),
    "long inference": Server(launch_s=0.5),
    "a noisy one": Server(noise=1.0),
}


def steady(server: Server, clients: list[Client], rows: int, *, seconds: float = 40) -> float:
    """Return the share of the saturated server's rows a second, once clients have settled."""
    before: list[int] = []
    warm_s = 5 + 20 * server.launch_s
    changes = {warm_s: lambda _: before.append(sum(c.done for c in clients))}
    simulate(server, clients, warm_s + seconds, changes)
    rate = (sum(c.done for c in clients) - before[0]) / seconds
    return rate * (1 + server.noise / 2) / server.saturation(rows)


@pytest.mark.parametrize("rows", [256, 1024])
@pytest.mark.parametrize("name", SERVERS)
def test_one_client_gets_what_there_is(name: str, rows: int) -> None:
    server = copy.deepcopy(SERVERS[name])
    client = Client(AdaptiveLimit(1024), rows)
    # Small requests wait for the batch before theirs, which looks like a queue.
    assert steady(server, [client], rows) > (0.95 if rows == 1024 else 0.75)


def test_the_queue_stays_short() -> None:
    server, client = Server(), Client(AdaptiveLimit(256), 1024)
    simulate(server, [client], 60)
    alone_s = server.launch_s + 1024 * server.row_s + 2 * server.network_s
    trips = sorted(client.trips)
    assert trips[len(trips) // 2] < 5 * alone_s
    assert trips[-1] < 10 * alone_s
    assert client.limit.value <= 6


def test_a_server_that_changes_is_followed() -> None:
    def slower(server: Server) -> None:
        server.launch_s, server.row_s = 4 * server.launch_s, 4 * server.row_s

    def more(server: Server) -> None:
        server.instances = 6

    client = Client(AdaptiveLimit(256), 1024)
    counts: list[int] = []

    def count(_: Server) -> None:
        counts.append(client.done)

    changes = {20.0: slower, 40.0: count, 60.0: count, 60.1: more, 80.0: count, 100.0: count}
    server = Server()
    simulate(server, [client], 101, changes)
    slow, fast = counts[1] - counts[0], counts[3] - counts[2]
    one = 20 * 1024 / (4 * (2e-3 + 1024 * 5e-6)) / (1 + server.noise / 2)
    assert slow > 0.95 * one
    assert fast > 6 * 0.95 * one


def test_refusals_slow_the_sender_down() -> None:
    server = Server(queue=4, network_s=0.02)
    clients = [Client(AdaptiveLimit(256), 1024) for _ in range(3)]
    assert steady(server, clients, 1024) > 0.9
    refused = sum(c.refusals for c in clients)
    answered = sum(c.done for c in clients) / 1024
    assert 0 < refused < 0.2 * answered


def test_clients_share_a_server_without_outbidding_each_other() -> None:
    server = Server(instances=4)
    clients = [Client(AdaptiveLimit(256), 1024) for _ in range(8)]
    share = steady(server, clients, 1024, seconds=600)
    assert share > 0.95
    done = [c.done for c in clients]
    fairness = sum(done) ** 2 / len(done) / sum(n * n for n in done)
    assert fairness > 0.8
    # Ten minutes of work, and still the queue is a matter of tens, not of all that limits allow.
    assert sum(c.limit.value for c in clients) < 150


def test_a_request_goes_out_alone_now_and_then() -> None:
    limit = AdaptiveLimit(10)
    assert limit.room(0, 0.0) == 4
    for out in (1, 2, 3, 4):
        limit.answered(0.01, 1024, out, 0.1)
    assert limit.room(0, 1.0) == limit.value == 5
    assert limit.room(0, 31.0) == 1
    assert limit.room(1, 31.0) == 0
    limit.answered(0.05, 1024, 3, 31.0)
    assert limit.room(0, 31.1) == 1
    limit.answered(0.02, 1024, 1, 31.2)
    assert limit.room(0, 31.3) == limit.value


def test_the_bounds_hold() -> None:
    limit = AdaptiveLimit(6)
    for k in range(100):
        limit.answered(0.01, 8, limit.value, k * 0.01)
    assert limit.value == 6
    for k in range(100):
        limit.refused(10.0 + k)
    assert limit.value == 1
    limit.lost()
    assert limit.value == 4
    assert AdaptiveLimit(1).value == 1


def test_a_share_is_waited_for_until_its_turn_or_its_end() -> None:
    def share(next_at: float, until: float) -> Quota:
        return Quota(1, 5.0, turn_at=next_at, until=until, next_at=next_at)

    assert share(3.0, until=8.0).wakes_at(1.0) == 3.0
    assert share(9.0, until=8.0).wakes_at(1.0) == 8.0
    for now in (3.0, 8.0):
        assert share(3.0, until=8.0).wakes_at(now) == math.inf
