"""Quotas: an equal share of each server for every client that has work for it.

State machines without a clock or messages; the scheduler plugin drives them in rounds, and
simulations on virtual time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sonic_coffea.pool import MAX_RTT_RATIO, ModelKey, RttStatistics, min_in_flight

ServedModel = tuple[str, ModelKey]
"""A server's URL, and a model."""

# Multiples of the golden ratio, modulo 1, spread any number of turns evenly (Weyl; Knuth, volume 3,
# 6.4), so that a client keeps its turns while others come and go.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# A lease lasts for this number of rounds; then a client goes by its own limit.
_LEASE_ROUNDS = 4
# What all clients together may have in flight before anything is known of a server.
_FIRST_IN_FLIGHT = 32
# Rounds get longer as clients come: ten thousand make them 20 s long.
_QUOTAS_WITHIN_S = 60.0
# What is measured lags behind by a round or two, so limit and rate change by steps.
_MAX_STEP, _SMOOTHING, _LAG_ROUNDS = 2.0, 0.3, 2
# While little is in flight, requests are paced faster by this factor each round.
_FASTER = 1.1
# In each round, a part of what keeps a server busy is added. Schedulers that know nothing of each
# other see the same RTT ratio, and go down by the same factor, so their limits become equal (as in
# FAST TCP: Wei, Jin, Low and Hegde, 2006).
_PUSH = 0.05


class Telemetry(NamedTuple):
    """What a client reports of a model on a server.

    The RTT statistics are since its last report. ``network_s`` is the time to the server and back
    without any work; 0 if it is unknown.
    """

    in_flight: int
    waiting: int
    rtt: RttStatistics
    network_s: float = 0.0


class Grant(NamedTuple):
    """A client's quota, whose times count from when it arrives.

    ``interval_s`` is 0 unless requests are paced; ``delay_s`` is the time to the first turn.
    """

    max_in_flight: int
    interval_s: float = 0.0
    delay_s: float = 0.0


@dataclass(slots=True)
class Capacity:
    """What a server can do for a model: the in-flight limit of all clients, and their rate.

    The limit goes to where a round trip takes `MAX_RTT_RATIO` times as long as without a queue:
    the server works on one batch, the next one waits, and another is on its way. Without a queue, a
    round trip takes the server's own compute time (`compute_s`) and that of the network, or the
    shortest RTT of requests of this size if that is less, or all that is known.

    Attributes
    ----------
    limit : float
        Requests that all clients together may have in flight.
    compute_s : float
        The server's mean compute time of a request, by its own statistics; infinity if unknown.
    """

    limit: float = 8.0
    compute_s: float = math.inf
    _least_rtt_s: dict[int, float] = field(default_factory=dict)
    _rate: float = 0.0
    _in_flight: float = 0.0
    _round_s: float = 0.5
    _phase: float = 0.0
    _interval_s: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second for the server, if they are paced; 0 before the first answers.

        By more or less than the rate of its answers, so that as many are in flight as may be.
        """
        lacking = (self.limit - self._in_flight) / (_LAG_ROUNDS * self._round_s)
        return max(self._rate + lacking, self._rate / _MAX_STEP) if self._rate else 0.0

    def end_round(self, reports: Iterable[Telemetry], round_s: float) -> None:
        """Take the reports of all clients in a round."""
        self._round_s = round_s
        rtts = [report.rtt for report in reports]
        waiting = sum(report.waiting for report in reports)
        if any(rtt.refused for rtt in rtts):
            self.limit = max(self.limit / _MAX_STEP, 1.0)
        answers, sum_s, idle_s = self._compare(reports)
        if not answers:
            self._in_flight = sum(report.in_flight for report in reports)
            return
        # Little's law.
        self._in_flight = sum_s / round_s
        if not any(rtt.refused for rtt in rtts):
            step = MAX_RTT_RATIO * idle_s / sum_s
            busy = max(min_in_flight(rtt.full) for rtt in rtts)
            if step < 1 or waiting:
                self.limit *= math.sqrt(min(max(step, 1 / _MAX_STEP), _MAX_STEP))
            if waiting:
                self.limit += _PUSH * busy
            self.limit = max(min(self.limit, 2 * _MAX_STEP * self._in_flight), busy)
        observed = answers / round_s
        if not self._rate:
            self._rate = observed
        elif observed > self._rate or self._in_flight > self.limit / _MAX_STEP:
            self._rate += _SMOOTHING * (observed - self._rate)
        elif waiting:
            # The server could do more: its answers tell what was sent.
            self._rate = min(_FASTER * self._rate, max(self._rate, _MAX_STEP * observed))

    def _compare(self, reports: Iterable[Telemetry]) -> tuple[int, float, float]:
        """Return the number of answers, the sum of their RTTs, and of those without a queue."""
        answers, sum_s, idle_s = 0, 0.0, 0.0
        for report in reports:
            for size, (number, size_sum_s, min_s) in report.rtt.trips.items():
                least_s = min(min_s, self._least_rtt_s.get(size, math.inf))
                self._least_rtt_s[size] = least_s
                answers += number
                sum_s += size_sum_s
                idle_s += number * min(least_s, self.compute_s + report.network_s)
        return answers, sum_s, idle_s

    def turns(self, clients: int, round_s: float) -> tuple[float, float]:
        """Return the time between the turns of a client, and the phase of the turns now."""
        if self._interval_s:
            self._phase = (self._phase + round_s / self._interval_s) % 1.0
        self._interval_s = clients / self.rate if self.rate else 0.0
        return self._interval_s, self._phase


@dataclass(slots=True)
class _Client:
    """What is known of a client: its place among the turns, and its last report."""

    number: int
    reported_at: float = -math.inf
    telemetry: dict[ServedModel, Telemetry] = field(default_factory=dict)
    open_circuits: set[str] = field(default_factory=set)


class Allocator:
    """Allocates servers to clients, in rounds.

    Clients report telemetry; `allocate` ends a round and says what each may have until the next.
    All of it is coarse and expires, so that nothing depends on a single message. Times are those of
    any clock that does not go back.
    """

    def __init__(self) -> None:
        self.capacities: defaultdict[ServedModel, Capacity] = defaultdict(Capacity)
        self._clients: dict[str, _Client] = {}
        self._reports: defaultdict[ServedModel, list[Telemetry]] = defaultdict(list)
        self._numbers: list[str] = []
        self._rounds = 0
        self._round_at = -math.inf
        self.held: set[str] = set()

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
        return sum(server in client.open_circuits for client in self._clients.values())

    def join(self, client: str) -> None:
        """Add a client, unless it is known."""
        if client not in self._clients:
            self._clients[client] = _Client(len(self._numbers))
            self._numbers.append(client)

    def leave(self, client: str) -> None:
        """Forget a client."""
        gone = self._clients.pop(client, None)
        if gone is not None and (last := self._numbers.pop()) != client:
            # The turns of those that stay are spread evenly, too.
            self._numbers[gone.number] = last
            self._clients[last].number = gone.number

    def report(
        self,
        client: str,
        telemetry: Mapping[ServedModel, Telemetry],
        circuits: Mapping[str, bool],
        now: float,
    ) -> list[str]:
        """Take a client's report: its telemetry, and which of its circuits are open.

        Returns
        -------
        list of str
            Servers whose circuit has opened or closed since the client's last report.
        """
        self.join(client)
        known = self._clients[client]
        known.reported_at = now
        known.telemetry.update(telemetry)
        for served, reported in telemetry.items():
            self._reports[served].append(reported)
        is_open = {server for server, is_open in circuits.items() if is_open}
        changed = known.open_circuits ^ is_open
        known.open_circuits = is_open
        return sorted(changed)

    def allocate(self, now: float) -> dict[str, dict[ServedModel, Grant]]:
        """End a round: return for each client what it may have until the next.

        Clients that are `held` keep what they began with, as the rate of a server is not known.
        """
        self._rounds += 1
        round_s = min(now - self._round_at, self.lease_s) or self.round_s
        self._round_at = now
        grants: dict[str, dict[ServedModel, Grant]] = {name: {} for name in self._clients}
        reports, self._reports = self._reports, defaultdict(list)
        active: defaultdict[ModelKey, list[str]] = defaultdict(list)
        for name, client in self._clients.items():
            for key in {key for (_, key), t in client.telemetry.items() if t.in_flight + t.waiting}:
                active[key].append(name)
        self.held.clear()
        for served in {s for c in self._clients.values() for s in c.telemetry}:
            capacity, names = self.capacities[served], active[served[1]]
            capacity.end_round(reports[served], round_s)
            each = capacity.limit / max(len(names), 1)
            if each < 1 and not capacity.rate:
                self.held.update(names)
                continue
            interval_s, phase = capacity.turns(len(names), round_s) if each < 1 else (0.0, 0.0)
            # What cannot be divided goes round-robin.
            left = int(capacity.limit) % max(len(names), 1)
            turn = self._rounds * left % max(len(names), 1)
            for place, name in enumerate(names[turn:] + names[:turn]):
                delay_s = (self._clients[name].number * _GOLDEN_RATIO - phase) % 1.0 * interval_s
                whole = max(int(each) + (place < left), 1)
                grants[name][served] = Grant(whole, interval_s, delay_s)
            # The others may ask for the model before the next round.
            for name, client in self._clients.items():
                if served in client.telemetry and served not in grants[name]:
                    grants[name][served] = Grant(1)
        for client in self._clients.values():
            if now - client.reported_at > self.lease_s:  # it is idle, or hangs
                client.telemetry.clear()
        return grants
