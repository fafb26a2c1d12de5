"""The scores of the demo's tagger by onnxruntime alone, by the rules of its preprocessing file."""

from __future__ import annotations

import json
from typing import Any

import awkward as ak
import numpy as np
import onnxruntime
from tests.nanoaod import sample

import sonic_coffea as sonic
from sonic_coffea.demo import features
from sonic_coffea.demo.samples import DATA


def direct_scores(name: str) -> dict[tuple[int, int], tuple[float, ...]]:
    """Return the top scores of each event's jets of a file, by luminosity block and event."""
    session = onnxruntime.InferenceSession(DATA / "toptagger.onnx")
    rules = json.loads((DATA / "toptagger.preprocess.json").read_text())
    events = sample(name, mode="eager")
    columns = features.constituent_features(events.FatJet, sonic.constituents(events))
    flat = ak.flatten(columns)
    inputs = {name: _tensor(flat, rules[name]) for name in rules["input_names"]}
    tops = [
        session.run(None, {name: tensor[i : i + 500] for name, tensor in inputs.items()})[0][:, 1]
        for i in range(0, len(flat), 500)
    ]
    by_event = ak.unflatten(np.concatenate(tops), ak.num(columns)).tolist()
    where = zip(events.luminosityBlock.tolist(), events.event.tolist(), strict=True)
    return dict(zip(where, map(tuple, by_event), strict=True))


def _tensor(jets: Any, group: dict[str, Any]) -> np.ndarray:
    tensor = np.zeros((len(jets), len(group["var_names"]), group["var_length"]), np.float32)
    for place, variable in enumerate(group["var_names"]):
        info = group["var_infos"][variable]
        padded = ak.pad_none(jets[variable], group["var_length"], clip=True)
        values = ak.to_numpy(padded, allow_missing=True).astype(np.float32)
        moved = (values - np.float32(info["median"])) * np.float32(info["norm_factor"])
        moved = np.ma.clip(moved, info["lower_bound"], info["upper_bound"])
        tensor[:, place] = np.ma.filled(moved, info["pad"])
    return tensor
