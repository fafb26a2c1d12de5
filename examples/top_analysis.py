"""Score the large-radius jets of NanoAOD files and fill histograms of the scores.

python top_analysis.py                                    # the package's sample, a local Triton
python top_analysis.py nano.root --server grpc://triton.example:8001 --workers 4
"""

import argparse
import contextlib
import tempfile
from pathlib import Path

import awkward as ak
import hist
import rich
from coffea import processor
from coffea.nanoevents import NanoAODSchema
from coffea.util import save
from distributed import Client, LocalCluster

import sonic_coffea as sonic
from sonic_coffea.demo.analysis import toptagger_inputs
from sonic_coffea.demo.samples import DATA, sample_files


class Schema(NanoAODSchema):
    """NanoAOD; a file may lack some collections."""

    warn_missing_crossrefs = False


class TopAnalysis(sonic.SonicProcessor, processor.ProcessorABC):
    """Scores of all jets, and the mass of those that look like top quarks."""

    def __init__(self):
        preprocess = DATA / "toptagger.preprocess.json"
        self.models = {"top": sonic.Model.from_weaver("toptagger", preprocess)}

    def acquire(self, events):
        """Send the constituents of each jet; a jet of which the file has none is None."""
        return {"top": toptagger_inputs(events)}

    def overlap(self, events):
        """Read the masses, while the servers infer."""
        return ak.flatten(events.FatJet.msoftdrop)

    def produce(self, events, scores):
        """Fill histograms."""
        dataset, top, mass = events.metadata["dataset"], scores["top"].Top, scores.overlap
        top = ak.flatten(top)
        new = hist.new.StrCat([dataset], name="dataset", growth=True)
        score = new.Reg(20, 0, 1, name="top", label="top score").Int64()
        tagged = new.Reg(50, 0, 300, name="mass", label="soft-drop mass [GeV]").Int64()
        score.fill(dataset, ak.drop_none(top))
        tagged.fill(dataset, mass[ak.fill_none(top > 0.9, value=False)])
        return {"top": score, "tagged": tagged, "jets": {dataset: len(top)}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="NanoAODv15 or PFNano files, or their URLs")
    parser.add_argument("--server", action="append", help="URL; by default a Triton is started")
    parser.add_argument("--workers", type=int, default=0, help="dask workers; 0: this process")
    parser.add_argument("--output", default="top.coffea", help="the histograms")
    options = parser.parse_args()
    files = options.files or [str(f) for names in sample_files().values() for f in names]
    fileset = {f: {"treename": "Events", "files": [f]} for f in files}  # each its own dataset
    with contextlib.ExitStack() as stack:
        client, executor = None, processor.IterativeExecutor(retries=0)
        if options.workers:
            cluster = LocalCluster(
                options.workers, threads_per_worker=1, dashboard_address="127.0.0.1:0"
            )
            client = stack.enter_context(Client(stack.enter_context(cluster)))
            executor = processor.DaskExecutor(client=client, retries=1)
        if not options.server:
            repository = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "repository"
            sonic.build_repository(repository, {"toptagger": DATA / "toptagger.onnx"})
            options.server = stack.enter_context(sonic.LocalServer(repository))
        stack.enter_context(sonic.connect(options.server, client=client))
        out = processor.Runner(executor, schema=Schema, chunksize=500)(fileset, TopAnalysis())
    rich.print(sonic.report(out), out["jets"])
    save(out, options.output)
