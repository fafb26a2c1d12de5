"""Statistics add up in any order and form; reports show them, and say what slows a run down."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest
from coffea.processor import accumulate
from coffea.processor.executor import Err, Ok
from rich.console import Console
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.reporting import STATISTICS_KEY, Statistics, Tally, tables
from sonic_coffea.testing import FakeModel, FakeServer, Wrong
from sonic_coffea.transport import ModelStatistics


def tally_of(*trips_s: float, **numbers: Any) -> Tally:
    tally = Tally(**numbers)
    for seconds in trips_s:
        tally.record_trip(seconds)
    return tally


def some_statistics() -> Statistics:
    counts = {"chunks": 2, "events": 50, "objects": 100, "elements": 60, "padding": 40}
    statistics = Statistics(**counts, truncated=5, datasets={"TTbar": 50})
    statistics.digests.add(("m", "1", "a"))
    numbers = {"rows": 100, "requests": 4, "sent_bytes": 4_000_000, "pack_s": 0.04}
    statistics.record("grpc://s:1", "m", "1", tally_of(0.010, 0.011, 0.012, 0.5, **numbers))
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


@pytest.mark.parametrize(
    ("trips_s", "p50_s", "p90_s", "rel"),
    [
        (np.linspace(0.010, 0.020, 1001), 0.015, 0.019, 0.03),
        # The same time again and again: no quantile is far from the mean.
        ([0.0081] * 100, 0.0081, 0.0081, 0.06),
        # Outside of the bins, the nearest edge.
        ([0.0], 1e-4, 1e-4, 0.01),
        ([1e5], 1e3, 1e3, 0.01),
    ],
    ids=["interpolated", "same", "short", "long"],
)
def test_quantiles(trips_s: Any, p50_s: float, p90_s: float, rel: float) -> None:
    tally = tally_of(*map(float, trips_s))
    assert tally.latency_s(0.5) == pytest.approx(p50_s, rel)
    assert tally.latency_s(0.9) == pytest.approx(p90_s, rel)
    assert tally.latencies.sum() == len(trips_s)
    assert tally.trip_s == pytest.approx(sum(trips_s))


def test_plain_forms_add_by_the_rules_of_coffea() -> None:
    first, second = some_statistics(), some_statistics()
    assert pickle.loads(pickle.dumps(first)).to_dict() == first.to_dict()
    second.record("grpc://t:1", "n", "2", Tally(rows=7))
    second.digests = {("n", "2", "b")}  # one, as the repr of a set has no order
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


def shown_at(width: int, statistics: Statistics) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(sonic.report(statistics, wall_s=2.0))
    return console.export_text()


def test_numbers_are_shown_in_terminals_notebooks_and_json() -> None:
    report = sonic.report(some_statistics(), wall_s=2.0)
    shown = ("100 of 100", "rows/s", "2.00 s", "40.0%", "4.0 MB", "grpc://s:1", "m v1", "10.00 ms")
    for text in (shown_at(100, some_statistics()), report._repr_html_()):
        assert all(part in text for part in shown)
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (plain["total"]["rows"], plain["padding"]) == (100, 40)
    assert plain["served"][0]["server"] == "grpc://s:1"
    assert "100 rows in 4 requests" in repr(report)


OUT = {"n": 1, STATISTICS_KEY: some_statistics().to_plain()}


@pytest.mark.parametrize(
    "source",
    [
        some_statistics(),
        some_statistics().to_plain(),
        OUT,
        (OUT, {"entries": 3}),
        {"out": OUT, "processed": set()},
        Ok(OUT),
        Ok({"out": OUT}),
        (Ok(OUT), {"entries": 3}),
        Err(ValueError("no such file"), OUT),
    ],
    ids=str,
)
def test_statistics_are_found_in_whatever_coffea_returns(source: Any) -> None:
    assert sonic.report(source).statistics.to_dict() == some_statistics().to_dict()


def test_outputs_without_statistics_are_errors() -> None:
    with pytest.raises(errors.ConfigError, match=r"has no output: ValueError\('no such file'\)"):
        sonic.report(Err(ValueError("no such file")))
    for nothing in (None, [], (), "out", Ok(None), {"n": 1}, Ok({"n": 1})):
        with pytest.raises(errors.ConfigError, match="carries no statistics"):
            sonic.report(nothing)


def test_quantiles_of_few_requests_are_not_shown() -> None:
    statistics = Statistics()
    statistics.record("grpc://s:1", "m", "1", tally_of(*[3.2] * 19, requests=19))
    assert "p50" not in shown_at(100, statistics)
    assert sonic.report(statistics).to_dict()["total"]["latency_p50_s"] is None
    statistics.record("grpc://s:1", "m", "1", tally_of(3.2, requests=1))
    lines = shown_at(100, statistics).splitlines()
    (mean,) = (line for line in lines if "network, queue" in line)
    (p50,) = (line for line in lines if "p50" in line)
    assert sum("│ requests " in line for line in lines) == 2  # of the run, and of the server
    p50_s = sonic.report(statistics).to_dict()["total"]["latency_p50_s"]
    assert p50_s == pytest.approx(3.2, 0.06)
    assert "3.20 s" in mean
    assert " s " in p50


def test_times_have_the_unit_that_suits_them() -> None:
    assert [*map(tables.duration, (5e-6, 0.25, 90.0))] == ["5.00 µs", "250.00 ms", "1.50 min"]


MODEL = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})


def test_pools_are_reported_as_they_are_now(sonic_server: Any) -> None:
    pool = sonic.connect(sonic_server(MODEL).url)
    before, report = pool.statistics, sonic.report(pool)
    MODEL(ak.Array([[{"pt": 1.0}]]), pool=pool)
    assert before.total().rows == report.statistics.total().rows == 0
    assert pool.statistics.total().rows == 1


def test_nothing_is_divided_by_nothing() -> None:
    page = sonic.report(Statistics(), wall_s=0.0)._repr_html_()
    assert "0 of 0" in page
    assert sonic.report(Statistics()).title == "Scores"
    assert "request's time" not in page  # of no server there is nothing to say
    lost = some_statistics()
    lost.record("grpc://lost:1", "m", "1", Tally(retries=3))
    page = sonic.report(lost)._repr_html_()
    assert "grpc://lost:1" in page
    assert "nan" not in page
    sonic.report(Statistics()).plot()


@pytest.mark.parametrize("wall_s", [-1.0, float("nan"), float("inf")])
def test_durations_that_cannot_be_are_refused(wall_s: float) -> None:
    with pytest.raises(errors.ConfigError, match="wall_s: expected a finite number of seconds"):
        sonic.report(Statistics(), wall_s=wall_s)


NO = grpc.StatusCode.INVALID_ARGUMENT, "no"


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize(
    ("break_it", "lost"),
    [
        (lambda server: server.fail(*NO, times=99), 10),
        (lambda server: server.answer_wrongly(Wrong.shape, times=99), 10),
        (lambda server: server.fail(*NO), 5),
    ],
    ids=["all", "all answers are wrong", "the first"],
)
def test_lost_rows_are_not_scored(break_it: Any, lost: int, deduplicate: bool) -> None:
    """Two different rows, five times each, in requests of one or of five."""
    served = FakeModel.of(MODEL, max_rows=1 if deduplicate else 5)
    jets = ak.Array([[{"pt": 1.0}] * 5, [{"pt": 2.0}] * 5])
    with FakeServer({"m": served}) as server, sonic.connect(server.url) as pool:
        break_it(server)
        pending = MODEL.submit(jets, on_error="mask", deduplicate=deduplicate)
        scores = pending.result()
        report = sonic.report(pending)
        until(lambda: pool.statistics.masked == lost)
    assert ak.num(scores.top).tolist() == [5, 5]
    assert ak.count(scores.top, axis=None) == 10 - lost
    assert (report.statistics.scored, report.statistics.masked) == (10 - lost, lost)
    page = report._repr_html_()
    assert f"{10 - lost} of 10" in page
    assert ("deduplicated" in page) == deduplicate


def bad(**numbers: Any) -> Statistics:
    statistics, tally = Statistics(objects=10_000, elements=100), tally_of(*[0.01] * 100)
    counts = {"rows": 10_000, "requests": 100, "pack_s": 0.1, "wait_s": 0.1, **numbers}
    for name, value in counts.items():
        setattr(tally if hasattr(tally, name) else statistics, name, value)
    statistics.record("grpc://s:1", "m", "1", tally)
    return statistics


@pytest.mark.parametrize(
    ("numbers", "timings", "sentence"),
    [
        ({}, {}, None),
        ({"padding": 300}, {}, "75% of the elements that are sent are padding: Bucketed"),
        ({"truncated": 20}, {}, "17% of the constituents are truncated: compare the length"),
        ({"masked": 7}, {}, "7 rows are masked (None)"),
        ({"digests": {("m", "1", "a"), ("m", "2", "b"), ("n", "1", "c")}}, {}, None),
        ({"digests": {("m", "1", "a"), ("m", "1", "b")}}, {}, "m v1 had 2 files: it was replaced"),
        ({"retries": 300}, {}, "75% of the requests were sent again"),
        ({"rows": 1000}, {}, "a request holds 10 rows: larger chunks"),
        ({"pack_s": 2.0}, {}, "packing and unpacking take longer than the servers"),
        ({"wait_s": 5.0}, {}, "wait here for m v1 on grpc://s:1 5 times as long as their round"),
        ({"wait_s": 5.0}, {"compute_s": 0.9}, "has an empty queue: allow more in flight"),
        (
            {},
            {"compute_s": 0.2, "queue_s": 0.8},
            "for m v1 on grpc://s:1 wait there 4 times as long as",
        ),
        # A server that does not say how long it works.
        *(({}, {name: seconds}, None) for name, seconds in (("compute_s", 0.0), ("queue_s", 0.8))),
        ({}, {"compute_s": 0.1}, "the network takes 9 times as long as m v1 on grpc://s:1"),
    ],
)
def test_advice(numbers: dict[str, Any], timings: dict[str, float], sentence: str | None) -> None:
    counted = ModelStatistics(requests=100, rows=10_000, **timings)  # type: ignore[arg-type]
    of_servers = {("grpc://s:1", "m", "1"): counted} if timings else {}
    report = sonic.Report(bad(**numbers), timings=of_servers)
    if sentence is None:
        assert report.advice == []
    else:
        (only,) = report.advice
        assert sentence in only
        assert sentence.split(":")[0][:20] in report._repr_html_()


def test_causes_are_told_from_effects() -> None:
    # The first requests wait for code that is compiled, and for servers that warm up.
    assert sonic.Report(bad(wait_s=5.0, pack_s=9.0, requests=8)).advice == []
    (only,) = sonic.Report(bad(pack_s=4.0, wait_s=5.0)).advice
    assert "packing and unpacking" in only  # and not the wait for what is packed
    statistics = bad()
    statistics.record("grpc://s:1", "m", "1", tally_of(1.0, 1.0, requests=2))
    (only,) = sonic.Report(statistics).advice
    assert "is 100 times their p50: hedge_after_s" in only


def test_pages_are_files_of_their_own(tmp_path: Path) -> None:
    statistics = bad(padding=300)
    statistics.datasets |= {"data": 3, "TTbar": 7}
    report = sonic.report(statistics, wall_s=3.0)
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert "75% of the elements" in page
    links = set(re.findall(r"http://([\w.]*)", page))
    assert links <= {"www.w3.org", "purl.org", "creativecommons.org"}
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    # It says of what it is.
    assert saved["title"] == report.title == "Scores of m for TTbar and data"
    for shown in (report.title, "TTbar (7 events)", saved["host"], "coffea 20"):
        assert shown in page, shown
    assert saved["date"][:10] in page
    assert saved["advice"] == report.advice
    os.mkfifo(pipe := tmp_path / "pipe.json")
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(pipe.read_text)
        report.save(pipe)
        assert json.loads(read.result()) == saved
    assert pipe.is_fifo()
    with pytest.raises(errors.ConfigError, match=r"ends in .html or .json, got report.pdf"):
        report.save(tmp_path / "report.pdf")
    with pytest.raises(errors.ConfigError, match=r"cannot write .*x.json: No such file"):
        report.save(tmp_path / "nowhere" / "x.json")
    assert len(report.plot().axes) == 2


def test_pages_name_the_package_that_their_plots_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(errors.ConfigError, match=r"needs matplotlib; .*pip install"):
        sonic.report(some_statistics()).save(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_each_version_of_a_model_has_its_own_account() -> None:
    """Also beside calls without a version, which ask for the newest."""
    both = {"m": FakeModel.of(MODEL, versions=("1", "2"))}
    with FakeServer(both) as server, sonic.connect(server.url) as pool:
        jets = ak.Array([[{"pt": 1.0}] * 3])
        for version, calls in ((1, 2), (None, 3), (2, 1)):
            for _ in range(calls):
                MODEL(jets, version=version)
        report = sonic.report(pool)
        counted = {key: (own.requests, own.rows) for key, own in report.timings.items()}
        assert counted == {(server.url, "m", "1"): (2, 6), (server.url, "m", "2"): (4, 12)}
        tallies = {key: (tally.requests, tally.rows) for key, tally in report.statistics}
        assert tallies == counted
        assert [each["version"] for each in report.to_dict()["servers"]] == ["1", "2"]


def test_servers_are_asked_for_their_statistics(
    server: sonic.LocalServer, tagger: sonic.Model, jets: Any
) -> None:
    with sonic.connect(server) as pool, sonic.connect(server, max_in_flight=5) as unused:
        tagger(jets, pool=pool)
        # Workers may have sent all requests of a run.
        report = sonic.report(pool, pool=unused)
        assert list(report.timings) == [(server.url, tagger.name, "1")]
        assert "the server says, of all clients" in report._repr_html_()
        assert report.to_dict()["servers"][0]["requests"] > 0
