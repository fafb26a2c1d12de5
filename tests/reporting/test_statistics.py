from __future__ import annotations

import copy
import json
import pickle
import pickletools
import threading

import numpy as np
import pytest
from coffea.processor import accumulate

from sonic_coffea.reporting import Span, Statistics, Tally


def some_statistics() -> Statistics:
    counts = {"chunks": 2, "events": 50, "objects": 100, "elements": 60, "padding": 40}
    statistics = Statistics(**counts, truncated=5, datasets={"TTbar": 50})
    tally = Tally(rows=100, requests=4, sent_bytes=4_000_000, received_bytes=800, pack_s=0.04)
    for seconds in (0.010, 0.011, 0.012, 0.5):
        tally.record_trip(seconds)
    statistics.record("grpc://s:1", "m", "1", tally)
    return statistics


def test_statistics_add() -> None:
    total = some_statistics() + some_statistics()
    assert (total.chunks, total.objects, total.total().rows) == (4, 200, 200)
    assert total.datasets == {"TTbar": 100}
    assert total.total().latencies.sum() == 8
    assert 0.009 < total.total().latency_s(0.5) < 0.014
    assert 0.4 < total.total().latency_s(0.99) < 0.7
    assert np.isnan(Tally().latency_s(0.5))


def test_quantiles_are_interpolated() -> None:
    tally = Tally()
    for seconds in np.linspace(0.010, 0.020, 1001):
        tally.record_trip(float(seconds))
    assert abs(tally.latency_s(0.5) / 0.015 - 1) < 0.03
    assert abs(tally.latency_s(0.9) / 0.019 - 1) < 0.03
    # The same time again and again: no quantile is far from the mean.
    tally = Tally()
    for _ in range(100):
        tally.record_trip(0.0081)
    for quantile in (0.5, 0.99):
        assert abs(tally.latency_s(quantile) / 0.0081 - 1) < 0.06


def test_statistics_of_different_servers_stay_apart() -> None:
    second = Statistics()
    second.record("grpc://t:1", "m", "1", Tally(rows=7))
    first = some_statistics()
    both = first + second
    assert {server: tally.rows for (server, _, _), tally in both} == {
        "grpc://s:1": 100,
        "grpc://t:1": 7,
    }
    assert both.total().rows == 107
    assert first.total().rows == 100  # what was added is as it was
    assert second.total().rows == 7
    both.tallies["grpc://s:1", "m", "1"].latencies[:] = 0
    assert first.total().latencies.sum() == 4


def with_spans(worker: str, requests: int) -> Statistics:
    statistics = some_statistics()
    for number in range(requests):
        span = Span(worker, "m", "grpc://s:1", 1.7e9 + number, 0.1, 1)
        statistics.record("grpc://s:1", "m", "1", Tally(rows=1), span)
    return statistics


def test_statistics_pickle() -> None:
    before = with_spans("a:1", 3)
    after = pickle.loads(pickle.dumps(before))
    assert after.to_dict() == before.to_dict()
    assert (after + before).total().rows == 206


def test_plain_form_needs_no_package_to_load() -> None:
    packed = pickle.dumps(with_spans("a:1", 3).to_plain())
    names = {argument for _, argument, _ in pickletools.genops(packed) if isinstance(argument, str)}
    assert not any("sonic" in name for name in names)
    assert "grpc://s:1" in names


@pytest.mark.parametrize("requests", [1, 3, 1200])
def test_plain_forms_add_by_the_rules_of_coffea(requests: int) -> None:
    first, second = with_spans("a:1", requests), with_spans("b:2", 2)
    second.record("grpc://t:1", "n", "2", Tally(rows=7))
    forms = [first.to_plain(), second.to_plain(), second.to_plain()]
    before = copy.deepcopy(forms)
    expected = (first + second + second).to_dict()
    total = Statistics.from_plain(accumulate(forms)).to_dict()
    spans = total.pop("spans"), expected.pop("spans")
    assert total == expected
    assert repr(forms) == repr(before)
    # Of a chunk with many requests, the plain form has a sample.
    assert 0 < len(spans[0]) <= 32 + 4
    assert spans[0] == spans[1] or requests == 1200


def test_snapshots_while_another_thread_records() -> None:
    """A snapshot is one state: as many rows as requests, and no server appears while it is read."""
    statistics, over = Statistics(), threading.Event()

    def record() -> None:
        number = 0
        while not over.is_set():
            number += 1
            statistics.record(f"grpc://s:{number % 500}", "m", "1", Tally(rows=1, requests=1))

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(20):
            for snapshot in (statistics.copy(), Statistics() + statistics, statistics):
                for _, tally in snapshot:
                    assert tally.rows == tally.requests or snapshot is statistics
            total = statistics.copy().total()
            assert total.rows == total.requests
    finally:
        over.set()
        thread.join()
    assert statistics.total().rows > 0


def test_statistics_are_plain_numbers_for_json() -> None:
    statistics = some_statistics()
    statistics.record("grpc://t:1", "m", "1", Tally(failures=1))
    plain = json.loads(json.dumps(statistics.to_dict(), allow_nan=False))
    assert plain["padding"] == 40
    assert plain["served"][0]["server"] == "grpc://s:1"
    assert plain["served"][0]["latency_p50_s"] == plain["total"]["latency_p50_s"]


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e5])
def test_no_round_trip_is_too_short_or_too_long(seconds: float) -> None:
    tally = Tally()
    tally.record_trip(seconds)
    assert tally.latencies.sum() == 1
    assert np.isfinite(tally.latency_s(0.5))
    assert tally.trip_s == seconds
