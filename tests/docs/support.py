"""Running what users run, and scoring without this package's help."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.demo.samples import DATA

if TYPE_CHECKING:
    from pathlib import Path


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
