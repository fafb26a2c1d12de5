"""The benchmarks run; how fast anything is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return what a benchmark shows, and its results."""
    results, figure = folder / "results.json", folder / "figure.png"
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick"]
    done = subprocess.run(
        [*command, "--json", results, "--figure", figure],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")
    return done.stdout, json.loads(results.read_text())


def test_layouts(tmp_path: Path) -> None:
    shown, found = run("layouts", tmp_path)
    assert "Padded" in shown
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


def test_shared_memory(tmp_path: Path) -> None:
    _, found = run("shared_memory", tmp_path)
    (ratio,) = found["shared memory over messages, by megabytes"].values()
    assert ratio > 0
