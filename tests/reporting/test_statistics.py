from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from sonic_coffea.reporting import Statistics, Tally


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


def test_statistics_of_different_servers_stay_apart() -> None:
    other = Statistics()
    other.tally("grpc://t:1", "m", "1").rows += 7
    one = some_statistics()
    both = one + other
    assert {server: tally.rows for (server, _, _), tally in both} == {
        "grpc://s:1": 100,
        "grpc://t:1": 7,
    }
    assert both.total().rows == 107
    assert one.total().rows == 100  # what was added is as it was
    assert other.total().rows == 7
    both.tally("grpc://s:1", "m", "1").latencies[:] = 0
    assert one.total().latencies.sum() == 4


def test_statistics_pickle() -> None:
    before = some_statistics()
    after = pickle.loads(pickle.dumps(before))
    assert after.to_dict() == before.to_dict()
    assert (after + before).total().rows == 200


def test_statistics_are_plain_numbers_for_json() -> None:
    found = json.loads(json.dumps(some_statistics().to_dict()))
    assert found["padded"] == 40
    assert found["served"][0]["server"] == "grpc://s:1"
    assert found["served"][0]["latency_p50_s"] == found["total"]["latency_p50_s"]


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e5])
def test_no_round_trip_is_too_short_or_too_long(seconds: float) -> None:
    tally = Tally()
    tally.record_trip(seconds)
    assert tally.latencies.sum() == 1
    assert np.isfinite(tally.latency_s(0.5))
    assert tally.trip_s == seconds
