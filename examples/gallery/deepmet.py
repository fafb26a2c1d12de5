"""DeepMET: one row for each event, with numbers and categories of its candidates."""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from toys import candidates, with_categories

import sonic_coffea as sonic

LENGTH = 200
PARTICLES = {211: 1, -211: 1, 11: 2, -11: 2, 13: 3, -13: 3, 22: 4, 130: 5}
CHARGES = {-1: 1, 0: 2, 1: 3}
NUMBERS = ["px", "py", sonic.Feature("dz", function="abs", upper=5.0), "puppi"]


def indices(name, categories):
    """Return the indices of an embedding, ``[N, L]``; 0 is padding."""
    feature = sonic.Feature(name, categories=categories)
    return sonic.Padded(feature, LENGTH, dtype="int64", axis_order="L")


MODEL = sonic.Model(
    "deepmet",
    {
        "candidates": sonic.Padded(NUMBERS, LENGTH, axis_order="LF"),
        "particle": indices("pdgId", PARTICLES),
        "charge": indices("charge", CHARGES),
    },
    {"weights": sonic.Output(per="constituent")},
)


def run():
    """Weigh candidates, and compare the missing momentum with the true one."""
    estimate, true = candidates(1000, 2)
    cands = with_categories(estimate, 3)
    with serving({MODEL.name: NETWORKS / "deepmet.onnx"}, max_batch_size=64):
        weights = compare(MODEL, cands, network("deepmet"), batch=64)
        # As if all were neutral hadrons: dz then says nothing.
        neutral = ak.with_field(cands, ak.full_like(cands.pdgId, 130), "pdgId")
        alike = MODEL(ak.with_field(neutral, ak.zeros_like(cands.charge), "charge"))
    expected = [[PARTICLES[n] for n in ids] for ids in cands.pdgId[:9].tolist()]
    packed = MODEL.inputs["particle"].pack(cands[:9])
    for row, known in zip(packed.tolist(), expected, strict=True):
        assert row == (known + [0] * LENGTH)[:LENGTH]

    def resolution(weight):
        """Half the width of the central 68 % of the differences, in GeV."""
        off = [-ak.sum(weight * cands[p], axis=1) - true[p] for p in ("px", "py")]
        return float(np.diff(np.quantile(np.concatenate(off), [0.16, 0.84]))[0] / 2)

    return {
        "resolution [GeV]": resolution(weights),
        "with one category for all [GeV]": resolution(alike),
        "without weights [GeV]": resolution(ak.ones_like(cands.px)),
        "rows": len(cands),
    }


if __name__ == "__main__":
    main(run)
