"""A served model is measured, and a run sized by it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.commands import run
from tests.curves import CURVE

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Settings
from sonic_coffea.reporting.plots import check_name
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.tools import Curve, measure, plan

if TYPE_CHECKING:
    from collections.abc import Iterator

LAUNCH_S, ROW_S, ROWS = 5e-3, 5e-4, 64

OPTIONS = ["--cores", "500", "--cpu-ms", "10", "--rows-per-event", "3", "--gbps", "25"]


def command(arguments: list[str], *, code: int) -> str:
    """Run a command, and return what it says of errors."""
    done = run(*arguments)
    assert done.returncode == code, done.stderr
    return done.stderr


def accelerator(inputs: Any) -> dict[str, Any]:
    time.sleep(LAUNCH_S + ROW_S * len(inputs["x"]))
    return {"y": inputs["x"][:, :1]}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    model = FakeModel(
        inputs={"x": ("float32", (10,))},
        outputs={"y": ("float32", (1,))},
        function=accelerator,
        max_rows=ROWS,
    )
    with FakeServer({"m": model}, threads=1) as running:
        yield running


def test_a_model_is_measured(server: FakeServer, tmp_path: Path) -> None:
    curve = measure(Settings.make(server.url), "m", seconds=0.2)
    assert curve.rows == (1, 2, 4, 8, 16, 32, 64)
    assert curve.row_bytes == 44
    # It cannot be faster than it sleeps; how much slower, depends on the machine.
    assert all(t >= LAUNCH_S + ROW_S * n for n, t in zip(curve.rows, curve.seconds, strict=True))
    assert curve.rows_per_s <= ROWS / (LAUNCH_S + ROW_S * ROWS)
    curve.save(tmp_path / "curve.json")
    assert Curve.load(tmp_path / "curve.json") == curve


def test_axes_of_any_length_have_the_length_that_is_named() -> None:
    lengths: set[int] = set()

    def note(inputs: Any) -> dict[str, Any]:
        lengths.add(inputs["x"].shape[2])
        return {"y": inputs["x"].sum(axis=2)}

    model = FakeModel(
        inputs={"x": ("float32", (2, -1))},
        outputs={"y": ("float32", (2,))},
        function=note,
        max_rows=8,
    )
    with FakeServer({"m": model}) as running:
        curve = measure(Settings.make(running.url), "m", length=40, seconds=0.01)
    assert lengths == {40}
    assert (curve.length, curve.row_bytes) == (40, 4 * 2 * 40 + 4 * 2)


def test_slow_models_are_saturated_too() -> None:
    """Requests of ten times what is measured for; 32 of them at a time are served."""
    request_s, served = 0.1, 32

    def slow(inputs: Any) -> dict[str, Any]:
        if len(inputs["x"]) == ROWS:
            time.sleep(request_s)
        return {"y": inputs["x"]}

    model = FakeModel(
        inputs={"x": ("float32", (1,))},
        outputs={"y": ("float32", (1,))},
        function=slow,
        max_rows=ROWS,
    )
    with FakeServer({"m": model}, threads=served) as running:
        curve = measure(Settings.make(running.url), "m", seconds=0.01)
    # Four requests, whatever is in flight, would be what is measured for the shortest time.
    assert curve.in_flight > 4
    assert curve.rows_per_s <= served * ROWS / request_s


def test_a_straight_line() -> None:
    assert CURVE.launch_s == pytest.approx(0.002, rel=0.05)
    assert CURVE.row_s == pytest.approx(1e-4, rel=0.05)


def test_what_limits_a_run() -> None:
    numbers: dict[str, Any] = {"cpu_s": 0.01, "rows_per_event": 2.0, "events": 1e6}
    free = plan(CURVE, cores=1000, **numbers)
    assert free.demand_rows_per_s == 200_000
    assert free.servers == 25  # four fifths of what 25 do
    assert free.bottleneck == "cores"
    assert free.seconds == pytest.approx(10.0)
    assert free.utilisation == pytest.approx(0.8)
    assert free.sent_bytes_per_s == pytest.approx(2e8)
    few = plan(CURVE, cores=1000, servers=5, **numbers)
    assert (few.bottleneck, few.events_per_s, few.utilisation) == ("servers", 25_000, 1.0)
    thin = plan(CURVE, cores=1000, bytes_per_s=1e8, **numbers)
    assert (thin.bottleneck, thin.events_per_s) == ("network", 50_000)


def test_time_and_number_of_requests() -> None:
    """A server without a queue takes what was measured; at half its capacity, half of it more."""
    numbers: dict[str, Any] = {"cpu_s": 0.01, "rows_per_event": 2.0, "events": 1e6}
    service_s = 512 / CURVE.rows_per_s
    idle = plan(CURVE, cores=1, servers=10_000, **numbers)
    assert idle.request_s == pytest.approx(CURVE.seconds[-1], rel=1e-3)
    half = plan(CURVE, cores=100, servers=4, **numbers)
    assert half.utilisation == 0.5
    assert half.request_s == pytest.approx(CURVE.seconds[-1] + service_s / 2)
    assert half.in_flight == pytest.approx(20_000 / 512 * half.request_s)
    saturated = plan(CURVE, cores=100, servers=2, **numbers)
    assert (saturated.request_s, saturated.in_flight) == (None, None)


@pytest.mark.parametrize("number", [0, -1, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["cores", "cpu_s", "rows_per_event", "events", "servers", "bytes_per_s"]
)
def test_numbers_that_cannot_be(name: str, number: float) -> None:
    numbers: dict[str, Any] = {"cores": 10, "cpu_s": 0.1, "rows_per_event": 1.0, "events": 10.0}
    message = f"{name}: expected a finite number above 0, got {number}"
    with pytest.raises(errors.ConfigError, match=message):
        plan(CURVE, **{**numbers, name: number})


@pytest.mark.parametrize("text", ["no json", "{}", '{"rows": [1], "seconds": [1]}'])
def test_files_that_are_no_curve(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(errors.ConfigError, match="expected a curve as `sonic-coffea bench`"):
        Curve.load(tmp_path / "c.json")


def test_the_commands(server: FakeServer, tmp_path: Path) -> None:
    file = str(tmp_path / "curve.json")
    output = run("bench", server.url, "m", "--seconds", "0.01", "--output", file).stdout
    assert "saturated with" in output
    assert "time, ms" in output
    planned = json.loads(run("plan", file, *OPTIONS, "--json").stdout)
    assert planned["servers"] >= 500 * 3 / 0.01 / Curve.load(file).rows_per_s
    drawn = tmp_path / "curve.svg"
    as_json = ["--seconds", "0.01", "--json", "--plot", str(drawn)]
    assert json.loads(run("bench", server.url, "m", *as_json).stdout)["model"] == "m"
    assert "<!-- rows of a request -->" in drawn.read_text()


def test_the_commands_make_the_folders_of_their_files(server: FakeServer, tmp_path: Path) -> None:
    curve, drawn = (tmp_path / name / "x" / name for name in ("c.json", "bench.svg"))
    measured = ["--seconds", "0.01", "--output", str(curve), "--plot", str(drawn)]
    command(["bench", server.url, "m", *measured], code=0)
    assert Curve.load(curve).model == "m"
    assert drawn.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("option", "place", "message"),
    [
        ("--output", "file/c.json", "cannot write"),
        ("--output", "folder", "cannot write"),
        ("--plot", "file/c.png", "cannot write"),
        ("--plot", "c.doc", "ends in .png, .pdf or .svg"),
    ],
)
def test_what_cannot_be_written_is_not_measured(
    option: str, place: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("as it was")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    # Nothing listens at this port: the command fails before it connects.
    output = command(["bench", "grpc://127.0.0.1:1", "m", option, str(tmp_path / place)], code=2)
    assert output.startswith("error: ")
    assert message in output
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "as it was"


def test_a_picture_has_a_form_that_is_known(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"ends in .png, .pdf or .svg, got curve.doc"):
        check_name(tmp_path / "curve.doc")


@pytest.mark.server
def test_a_real_triton_is_measured(server: Any, repository: Path) -> None:
    with sonic.LocalServer(repository, threads=1) as triton:
        curve = measure(Settings.make(triton), "tagger", seconds=0.05)
    assert curve.version == "1"
    assert np.all(np.asarray(curve.seconds) > 0)
