"""Trees for whole events: leading jets side by side, NaN where there is none, k folds."""

import awkward as ak
import numpy as np
import xgboost
from common import NETWORKS, main, serving
from sample import auc, events

import sonic_coffea as sonic

FOLDS, JETS = 3, 3
NAMES = ("pt", "eta", "msoftdrop")
RATIOS = [
    sonic.Feature(f"tau32_{i}", expression=f"FatJet[{i}].tau3 / FatJet[{i}].tau2", nonfinite=np.nan)
    for i in range(JETS)
]
FEATURES = sonic.Row(
    [*(f"FatJet[:{JETS}].{name}" for name in NAMES), *RATIOS, "Jet[:4].pt", "n_jets"],
    missing=np.nan,
)


def objects(number):
    """``events * {FatJet: var * {...}, Jet: var * {pt}, n_jets, event, is_top}``."""
    both = []
    for label, dataset in zip((True, False), events(number), strict=True):
        fat = ak.zip({name: dataset.FatJet[name] for name in (*NAMES, "tau2", "tau3")})
        jets = ak.zip({"pt": dataset.Jet.pt})
        columns = {"FatJet": fat, "Jet": jets, "n_jets": ak.num(jets), "event": dataset.event}
        columns["is_top"] = np.full(len(dataset), label)
        both.append(ak.zip(columns, depth_limit=1))
    return ak.concatenate(both)


def by_hand(records):
    """Return the same tensor, made with awkward and numpy."""

    def leading(column, number):
        padded = ak.to_numpy(ak.fill_none(ak.pad_none(column, number, clip=True), np.nan))
        return padded.astype(np.float32)

    fat = records.FatJet
    columns = [leading(fat[name], JETS) for name in NAMES]
    with np.errstate(all="ignore"):
        ratio = leading(fat.tau3, JETS) / leading(fat.tau2, JETS)
    columns.append(np.where(np.isfinite(ratio), ratio, np.nan))
    number = ak.to_numpy(records.n_jets)[:, None]
    return np.concatenate([*columns, leading(records.Jet.pt, 4), number], 1).astype(np.float32)


def fold(records):
    """Return the fold of each event: 1 to 3. The forest of a fold has not seen its events."""
    return ak.to_numpy(records.event) % FOLDS + 1


def run():
    """Score the events that the forests were trained on, each by the one that has not seen it."""
    model = sonic.Model("events", {"features": FEATURES}, {"scores": ["top"]})
    records = objects(1)
    files = [NETWORKS / f"event_classifier_{number}.ubj" for number in range(1, FOLDS + 1)]
    with serving({model.name: files}, extras=["xgboost"], max_batch_size=4096):
        scores = model(records, version=fold(records))
    tensor = by_hand(records)
    np.testing.assert_array_equal(FEATURES.pack(records), tensor)
    direct = np.empty((FOLDS, len(records)))
    for number, file in enumerate(files):
        direct[number] = xgboost.Booster(model_file=file).inplace_predict(tensor)
    own = np.arange(FOLDS)[:, None] == fold(records) - 1
    np.testing.assert_allclose(ak.to_numpy(scores.top), direct.T[own.T], rtol=1e-5)
    seen = np.where(own, 0, direct).sum(axis=0)
    return {
        "auc": auc(records.is_top, scores.top),
        "auc of forests that have seen the events": auc(records.is_top, seen),
        "share of NaN": float(np.isnan(tensor).mean()),
        "rows": len(records),
    }


if __name__ == "__main__":
    main(run)
