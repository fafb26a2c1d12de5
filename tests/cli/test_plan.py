"""`bench` measures a model within the time that is named; `plan` sizes a run by the figures."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.commands import json_of, run

from sonic_coffea import errors
from sonic_coffea.pool import Settings
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.tools import Curve, check, measure, plan, scaffold

CURVE = Curve(
    model="m",
    version="1",
    server="grpc://s:1",
    rows=(1, 64, 512),
    seconds=(0.0021, 0.0085, 0.0533),
    rows_per_s=10_000.0,
    in_flight=2,
    row_bytes=1000.0,
)
LAUNCH_S, ROW_S, ROWS = 5e-3, 5e-4, 64
RUN: dict[str, Any] = {"cores": 1000, "cpu_s": 0.01, "rows_per_event": 2.0, "events": 1e6}


def echo(delay_s: Callable[[int], float], **options: Any) -> FakeModel:
    def function(inputs: Any) -> dict[str, Any]:
        time.sleep(delay_s(len(inputs["x"])))
        return {"y": inputs["x"].reshape(len(inputs["x"]), -1)[:, :1]}

    inputs = options.pop("inputs", {"x": ("float32", (10,))})
    outputs = {"y": ("float32", (1,))}
    return FakeModel(inputs=inputs, outputs=outputs, function=function, max_rows=ROWS, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer({"m": echo(lambda n: LAUNCH_S + ROW_S * n)}, threads=1) as running:
        yield running


def test_curve_is_what_the_model_takes(server: FakeServer, tmp_path: Path) -> None:
    curve = measure(server.url, "m", seconds=0.1)
    assert curve.rows == (1, 2, 4, 8, 16, 32, 64)
    assert curve.row_bytes == 44
    # It cannot be faster than it sleeps; how much slower, depends on the machine.
    assert all(t >= LAUNCH_S + ROW_S * n for n, t in zip(curve.rows, curve.seconds, strict=True))
    assert curve.rows_per_s <= ROWS / (LAUNCH_S + ROW_S * ROWS)
    curve.save(tmp_path / "curve.json")
    assert Curve.load(tmp_path / "curve.json") == curve


def test_functions_take_a_url_and_numbers_of_versions(server: FakeServer) -> None:
    assert all(step.ok for step in check(server.url, "m", 1))
    assert 'sonic.Model(\n    "m"' in scaffold(server.url, "m")


def test_slow_models_are_saturated_with_few_requests() -> None:
    """Requests of ten times what is measured for; 32 of them at a time are served."""
    with FakeServer({"m": echo(lambda n: 0.1 * (n == ROWS))}, threads=32) as running:
        curve = measure(Settings.make(running.url), "m", seconds=0.01)
    assert curve.in_flight > 4
    assert curve.rows_per_s <= 32 * ROWS / 0.1


def test_points_of_slow_models_are_two_requests() -> None:
    sizes: list[int] = []

    def slow(rows: int) -> float:
        sizes.append(rows)
        return 0.02

    with FakeServer({"m": echo(slow)}) as running:
        measure(Settings.make(running.url, max_in_flight=1), "m", seconds=0.01)
    assert sizes == [1, *(n for n in (1, 2, 4, 8, 16, 32, 64) for _ in range(2))]


def test_bench_takes_the_length_of_open_axes() -> None:
    sizes = []
    with FakeServer({"m": echo(lambda _: 0.0, inputs={"x": ("float32", (1, -1))})}) as fake:
        for length in (10, 20):
            curve = json_of("bench", fake.url, "m", "--seconds", "0.01", "--length", length)
            sizes.append(curve["row_bytes"])
    assert sizes[1] - sizes[0] == 4 * 10


def test_bottleneck_limits_a_run() -> None:
    free = plan(CURVE, **RUN)
    assert free.servers == 25  # four fifths of what 25 do
    assert free.bottleneck == "cores"
    assert free.seconds == pytest.approx(10.0)
    assert free.utilisation == pytest.approx(0.8)
    assert free.sent_bytes_per_s == pytest.approx(2e8)
    few = plan(CURVE, **RUN, servers=5)
    assert (few.bottleneck, few.events_per_s, few.utilisation) == ("servers", 25_000, 1.0)
    thin = plan(CURVE, **RUN, bytes_per_s=1e8)
    assert (thin.bottleneck, thin.events_per_s) == ("network", 50_000)


@pytest.mark.parametrize("name", [*RUN, "servers", "bytes_per_s"])
def test_impossible_numbers_are_refused(name: str) -> None:
    for number in (0, -1, math.nan, math.inf):
        message = f"{name}: expected a finite number above 0, got {number}"
        with pytest.raises(errors.ConfigError, match=message):
            plan(CURVE, **{**RUN, name: number})


def test_plan_is_shown_and_as_json(tmp_path: Path) -> None:
    CURVE.save(tmp_path / "curve.json")
    numbers = ("--cores", 500, "--cpu-ms", 10, "--rows-per-event", 3, "--gbps")
    planned = partial(run, "plan", tmp_path / "curve.json", *numbers)
    shown = planned(25).stdout
    for label in ("bottleneck", "utilisation", "capacity of the network", "Gb/s"):
        assert label in shown
    plan = json.loads(planned(25, "--json").stdout)
    assert (plan["bottleneck"], plan["servers"]) == ("cores", 19)
    slow = (*numbers[:2], "--cpu-ms", 4000, "--rows-per-event", 3, "--servers", 1000)
    few = run("plan", tmp_path / "curve.json", *slow).stdout
    numbers_shown = r"cores a server +│ +0\.5 .*events/s +│ +125\.0 .*cores +│ +125\.0 "
    assert re.search(numbers_shown, few, re.DOTALL)
    wrong = planned(0)
    assert wrong.returncode == 2
    assert "expected a finite number above 0" in wrong.stderr


@pytest.mark.parametrize("wrong", [{"rows_per_s": 0}, {"rows_per_s": "many"}, {"seconds": (0,)}])
def test_impossible_curves_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    replace(CURVE, **wrong).save(tmp_path / "c.json")
    with pytest.raises(errors.ConfigError, match="expected finite numbers above 0 in the curve"):
        Curve.load(tmp_path / "c.json")
    for text in ("no json", "{}", '{"rows": [1], "seconds": [1]}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(errors.ConfigError, match="expected a curve as `sonic-coffea bench`"):
            Curve.load(tmp_path / "c.json")


def test_bench_writes_a_curve_and_shows_it_even_if_it_cannot(
    server: FakeServer, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "curve.json"
    bench = ("bench", server.url, "m", "--seconds", "0.01", "--output")
    done = run(*bench, file)
    assert done.returncode == 0, done.stderr
    assert "time, ms" in done.stdout
    assert Curve.load(file).model == "m"
    done = run(*bench, file / "c.json")
    assert done.returncode == 2
    assert "saturated with" in done.stdout
    assert done.stderr.startswith("error: cannot write")
    assert Curve.load(file).model == "m"
