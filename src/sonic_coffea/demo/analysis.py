"""The demo's networks and its processor: each large-radius jet gets a top score, and a row."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np

import sonic_coffea as sonic
from sonic_coffea.demo import features
from sonic_coffea.demo.samples import DATA
from sonic_coffea.scoring import Scoring

KEPT = "dataset", "pt", "eta", "phi", "mass", "msoftdrop", "weight"
"""What is written beside the scores; of simulation ``is_top``, too."""

_LABELS = ["qcd", "top"]


def toptagger() -> sonic.Model:
    """Return the network that reads constituents, as its preprocessing file declares it."""
    return sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json", labels=_LABELS)


def toptagger_inputs(events: Any) -> ak.Array:
    """Return the inputs of `toptagger` for each ``FatJet``; None without constituents.

    NanoAOD keeps no constituents of the softest jets; these have no score.
    """
    constituents = sonic.constituents(events)
    kept = ak.num(constituents, axis=2) > 0
    return ak.mask(features.constituent_features(events.FatJet, constituents), kept)


def substructure() -> sonic.Model:
    """Return the network for files that have no constituents."""
    inputs = {"features": sonic.Row(features.SUBSTRUCTURE_FIELDS)}
    return sonic.Model("substructure", inputs, {"softmax": _LABELS})


class TopTagging(Scoring):
    """Score every ``FatJet``, and write it with its dataset, weight and truth."""

    def process(self, events: Any) -> Any:
        """Score a chunk, whose jets are given what is written beside the scores."""
        jets = events.FatJet
        jets["dataset"] = np.full(len(events), events.metadata["dataset"])
        has_weight = "genWeight" in events.fields
        jets["weight"] = events.genWeight if has_weight else ak.ones_like(events.run)
        if "is_top" in self.keep:
            jets["is_top"] = features.is_merged_top(jets, events.GenPart)
        return super().process(ak.with_field(events, jets, "FatJet"))
