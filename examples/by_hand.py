"""Call a model by hand in a processor: send first, do other work, take the scores last.

python by_hand.py [nano.root]
"""

import sys
import tempfile
from pathlib import Path

import awkward as ak
import hist
import numpy as np
from coffea import processor
from coffea.nanoevents import NanoAODSchema

import sonic_coffea as sonic
from sonic_coffea.demo.features import constituent_features, is_merged_top
from sonic_coffea.demo.samples import DATA


class ByHand(processor.ProcessorABC):
    """Scores of all jets, and of those that truly hold a top quark."""

    def __init__(self):
        self.model = sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")

    def process(self, events):
        """Send the jets, look for true tops meanwhile, then take the scores."""
        jets = events.FatJet
        pending = self.model.submit(constituent_features(jets, sonic.constituents(events)))
        truth = ak.flatten(is_merged_top(jets, events.GenPart))  # while the server infers
        top = ak.flatten(pending.result(timeout_s=60).Top)
        scores = hist.new.Bool(name="truth").Reg(20, 0, 1, name="top", label="top score").Int64()
        statistics = pending.statistics.to_plain()  # numbers that coffea adds up
        return {"top": scores.fill(truth, top), "sonic_statistics": statistics}


def main() -> None:
    NanoAODSchema.warn_missing_crossrefs = False  # the sample holds only a part of NanoAOD
    file = sys.argv[1] if len(sys.argv) > 1 else str(DATA / "TTbar_1.root")
    fileset = {"jets": {"treename": "Events", "files": [file]}}
    runner = processor.Runner(processor.IterativeExecutor(retries=0), chunksize=500)
    with tempfile.TemporaryDirectory() as scratch:
        models = {"toptagger": DATA / "toptagger.onnx"}
        repository = sonic.build_repository(Path(scratch) / "repository", models)
        with sonic.LocalServer(repository) as server, sonic.connect(server):
            out = runner(fileset, ByHand())
    print(sonic.report(out))
    counts = out["top"].values()
    fraction = counts[1] / np.maximum(counts.sum(axis=0), 1)
    print("true tops, by score:", *(f"{f:.2f}" for f in fraction))
    print(*counts.sum(axis=0).astype(int))


if __name__ == "__main__":
    main()
