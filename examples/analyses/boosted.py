"""Large-radius jets: a transformer's 316 numbers become one discriminant (as in HHbbVV)."""

import awkward as ak
import made_up
import numpy as np
import onnxruntime

import sonic_coffea as sonic

LABELS = [f"class_{i}" for i in range(314)]
CHANNELS = [
    sonic.Feature("pf.pt", function="log", shift=1.5, scale=0.6),
    sonic.Feature("deta", expression="pf.eta - eta"),
    sonic.Feature("dphi", expression="delta_phi(pf.phi, phi)"),
    "pf.charge",
]
MODEL = sonic.Model(
    "tagger",
    {"features": sonic.Padded(CHANNELS, 128), "mask": sonic.Mask(128)},
    {
        "classes": sonic.Output(
            LABELS, function="softmax", groups={"HVV": slice(0, 9), "QCD": slice(309, 314)}
        ),
        "masses": ["visible", "full"],
    },
)


def tagged(events):
    """Return the jets with the discriminant and the regressed mass."""
    jets = events.FatJet
    scores = MODEL(jets)
    jets["HVV"] = scores.classes.HVV / (scores.classes.HVV + scores.classes.QCD)
    jets["regressed"] = scores.masses.visible
    return jets


# What follows compares this with the network called by hand.


def by_hand(events, folder):
    """Return the discriminant and the mass, flat."""
    jets = ak.flatten(events.FatJet)

    pf = jets.pf
    dphi = (pf.phi - jets.phi + np.pi) % (2 * np.pi) - np.pi
    columns = [(np.log(pf.pt) - 1.5) * 0.6, pf.eta - jets.eta, dphi, pf.charge]
    padded = [made_up.padded(column, 128) for column in [*columns, ak.ones_like(pf.pt)]]
    tensors = {"features": np.stack(padded[:-1], axis=1), "mask": padded[-1][:, np.newaxis]}
    session = onnxruntime.InferenceSession(folder / "tagger.onnx")
    classes, masses = session.run(["classes", "masses"], tensors)
    classes = made_up.softmax(classes)
    signal, background = classes[:, 0:9].sum(axis=1), classes[:, 309:314].sum(axis=1)
    return signal / (signal + background), masses[:, 0]


def run(number=500):
    """Tag the jets of random events."""

    def make(folder):
        shapes = {"features": (len(CHANNELS), 128), "mask": (1, 128)}
        made_up.network(folder / "tagger.onnx", shapes, {"classes": (314,), "masses": (2,)}, seed=1)

    events = made_up.events(number)
    with made_up.served(make) as folder:
        jets = ak.flatten(tagged(events))
        discriminant, mass = by_hand(events, folder)
    return {
        "discriminant": (ak.to_numpy(jets.HVV), discriminant),
        "mass": (ak.to_numpy(jets.regressed), mass),
    }


if __name__ == "__main__":
    made_up.main(run)
