"""Four b jets: candidates and other jets in one network, in three folds (as in coffea4bees)."""

import awkward as ak
import made_up
import numpy as np
import onnxruntime

import sonic_coffea as sonic

FIELDS = ["pt", "eta", "phi", "mass"]
INPUTS = {
    "candidates": sonic.Padded([f"candidates.{name}" for name in FIELDS], 4),
    "others": sonic.Padded([f"others.{name}" for name in [*FIELDS, "btag"]], 8, fill=-1),
    "event": sonic.Row(
        [
            sonic.Feature("others", expression="num(others)"),
            sonic.Feature("ht", expression="sum(candidates.pt)"),
        ]
    ),
}
CLASSES = sonic.Output(["d4", "d3", "t4", "t3"], function="softmax")
FOLDS = sonic.Folds(
    [sonic.Model(f"fold_{n}", INPUTS, {"classes": CLASSES}) for n in range(3)], fold="event % 3"
)


def weighted(events):
    """Return the weight that makes three b jets look like four, for each event."""
    jets = events.Jet[ak.argsort(events.Jet.btag, ascending=False)]
    rows = ak.zip(
        {"candidates": jets[:, :4], "others": jets[:, 4:], "event": events.event}, depth_limit=1
    )
    scores = FOLDS(rows)
    return (scores.d4 - scores.t4) / scores.d3


# What follows compares this with the networks called by hand.


def by_hand(events, folder):
    """Return the weights."""
    jets = events.Jet[ak.argsort(events.Jet.btag, ascending=False)]

    def padded(array, fields, length, fill):
        return np.stack([made_up.padded(array[f], length, fill) for f in fields], axis=1)

    numbers = [ak.num(jets) - 4, ak.sum(jets[:, :4].pt, axis=1)]
    tensors = {
        "candidates": padded(jets[:, :4], FIELDS, 4, 0),
        "others": padded(jets[:, 4:], [*FIELDS, "btag"], 8, -1),
        "event": np.stack([ak.to_numpy(n) for n in numbers], axis=1).astype("float32"),
    }
    weights = np.empty(len(events), "float32")
    for n in range(3):
        own = ak.to_numpy(events.event) % 3 == n
        session = onnxruntime.InferenceSession(folder / f"fold_{n}.onnx")
        (classes,) = session.run(None, {name: tensor[own] for name, tensor in tensors.items()})
        d4, d3, t4, _ = made_up.softmax(classes).T
        weights[own] = (d4 - t4) / d3
    return weights


def run(number=500):
    """Weight random events."""

    def make(folder):
        shapes = {"candidates": (4, 4), "others": (5, 8), "event": (2,)}
        for n in range(3):
            made_up.network(folder / f"fold_{n}.onnx", shapes, {"classes": (4,)}, seed=n)

    events = made_up.events(number)
    with made_up.served(make) as folder:
        return {"weight": (ak.to_numpy(weighted(events)), by_hand(events, folder))}


if __name__ == "__main__":
    made_up.main(run)
