"""The benchmarks run; how fast anything is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
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


def compared(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> tuple[int, str]:
    """Return the exit status and what is said of two results."""
    files = [folder / "before.json", folder / "after.json"]
    for file, found in zip(files, (before, after), strict=True):
        file.write_text(json.dumps(found))
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "compare.py", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def result(times: dict[str, tuple[float, float, float]], met: bool = True) -> dict[str, Any]:
    """Return a result with quartiles of times, the first of which is the peer of the others."""
    peer = next(iter(times))
    return {
        "benchmark": "Layouts",
        "machine": {"processor": "one"},
        "measurements": [
            {
                "name": name,
                "lower_s": lower,
                "median_s": median,
                "upper_s": upper,
                "repeats": 9,
                "against": "" if name == peer else peer,
            }
            for name, (lower, median, upper) in times.items()
        ],
        "figures": [{"name": "fairness", "value": 1.0, "target": "≥ 0.9", "met": met}],
    }


def test_what_got_slower_is_told_from_noise(tmp_path: Path) -> None:
    before = result({"copy": (0.9, 1.0, 1.1), "pack": (1.9, 2.0, 2.1), "back": (2.9, 3.0, 3.1)})
    # The machine is half as fast; besides, only packing got slower by more than its spread.
    after = result({"copy": (1.8, 2.0, 2.2), "pack": (5.8, 6.0, 6.2), "back": (5.5, 6.2, 6.5)})
    status, said = compared(tmp_path, before, after)
    assert status == 1
    assert "pack │ 1.50 │ slower" in said
    assert "back" not in said
    assert "1.00 │ slower" not in said
    status, said = compared(tmp_path, before, before)
    assert (status, said) == (0, "4 compared; 0 got worse")


def test_targets_that_are_missed_and_strange_files(tmp_path: Path) -> None:
    good, bad = (result({"copy": (0.9, 1.0, 1.1)}, met) for met in (True, False))
    status, said = compared(tmp_path, good, bad)
    assert status == 1
    assert "misses its target now" in said
    status, said = compared(tmp_path, bad, good)
    assert status == 0
    assert "meets its target now" in said
    status, said = compared(tmp_path, good, {"measurements": []})
    assert status == 1
    assert "is not what a benchmark writes" in said


def test_the_page_shows_the_results_that_are_kept() -> None:
    """If not, run ``make bench-page``."""
    spec = spec_from_file_location("document", BENCHMARKS / "document.py")
    assert spec is not None
    assert spec.loader is not None
    document = module_from_spec(spec)
    spec.loader.exec_module(document)
    docs = BENCHMARKS.parent / "docs"
    shown = (docs / "benchmarks.md").read_text(encoding="utf-8")
    assert shown == document.page(document.load(document.RESULTS))
    drawn = {p.stem for p in (docs / "benchmarks").glob("*.svg")}
    assert drawn == set(document.ORDER) <= {p.stem for p in BENCHMARKS.glob("*.py")}
