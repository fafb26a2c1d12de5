"""The benchmarks run, and the page shows their results; how fast anything is, no test says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from benchmarks import document, link
from benchmarks.harness import common_rates
from tests.scripts import python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MAKEFILE = (BENCHMARKS.parent / "Makefile").read_text(encoding="utf-8")
MEASURED = re.findall(r"^BENCHMARKS := (.*)$", MAKEFILE, re.MULTILINE)[0].split()
# These start dask's workers, which import the script, or enter a namespace.
ALONE = ["cluster", "distance", "facility", "workflow"]
# Runs scripts one after the other, each with a file for its results.
DRIVER = """
import runpy, sys
from pathlib import Path
folder, *scripts = map(Path, sys.argv[1:])
sys.path.insert(0, str(scripts[0].parent))
for script in scripts:
    sys.argv = [str(script), "--quick", "--json", str(folder / f"{script.stem}.json")]
    runpy.run_path(str(script), run_name="__main__")
"""


@pytest.mark.timeout(600)
@pytest.mark.benchmark
@pytest.mark.parametrize(
    "names",
    [[name for name in MEASURED if name not in ALONE], *([name] for name in ALONE)],
    ids=["others", *ALONE],
)
def test_benchmarks_run(names: list[str], tmp_path: Path) -> None:
    """Those that can share a process do, which spares the others' imports."""
    if names == ["distance"] and not link.available():
        pytest.skip("no namespaces for users")
    scripts = [BENCHMARKS / f"{name}.py" for name in names]
    if names[0] in ALONE:
        command = [*scripts, "--quick", "--json", tmp_path / f"{names[0]}.json"]
    else:
        command = ["-c", DRIVER, tmp_path, *scripts]
    done = python(*command, timeout_s=580)
    for name in names:
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        assert saved["benchmark"].split(":")[0] in done.stdout
        if name not in ("distance", "shared_memory"):  # whose results have forms of their own
            assert len(saved["results"]) > 1
        if name == "layouts":
            # 1,000 rows are one block, whose values are gathered beside the tensor.
            assert 1 <= saved["peak memory of Padded, over its result"] < 2


def test_rates_count_while_all_workers_are_busy() -> None:
    """Both have the server from 1 s to 3 s; before and after, one has it alone."""
    first = np.array([(0.0, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, 3.0)])
    second = np.array([(1.0, 2.0), (2.0, 3.0), (3.0, 3.5)])
    assert common_rates([first, second]) == [1.0, 1.0]
    # From 1.5 s, half of what was under way counts.
    assert common_rates([first, second + 0.5]) == [1.0, 1.0]
    assert common_rates([first]) == [4 / 3]


def test_the_page_shows_the_kept_results() -> None:
    """If not, run ``make bench-page``."""
    shown = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert shown == document.page(document.load(document.RESULTS))
    assert {path.stem for path in document.RESULTS.iterdir()} == set(MEASURED)


@pytest.mark.parametrize(("part", "words"), [("50%", "became"), ("25%", "spends a quarter,")])
def test_the_readme_says_what_was_measured(part: str, words: str) -> None:
    workflow = document.load(document.RESULTS)["workflow"]
    gain = workflow[f"tagger {part} of a chunk: gain of the whole workflow"]
    assert f"{words} {gain:%} faster" in (BENCHMARKS.parent / "README.md").read_text("utf-8")


def test_the_page_has_its_pictures() -> None:
    docs = BENCHMARKS.parent / "docs"
    shown = re.findall(r"\(benchmarks/(\w+)\.svg\)", (docs / "benchmarks.md").read_text("utf-8"))
    drawn = {p.stem for p in (docs / "benchmarks").glob("*.svg")}
    assert drawn == set(shown) == set(document.PICTURES)
    for name, draw in document.PICTURES.items():
        assert draw(document.load(document.RESULTS)[name]).axes
