"""The notebooks of the examples run as they are, and what they show is right."""

from __future__ import annotations

import ast
import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import awkward as ak
import nbformat
import numpy as np
import pytest
import uproot

from sonic_coffea.demo.samples import DATA

from .support import execute, scored_directly

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SAMPLE = json.loads((DATA / "sample.json").read_text(encoding="utf-8"))["files"]

# What is asked of a notebook before its last cell, which tidies up.
PROBES = {
    "analysis_on_dask": """
probed = {name: out["mass"]["TTbar", name, :].values(flow=True).sum() for name in VARIATIONS}
""",
    "shared_server": """
probed = {name: one.tolist() for name, one in served.items()}
""",
}
KEEP = """
import json, os
with open(os.environ["PROBED"], "w") as file:
    json.dump(probed, file)
"""
RUN = """
import sys
from pathlib import Path
import nbformat

sys.path.insert(0, sys.argv[1])
from notebooks import execute

notebook = nbformat.read(sys.argv[2], as_version=4)
if sys.argv[4]:
    notebook.cells.insert(-1, nbformat.v4.new_code_cell(sys.argv[4]))
execute(notebook, Path.cwd())
nbformat.write(notebook, sys.argv[3])
"""


# What a loaded machine adds: dask may speak of a worker whose scheduler has just been closed, or
# that is told twice to remove a plugin, and a response that is late by the load has its request
# sent again.
OF_LOAD = re.compile(
    r"^.* Failed to communicate with scheduler during heartbeat\.\n(.*\n)*?.*CommClosedError: .*\n"
    r"|^.* Worker plugin .* failed to teardown\n(.*\n)*?KeyError: .*\n"
    r"|^no response in .* sent again\n",
    re.MULTILINE,
)


@dataclass
class Shown:
    """What the cells of a notebook show."""

    text: str = ""
    pages: list[str] = field(default_factory=list)
    images: int = 0
    errors: list[str] = field(default_factory=list)
    probed: Any = None

    def add(self, output: Any) -> None:
        if output.output_type == "error":
            self.errors.append(output.evalue)
        elif output.output_type == "stream":
            if output.name == "stderr" and (text := OF_LOAD.sub("", output.text)):
                self.errors.append(text)
            for line in output.text.splitlines():
                self.text += f"{line}\n"
        else:
            self.images += "image/png" in output.data
            self.pages += [output.data[kind] for kind in output.data if kind == "text/html"]
            self.text += output.data.get("text/plain", "") + "\n"

    def report(self, number: int = 0) -> dict[str, str]:
        """Return what a report says, by label: of the first table, and a server's first column."""
        page = [candidate for candidate in self.pages if "objects scored" in candidate][number]
        text = html.unescape(re.sub(r"<[^>]*>", "", page))
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
        return {row[0]: row[1] for row in reversed(rows) if row}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def shape(cell: Any) -> list[Any]:
    """Return which kinds of output a cell has, but for bars of progress and what is logged."""
    kinds = [
        sorted(output["data"]) if "data" in output else output.get("name", output.output_type)
        for output in cell.get("outputs", [])
        if output.get("data", {}).get("text/plain", "shown") and output.get("name") != "stderr"
    ]
    kinds = [kind for kind in kinds if not any("widget" in part for part in kind)]
    # What is printed comes in as many parts as happens.
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


@pytest.mark.server
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_show_the_right_numbers(
    path: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    work.mkdir()
    scratch.mkdir()
    # The notebook's own way of drawing, not that of scripts.
    plain = {k: v for k, v in environment.items() if k != "MPLBACKEND"} | {
        "TMPDIR": str(scratch),
        # What dask says of a machine that is busy is no error of the notebook.
        "DASK_LOGGING__DISTRIBUTED": "error",
        "PYTHONWARNINGS": "ignore:Creating scratch directories is taking:UserWarning",
    }
    done, probed = tmp_path / "done.ipynb", tmp_path / "probed.json"
    probe = PROBES[path.stem] + KEEP if path.stem in PROBES else ""
    execute([tmp_path / "run.py", DOCS, path, done, probe], work, plain | {"PROBED": str(probed)})
    shown = Shown(probed=json.loads(probed.read_text()) if probe else None)
    cells = nbformat.read(done, as_version=4).cells
    if probe:
        del cells[-2]
    for cell in cells:
        for output in cell.get("outputs", []):
            shown.add(output)
    assert shown.errors == []
    globals()[f"check_{path.stem}"](shown)
    kept = nbformat.read(path, as_version=4).cells
    hint = f"what {path.name} shows is of another day: run python docs/notebooks.py {path.stem}"
    assert [shape(cell) for cell in kept] == [shape(cell) for cell in cells], hint
    assert list(work.iterdir()) == []
    # dask keeps a folder of its own there.
    assert [path for path in scratch.iterdir() if path.name.startswith("tmp")] == []
    servers = execute(["-m", "sonic_coffea", "status", "--json"], work, plain)
    assert json.loads(servers) == []


def check_first_scores(shown: Shown) -> None:
    assert shown.images == 1
    jets = SAMPLE["TTbar_1.root"]["fatjets"]
    assert shown.report()["objects scored"] == f"{jets:,} of {jets:,}"


def check_analysis_on_dask(shown: Shown) -> None:
    assert shown.images == 1
    shifts = {"nominal": (0.0, 0.0), "jms_up": (0.0, 0.0), "jms_down": (0.0, 0.0)}
    shifts |= {"jes_barrel_up": (0.02, 0.0), "jes_barrel_down": (-0.02, 0.0)}
    shifts |= {"jes_endcap_up": (0.0, 0.04), "jes_endcap_down": (0.0, -0.04)}
    objects, sent, nominal = 0, 0, {}
    for name in ("TTbar", "QCD"):
        with uproot.open(DATA / f"{name}_1.root") as file:
            branches = file["Events"].arrays(["FatJet_pt", "FatJet_eta"])
        pt = ak.to_numpy(ak.flatten(branches.FatJet_pt)).astype(np.float64)
        barrel = np.abs(ak.to_numpy(ak.flatten(branches.FatJet_eta))) < 1.3
        nominal[name] = int((pt > 350).sum())
        sent += nominal[name]
        for inside, outside in shifts.values():
            shift = np.where(barrel, inside, outside)
            passes = pt * (1 + shift) > 350
            objects += passes.sum()
            sent += (passes & (shift != 0)).sum()  # of those that a shift leaves alone, no row
    for run in (0, 1):
        report = shown.report(run)
        assert report["objects scored"] == f"{objects:,} of {objects:,}"
        assert number(report["deduplicated"]) == objects - sent
    assert number(shown.report(0)["rows"]) == sent
    assert number(shown.report(1)["cache hits"]) == sent
    assert shown.report(1)["requests"] == "0"
    assert f"{objects:,} jets in 7 collections, {sent:,} rows sent" in shown.text
    assert ast.literal_eval(re.search(r"\{'(QCD|TTbar)': \d.*\}", shown.text)[0]) == nominal
    for name, weight in shown.probed.items():
        assert weight > 0, name
    expected = weight_of_top_jets()
    assert shown.probed["nominal"] == pytest.approx(expected, rel=0.01)
    # The soft-drop mass moves between bins, and changes nothing else.
    assert shown.probed["jms_up"] == pytest.approx(expected, rel=0.01)
    assert shown.probed["jes_barrel_down"] < expected < shown.probed["jes_barrel_up"]


def weight_of_top_jets() -> float:
    """Return the weights of hard jets of top-quark pairs that onnxruntime scores above 0.5."""
    path = DATA / "TTbar_1.root"
    with uproot.open(path) as file:
        branches = file["Events"].arrays(["FatJet_pt", "genWeight"])
    pt = ak.to_numpy(ak.flatten(branches.FatJet_pt))
    weight = ak.flatten(ak.broadcast_arrays(branches.genWeight, branches.FatJet_pt)[0])
    passes = (pt > 350) & (np.asarray(scored_directly(path)) > 0.5)
    return float(ak.sum(weight[passes]))


def check_shared_server(shown: Shown) -> None:
    differences = re.findall(r"(\w+): ([\d,]+) jets, largest difference (\S+)", shown.text)
    assert [name for name, _, _ in differences] == ["QCD_1", "TTbar_1", "TTbar_2"]
    for name, jets, difference in differences:
        assert number(jets) == SAMPLE[f"{name}.root"]["fatjets"]
        assert float(difference) < 1e-5
    np.testing.assert_allclose(
        shown.probed["QCD_1"], scored_directly(DATA / "QCD_1.root"), rtol=0, atol=1e-5
    )
    jets = sum(SAMPLE[f"TTbar_{n}.root"]["fatjets"] for n in (1, 2))
    assert shown.report()["objects scored"] == f"{jets:,} of {jets:,}"
    assert number(shown.report()["retries"]) > 0
    assert re.search(r"^\d\s+lost\s+unix:/", shown.text, re.MULTILINE)
    # One server is left.
    assert len(set(re.findall(r"^(?:│ )?(unix:\S+)", shown.text, re.MULTILINE))) == 1
    assert "the script ended with 0" in shown.text
    assert re.search(r"needed: \d+ such servers", shown.text)
    assert "✓ declaration of toptagger: fits version 1" in shown.text


def check_your_own_model(shown: Shown) -> None:
    assert shown.images == 1
    differences = re.findall(r"largest difference (\S+)", shown.text)
    assert len(differences) == 3
    assert max(map(float, differences)) < 1e-6
    jets = sum(SAMPLE[f"{name}_2.root"]["fatjets"] for name in ("TTbar", "QCD"))
    assert shown.text.count(f"{jets:,} jets; ") == 2
    assert "input 'features' is FP32 [N, 8], the model takes FP32 [N, 9]" in shown.text
    assert "no field 'nConstituent'; did you mean 'nConstituents'?" in shown.text
    digests = re.findall(r"^version (\d), file (\w{12})", shown.text, re.MULTILINE)
    assert [version for version, _ in digests] == ["1", "2"]
    assert digests[0][1] != digests[1][1]
    assert "trees 2 better.ubj {'rounds': 60}" in shown.text
