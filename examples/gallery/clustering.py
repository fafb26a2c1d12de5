"""Anti-kt clustering as a service: a function, not a network, returns a collection of jets."""

from pathlib import Path

import awkward as ak
import numpy as np
from antikt import cluster
from common import compare, main, serving
from sample import events

import sonic_coffea as sonic
from sonic_coffea.server import Served

INPUTS = {"particles": ("float32", ["n", 4]), "row_splits": ("int64", ["splits"])}
OUTPUTS = {"jets": ("float32", ["jets", 4]), "jet_splits": ("int64", ["splits"])}


def run(number=100):
    """Cluster the candidates of events, on the server and in this process."""
    top, _ = events(2)
    cands = top.PFCands if "PFCands" in top.fields else top.PFCand
    pt, eta, phi, mass = (cands[name][:number] for name in ("pt", "eta", "phi", "mass"))
    energy = np.sqrt((pt * np.cosh(eta)) ** 2 + mass**2)
    momentum = {"px": pt * np.cos(phi), "py": pt * np.sin(phi), "pz": pt * np.sinh(eta)}
    four = ak.values_astype(ak.zip({**momentum, "e": energy}), np.float32)
    model = sonic.Model(
        "antikt",
        {"particles": sonic.Flat(["px", "py", "pz", "e"], splits="row_splits")},
        {"jets": sonic.Output(["pt", "eta", "phi", "n"], splits="jet_splits")},
    )
    source = Served(
        f"{Path(__file__).with_name('antikt.py')}:cluster", inputs=INPUTS, outputs=OUTPUTS
    )
    with serving({model.name: source}, max_batch_size=0, warmup=False):
        jets = compare(model, four, lambda tensors: cluster(**tensors), batch=50)
    # As many jets for each event as the function finds.
    assert len(jets) == len(four)
    leading = ak.firsts(jets.pt[ak.argsort(jets.pt, ascending=False)])
    stored = ak.max(top.FatJet.pt[:number], axis=1)
    return {
        "jets an event": float(ak.mean(ak.num(jets))),
        "leading pt over that of the file": float(
            np.median(ak.to_numpy(ak.drop_none(leading / stored)))
        ),
        "rows": len(four),
    }


if __name__ == "__main__":
    main(run)
