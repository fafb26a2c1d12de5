"""Quotas: an equal share of each server for every client that has work for it.

State machines without a clock or messages; the scheduler plugin drives them in rounds, and
simulations on virtual time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sonic_coffea.pool import MAX_RTT_RATIO, ModelKey, Quota, Telemetry, min_in_flight

ServedModel = tuple[str, ModelKey]
"""A server's URL, and a model."""

# Multiples of the golden ratio, modulo 1, spread any number of turns evenly (Weyl; Knuth, volume 3,
# 6.4), so that clients keep their turns while others come.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# A lease lasts for this number of rounds; then a client adapts its own limit.
LEASE_ROUNDS = 4
# What all clients together may have in flight before anything is known of a server.
_FIRST_IN_FLIGHT = 32
# Rounds get longer as clients come: ten thousand make them 20 s long.
_QUOTAS_WITHIN_S = 60.0
# Measurements lag behind by a round or two, so limit and rate change in small steps.
_MAX_STEP, _SMOOTHING, _LAG_ROUNDS = 2.0, 0.3, 2
# While little is in flight, requests are paced faster by this factor each round.
_FASTER = 1.1
# In each round, a part of what keeps a server busy is added. Schedulers that know nothing of each
# other see the same RTT ratio, and go down by the same factor, so their limits become equal (as in
# FAST TCP: Wei, Jin, Low and Hegde, 2006).
_PUSH = 0.05


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
    reports : list of Telemetry
        What clients have reported in this round.
    active : dict
        The places of the clients that have shares in this round.
    interval_s, phase : float
        The time between the turns of a client, 0 unless they are paced, and the phase of the turns
        at the beginning of the round.
    """

    limit: float = 8.0
    compute_s: float = math.inf
    reports: list[Telemetry] = field(default_factory=list)
    active: dict[Hashable, int] = field(default_factory=dict)
    interval_s: float = 0.0
    phase: float = 0.0
    _min_rtt_s: dict[int, float] = field(default_factory=dict)
    _rate: float = 0.0
    _in_flight: float = 0.0
    _round_s: float = 0.5

    @property
    def rate(self) -> float:
        """Requests a second for the server, if they are paced; 0 before the first answers.

        It differs from the rate of answers so that the requests in flight approach the limit.
        """
        lacking = (self.limit - self._in_flight) / (_LAG_ROUNDS * self._round_s)
        return max(self._rate + lacking, self._rate / _MAX_STEP) if self._rate else 0.0

    def end_round(self, active: dict[Hashable, int], round_s: float) -> None:
        """Take the reports of a round, and share among the active clients until the next."""
        reports, self.reports = self.reports, []
        self.active, self._round_s = active, round_s
        self._adapt(reports)
        if self.interval_s:
            self.phase = (self.phase + round_s / self.interval_s) % 1.0
        paced = int(self.limit) < len(active) and self.rate
        self.interval_s = len(active) / self.rate if paced else 0.0

    def _adapt(self, reports: list[Telemetry]) -> None:
        """Adapt the limit and the rate."""
        waiting = sum(report.waiting for report in reports)
        refused = any(report.refused for report in reports)
        if refused:
            self.limit = max(self.limit / _MAX_STEP, 1.0)
        # The number of answers, the sum of their RTTs, and of those that they had without a queue.
        answers, sum_s, idle_s = 0, 0.0, 0.0
        for report in reports:
            for size, (number, size_sum_s, min_s) in report.rtts.items():
                baseline_s = min(min_s, self._min_rtt_s.get(size, math.inf))
                self._min_rtt_s[size] = baseline_s
                answers += number
                sum_s += size_sum_s
                idle_s += number * min(baseline_s, self.compute_s + report.network_s)
        if not answers:
            self._in_flight = sum(report.in_flight for report in reports)
            return
        # Little's law.
        self._in_flight = sum_s / self._round_s
        if not refused:
            step = MAX_RTT_RATIO * idle_s / sum_s
            busy = max(min_in_flight(report.full) for report in reports)
            if step < 1 or waiting:
                self.limit *= math.sqrt(min(max(step, 1 / _MAX_STEP), _MAX_STEP))
            if waiting:
                self.limit += _PUSH * busy
            self.limit = max(min(self.limit, 2 * _MAX_STEP * self._in_flight), busy)
        self._pace(answers / self._round_s, waiting=bool(waiting))

    def _pace(self, observed: float, *, waiting: bool) -> None:
        """Adapt the rate to that of the answers."""
        if not self._rate:
            self._rate = observed
        elif observed > self._rate or self._in_flight > self.limit / _MAX_STEP:
            self._rate += _SMOOTHING * (observed - self._rate)
        elif waiting:
            # The server could do more: its answers tell what was sent.
            self._rate = min(_FASTER * self._rate, max(self._rate, _MAX_STEP * observed))


@dataclass(slots=True)
class Client:
    """What is known of a client, by its last report."""

    reported_at: float = -math.inf
    telemetry: dict[ServedModel, Telemetry] = field(default_factory=dict)
    circuits: Mapping[str, bool] = field(default_factory=dict)


class Allocator:
    """Allocates servers to clients, in rounds.

    Clients report telemetry; `end_round` ends a round and says what each may have until the next.
    All of it is coarse and expires, so that nothing depends on a single message. Times are those of
    any clock that does not go back.
    """

    def __init__(self) -> None:
        self.capacities: defaultdict[ServedModel, Capacity] = defaultdict(Capacity)
        self.clients: dict[Any, Client] = {}
        self._rounds = 0
        self._round_at = -math.inf

    @property
    def round_s(self) -> float:
        """How long a round is: the more clients, the longer, to spare the scheduler."""
        return max(0.5, len(self.clients) / 500)

    @property
    def first_in_flight(self) -> int:
        """How many requests of a model a new client may have in flight until it has quotas."""
        return max(_FIRST_IN_FLIGHT // max(len(self.clients), 1), 1)

    @property
    def quotas_within_s(self) -> float:
        """How long a client waits for its first quotas before it adapts its own limit."""
        return max(_QUOTAS_WITHIN_S, self.lease_s)

    @property
    def lease_s(self) -> float:
        """How long quotas are valid."""
        return LEASE_ROUNDS * self.round_s

    def demand(self, server: str, model: str, version: str) -> tuple[int, int, float]:
        """Return the requests in flight, and those that wait, over all clients, and their limit."""
        keys = [(server, ModelKey(model, asked)) for asked in (None, version)]
        reported = [c.telemetry[k] for c in self.clients.values() for k in keys if k in c.telemetry]
        # Requests that ask for no version are of the newest.
        known = [t for t in reported if t.version in ("", version)]
        limit = sum(self.capacities[key].limit for key in keys if key in self.capacities)
        return sum(t.in_flight for t in known), sum(t.waiting for t in known), limit

    def circuits(self, server: str) -> list[bool]:
        """Return whether each client's circuit to a server is open."""
        known = [client.circuits for client in self.clients.values()]
        return [circuits[server] for circuits in known if server in circuits]

    def join(self, client: Hashable) -> None:
        """Add a client, unless it is known."""
        self.clients.setdefault(client, Client())

    def leave(self, client: Hashable) -> None:
        """Forget a client."""
        self.clients.pop(client, None)

    def report(
        self,
        client: Hashable,
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
        known = self.clients.setdefault(client, Client())
        known.reported_at = now
        known.telemetry = dict(telemetry)
        for served, reported in telemetry.items():
            self.capacities[served].reports.append(reported)
        before, known.circuits = known.circuits, circuits
        return sorted(s for s, is_open in circuits.items() if is_open != before.get(s, False))

    def end_round(self, now: float) -> dict[Any, dict[ServedModel, Quota]]:
        """End a round: return for each client with telemetry what it may have until the next.

        While a client needs turns at a server whose rate is not known, it has no quota there, and
        keeps what it began with.
        """
        self._rounds += 1
        round_s = min(now - self._round_at, self.lease_s) or self.round_s
        self._round_at = now
        active: defaultdict[ServedModel, dict[Hashable, int]] = defaultdict(dict)
        for name, client in self.clients.items():
            # A client has its share of all its servers, whichever of them its requests are at.
            busy = {key for (_, key), t in client.telemetry.items() if t.in_flight + t.waiting}
            for served in client.telemetry:
                if served[1] in busy:
                    active[served][name] = len(active[served])
        for served, capacity in self.capacities.items():
            capacity.end_round(active[served], round_s)
        quotas: dict[Any, dict[ServedModel, Quota]] = {}
        for number, (name, client) in enumerate(self.clients.items()):
            if client.telemetry:
                shares = ((s, self._share(s, name, number)) for s in client.telemetry)
                quotas[name] = {served: share for served, share in shares if share is not None}
            if now - client.reported_at > self.lease_s:  # it is idle, or hangs
                client.telemetry.clear()
        return quotas

    def _share(self, served: ServedModel, name: Hashable, number: int) -> Quota | None:
        capacity = self.capacities[served]
        clients, limit = len(capacity.active), int(capacity.limit)
        if name not in capacity.active:  # it may ask for the model before the next round
            return Quota(1)
        if interval_s := capacity.interval_s:
            turn = number * _GOLDEN_RATIO - capacity.phase
            return Quota(1, interval_s, turn % 1.0 * interval_s)
        # What cannot be divided goes round-robin.
        place = (capacity.active[name] + self._rounds) % clients
        whole = (place + 1) * limit // clients - place * limit // clients
        return Quota(whole) if limit >= clients else None
