"""The package's sample of top-quark and QCD jets, as the examples use it."""

import awkward as ak
import numba
import numpy as np
from coffea.nanoevents import NanoAODSchema, NanoEventsFactory
from sklearn.metrics import roc_auc_score

import sonic_coffea as sonic
from sonic_coffea.demo.features import constituent_features, is_merged_top
from sonic_coffea.demo.samples import DATA

NanoAODSchema.warn_missing_crossrefs = False
GRID = 16


def events(number):
    """Return the events of the files with this number: 1 for training, 2 for testing."""
    names = [DATA / f"{process}_{number}.root" for process in ("TTbar", "QCD")]
    return [NanoEventsFactory.from_root({str(n): "Events"}, mode="eager").events() for n in names]


def jets(number):
    """``jets * {pt, ..., is_top, parts: constituents * {part_..., px, py, pz, e, pt}}``, flat."""
    both = []
    for dataset in events(number):
        parts = sonic.constituents(dataset)
        features = constituent_features(dataset.FatJet, parts)
        order = ak.argsort(parts.pt, axis=-1, ascending=False, stable=True)
        pt, eta, phi, mass = (parts[name][order] for name in ("pt", "eta", "phi", "mass"))
        px, py, pz = pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)
        energy = np.sqrt((pt * np.cosh(eta)) ** 2 + mass**2)
        columns = {name: features[name] for name in features.fields}
        columns |= {"part_px": px, "part_py": py, "part_pz": pz, "part_energy": energy, "pt": pt}
        jet = {name: dataset.FatJet[name] for name in ("pt", "eta", "phi", "mass", "msoftdrop")}
        jet["is_top"] = is_merged_top(dataset.FatJet, dataset.GenPart)
        flat = ak.zip({**jet, "parts": ak.zip(columns)}, depth_limit=2)
        both.append(ak.flatten(flat))
    together = ak.concatenate([ak.values_astype(dataset, np.float32) for dataset in both])
    return together[ak.num(together.parts.pt) > 0]


@numba.njit
def _fill(images, starts, stops, deta, dphi, pt, kind):
    for row in range(len(starts)):
        for i in range(starts[row], stops[row]):
            x = int((deta[i] + 0.8) / 1.6 * GRID)
            y = int((dphi[i] + 0.8) / 1.6 * GRID)
            if 0 <= x < GRID and 0 <= y < GRID:
                images[row, kind[i], x, y] += pt[i]


def grids(jets):
    """``jets * 3 * 16 * 16``: sums over charged, neutral and electromagnetic constituents."""
    parts = jets.parts
    kind = ak.where(parts.part_isPhoton > 0, 2, ak.where(parts.part_isNeutralHadron > 0, 1, 0))
    offsets = np.r_[0, np.cumsum(ak.num(parts.pt))]
    flat = [np.asarray(ak.flatten(a)) for a in (parts.part_deta, parts.part_dphi, parts.pt, kind)]
    images = np.zeros((len(jets), 3, GRID, GRID), np.float32)
    _fill(images, offsets[:-1], offsets[1:], *flat)
    return np.log1p(images)


def auc(signal, score):
    """Return the area under the ROC curve."""
    return float(roc_auc_score(np.asarray(signal, bool), np.asarray(score)))
