"""The capacity of a server, from what its clients report."""

from __future__ import annotations

import itertools

from sonic_coffea.dask._capacity import Capacity
from sonic_coffea.pool import RttStatistics

ROUND_S = 0.5


def test_a_pause_of_the_clients_does_not_lower_the_rate() -> None:
    """While little is in flight, answers tell what was sent, and not what the server can do."""
    capacity = Capacity(0.0)
    now = itertools.count(ROUND_S, ROUND_S)

    def run(rounds: int, answers: int, rtt_s: float, *, waiting: int = 40) -> None:
        for at in itertools.islice(now, rounds):
            trips = {11: (answers, answers * rtt_s, 0.009)}
            in_flight = round(answers * rtt_s / ROUND_S)
            capacity.end_round([RttStatistics(trips=trips)], in_flight, waiting, at)

    run(20, answers=60, rtt_s=0.04)
    assert 110 < capacity.rate < 130
    run(8, answers=45, rtt_s=0.02)
    assert capacity.rate > 115
    # Nor when all begin again at the same time.
    run(4, answers=8, rtt_s=0.02, waiting=0)
    run(1, answers=40, rtt_s=0.15)
    assert capacity.rate > 80
    # With more in flight than may be, the server does what it can.
    run(20, answers=45, rtt_s=0.06)
    assert capacity.rate < 95
