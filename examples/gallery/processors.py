"""One processor of each kind: a producer that writes, a filter, and an analyzer with histograms."""

import tempfile
from pathlib import Path

import awkward as ak
import hist
from coffea import processor
from coffea.nanoevents import NanoAODSchema
from common import main, serving

import sonic_coffea as sonic
from sonic_coffea import provenance
from sonic_coffea.demo.features import constituent_features
from sonic_coffea.demo.samples import DATA, sample_files

MODELS = {"top": sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")}


class Tops(sonic.SonicProcessor):
    """The part that all three share: what they send."""

    models = MODELS

    def acquire(self, events):
        return {"top": constituent_features(events.FatJet, sonic.constituents(events))}


class Producer(Tops, processor.ProcessorABC):
    """Writes jets with their scores and provenance, to a file for each chunk."""

    def __init__(self, folder):
        self.folder = folder

    def produce(self, events, scores):
        top = scores["top"]
        jets = ak.zip(
            {"pt": events.FatJet.pt, "msoftdrop": events.FatJet.msoftdrop, "top": top.Top}
        )
        name = "{dataset}-{fileuuid}-{entrystart}.parquet".format(**events.metadata)
        provenance.to_parquet(jets, Path(self.folder) / name, top)
        return {"written": len(jets)}


class Filter(Tops, sonic.SonicFilter, processor.ProcessorABC):
    """Counts in events with a top quark, and reads nothing more of the others."""

    def decide(self, events, scores):
        return ak.any(scores["top"].Top > 0.9, axis=1)

    def produce(self, events, scores):
        return {"passed": len(events), "small jets": int(ak.sum(ak.num(events.Jet)))}


class Analyzer(Tops, processor.ProcessorABC):
    """Fills a histogram."""

    def produce(self, events, scores):
        top = hist.new.Reg(20, 0, 1, name="top").Int64().fill(ak.flatten(scores["top"].Top))
        return {"top": top}


def run():
    """Run all three on a file of each dataset of the sample."""
    NanoAODSchema.warn_missing_crossrefs = False
    files = {
        name: {"treename": "Events", "files": [str(names[0])]}
        for name, names in sample_files().items()
    }
    runner = processor.Runner(processor.IterativeExecutor(retries=0), schema=NanoAODSchema)
    with tempfile.TemporaryDirectory() as folder, serving({"toptagger": DATA / "toptagger.onnx"}):
        produced, passed, analyzed = (
            runner(files, instance) for instance in (Producer(folder), Filter(), Analyzer())
        )
        (model,) = provenance.read(next(Path(folder).iterdir()))["models"]
    return {
        **produced,
        **passed,
        "jets": int(analyzed["top"].sum(flow=True)),
        "version": model["version"],
    }


if __name__ == "__main__":
    main(run)
