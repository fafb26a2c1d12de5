"""What `plan` is given, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.curves import CURVE

if TYPE_CHECKING:
    from pathlib import Path

    from sonic_coffea.tools import Curve


def planned(curve: Curve, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    curve.save(folder / "curve.json")
    options = {"cores": "500", "cpu-ms": "10", "rows-per-event": "3", **changes}
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    return subprocess.run(
        [sys.executable, "-m", "sonic_coffea", "plan", str(folder / "curve.json"), *given],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", ["cpu-ms", "rows-per-event", "events", "gbps"])
@pytest.mark.parametrize("value", ["inf", "nan", "0"])
def test_numbers_that_cannot_be(name: str, value: str, tmp_path: Path) -> None:
    done = planned(CURVE, tmp_path, **{name: value})
    assert done.returncode == 2
    assert "expected a finite number above 0" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "changes",
    [{"rows_per_s": 0}, {"rows_per_s": "many"}, {"row_bytes": 0}, {"seconds": (0, 0, 0)}],
)
def test_a_curve_that_cannot_be(changes: dict[str, Any], tmp_path: Path) -> None:
    done = planned(replace(CURVE, **changes), tmp_path)
    assert done.returncode == 1
    assert "expected finite numbers above 0 in the curve" in done.stderr
    assert "Traceback" not in done.stderr
