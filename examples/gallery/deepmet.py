"""DeepMET: one row for an event, of all candidates; their weights are summed here."""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from toys import candidates

import sonic_coffea as sonic

FIELDS = ["px", "py", "eta", "charge", "dz", "puppi"]


def run():
    """Weigh candidates, and compare the missing momentum with the true one."""
    cands, true = candidates(1000, 2)
    model = sonic.Model(
        "deepmet",
        {"candidates": sonic.Padded(FIELDS, 200)},
        {"weights": sonic.Output(per="constituent")},
    )
    with serving({model.name: NETWORKS / "deepmet.onnx"}, max_batch_size=64):
        weights = compare(model, cands, network("deepmet"), batch=64)

    def resolution(weight):
        """Half the central 68 % of what is off, in GeV."""
        off = [-ak.sum(weight * cands[p], axis=1) - true[p] for p in ("px", "py")]
        return float(np.diff(np.quantile(np.concatenate(off), [0.16, 0.84]))[0] / 2)

    return {
        "resolution [GeV]": resolution(weights),
        "without weights [GeV]": resolution(ak.ones_like(cands.px)),
        "by puppi [GeV]": resolution(cands.puppi),
        "rows": len(cands),
    }


if __name__ == "__main__":
    main(run)
