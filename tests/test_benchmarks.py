"""The benchmarks run, and the page shows their results; how fast anything is, no test says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# More is asked of these than that they run.
CHECKED = {"distance", "layouts", "shared_memory"}


def script(name: str) -> Any:
    """Import one of the scripts."""
    spec = spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # which dataclasses ask
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def run(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return what a benchmark shows, and its results."""
    results, figure = folder / "results.json", folder / "figure.png"
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick"]
    done = subprocess.run(
        [*command, "--json", results, "--figure", figure],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")
    return done.stdout, json.loads(results.read_text())


@pytest.mark.timeout(600)
@pytest.mark.benchmark
@pytest.mark.parametrize("name", [n for n in script("document").ORDER if n not in CHECKED])
def test_benchmarks_run(name: str, tmp_path: Path) -> None:
    shown, saved = run(name, tmp_path)
    assert saved["benchmark"].split(":")[0] in shown
    assert len(saved["measurements"] + saved["figures"]) > 1


@pytest.mark.timeout(600)
@pytest.mark.benchmark
def test_layouts_measure_every_target(tmp_path: Path) -> None:
    shown, saved = run("layouts", tmp_path)
    assert "Padded" in shown
    aimed = {m["name"].split(",")[0] for m in saved["measurements"] if m["target"]}
    assert aimed == {
        "plain",
        "shift",
        "log",
        "tanh",
        "weaver",
        "sorted",
        "Padded",
        "Flat",
        "Pairwise",
        "a call without rows",
        "scores to jets",
        "values to constituents",
    }
    # 1,000 rows are one block, whose values are gathered beside the tensor.
    assert 1 <= saved["peak memory of Padded, over its result"] < 2
    assert saved["packages"]["awkward"]


@pytest.mark.timeout(600)
@pytest.mark.benchmark
@pytest.mark.skipif(not script("link").available(), reason="no namespaces for users")
def test_distance_measures_one_and_four_connections(tmp_path: Path) -> None:
    _, saved = run("distance", tmp_path)
    parts = saved["part of the link, by the second"]
    assert [name.split("; ")[1] for name in parts] == ["1 connection", "4 connections"]


@pytest.mark.timeout(600)
@pytest.mark.benchmark
def test_shared_memory_is_compared_with_messages(tmp_path: Path) -> None:
    _, saved = run("shared_memory", tmp_path)
    (ratio,) = saved["shared memory over messages, by megabytes"].values()
    assert ratio > 0


def compared(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> tuple[int, str]:
    """Return the exit status and what is said of two results."""
    files = [folder / "before.json", folder / "after.json"]
    for file, results in zip(files, (before, after), strict=True):
        file.write_text(json.dumps(results))
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "compare.py", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


Times = dict[str, tuple[float, float, float]]


def result(*groups: Times, met: bool = True) -> dict[str, Any]:
    """Return a result with quartiles of times, the first of each group the peer of its others."""
    results = script("harness").Results("Layouts")
    for group in groups:
        # So many of each that the quartiles are these.
        times = {name: sorted(4 * quartiles) for name, quartiles in group.items()}
        peer, *others = times
        if all(one.name != peer for one in results.measurements):
            results.add(times, peer)
        for name in others:
            results.add(times, name, against=peer)
    results.note("fairness", 1.0 if met else 0.8, at_least=0.9)
    plain: dict[str, Any] = results.to_dict()
    return plain


def test_slower_results_are_told_from_noise(tmp_path: Path) -> None:
    before = result({"copy": (0.9, 1.0, 1.1), "pack": (1.9, 2.0, 2.1), "back": (2.9, 3.0, 3.1)})
    # The machine is half as fast; besides, only packing got slower by more than its spread.
    after = result({"copy": (1.8, 2.0, 2.2), "pack": (5.8, 6.0, 6.2), "back": (5.5, 6.2, 6.5)})
    status, output = compared(tmp_path, before, after)
    assert status == 1
    assert "pack │ 1.50 │ slower" in output
    assert "back" not in output
    assert "1.00 │ slower" not in output
    status, output = compared(tmp_path, before, before)
    assert (status, output) == (0, "4 compared; 0 got worse")


def test_ratios_are_to_the_peer_of_the_same_turns(tmp_path: Path) -> None:
    """The machine may have been slower in one of them, which is no news."""
    before = result(
        {"copy": (0.9, 1.0, 1.1), "pack": (1.9, 2.0, 2.1)},
        {"copy": (0.9, 1.0, 1.1), "sort": (3.9, 4.0, 4.1)},
    )
    after = result(
        {"copy": (0.9, 1.0, 1.1), "pack": (1.9, 2.0, 2.1)},
        {"copy": (1.8, 2.0, 2.2), "sort": (7.8, 8.0, 8.2)},
    )
    assert compared(tmp_path, before, after) == (0, "4 compared; 0 got worse")
    # As fast as before, but the copy beside it took half as long.
    slower = result(
        {"copy": (0.9, 1.0, 1.1), "pack": (1.9, 2.0, 2.1)},
        {"copy": (0.45, 0.5, 0.55), "sort": (3.9, 4.0, 4.1)},
    )
    status, output = compared(tmp_path, before, slower)
    assert status == 1
    assert "sort │ 2.00 │ slower" in output
    assert "pack" not in output


def test_results_with_another_peer_are_named(tmp_path: Path) -> None:
    times = {"copy": (0.9, 1.0, 1.1), "pack": (1.9, 2.0, 2.1)}
    before, after = result(times), result({"by hand": (8.9, 9.0, 9.1), "pack": (1.9, 2.0, 2.1)})
    status, output = compared(tmp_path, before, after)
    assert status == 0
    assert "pack │ │ not measured any more" in output
    assert "1 compared; 0 got worse" in output


def test_names_of_results_are_unique() -> None:
    results = script("harness").Results("Layouts")
    times = {"copy": [1.0, 2.0, 3.0], "by hand": [9.0], "pack": [2.0, 2.0, 2.0]}
    results.add(times, "pack", against="copy")
    with pytest.raises(ValueError, match="'pack' already"):
        results.add(times, "pack", against="by hand")
    measurement = results.add(times, "pack", called="pack, over by hand", against="by hand")
    assert (measurement.name, measurement.against, measurement.ratio) == (
        "pack, over by hand",
        "by hand",
        2 / 9,
    )
    assert (measurement.lower_ratio, measurement.upper_ratio) == (2 / 9, 2 / 9)
    results.note("fairness", 1.0)
    with pytest.raises(ValueError, match="'fairness' already"):
        results.note("fairness", 1.0)


def test_rates_count_while_all_workers_are_busy() -> None:
    """Both have the server from 1 s to 3 s; before and after, one has it alone."""
    first = np.array([(0.0, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, 3.0)])
    second = np.array([(1.0, 2.0), (2.0, 3.0), (3.0, 3.5)])
    common_rates = script("harness").common_rates
    assert common_rates([first, second]) == [1.0, 1.0]
    # From 1.5 s, half of what was under way counts.
    assert common_rates([first, second + 0.5]) == [1.0, 1.0]
    assert common_rates([first]) == [4 / 3]


def test_missed_targets_and_malformed_files_are_named(tmp_path: Path) -> None:
    good, bad = (result({"copy": (0.9, 1.0, 1.1)}, met=met) for met in (True, False))
    status, output = compared(tmp_path, good, bad)
    assert status == 1
    assert "misses its target now" in output
    status, output = compared(tmp_path, bad, good)
    assert status == 0
    assert "meets its target now" in output
    status, output = compared(tmp_path, good, {"measurements": []})
    assert status == 1
    assert "is not what a benchmark writes" in output


def test_the_page_shows_the_kept_results() -> None:
    """If not, run ``make bench-page``."""
    document = script("document")
    docs = BENCHMARKS.parent / "docs"
    shown = (docs / "benchmarks.md").read_text(encoding="utf-8")
    assert shown == document.page(document.load(document.RESULTS))
    drawn = {p.stem for p in (docs / "benchmarks").glob("*.svg")}
    makefile = (BENCHMARKS.parent / "Makefile").read_text(encoding="utf-8")
    measured = re.search(r"^BENCHMARKS := (.*)$", makefile, re.MULTILINE)
    assert measured is not None
    assert drawn == set(document.ORDER) == set(measured[1].split())
