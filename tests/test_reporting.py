from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.processor import Scored
from sonic_coffea.statistics import Statistics, Tally


def some_statistics() -> Statistics:
    statistics = Statistics(chunks=2, events=50, objects=100, filled=60, padded=40, truncated=5)
    tally = statistics.tally("grpc://s:1", "m", "1")
    tally += Tally(rows=100, requests=4, sent_bytes=4_000_000, received_bytes=800, pack_s=0.04)
    for seconds in (0.010, 0.011, 0.012, 0.5):
        tally.record_trip(seconds)
    return statistics


def test_report() -> None:
    report = sonic.report(some_statistics(), wall_s=2.0)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    for shown in (
        "100 of 100",
        "rows/s",
        "50",
        "40.0%",
        "4.0 MB",
        "grpc://s:1",
        "m v1",
        "10.00 ms",
    ):
        assert shown in text, shown
    assert "grpc://s:1" in report._repr_html_()
    assert json.loads(json.dumps(report.to_dict()))["total"]["rows"] == 100
    assert "100 rows in 4 requests" in repr(report)
    with pytest.raises(errors.ConfigError, match="a dict carries no statistics"):
        sonic.report({"n": 1})


def test_report_of_what_carries_statistics() -> None:
    output = Scored({"n": 1}, some_statistics())
    for source in (output, (output, {"metrics": 1}), {"out": output, "processed": set()}):
        assert sonic.report(source).statistics.total().rows == 100
    with sonic.connect("grpc://triton.example:8001") as pool:
        assert sonic.report(pool).statistics.total().requests == 0


def test_report_of_nothing_divides_by_nothing() -> None:
    assert "0 of 0" in sonic.report(Statistics(), wall_s=0.0)._repr_html_()
