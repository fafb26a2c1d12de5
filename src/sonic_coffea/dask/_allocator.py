"""Max-min fair allocation of servers among clients: state machines without a clock."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from sonic_coffea.dask._capacity import Capacity
from sonic_coffea.pool import DEFAULT, ModelKey, RttStatistics, Share

Name = TypeVar("Name")
ServedModel = tuple[str, ModelKey]
"""A server's URL, and a model."""

# The fractional parts of its multiples are spread evenly (Weyl; Knuth, volume 3, 6.4).
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# Rounds for which a lease lasts; then a client goes by its own limit.
_LEASE_ROUNDS = 4
# Of all clients together, before anything is known of the servers.
_FIRST_IN_FLIGHT = 32
# Rounds become longer while clients come: ten thousand make them 20 s long.
_QUOTAS_WITHIN_S = 60.0
# Of parts of requests.
_ROUNDING = 1e-6


class Telemetry(NamedTuple):
    """What a client reports of a model on a server; RTT statistics are since its last report.

    ``shares`` has the client's requests for the model on any server, by share; it is empty if all
    are of the default share.
    """

    in_flight: int
    waiting: int
    rtt: RttStatistics
    shares: Mapping[Share, int] = MappingProxyType({})

    @property
    def demand(self) -> int:
        """The requests that the client has."""
        return self.in_flight + self.waiting


class Grant(NamedTuple):
    """What a client may have in flight: a quota, whose times count from when it arrives.

    ``interval_s`` is 0 unless requests are paced; ``delay_s`` is the time to the first turn.
    """

    max_in_flight: int
    interval_s: float
    delay_s: float


@dataclass(slots=True)
class _Turns:
    """The phase of paced clients: a turn begins where it passes the client's phase."""

    phase: float = 0.0
    interval_s: float = 0.0
    at: float = 0.0

    def advance(self, interval_s: float, now: float) -> float:
        """Return the phase now, and go on with another interval; 0 if requests are not paced."""
        if self.interval_s:
            self.phase = (self.phase + (now - self.at) / self.interval_s) % 1.0
        self.interval_s, self.at = interval_s, now
        return self.phase


@dataclass(slots=True)
class _Client:
    """What is known of a client: its last telemetry, and circuits and answers by server."""

    number: int
    """Its phase is a multiple of the golden ratio, which spreads any number of turns evenly."""
    weight: int = 1
    reported_at: float = -math.inf
    telemetry: dict[ServedModel, Telemetry] = field(default_factory=dict)
    open_since: dict[str, float] = field(default_factory=dict)
    answered_at: dict[str, float] = field(default_factory=dict)


class Allocator:
    """Allocates the capacity of servers to the clients that ask for it, in rounds.

    Clients report telemetry; `allocate` ends a round and says what each may have. All of it is
    coarse and expires, so that nothing depends on a message. Times are those of any clock that does
    not go back, best of one that agrees with those of other schedulers. ``weight`` is the weight of
    these clients beside the clients of other schedulers.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.capacities: dict[ServedModel, Capacity] = {}
        self._clients: dict[str, _Client] = {}
        self._rtts: defaultdict[ServedModel, list[RttStatistics]] = defaultdict(list)
        self._phases: dict[tuple[ServedModel, str], _Turns] = {}
        self.held: set[str] = set()
        self._rounds = 0
        self._numbered: list[str] = []

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self._clients)

    @property
    def round_s(self) -> float:
        """How long a round is: the more clients, the longer, to spare the scheduler."""
        return max(0.5, len(self._clients) / 500)

    @property
    def first_in_flight(self) -> int:
        """How many requests of a model a new client may have in flight until it has quotas."""
        return max(_FIRST_IN_FLIGHT // max(len(self._clients), 1), 1)

    @property
    def quotas_within_s(self) -> float:
        """After which time without a word from here a client without quotas goes by its limit."""
        return max(_QUOTAS_WITHIN_S, self.lease_s)

    @property
    def lease_s(self) -> float:
        """How long quotas are valid."""
        return _LEASE_ROUNDS * self.round_s

    def demand(self, served: ServedModel) -> tuple[int, int]:
        """Return the requests in flight, and those that wait, over all clients."""
        known = [c.telemetry[served] for c in self._clients.values() if served in c.telemetry]
        return sum(t.in_flight for t in known), sum(t.waiting for t in known)

    def open_circuits(self, server: str) -> int:
        """Return how many clients have an open circuit to a server."""
        return sum(server in client.open_since for client in self._clients.values())

    def join(self, client: str, weight: int = 1) -> None:
        """Add a client, or change its weight: it counts as that many clients."""
        self._known(client).weight = weight

    def _known(self, client: str) -> _Client:
        if client not in self._clients:
            self._clients[client] = _Client(number=len(self._numbered))
            self._numbered.append(client)
        return self._clients[client]

    def leave(self, client: str) -> None:
        """Forget a client."""
        gone = self._clients.pop(client, None)
        if gone is not None and (last := self._numbered.pop()) != client:
            # The turns of those that stay are spread evenly, too.
            self._numbered[gone.number] = last
            self._clients[last].number = gone.number

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
        known.telemetry.update(telemetry)
        for served, reported in telemetry.items():
            self._rtts[served].append(reported.rtt)
            if reported.rtt.trips:
                known.answered_at[served[0]] = now
        changed = [url for url, is_open in circuits.items() if is_open != (url in known.open_since)]
        for server in changed:
            if circuits[server]:
                known.open_since[server] = now
            else:
                del known.open_since[server]
        return changed

    def allocate(self, now: float) -> dict[str, dict[ServedModel, Grant]]:
        """End a round: return for each client what it may have until the next.

        Clients that are `held` keep what they began with, as the rate of a server is not known.
        """
        self._rounds += 1
        grants: dict[str, dict[ServedModel, Grant]] = {name: {} for name in self._clients}
        rtts, self._rtts = self._rtts, defaultdict(list)
        active: defaultdict[ModelKey, set[str]] = defaultdict(set)
        for name, client in self._clients.items():
            for (_, key), reported in client.telemetry.items():
                if reported.demand:
                    active[key].add(name)
        self.held.clear()
        for served in {s for c in self._clients.values() for s in c.telemetry}:
            capacity = self.capacities.setdefault(served, Capacity(now))
            capacity.weight = self.weight
            total = capacity.end_round(rtts[served], *self.demand(served), now)
            among = active[served[1]]
            if capacity.rate or len(among) <= total:
                for name, grant in self._allocate(served, capacity, total, among, now):
                    grants[name][served] = grant
            else:
                self.held |= among
        for client in self._clients.values():
            if now - client.reported_at > self.lease_s:  # it is idle, or hangs
                client.telemetry.clear()
        return grants

    def _allocate(
        self,
        served: ServedModel,
        capacity: Capacity,
        total: float,
        active_clients: Collection[str],
        now: float,
    ) -> Iterable[tuple[str, Grant]]:
        """Yield what each client may have of one model on one server.

        A client that asks for the model only elsewhere may come here next, and has its turns.
        """
        clients = {n: c for n, c in self._clients.items() if served in c.telemetry}
        weights = {name: client.weight for name, client in clients.items()}
        by_share = _by_share(served, clients, active_clients)
        totals = {share: sum(demands.values()) for share, demands in by_share.items()}
        parts = weighted_fair(total, totals, {share: share.weight for share in by_share})
        quotas: Counter[str] = Counter()
        turns: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for share, demands in by_share.items():
            active = sum(min(demand, weights[name]) for name, demand in demands.items())
            paced = parts[share] < active and capacity.rate > 0
            interval_s = active * total / parts[share] / capacity.rate if paced else 0.0
            # A client's turns at several servers are spread evenly, too.
            begun = _Turns(len(self._phases) * _GOLDEN_RATIO % 1.0)
            of_share = self._phases.setdefault((served, share.name), begun)
            phase = of_share.advance(interval_s, now)
            # Whole numbers that are the part in the mean.
            first, after = parts[share] * self._rounds, parts[share] * (self._rounds + 1)
            whole = math.floor(after) - math.floor(first)
            for name, quota in max_min_fair(whole, demands, weights, self._rounds).items():
                quotas[name] += quota
                if demands[name]:
                    of_client = clients[name].number * _GOLDEN_RATIO
                    delay_s = (of_client - phase) % (1.0 / weights[name]) * interval_s
                    turns[name].append((interval_s / weights[name], delay_s))
        for name in clients:
            yield name, Grant(quotas[name], *_merged(turns[name]))

    def ejected(self) -> dict[str, list[str]]:
        """Return servers that have answered nobody since a circuit opened, and who still tries.

        These are one client with an open circuit, which may itself have lost the network, and one
        with a closed circuit.
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


def _by_share(
    served: ServedModel, clients: Mapping[str, _Client], active: Collection[str]
) -> dict[Share, dict[str, int]]:
    """Return what clients ask for of a model on a server, by share."""
    by_share: defaultdict[Share, dict[str, int]] = defaultdict(dict)
    for name, client in clients.items():
        reported = client.telemetry[served]
        shares = reported.shares or {DEFAULT: 1}
        demand = max(reported.demand, name in active)
        whole = sum(shares.values())
        for share, number in shares.items():
            by_share[share][name] = math.ceil(demand * number / whole)
    return by_share


def _merged(turns: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the interval and the delay of a client that has turns of several shares."""
    if not turns or not all(interval_s for interval_s, _ in turns):
        return 0.0, 0.0
    return 1.0 / sum(1.0 / interval_s for interval_s, _ in turns), min(d for _, d in turns)


def weighted_fair(
    total: float, demands: Mapping[Name, float], weights: Mapping[Name, float]
) -> dict[Name, float]:
    """Divide a number among those that ask: by weight, but to none more than it asks for.

    What is left when all have what they ask for goes by weight, too.
    """
    parts = dict.fromkeys(demands, 0.0)
    for bounds in (demands, dict.fromkeys(demands, math.inf)):
        unsatisfied = [name for name in demands if parts[name] < bounds[name]]
        while unsatisfied and total > 0:
            each = total / sum(weights[name] for name in unsatisfied)
            full = {n for n in unsatisfied if bounds[n] - parts[n] <= each * weights[n]}
            for name in full or unsatisfied:
                more = min(each * weights[name], bounds[name] - parts[name])
                parts[name] += more
                total -= more
            unsatisfied = [name for name in unsatisfied if name not in full] if full else []
    return parts


def max_min_fair(
    total: float, demands: Mapping[Name, int], weights: Mapping[Name, int], rounds: int
) -> dict[Name, int]:
    """Allocate requests: to each what it asks for, or as many for its weight as to the others.

    Each has at least its weight, also if it asks for none, as it may do so before the next round.
    What cannot be divided goes round-robin, by the number of rounds.
    """
    more = {name: max(demand - weights[name], 0) for name, demand in demands.items() if demand}
    left = int(total) - sum(min(demands[name], weights[name]) for name in more)
    parts = weighted_fair(left, more, weights)
    # Rounding errors must not make 2 of 3.
    extra = {name: math.floor(part + _ROUNDING) for name, part in parts.items()}
    left -= sum(extra.values())
    undivided = [name for name, part in parts.items() if part - extra[name] > _ROUNDING]
    first = rounds * left % max(len(undivided), 1)
    turns = set((undivided + undivided)[first : first + max(left, 0)])
    return {n: weights[n] + extra.get(n, 0) + (n in turns) for n in demands}
