"""What `plan` takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.commands import run
from tests.curves import CURVE

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from sonic_coffea.tools import Curve


def planned(
    curve: Curve, folder: Path, *more: str, **changes: str
) -> subprocess.CompletedProcess[str]:
    curve.save(folder / "curve.json")
    options = {"cores": "500", "cpu-ms": "10", "rows-per-event": "3", **changes}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    return run("plan", folder / "curve.json", *arguments, *more)


def test_shown_and_as_json(tmp_path: Path) -> None:
    shown = planned(CURVE, tmp_path, gbps="25").stdout
    for label in ("bottleneck", "utilisation", "capacity of the network", "Gb/s", "in flight"):
        assert label in shown
    plan = json.loads(planned(CURVE, tmp_path, "--json", gbps="25").stdout)
    assert (plan["bottleneck"], plan["servers"]) == ("cores", 19)
    saturated = planned(CURVE, tmp_path, servers="1").stdout
    assert "time of a request" not in saturated


@pytest.mark.parametrize("name", ["cpu-ms", "rows-per-event", "events", "gbps"])
@pytest.mark.parametrize("value", ["inf", "nan", "0"])
def test_numbers_that_cannot_be(name: str, value: str, tmp_path: Path) -> None:
    done = planned(CURVE, tmp_path, **{name: value})
    assert done.returncode == 2
    assert "expected a finite number above 0" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "changes",
    [{"rows_per_s": 0}, {"rows_per_s": "many"}, {"row_bytes": 0}, {"seconds": (0, 0, 0)}],
)
def test_a_curve_that_cannot_be(changes: dict[str, Any], tmp_path: Path) -> None:
    done = planned(replace(CURVE, **changes), tmp_path)
    assert done.returncode == 1
    assert "expected finite numbers above 0 in the curve" in done.stderr
