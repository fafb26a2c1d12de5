"""The demo's processor: each large-radius jet gets a top score, and a row of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
from coffea import processor

import sonic_coffea as sonic
from sonic_coffea import provenance
from sonic_coffea.demo import features
from sonic_coffea.demo.samples import DATA
from sonic_coffea.model import has_constituents
from sonic_coffea.processor import chunk_name


def toptagger() -> sonic.Model:
    """Return the network that reads constituents, as its preprocessing file declares it."""
    return sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")


def toptagger_inputs(events: Any) -> ak.Array:
    """Return the inputs of `toptagger` for each ``FatJet``; None without constituents.

    NanoAOD keeps no constituents of the softest jets; these have no score.
    """
    constituents = sonic.constituents(events)
    kept = ak.num(constituents, axis=2) > 0
    return ak.mask(features.constituent_features(events.FatJet, constituents), kept)


def substructure() -> sonic.Model:
    """Return the network for files that have no constituents."""
    return sonic.Model(
        "substructure",
        inputs={"features": sonic.Row(features.SUBSTRUCTURE_FIELDS)},
        outputs={"softmax": ["QCD", "Top"]},
    )


class TopTagging(sonic.SonicProcessor, processor.ProcessorABC):  # type: ignore[misc]
    """Score every ``FatJet``, and write it to a folder."""

    def __init__(self, jets_dir: str | Path) -> None:
        self.jets_dir = str(jets_dir)
        self.models = {"toptagger": toptagger(), "substructure": substructure()}

    def acquire(self, events: Any) -> dict[str, Any]:
        """Send constituents where the file has them, jet variables where not."""
        if not has_constituents(events):
            return {"substructure": events.FatJet}
        return {"toptagger": toptagger_inputs(events)}

    def overlap(self, events: Any) -> Any:
        """Find out which jets truly are tops, while the server infers."""
        if "GenPart" not in events.fields:
            return None
        return features.is_merged_top(events.FatJet, events.GenPart)

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        """Write the jets with their scores."""
        (scored,) = scores.values()
        jets, truth = events.FatJet, scores.overlap
        dataset = events.metadata["dataset"]
        weight = events.genWeight if "genWeight" in events.fields else ak.ones_like(events.run)
        columns = {
            **{name: events[name] for name in ("run", "luminosityBlock", "event")},
            "weight": weight,
            "index": ak.local_index(jets.pt),
            **{name: jets[name] for name in ("pt", "eta", "phi", "mass", "msoftdrop")},
            "top": scored.Top,
        }
        if truth is not None:
            columns["is_top"] = truth
        flat = ak.flatten(ak.zip(columns, depth_limit=2))
        written = ak.drop_none(ak.with_field(flat, dataset, "dataset"), axis=0)
        path = Path(self.jets_dir) / f"{dataset}-{chunk_name(events.metadata)}.parquet"
        provenance.to_parquet(written, path, scored)
        return {}
