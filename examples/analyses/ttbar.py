"""Top quark pairs: trees for even and odd events assign jets to quarks (AGC)."""

from itertools import permutations

import awkward as ak
import made_up
import numpy as np
import xgboost

import sonic_coffea as sonic

ROLES = ("b_had", "b_lep", "q1", "q2")
ORDERS = np.array([order for order in permutations(range(4)) if order[2] < order[3]])
FEATURES = {
    "dr_lepton_b": "delta_r(lepton, b_lep)",
    "dr_quarks": "delta_r(q1, q2)",
    "dr_quark_b": "delta_r(q1, b_had)",
    "mass_lepton_b": "mass(lepton, b_lep)",
    "mass_w": "mass(q1, q2)",
    "btags": "b_had.btag + b_lep.btag",
    "btags_w": "q1.btag + q2.btag",
    "pt": "b_had.pt + b_lep.pt + q1.pt + q2.pt",
}
ROW = sonic.Row([sonic.Feature(name, expression=text) for name, text in FEATURES.items()])
TREES = [sonic.Model(f"trees_{n}", {"features": ROW}, {"scores": ["right"]}) for n in (0, 1)]
MODEL = sonic.Folds(TREES, fold="event % 2")


def assigned(events):
    """Return the best assignment of four jets: ``events * {b_had, b_lep, q1, q2, score}``."""
    roles = {name: events.Jet[:, ORDERS[:, i]] for i, name in enumerate(ROLES)}
    tried = ak.zip({**roles, "lepton": events.Lepton[:, np.newaxis]}, depth_limit=2)
    tried["score"] = MODEL(tried, events=events).right
    return tried[ak.argmax(tried.score, axis=1, keepdims=True)][:, 0]


# What follows compares this with the trees called by hand.


def by_hand(events, folder):
    """Return the scores of all assignments: ``[events, 12]``."""

    def angle(a, b):
        dphi = (a.phi - b.phi + np.pi) % (2 * np.pi) - np.pi
        return np.hypot(a.eta - b.eta, dphi)

    def mass(a, b):
        def vector(p):
            px, py, pz = p.pt * np.cos(p.phi), p.pt * np.sin(p.phi), p.pt * np.sinh(p.eta)
            return np.sqrt(px**2 + py**2 + pz**2 + p.mass**2), px, py, pz

        total, *momentum = (x + y for x, y in zip(vector(a), vector(b), strict=True))
        return np.sqrt(np.maximum(total**2 - sum(p**2 for p in momentum), 0))

    boosters = [xgboost.XGBClassifier() for _ in TREES]
    for booster, model in zip(boosters, TREES, strict=True):
        booster.load_model(folder / f"{model.name}.json")
    scores = np.empty((len(events), len(ORDERS)))
    for k, order in enumerate(ORDERS):
        bh, bl, q1, q2 = (events.Jet[:, int(i)] for i in order)
        columns = [
            angle(events.Lepton, bl),
            angle(q1, q2),
            angle(q1, bh),
            mass(events.Lepton, bl),
            mass(q1, q2),
            bh.btag + bl.btag,
            q1.btag + q2.btag,
            bh.pt + bl.pt + q1.pt + q2.pt,
        ]
        table = np.stack([ak.to_numpy(column) for column in columns], axis=1).astype("float32")
        for n, booster in enumerate(boosters):
            own = ak.to_numpy(events.event) % 2 == n
            scores[own, k] = booster.predict_proba(table[own])[:, 1]
    return scores


def run(number=500):
    """Assign the jets of random events."""

    def make(folder):
        for n, model in enumerate(TREES):
            made_up.forest(folder / f"{model.name}.json", FEATURES, seed=n)

    events = made_up.events(number)
    with made_up.served(make) as folder:
        best = assigned(events)
        expected = by_hand(events, folder)
    return {"assignments": (ak.to_numpy(best.score), expected.max(axis=1))}


if __name__ == "__main__":
    made_up.main(run)
