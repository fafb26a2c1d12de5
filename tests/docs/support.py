"""Running what users run, and scoring without this package's help."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sonic_coffea.demo.samples import DATA

ROOT = Path(__file__).parents[2]
# Commands that would install or build are compared with what there is to run, not run.
NOT_RUN = ("make ", "pip install ")
# Runs the blocks of a page in one namespace; tracebacks point at the lines of the page. Read from
# the command line, so that dask's workers do not run the page again when they start. Tests of a
# page are run by pytest, with the blocks above them.
DRIVER = """
import json, subprocess, sys
namespace, above = {"__name__": "__main__"}, ""
for block in json.load(open(sys.argv[1])):
    if block["language"] == "bash":
        subprocess.run(["bash", "-euo", "pipefail", "-c", block["text"]], check=True)
    else:
        text = "\\n" * (block["line"] - 1) + block["text"]
        exec(compile(text, block["page"], "exec"), namespace)
        above += block["text"]
        if "def test_" in block["text"]:
            open("test_page.py", "w").write(above)
            subprocess.run([sys.executable, "-m", "pytest", "-q", "test_page.py"], check=True)
"""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        return [line for line in self.text.splitlines() if line and not line.startswith("#")]

    @property
    def installs(self) -> bool:
        return self.language == "bash" and any(c.startswith(NOT_RUN) for c in self.commands)


def blocks_of(page: Path) -> list[Block]:
    found, opened = [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number, line.removeprefix("```").strip()
        else:
            lines = page.read_text(encoding="utf-8").splitlines()[opened[0] : number - 1]
            found.append(Block(page, opened[0] + 1, opened[1], "\n".join(lines) + "\n"))
            opened = None
    assert opened is None, f"{page}: the block of line {opened} is not closed"
    return found


def to_run(page: Path) -> list[Block]:
    chosen = [b for b in blocks_of(page) if b.language in ("python", "bash")]
    return [b for b in chosen if not b.installs]


def clean_environment(state: Path) -> dict[str, str]:
    """Return a user's: this Python first, no display, a place of its own for state."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DASK_SONIC", "PYTEST"))}
    return {
        **clean,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "MPLBACKEND": "Agg",
        "SONIC_COFFEA_STATE_DIR": str(state),
    }


def run_page(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Run the blocks of a page in ``folder/work``, beside the sample and the example."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    shutil.copy(DATA / "toptagger.onnx", work / "toptagger.onnx")
    shutil.copy(DATA / "toptagger.preprocess.json", work / "preprocess.json")
    shutil.copy(DATA / "TTbar_1.root", work / "nano.root")
    shutil.copy(ROOT / "examples" / "top_analysis.py", work)
    blocks = [
        {"page": str(b.page), "line": b.line, "language": b.language, "text": b.text}
        for b in to_run(page)
    ]
    assert blocks
    listed = folder / "blocks.json"
    listed.write_text(json.dumps(blocks), encoding="utf-8")
    execute(["-c", DRIVER, listed], work, environment)


def execute(arguments: list[Any], where: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def scored_directly(path: Path) -> list[float]:
    """Return the top scores of a sample file by onnxruntime, without servers or layouts' help."""
    import awkward as ak
    import onnxruntime
    import uproot

    from sonic_coffea.demo.features import constituent_features

    with uproot.open(path) as file:
        names = ("FatJet", "PFCand", "FatJetPFCand")
        arrays = file["Events"].arrays(filter_name=[f"{n}_*" for n in names])
    jets, candidates, links = (
        ak.zip({f.removeprefix(f"{n}_"): arrays[f] for f in arrays.fields if f.startswith(f"{n}_")})
        for n in names
    )
    of_jet = links.jetIdx[:, np.newaxis] == ak.local_index(jets.pt)[:, :, np.newaxis]
    index = ak.broadcast_arrays(links.pfCandIdx[:, np.newaxis], of_jet)[0][of_jet]
    nested = ak.unflatten(
        candidates[ak.flatten(index, axis=2)], ak.flatten(ak.num(index, axis=2)), axis=1
    )
    features = ak.to_list(ak.flatten(constituent_features(jets, nested)))
    preprocess = json.loads((DATA / "toptagger.preprocess.json").read_text(encoding="utf-8"))
    session = onnxruntime.InferenceSession(DATA / "toptagger.onnx")
    tensors = {}
    for name in preprocess["input_names"]:
        group = preprocess[name]
        tensor = np.zeros((len(features), len(group["var_names"]), 64), np.float32)
        for j, jet in enumerate(features):
            for v, variable in enumerate(group["var_names"]):
                rule = group["var_infos"][variable]
                numbers = np.asarray([c[variable] for c in jet[:64]])
                scaled = (numbers - rule["median"]) * rule["norm_factor"]
                clipped = np.clip(scaled, rule["lower_bound"], rule["upper_bound"])
                tensor[j, v, : len(jet)] = clipped
        tensors[name] = tensor
    return session.run(["softmax"], tensors)[0][:, 1].tolist()
