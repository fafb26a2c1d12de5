"""Statistics add up in any order and form, and keep their quantiles."""

from __future__ import annotations

import copy
import pickle
import pickletools
import threading

import numpy as np
import pytest
from coffea.processor import accumulate

from sonic_coffea.reporting import Statistics, Tally


def some_statistics() -> Statistics:
    counts = {"chunks": 2, "events": 50, "objects": 100, "elements": 60, "padding": 40}
    statistics = Statistics(**counts, truncated=5, datasets={"TTbar": 50})
    tally = Tally(rows=100, requests=4, sent_bytes=4_000_000, received_bytes=800, pack_s=0.04)
    for seconds in (0.010, 0.011, 0.012, 0.5):
        tally.record_trip(seconds)
    statistics.record("grpc://s:1", "m", "1", tally)
    return statistics


def test_statistics_add_by_server_and_model() -> None:
    first, second = some_statistics(), some_statistics()
    second.record("grpc://t:1", "m", "1", Tally(rows=7))
    both = first + second
    assert (both.chunks, both.objects, both.total().rows) == (4, 200, 207)
    assert both.datasets == {"TTbar": 100}
    assert {server: tally.rows for (server, _, _), tally in both} == {
        "grpc://s:1": 200,
        "grpc://t:1": 7,
    }
    assert both.total().latencies.sum() == 8
    assert 0.009 < both.total().latency_s(0.5) < 0.014
    assert 0.4 < both.total().latency_s(0.99) < 0.7
    assert np.isnan(Tally().latency_s(0.5))
    both.tallies["grpc://s:1", "m", "1"].latencies[:] = 0
    assert first.total().latencies.sum() == 4  # what was added is as it was


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


def test_plain_form_needs_no_package_to_load() -> None:
    before = some_statistics()
    assert pickle.loads(pickle.dumps(before)).to_dict() == before.to_dict()
    packed = pickle.dumps(before.to_plain())
    names = {argument for _, argument, _ in pickletools.genops(packed) if isinstance(argument, str)}
    assert not any("sonic" in name for name in names)
    assert "grpc://s:1" in names


def test_plain_forms_add_by_the_rules_of_coffea() -> None:
    first, second = some_statistics(), some_statistics()
    second.record("grpc://t:1", "n", "2", Tally(rows=7))
    forms = [first.to_plain(), second.to_plain(), second.to_plain()]
    before = copy.deepcopy(forms)
    total = Statistics.from_plain(accumulate(forms))
    assert total.to_dict() == (first + second + second).to_dict()
    assert repr(forms) == repr(before)


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


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e5])
def test_no_round_trip_is_too_short_or_too_long(seconds: float) -> None:
    tally = Tally()
    tally.record_trip(seconds)
    assert tally.latencies.sum() == 1
    assert np.isfinite(tally.latency_s(0.5))
    assert tally.trip_s == seconds
