"""Photons: corrections, then an identification, for barrel and endcap (as in HiggsDNA)."""

import awkward as ak
import made_up
import numpy as np
import xgboost

import sonic_coffea as sonic

FIELDS = ["pt", "eta", "r9", "sieie", "phoIso"]
CORRECTED = ["sieie_corrected", "phoIso_corrected"]


def of_region(name, fields, label):
    """Return a model for the endcap and one for the barrel."""
    inputs = {"features": sonic.Row(fields)}
    models = [sonic.Model(f"{name}_{r}", inputs, {"scores": [label]}) for r in ("EE", "EB")]
    return sonic.Choice(dict(enumerate(models)), by="abs(eta) < 1.5")


class Photons(sonic.SonicProcessor):
    """Correct the shower shapes one by one, and identify photons with them."""

    models = {
        "sieie": of_region("sieie", FIELDS, "factor"),
        "phoIso": of_region("phoIso", [*FIELDS, "sieie_corrected"], "factor"),
        "id": of_region("id", [*FIELDS, *CORRECTED], "photon"),
    }

    def acquire(self, events):
        return {"sieie": events.Photon}

    def produce(self, events, scores):
        photons = events.Photon
        photons["sieie_corrected"] = photons.sieie * scores["sieie"].factor
        more = yield {"phoIso": photons}
        photons["phoIso_corrected"] = photons.phoIso * more["phoIso"].factor
        more = yield {"id": photons}
        return {"id": more["id"].photon}


# What follows compares this with the trees called by hand.


def by_hand(events, folder):
    """Return the identification of each photon, flat."""
    photons = ak.flatten(events.Photon)
    columns = {name: ak.to_numpy(photons[name]) for name in FIELDS}
    barrel = np.abs(columns["eta"]) < 1.5

    def scored(name, kind):
        table = np.stack(list(columns.values()), axis=1)
        scores = np.empty(len(table), "float32")
        for region, own in (("EE", ~barrel), ("EB", barrel)):
            trees = kind()
            trees.load_model(folder / f"{name}_{region}.json")
            if kind is xgboost.XGBClassifier:
                scores[own] = trees.predict_proba(table[own])[:, 1]
            else:
                scores[own] = trees.predict(table[own])
        return scores

    for name in ("sieie", "phoIso"):
        columns[f"{name}_corrected"] = columns[name] * scored(name, xgboost.XGBRegressor)
    return scored("id", xgboost.XGBClassifier)


def run(number=500):
    """Identify the photons of random events."""

    def make(folder):
        fields = {"sieie": FIELDS, "phoIso": [*FIELDS, CORRECTED[0]], "id": [*FIELDS, *CORRECTED]}
        for seed, region in enumerate(("EE", "EB")):
            for name, read in fields.items():
                path = folder / f"{name}_{region}.json"
                made_up.forest(path, read, seed=seed, regression=name != "id")

    events = made_up.events(number)
    with made_up.served(make) as folder:
        scores = Photons().process(events)["id"]
        return {"id": (ak.to_numpy(ak.flatten(scores)), by_hand(events, folder))}


if __name__ == "__main__":
    made_up.main(run)
