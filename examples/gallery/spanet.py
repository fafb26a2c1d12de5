"""SPANet assigns jets to a top quark, from jets, lepton, missing energy and event."""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from toys import tops

import sonic_coffea as sonic

JET = ["mass", "pt", "eta", "sin_phi", "cos_phi", "btag", "tagged"]


def single(collection, names):
    """Return the layouts of a sequence of length 1, ``[N, 1, F]``, and of its mask."""
    fields = [f"{collection}.{name}" for name in names]
    mask = sonic.Mask(beside=f"{collection}_data", axis_order="L", dtype="bool")
    return {
        f"{collection}_data": sonic.Tokens({collection: sonic.Row(fields)}),
        f"{collection}_mask": mask,
    }


MODEL = sonic.Model(
    "spanet",
    {
        "Jet_data": sonic.Padded([f"Jet.{name}" for name in JET], 16, axis_order="LF"),
        "Jet_mask": sonic.Mask(beside="Jet_data", axis_order="L", dtype="bool"),
        **single("Met", ["pt", "eta", "sin_phi", "cos_phi"]),
        **single("Lepton", ["pt", "eta", "sin_phi", "cos_phi", "is_e"]),
        **single("Event", ["ht"]),
    },
    {
        # [N, J, J, J]: the most probable triplet, as indices in each event's list of jets.
        "t1_assignment_log_probability": sonic.Output(
            ["q1", "q2", "b"], per="constituent", axes=3, choose="argmax", of="Jet_data"
        ),
        "EVENT_top": ["without", "with_top"],
    },
)


def run():
    """Assign jets to top quarks, and compare with the truth."""
    events = tops(1000, 3)
    with serving({"spanet": NETWORKS / "spanet.onnx"}, max_batch_size=64):
        scores = compare(MODEL, events, network("spanet"), batch=64, rtol=1e-3, atol=1e-3)
    chosen = scores.t1_assignment_log_probability
    assigned = np.column_stack([ak.to_numpy(chosen[name]) for name in ("q1", "q2", "b")])
    true = ak.to_numpy(events.true)
    right = (np.sort(assigned[:, :2], axis=1) == np.sort(true[:, :2], axis=1)).all(axis=1)
    right &= assigned[:, 2] == true[:, 2]
    number = ak.to_numpy(ak.num(events.Jet))
    return {
        "tops with all jets right": float(right.mean()),
        "by chance": float((2 / (number * (number - 1) * (number - 2))).mean()),
        "fewest jets": int(number.min()),
        "rows": len(events),
    }


if __name__ == "__main__":
    main(run)
