"""The capacity of a server for a model, from the RTTs of all clients, without a clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from sonic_coffea.pool import MAX_RTT_RATIO, RttStatistics, min_in_flight

_INITIAL = 8.0
# When the clock shows a multiple of this, the baseline RTT may be measured anew. Then clients have
# a quarter of what keeps the server busy in flight, so that requests find no queue (BBR's
# ProbeRTT). This ends when the baseline is confirmed, or when the RTT has not fallen for some
# rounds and its own length. By the clock, the clients of other schedulers make room at the same
# time: with their queue in its baseline, this scheduler would take more than they.
_BASELINE_S = 60.0
_PROBE_RTT_PART, _PROBE_RTT_ROUNDS, _MAX_PROBE_S = 0.25, 2, 20.0
# A probe costs a second's rows. A new scheduler makes two, as others notice it only after a while.
# Later, it probes if the server does more or less for its clients than after the last probe, by
# this factor in the mean of some rounds: the server has changed, or clients of another scheduler
# come or go. A mean of few answers varies by chance, by a multiple of the inverse root of their
# number; no probe is made for that, as one that others do not make measures their queue.
_FIRST_PROBES, _CHANGED, _SERVED_ROUNDS, _BY_CHANCE = 2, 1.25, 16, 4.0
# What is less than this part of the RTT before has fallen.
_FALLEN = 0.95
# Baselines that differ by less than this factor are the same, if this number of answers agree.
# With few answers, clients of another scheduler may not have had one yet.
_SAME, _CONFIRMING_ANSWERS = 1.1, 8
# With a lower RTT ratio than this, there is no queue.
_NO_QUEUE = 1.5
# The limit changes by at most this factor at once.
_MAX_STEP = 2.0
# It grows only where it is what holds requests back.
_BINDING_PART = 0.7
# In each round, a part of what keeps a server busy is added, times the weight. Schedulers that know
# nothing of each other see the same RTT ratio, and go down by the same factor. So their limits
# become proportional to their weights (as in FAST TCP: Wei, Jin, Low and Hegde, 2006).
_PUSH = 0.05
# With fewer requests than clients, clients send at the mean rate of the last 64 answers, or of some
# rounds. It is not the greatest of these rates, which is greater by chance, most of all for the
# cluster with the smallest part of a server: that would outbid the others.
_RATE_ANSWERS, _MIN_RATE_ROUNDS, _RATE_ROUNDS = 64, 3, 8
# With fewer rounds, the rate is not known; clients keep what they began with in flight.
_KNOWN_ROUNDS = 2
# If a round is longer than the last by this factor, as clients have come, its reports cover only a
# part of it.
_LONGER = 1.25
# Every few seconds, clients send a bit faster for a round, to see if the server has become faster,
# and slower, to make up for it. While less than this part of the limit is in flight all the same,
# the surplus doubles, up to a maximum.
_PACES, _PACES_S, _MIN_PACES = (1.05, 0.95), 4.0, 4
_EMPTY_PART, _MAX_FASTER = 0.5, 1.0
# If more or fewer requests are in flight than the limit, the rate makes up for it in two rounds,
# but never falls below 0.3 of the rate of answers. So the requests of clusters
# that pace are in flight as their limits allow, and so are their parts of a server.
_RELIEF_ROUNDS, _MIN_PACE = 2, 0.3
# With this number of answers in a round, Little's law gives the mean number in flight. With fewer
# answers, that mean varies by chance; with RTTs longer than a round, it is one of earlier rounds.
# Then the clients' reports say more.
_LITTLE_ANSWERS = 16


@dataclass(slots=True)
class _Probe:
    """Rounds that measure the baseline RTT anew, by size of requests."""

    begun_at: float
    baseline_before_s: dict[int, float]
    baseline_rtt_s: dict[int, float] = field(default_factory=dict)
    rtt_s: float = math.inf
    settled_rounds: int = 0

    @property
    def confirms(self) -> bool:
        """Whether it finds the baseline as it was, for all sizes that were sent meanwhile."""
        before_s = self.baseline_before_s
        return all(
            size in before_s and before_s[size] / _SAME < rtt_s < before_s[size] * _SAME
            for size, rtt_s in self.baseline_rtt_s.items()
        )


class Capacity:
    """The in-flight limit of all clients of a server together, and the rate of paced requests.

    In each round, RTTs are compared with the baseline of their size. The limit goes to where the
    RTT ratio is as a process's own limit has it.
    """

    def __init__(self, now: float) -> None:
        self.limit = self._busy = _INITIAL
        self.weight = 1.0
        self.baseline_s = _BASELINE_S
        self._baseline_rtt_s: dict[int, float] = {}
        self._round_at = now
        self._round_s = 0.5
        self._rounds = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RATE_ROUNDS)
        self._rate = 0.0
        self._answered = self._known = False
        self._in_flight = 0.0
        self._pace = 1.0
        # Requests that were in flight, had they found no queue: what the server does for clients.
        self._served: deque[tuple[float, int]] = deque(maxlen=_SERVED_ROUNDS)
        self._served_after_probe: float | None = None
        self._probe: _Probe | None = None
        self._probe_ended = False
        self._first_probes = _FIRST_PROBES

    @property
    def rate(self) -> float:
        """Requests a second for the server, if they are paced; 0 if that is not known yet."""
        if not self._known:
            return 0.0
        if self._probe:
            return _PROBE_RTT_PART * self._rate
        lacking = (self.limit - self._in_flight) / (self._round_s * _RELIEF_ROUNDS)
        return max(self._pace * self._rate + lacking, _MIN_PACE * self._rate)

    def end_round(
        self, rtts: Iterable[RttStatistics], in_flight: int, waiting: int, now: float
    ) -> float:
        """End a round, and return how many requests may be in flight.

        ``rtts`` has the round's RTTs of each client; the requests in flight and waiting are those
        of all clients, by their last reports.
        """
        rtts = list(rtts)
        before_s, self._round_s = self._round_s, now - self._round_at or self._round_s
        self._round_at = now
        self._rounds += 1
        answers, sum_s, rtt_ratio = self._compare(rtts)
        if any(rtt.refused for rtt in rtts):
            self.limit = max(self.limit / _MAX_STEP, 1.0)
            self._known = True  # it is too much, whatever it is
        elif answers and not (self._probe or self._probe_ended):
            current = answers >= _LITTLE_ANSWERS and sum_s < answers * self._round_s
            self._in_flight = sum_s / self._round_s if current else in_flight
            # The first answers come some time after the beginning of their round.
            if self._answered and self._round_s < _LONGER * before_s:
                # With little in flight, answers tell what was sent, not what the server can do.
                little = self._in_flight < _EMPTY_PART * self.limit
                if not (self._known and little and answers < self._rate * self._round_s):
                    self._recent.append((answers, self._round_s))
                # With fewer in flight than may be, the server could have answered more.
                min_rate = self._rate if self._in_flight < self.limit else 0.0
                self._rate = max(self._mean_rate(), min_rate)
            self._answered = True
            self._known = self._known or len(self._recent) >= _KNOWN_ROUNDS
            self._note_served(sum_s / rtt_ratio / self._round_s, answers)
            factor = min(max(MAX_RTT_RATIO / rtt_ratio, 1 / _MAX_STEP), _MAX_STEP)
            self._busy = max(min_in_flight(rtt.full) for rtt in rtts)
            min_limit = self.weight * self._busy
            binding = waiting and self._in_flight > _BINDING_PART * self.limit
            if factor < 1 or binding:
                # Half of the way, as what is measured lags behind.
                self.limit *= math.sqrt(factor)
            self.limit = max(self.limit + (_PUSH * min_limit if binding else 0.0), min_limit, 1.0)
        self._set_pace(answered=answers > 0)
        empty = answers >= _CONFIRMING_ANSWERS and rtt_ratio < _NO_QUEUE
        self._probe_rtt(sum_s / answers if answers else None, now, empty=empty)
        # Whatever limit and weight are: more requests would be each other's queue.
        return _PROBE_RTT_PART * self._busy if self._probe else self.limit

    def _mean_rate(self) -> float:
        """Return the answers a second of the last rounds that have enough of them."""
        answers, seconds = 0, 0.0
        for rounds, (number, took_s) in enumerate(reversed(self._recent), 1):
            answers += number
            seconds += took_s
            if answers >= _RATE_ANSWERS and rounds >= _MIN_RATE_ROUNDS:
                break
        return answers / seconds

    def _set_pace(self, *, answered: bool) -> None:
        """Set the pace for the next round, by what is in flight at this one."""
        if self._probe:
            self._pace = 1.0
        elif self._pace > 1 and answered and self._in_flight < _EMPTY_PART * self.limit:
            self._pace = 1 + min(2 * (self._pace - 1), _MAX_FASTER)
        else:
            turn = self._rounds % max(round(_PACES_S / self._round_s), _MIN_PACES)
            self._pace = _PACES[turn] if turn < len(_PACES) else 1.0

    def _compare(self, rtts: Iterable[RttStatistics]) -> tuple[int, float, float]:
        """Return the number and the sum of all RTTs, and their ratio to the baseline."""
        answers, sum_s, baseline_s = 0, 0.0, 0.0
        probed_s = self._probe.baseline_rtt_s if self._probe else {}
        for rtt in rtts:
            for size, (number, size_sum_s, min_s) in rtt.trips.items():
                for baseline in (self._baseline_rtt_s, probed_s):
                    baseline[size] = min(min_s, baseline.get(size, math.inf))
                answers += number
                sum_s += size_sum_s
                baseline_s += number * self._baseline_rtt_s[size]
        return answers, sum_s, sum_s / baseline_s if baseline_s else 1.0

    def _note_served(self, requests: float, answers: int) -> None:
        """Take what the server did for the clients in a round."""
        self._served.append((requests, answers))
        if self._served_after_probe is None and len(self._served) == _SERVED_ROUNDS:
            self._served_after_probe = fmean(requests for requests, _ in self._served)

    @property
    def _changed(self) -> bool:
        """Whether the baseline RTT may be wrong: the server does more or less than before."""
        if self._served_after_probe is None:
            return True
        answers = sum(answers for _, answers in self._served)
        change = max(_CHANGED, 1 + _BY_CHANCE / math.sqrt(answers))
        factor = fmean(requests for requests, _ in self._served) / self._served_after_probe
        return not 1 / change < factor < change

    def _probe_rtt(self, rtt_s: float | None, now: float, *, empty: bool) -> None:
        """Begin the rounds that measure the baseline RTT anew, or end them.

        They end when requests that were sent in the probe confirm the baseline, or find no shorter
        queue than others did.
        """
        self._probe_ended = False
        probe = self._probe
        if probe is None:
            # Longer, if rounds are long.
            doublings = max(math.ceil(math.log2(2 * self._round_s) - 0.1), 0)
            interval_s = self.baseline_s * 2.0**doublings
            full = now // interval_s > (now - self._round_s) // interval_s
            if full and (self._first_probes or self._changed):
                self._first_probes = max(self._first_probes - 1, 0)
                self._probe = _Probe(now, dict(self._baseline_rtt_s))
            return
        # The answers may be to requests sent before the probe, or before another scheduler's probe.
        probed_s = now - probe.begun_at - self._round_s
        if rtt_s is None:
            probe.settled_rounds += not self._in_flight
        elif rtt_s < min(_FALLEN * probe.rtt_s, now - probe.begun_at):
            probe.settled_rounds, probe.rtt_s = 0, rtt_s
        elif probe.rtt_s < math.inf:
            probe.settled_rounds += 1
        empty = empty and rtt_s is not None and rtt_s < probed_s
        settled_s = probe.settled_rounds * self._round_s if rtt_s is not None else math.inf
        if (
            (empty and probe.confirms)
            or (probe.settled_rounds >= _PROBE_RTT_ROUNDS and settled_s >= probe.rtt_s)
            or now > probe.begun_at + _MAX_PROBE_S
        ):
            self._probe, self._probe_ended = None, True
            # Of sizes that nobody sent meanwhile, there is only the old one.
            self._baseline_rtt_s.update(probe.baseline_rtt_s)
            self._served.clear()
            self._served_after_probe = None
