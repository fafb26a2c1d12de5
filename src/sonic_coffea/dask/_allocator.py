"""Max-min fair allocation of servers among clients: pure state machines, told of the time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sonic_coffea.pool import MAX_RTT_RATIO, ModelKey, RttStatistics, min_in_flight

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Name = TypeVar("Name")
ServedModel = tuple[str, ModelKey]
"""A server's URL, and a model."""

_INITIAL = 8.0
# The baseline RTT is forgotten after so long, as servers change. Then all clients keep to a part of
# the limit for a round, so that some requests find no queue (BBR's ProbeRTT).
_BASELINE_S = 60.0
_PROBE_RTT_PART = 0.25
# The limit changes by at most this factor at once.
_MAX_STEP = 2.0
# It grows only where it is what holds requests back.
_BINDING_PART = 0.7
# With fewer requests than clients, these send at the best rate of so many rounds; at times a bit
# faster, to see whether the server has become faster, and slower, to make up for it.
_RATE_ROUNDS = 16
_PACES = (1.05, 0.93, 0.98, 0.98, 0.98, 0.98, 0.98, 0.98)
# What is in flight beyond the limit is made up for in so many rounds, but the rate never falls
# below a part of the best.
_RELIEF_ROUNDS, _MIN_PACE = 2, 0.3
# The fractional parts of its multiples are spread evenly (Weyl; Knuth, volume 3, 6.4).
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# A lease lasts for so many rounds; then a client goes by its own limit.
_LEASE_ROUNDS = 4


class Telemetry(NamedTuple):
    """What a client reports of a model on a server; RTT statistics are since its last report."""

    in_flight: int
    waiting: int
    rtt: RttStatistics


class Grant(NamedTuple):
    """What a client may have in flight: a quota, before it is known when it arrives.

    ``interval_s`` is 0 unless requests are paced; ``delay_s`` is the time to the first turn.
    """

    max_in_flight: int
    interval_s: float
    delay_s: float


class Capacity:
    """The in-flight limit of all clients of a server together, and the rate of paced requests.

    In each round, RTTs are compared with the baseline of their size. The limit goes to where the
    RTT ratio is as a process's own limit has it.
    """

    def __init__(self, now: float) -> None:
        self.limit = _INITIAL
        self.phase = 0.0
        self._baseline_rtt_s: dict[int, float] = {}
        self._next_baseline_rtt_s: dict[int, float] = {}
        self._baseline_at = self._round_at = now
        self._round_s = 1.0
        self._rounds = 0
        self._rates: deque[float] = deque(maxlen=_RATE_ROUNDS)
        self._in_flight = 0.0
        self._interval_s = self._paced_at = 0.0
        self._probing_rtt = False

    @property
    def rate(self) -> float:
        """Requests a second for the server, if they are paced."""
        best = max(self._rates, default=0.0)
        pace = _PROBE_RTT_PART if self._probing_rtt else _PACES[self._rounds % len(_PACES)]
        excess = max(self._in_flight - self.limit, 0.0) / (self._round_s * _RELIEF_ROUNDS)
        return max(best * pace - excess, best * min(pace, _MIN_PACE))

    def pace(self, interval_s: float, now: float) -> None:
        """Take the time between two turns of a client.

        Turns are where the phase passes that of the client; it runs on as the interval changes.
        """
        if self._interval_s:
            self.phase = (self.phase + (now - self._paced_at) / self._interval_s) % 1.0
        self._interval_s, self._paced_at = interval_s, now

    def end_round(self, rtts: Iterable[RttStatistics], waiting: int, now: float) -> float:
        """Take all RTTs of a round, and return how many requests may be in flight."""
        rtts = list(rtts)
        self._round_s = max(now - self._round_at, 1e-9)
        self._round_at = now
        self._rounds += 1
        answers, sum_s, rtt_ratio = self._compare(rtts)
        if any(rtt.refused for rtt in rtts):
            self.limit = max(self.limit / _MAX_STEP, 1.0)
        elif answers and not self._probing_rtt:
            self._rates.append(answers / self._round_s)
            # Little's law: so many were in flight, on average over the round.
            self._in_flight = sum_s / self._round_s
            factor = min(max(MAX_RTT_RATIO / rtt_ratio, 1 / _MAX_STEP), _MAX_STEP)
            if factor < 1 or (waiting and self._in_flight > _BINDING_PART * self.limit):
                # Half of the way, as what is measured lags behind.
                self.limit *= math.sqrt(factor)
            self.limit = max(self.limit, *(min_in_flight(rtt.full) for rtt in rtts))
        self._probe_rtt(now)
        return self.limit * (_PROBE_RTT_PART if self._probing_rtt else 1.0)

    def _compare(self, rtts: Iterable[RttStatistics]) -> tuple[int, float, float]:
        """Return the number and the sum of all RTTs, and their ratio to the baseline."""
        answers, sum_s, baseline_s = 0, 0.0, 0.0
        for rtt in rtts:
            for size, (number, size_sum_s, min_s) in rtt.trips.items():
                for baseline in (self._baseline_rtt_s, self._next_baseline_rtt_s):
                    baseline[size] = min(min_s, baseline.get(size, math.inf))
                answers += number
                sum_s += size_sum_s
                baseline_s += number * self._baseline_rtt_s[size]
        return answers, sum_s, sum_s / baseline_s if baseline_s else 1.0

    def _probe_rtt(self, now: float) -> None:
        """Begin a round that measures the baseline RTT anew, or end it."""
        if self._probing_rtt:
            self._probing_rtt = False
            self._baseline_rtt_s, self._next_baseline_rtt_s = self._next_baseline_rtt_s, {}
            self._baseline_at = now
        elif now - self._baseline_at > _BASELINE_S:
            self._probing_rtt = True
            self._next_baseline_rtt_s = {}


@dataclass(slots=True)
class _Client:
    """What is known of a client: demand by model, circuits and answers by server."""

    phase: float
    weight: int = 1
    reported_at: float = -math.inf
    demand: dict[ServedModel, tuple[int, int]] = field(default_factory=dict)
    open_since: dict[str, float] = field(default_factory=dict)
    answered_at: dict[str, float] = field(default_factory=dict)


class Allocator:
    """Allocates the capacity of servers to the clients that ask for it, in rounds.

    Clients report telemetry; `allocate` ends a round and says what each may have. All of it is
    coarse and expires, so that nothing depends on a message. Times are those of any clock that does
    not go back.
    """

    def __init__(self) -> None:
        self.capacities: dict[ServedModel, Capacity] = {}
        self._clients: dict[str, _Client] = {}
        self._rtts: defaultdict[ServedModel, list[RttStatistics]] = defaultdict(list)
        self._rounds = 0
        self._joined = 0

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self._clients)

    @property
    def round_s(self) -> float:
        """How long a round is: the more clients, the longer, to spare the scheduler."""
        return max(0.5, len(self._clients) / 500)

    @property
    def lease_s(self) -> float:
        """How long quotas are valid."""
        return _LEASE_ROUNDS * self.round_s

    def demand(self, served: ServedModel) -> tuple[int, int]:
        """Return the requests in flight, and those that wait, over all clients."""
        demands = [c.demand[served] for c in self._clients.values() if served in c.demand]
        return sum(d[0] for d in demands), sum(d[1] for d in demands)

    def open_circuits(self, server: str) -> int:
        """Return how many clients have an open circuit to a server."""
        return sum(server in client.open_since for client in self._clients.values())

    def join(self, client: str, weight: int = 1) -> None:
        """Take in a client, or change its weight: it counts as so many."""
        self._known(client).weight = weight

    def _known(self, client: str) -> _Client:
        if client not in self._clients:
            # However many there are, their turns are spread evenly.
            self._joined += 1
            self._clients[client] = _Client(phase=self._joined * _GOLDEN_RATIO % 1.0)
        return self._clients[client]

    def leave(self, client: str) -> None:
        """Forget a client: what it had is for the others."""
        self._clients.pop(client, None)

    def report(
        self,
        client: str,
        telemetry: Mapping[ServedModel, Telemetry],
        circuits: Mapping[str, bool],
        now: float,
    ) -> list[str]:
        """Take a client's report.

        Parameters
        ----------
        client : str
            Its name.
        telemetry : mapping
            By server and model.
        circuits : mapping
            Server to whether its circuit is open.

        Returns
        -------
        list of str
            Servers whose circuit has opened or closed since the client's last report.
        """
        known = self._known(client)
        known.reported_at = now
        for served, (in_flight, waiting, rtt) in telemetry.items():
            known.demand[served] = in_flight, waiting
            self._rtts[served].append(rtt)
            if rtt.trips:
                known.answered_at[served[0]] = now
        changed = [url for url, is_open in circuits.items() if is_open != (url in known.open_since)]
        for server in changed:
            if circuits[server]:
                known.open_since[server] = now
            else:
                del known.open_since[server]
        return changed

    def allocate(self, now: float) -> dict[str, dict[ServedModel, Grant]]:
        """End a round: return for each client what it may have until the next."""
        self._rounds += 1
        grants: dict[str, dict[ServedModel, Grant]] = {name: {} for name in self._clients}
        rtts, self._rtts = self._rtts, defaultdict(list)
        for served in {s for c in self._clients.values() for s in c.demand}:
            capacity = self.capacities.setdefault(served, Capacity(now))
            total = capacity.end_round(rtts[served], self.demand(served)[1], now)
            for name, grant in self._allocate(served, capacity, total, now):
                grants[name][served] = grant
        for client in self._clients.values():
            if now - client.reported_at > self.lease_s:  # it is idle, or hangs
                client.demand.clear()
        return grants

    def _allocate(
        self, served: ServedModel, capacity: Capacity, total: float, now: float
    ) -> Iterable[tuple[str, Grant]]:
        """Yield what each client may have of one model on one server."""
        clients = {n: c for n, c in self._clients.items() if served in c.demand}
        # A client of some weight is as many that share its demand.
        demands = {
            (name, part): (sum(client.demand[served]) + part) // client.weight
            for name, client in clients.items()
            for part in range(client.weight)
        }
        active = sum(demand > 0 for demand in demands.values())
        paced = total < active and capacity.rate > 0
        interval_s = active / capacity.rate if paced else 0.0
        if paced:
            capacity.pace(interval_s, now)
        granted: Counter[str] = Counter()
        for (name, _), quota in max_min_fair(total, demands, self._rounds).items():
            granted[name] += quota
        for name, client in clients.items():
            delay_s = (client.phase - capacity.phase) % (1.0 / client.weight) * interval_s
            yield name, Grant(granted[name], interval_s / client.weight, delay_s)

    def ejected(self) -> dict[str, list[str]]:
        """Return servers that nobody has an answer from since a circuit opened, and who tries them.

        These are a client whose circuit is open, and one whose is not: the first may have lost the
        network.
        """
        ejected: dict[str, list[str]] = {}
        for server in {s for c in self._clients.values() for s in c.open_since}:
            since = {n: c.open_since.get(server, math.inf) for n, c in self._clients.items()}
            first = min(since, key=since.__getitem__)
            answered_at = max(c.answered_at.get(server, -math.inf) for c in self._clients.values())
            if answered_at <= since[first]:
                others = [name for name, opened_at in since.items() if opened_at == math.inf]
                turn = self._rounds // _LEASE_ROUNDS % max(len(others), 1)
                ejected[server] = [first, *others[turn : turn + 1]]
        return ejected


def max_min_fair(total: float, demands: Mapping[Name, int], rounds: int) -> dict[Name, int]:
    """Allocate requests: to each what it asks for, or as many as to the others.

    Each has one at the least; who asks for none has it for when it does.

    Parameters
    ----------
    total : float
        Requests that may be in flight.
    demands : mapping
        What each has in flight or waiting.
    rounds : int
        Counts the rounds: what cannot be divided goes round-robin.
    """
    active = [name for name, demand in demands.items() if demand]
    quotas = dict.fromkeys(demands, 1)
    left = int(total) - len(active)
    # First what they ask for, then what is left: they may ask for it before the next round.
    for bounds in (demands, dict.fromkeys(active, math.inf)):
        unsatisfied = [name for name in active if bounds[name] > 1]
        while left > 0 and unsatisfied:
            each = left // len(unsatisfied)
            if each == 0:
                first = rounds * left % len(unsatisfied)
                unsatisfied = (unsatisfied + unsatisfied)[first : first + left]
                each = 1
            for name in unsatisfied:
                more = int(min(each, bounds[name] - quotas[name]))
                quotas[name] += more
                left -= more
            unsatisfied = [name for name in unsatisfied if quotas[name] < bounds[name]]
    return quotas
