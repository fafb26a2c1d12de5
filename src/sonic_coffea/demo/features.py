"""The input variables of the demo's networks, and the truth of each jet.

Training and inference share these functions. They work on plain arrays of NanoAOD branches and on
those of coffea.
"""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np

from sonic_coffea.model import within_cone

CONSTITUENT_FEATURES = (
    "part_deta",
    "part_dphi",
    "part_logpt",
    "part_logptrel",
    "part_loge",
    "part_logerel",
    "part_deltaR",
    "part_charge",
    "part_isChargedHadron",
    "part_isNeutralHadron",
    "part_isPhoton",
    "part_isElectron",
    "part_isMuon",
)
"""Fields of `constituent_features`, in the order of the network's channels."""

SUBSTRUCTURE_FIELDS = (
    *("pt", "eta", "mass", "msoftdrop"),
    *("tau1", "tau2", "tau3", "tau4"),
    "nConstituents",
)
"""Fields of FatJet, there since NanoAODv9: the inputs of the network without constituents."""

_RADIUS = 0.8


def constituent_features(jets: Any, constituents: Any) -> Any:
    """Describe each constituent of a jet relative to that jet.

    Parameters
    ----------
    jets
        ``events * jets * {pt, eta, phi, mass, ...}``, energies in GeV.
    constituents
        ``events * jets * var * {pt, eta, phi, mass, pdgId, ...}``, in any order. The codes are
        those of CMS particle flow: 211, 130, 22, 11, 13, and in the forward calorimeter 1
        (hadronic) and 2 (electromagnetic).

    Returns
    -------
    ak.Array
        ``events * jets * var * {part_deta: float32, part_dphi: float32, ...}`` with the fields of
        `CONSTITUENT_FEATURES` and a ``part_mask`` of ones, in descending pt. Finite wherever pt is
        positive.
    """
    order = ak.argsort(constituents.pt, axis=-1, ascending=False, stable=True)
    pt, eta, phi, mass, pdg_id = (
        constituents[field][order] for field in ("pt", "eta", "phi", "mass", "pdgId")
    )
    species = abs(pdg_id)
    is_lepton = (species == 11) | (species == 13)
    is_charged = is_lepton | (species == 211)
    deta = eta - jets.eta
    dphi = _wrap(phi - jets.phi)
    log_pt = np.log(pt)
    log_energy = np.log(_energy(pt, eta, mass))

    features = {
        "part_deta": deta,
        "part_dphi": dphi,
        "part_logpt": log_pt,
        "part_logptrel": log_pt - np.log(jets.pt),
        "part_loge": log_energy,
        "part_logerel": log_energy - np.log(_energy(jets.pt, jets.eta, jets.mass)),
        "part_deltaR": np.hypot(deta, dphi),
        # A negative lepton has a positive code.
        "part_charge": np.sign(pdg_id) * is_charged * (1 - 2 * is_lepton),
        "part_isChargedHadron": species == 211,
        "part_isNeutralHadron": (species == 130) | (species == 1),
        "part_isPhoton": (species == 22) | (species == 2),
        "part_isElectron": species == 11,
        "part_isMuon": species == 13,
        "part_mask": ak.ones_like(pt),
    }
    columns = {name: ak.values_astype(x, np.float32) for name, x in features.items()}
    return ak.without_parameters(ak.zip(columns))


def is_merged_top(jets: Any, genparts: Any) -> Any:
    """Tell which jets hold all three quarks of a hadronic top decay within their radius.

    Parameters
    ----------
    jets
        ``events * jets * {eta, phi, ...}``
    genparts
        ``events * var * {eta, phi, pdgId, genPartIdxMother, ...}``; a mother of -1 means none.
        Copies of one particle along its history, as in CMS files, are seen through.

    Returns
    -------
    ak.Array
        ``events * jets * bool``
    """
    quarks = ak.zip({"eta": genparts.eta, "phi": genparts.phi, "top": _top_of_quark(genparts)})
    tops = within_cone(jets, quarks[quarks.top >= 0], _RADIUS).top
    # events * jets * quarks * quarks of the same top
    same_top = tops[..., np.newaxis] == tops[:, :, np.newaxis, :]
    return ak.any(ak.sum(same_top, axis=-1) == 3, axis=-1)


def _top_of_quark(genparts: Any) -> Any:
    """Index of the top quark that each quark of a top decay comes from, -1 for all other particles.

    Only the first copy of a quark counts: the one whose mother is the top or its W boson.
    """
    species, mother = np.abs(genparts.pdgId), genparts.genPartIdxMother
    ancestor = mother = ak.mask(mother, mother >= 0)
    while ak.any(is_w := ak.fill_none(species[ancestor] == 24, value=False)):
        ancestor = ak.where(is_w, mother[ancestor], ancestor)
    is_quark = (species > 0) & (species <= 5)
    from_top = ak.fill_none(is_quark & (species[ancestor] == 6), value=False)
    return ak.fill_none(ak.mask(ancestor, from_top), -1)


def _wrap(phi: Any) -> Any:
    """Bring an angle into [-pi, pi]."""
    return phi - 2 * np.pi * np.rint(phi / (2 * np.pi))


def _energy(pt: Any, eta: Any, mass: Any) -> Any:
    return np.hypot(pt * np.cosh(eta), mass)
