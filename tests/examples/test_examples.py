"""Examples run, equal the direct way, make sense, and are as short as their pages say.

Those of the gallery run on a real Triton.
"""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from coffea import processor
from coffea.util import load
from tests.nanoaod import Schema, sample

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA

EXAMPLES = Path(__file__).parents[2] / "examples"
ANALYSES, GALLERY = EXAMPLES / "analyses", EXAMPLES / "gallery"
LISTED = dict(
    re.findall(
        r"^\| \[(\w+)\.py\].*\| (\d+) \|$", (ANALYSES / "README.md").read_text(), re.MULTILINE
    )
)

# What comes out, within what is sensible: as printed, and at least, at most.
EXPECTED: dict[str, dict[str, tuple[float, float]]] = {
    "glopart": {"auc": (0.9, 1), "mass of tops: median of the ratio": (0.8, 1.2)},
    "upart": {"auc": (0.94, 1), "jets without a vertex": (1000, 2500)},
    "spanet": {"tops with all jets right": (0.65, 0.85), "by chance": (0, 0.05)},
    "tracking": {"efficiency": (0.75, 1), "purity": (0.8, 1), "purity of all edges": (0.2, 0.3)},
    "tau_images": {"auc": (0.85, 1)},
    "deepmet": {
        "resolution [GeV]": (1, 9.5),
        "with one category for all [GeV]": (10, 20),
        "without weights [GeV]": (25, 60),
    },
    "facile": {"mean error [GeV]": (0, 0.6), "of a sum of three samples [GeV]": (0.7, 5)},
    "gravnet": {"hits in the right cluster": (0.8, 1)},
    "clustering": {"leading pt over that of the file": (0.9, 1.1), "jets an event": (1, 10)},
    "fixed_point": {"auc": (0.85, 1)},
    "event_classifier": {"auc": (0.85, 1), "share of NaN": (0.05, 0.6)},
    "ensemble": {"auc": (0.85, 1)},
    "systematics": {"saved": (0.4, 0.9)},
    "processors": {"passed": (100, 3500)},
}
# These compare what they found with something else than the network run here.
SILENT = {"event_classifier", "systematics", "processors"}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GALLERY)
        patch.syspath_prepend(ANALYSES)
        yield


def test_every_example_is_listed_and_short() -> None:
    runnable = {
        p.stem for p in GALLERY.glob("*.py") if 'if __name__ == "__main__"' in p.read_text()
    }
    assert runnable - {"train"} == set(EXPECTED)
    assert all(len((GALLERY / f"{name}.py").read_text().splitlines()) <= 85 for name in EXPECTED)


def test_equal_scores_separate_nothing() -> None:
    auc = importlib.import_module("sample").auc
    assert auc([True] * 5 + [False] * 5, np.zeros(10)) == 0.5
    assert auc([True, False, True], [0.9, 0.1, 0.8]) == 1


def test_networks_are_small() -> None:
    files = list((GALLERY / "networks").iterdir())
    assert sum(p.stat().st_size for p in files) < 10_000_000
    # The exporter's notes of where it ran are left out.
    assert not [p.name for p in files if b"site-packages" in p.read_bytes()]


@pytest.mark.server
@pytest.mark.parametrize("name", EXPECTED)
def test_examples_equal_direct_inference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = importlib.import_module(name).run()
    for what, (least, most) in EXPECTED[name].items():
        assert least <= found[what] <= most, f"{what}: {found}"
    assert "equal" in capsys.readouterr().out or name in SILENT


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return sonic.build_repository(tmp_path / "models", {"toptagger": DATA / "toptagger.onnx"})


def test_files_of_one_dataset_are_all_written(models: Path, tmp_path: Path) -> None:
    made = importlib.import_module("processors")
    (tmp_path / "jets").mkdir()
    files = {"QCD": {"treename": "Events", "files": [str(DATA / f"QCD_{n}.root") for n in (1, 2)]}}
    with sonic.connect(models):
        runner = processor.Runner(processor.IterativeExecutor(retries=0), schema=Schema)
        out = runner(files, made.Producer(tmp_path / "jets"))
    assert len(ak.from_parquet(tmp_path / "jets")) == out["written"]


def test_files_of_one_name_are_all_scored(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for name in ("TTbar", "QCD"):
        files.append(tmp_path / name / "nano.root")
        files[-1].parent.mkdir()
        shutil.copy(DATA / f"{name}_1.root", files[-1])
    arguments = [*files, "--server", models, "--output", tmp_path / "top.coffea"]
    monkeypatch.setattr("sys.argv", ["top_analysis.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / "top_analysis.py"), run_name="__main__")
    jets = sum(int(ak.sum(ak.num(sample(f"{name}_1").FatJet.pt))) for name in ("TTbar", "QCD"))
    assert sum(load(tmp_path / "top.coffea")["jets"].values()) == jets


def test_jets_without_constituents_are_in_no_histogram_of_scores(models: Path) -> None:
    analysis = runpy.run_path(str(EXAMPLES / "top_analysis.py"))["TopAnalysis"]()
    events = sample(entry_stop=50, metadata={"dataset": "TTbar"})
    jets = ak.num(events.FatJet.pt)
    events["FatJetPFCand"] = events.FatJetPFCand[events.FatJetPFCand.jetIdx > 0]
    with sonic.connect(models):
        out = analysis.process(events)
    assert out["jets"] == {"TTbar": ak.sum(jets)}
    assert out["top"].sum(flow=True) == ak.sum(jets) - ak.sum(jets > 0)


@pytest.mark.parametrize("name", LISTED)
def test_analyses_equal_those_by_hand(name: str) -> None:
    for ours, direct in importlib.import_module(name).run().values():
        np.testing.assert_allclose(ours, direct, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LISTED)
def test_lines_are_those_of_the_page(name: str) -> None:
    text = (ANALYSES / f"{name}.py").read_text().partition("# What follows")[0]
    tree = ast.parse(text)
    skipped = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skipped.append(first)
    without = {n for s in skipped for n in range(s.lineno, (s.end_lineno or 0) + 1)}
    lines = [line for n, line in enumerate(text.splitlines(), 1) if n not in without]
    assert len([line for line in lines if line.strip()]) == int(LISTED[name])


def test_all_five_are_short() -> None:
    assert len(LISTED) == 5
    assert sum(map(int, LISTED.values())) <= 120
