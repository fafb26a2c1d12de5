"""Jets to partons, then a classifier of what was assigned (as PocketCoffea's ttHbb with SPANet)."""

import awkward as ak
import made_up
import numpy as np
import onnxruntime

import sonic_coffea as sonic

JET = ["pt", "eta", "phi", "mass", "btag"]
ASSIGN = sonic.Model(
    "assign",
    {
        "Jet_data": sonic.Padded([f"Jet.{name}" for name in JET], 8, axis_order="LF"),
        "Jet_mask": sonic.Mask(8, of="Jet.pt", axis_order="L"),
        "Met_data": sonic.Tokens({"MET": sonic.Row(["MET.pt", "MET.phi"])}),
        "Lepton_data": sonic.Tokens({"Lepton": sonic.Row([f"Lepton.{name}" for name in JET[:4]])}),
    },
    {
        "higgs_log_probability": sonic.Output(
            ["b1", "b2"], per="constituent", axes=2, choose="argmax", of="Jet_data"
        ),
        "EVENT": ["ttbb", "ttH"],
    },
)
MASS = sonic.Feature("mass", expression="mass(b1, b2)")
CLASSIFY = sonic.Model(
    "classify", {"x": sonic.Row([MASS, "b1.btag", "b2.btag", "ttH"])}, {"y": ["weight"]}
)


class Higgs(sonic.SonicProcessor):
    """Find the Higgs boson's jets, and weight events with them."""

    models = {"assign": ASSIGN, "classify": CLASSIFY}

    def acquire(self, events):
        return {"assign": events[["Jet", "MET", "Lepton"]]}

    def produce(self, events, scores):
        assigned = scores["assign"]
        places = assigned.higgs_log_probability
        found = {name: events.Jet[places[name][:, np.newaxis]][:, 0] for name in ("b1", "b2")}
        rows = ak.zip({**found, "ttH": assigned.EVENT.ttH}, depth_limit=1)
        more = yield {"classify": rows}
        return {"weight": more["classify"].weight, "b1": places.b1}


# What follows compares this with the networks called by hand.


def by_hand(events, folder):
    """Return the weights, and the first jet of the Higgs boson."""

    def columns(record, names):
        return np.stack([ak.to_numpy(record[name]) for name in names], axis=1)[:, np.newaxis]

    mask = made_up.padded(ak.ones_like(events.Jet.pt), 8)
    tensors = {
        "Jet_data": np.stack([made_up.padded(events.Jet[name], 8) for name in JET], axis=2),
        "Jet_mask": mask,
        "Met_data": columns(events.MET, ["pt", "phi"]),
        "Lepton_data": columns(events.Lepton, JET[:4]),
    }
    session = onnxruntime.InferenceSession(folder / "assign.onnx")
    pairs, classes = session.run(["higgs_log_probability", "EVENT"], tensors)
    pairs = np.where(mask[:, :, np.newaxis] * mask[:, np.newaxis] > 0, pairs, -np.inf)
    first, second = np.unravel_index(pairs.reshape(len(pairs), -1).argmax(axis=1), (8, 8))
    b1, b2 = (
        {n: _taken(tensors, i, chosen) for i, n in enumerate(JET)} for chosen in (first, second)
    )
    mass = (two_body_mass(b1, b2), b1["btag"], b2["btag"], classes[:, 1])
    session = onnxruntime.InferenceSession(folder / "classify.onnx")
    (weights,) = session.run(None, {"x": np.stack(mass, axis=1).astype("float32")})
    return weights[:, 0], first


def _taken(tensors, field, chosen):
    return tensors["Jet_data"][np.arange(len(chosen)), chosen, field].astype("float64")


def two_body_mass(first, second):
    """Return the invariant mass of two jets."""
    total = 0
    for jet in (first, second):
        px, py = jet["pt"] * np.cos(jet["phi"]), jet["pt"] * np.sin(jet["phi"])
        pz = jet["pt"] * np.sinh(jet["eta"])
        energy = np.sqrt(px**2 + py**2 + pz**2 + jet["mass"] ** 2)
        total = total + np.array([energy, px, py, pz])
    return np.sqrt(np.maximum(total[0] ** 2 - (total[1:] ** 2).sum(axis=0), 0))


def run(number=500):
    """Find the Higgs boson's jets in random events."""

    def make(folder):
        shapes = {"Jet_data": (8, 5), "Jet_mask": (8,), "Met_data": (1, 2), "Lepton_data": (1, 4)}
        outputs = {"higgs_log_probability": (8, 8), "EVENT": (2,)}
        made_up.network(folder / "assign.onnx", shapes, outputs, seed=1)
        made_up.network(folder / "classify.onnx", {"x": (4,)}, {"y": (1,)}, seed=2)

    events = made_up.events(number)
    with made_up.served(make) as folder:
        found = Higgs().process(events)
        weights, first = by_hand(events, folder)
    return {
        "weight": (ak.to_numpy(found["weight"]), weights),
        "first jet": (ak.to_numpy(found["b1"]), first),
    }


if __name__ == "__main__":
    made_up.main(run)
