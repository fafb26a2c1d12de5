"""Boosted trees by folds: each event is scored by the version that was not trained on it."""

import awkward as ak
import numpy as np
import xgboost
from common import NETWORKS, main, serving
from sample import auc, events

import sonic_coffea as sonic
from sonic_coffea.demo.features import SUBSTRUCTURE_FIELDS, is_merged_top

FIELDS = list(SUBSTRUCTURE_FIELDS)


def objects(number):
    """``events * {event, jets: var * {pt, ..., is_top}}``."""
    both = []
    for dataset in events(number):
        columns = {name: dataset.FatJet[name] for name in FIELDS}
        columns["is_top"] = is_merged_top(dataset.FatJet, dataset.GenPart)
        jets = ak.values_astype(ak.zip(columns), np.float32)
        both.append(ak.zip({"event": dataset.event, "jets": jets}, depth_limit=1))
    return ak.concatenate(both)


def run():
    """Score the sample's jets by two forests in one call."""
    model = sonic.Model("forest", {"features": sonic.Row(FIELDS)}, {"scores": ["top"]})
    test_events = objects(2)
    version = test_events.event % 2 + 1
    files = [NETWORKS / f"kfold_{number}.ubj" for number in (1, 2)]
    with serving({"forest": files}, extras=["xgboost"], max_batch_size=4096):
        pending = model.submit(test_events.jets, version=version)
        scores = pending.result()
        made = pending.provenance()
    assert made["version"] == "1, 2"
    for number, file in enumerate(files, 1):
        chosen = version == number
        rows = ak.flatten(test_events.jets[chosen])
        tensor = np.stack([ak.to_numpy(rows[name]) for name in FIELDS], 1)
        direct = xgboost.Booster(model_file=file).inplace_predict(tensor)
        np.testing.assert_allclose(ak.to_numpy(ak.flatten(scores.top[chosen])), direct, rtol=1e-5)
    top = ak.flatten(scores.top)
    return {
        "auc": auc(ak.flatten(test_events.jets.is_top), top),
        "rows": len(top),
        "versions": made["version"],
    }


if __name__ == "__main__":
    main(run)
