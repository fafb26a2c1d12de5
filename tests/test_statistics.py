from __future__ import annotations

import numpy as np

from sonic_coffea.statistics import Statistics, Tally


def some_statistics() -> Statistics:
    statistics = Statistics(chunks=2, events=50, objects=100, filled=60, padded=40, truncated=5)
    tally = statistics.tally("grpc://s:1", "m", "1")
    tally += Tally(rows=100, requests=4, sent_bytes=4_000_000, received_bytes=800, pack_s=0.04)
    for seconds in (0.010, 0.011, 0.012, 0.5):
        tally.record_trip(seconds)
    return statistics


def test_statistics_add() -> None:
    total = some_statistics() + some_statistics()
    assert (total.chunks, total.objects, total.total().rows) == (4, 200, 200)
    assert total.total().latencies.sum() == 8
    assert 0.009 < total.total().latency_s(0.5) < 0.014
    assert 0.4 < total.total().latency_s(0.99) < 0.7
    assert np.isnan(Tally().latency_s(0.5))
