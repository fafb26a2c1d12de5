"""The benchmarks run; how fast anything is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_layouts(tmp_path: Path) -> None:
    results, figure = tmp_path / "results.json", tmp_path / "figure.png"
    done = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "layouts.py",
            "--quick",
            "--json",
            results,
            "--figure",
            figure,
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Padded" in done.stdout
    found = json.loads(results.read_text())
    aimed = [m["name"] for m in found["measurements"] if m["target"]]
    assert aimed == [
        "Padded",
        "Padded, shift scale clip",
        "Padded",
        "Padded, 100 rows",
        "scores to jets",
        "values to constituents",
    ]
    assert 1 <= found["peak memory of Padded, over its result"] < 1.2
    assert found["packages"]["awkward"]
    assert figure.read_bytes().startswith(b"\x89PNG")
