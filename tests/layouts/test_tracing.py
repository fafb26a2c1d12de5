"""Arrays without data: what is read of them, and what comes back."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from coffea.nanoevents import NanoEventsFactory
from coffea.nanoevents.trace import trace_with_typetracer
from tests.nanoaod import Schema

import sonic_coffea as sonic
from sonic_coffea.demo.features import constituent_features
from sonic_coffea.demo.samples import DATA
from sonic_coffea.errors import FieldError, InputError

JETS = ak.Array(
    [
        [
            {"pt": 50.0, "image": np.ones((2, 2)), "pf": [{"pt": 1.0, "eta": 0.0}]},
            {"pt": 30.0, "image": np.ones((2, 2)), "pf": []},
        ],
        [],
    ]
)
IMAGES = ak.with_field(JETS, ak.to_regular(ak.to_regular(JETS.image, 2), 3), "image")
MASKED = ak.mask(JETS, [[True, False], []])


def without_data(array: ak.Array) -> ak.Array:
    return ak.Array(ak.to_layout(array).to_typetracer(forget_length=True))


@pytest.mark.parametrize(
    ("layout", "array"),
    [
        (sonic.Row("pt"), JETS),
        (sonic.Row("pt"), MASKED),
        (sonic.Row("pt"), ak.flatten(JETS)),
        (sonic.Row("pf.pt"), JETS),
        (sonic.Padded("pf.pt", 4), JETS),
        (sonic.Padded("pf.pt", 4), MASKED),
        (sonic.Padded("pt", 4), JETS),
        (sonic.Bucketed("pf.pt", (1, 2)), JETS[::-1]),
        (sonic.Flat("pf.pt"), ak.to_regular(JETS[:, :0])),
        (sonic.Mask(4, of="pf.pt"), MASKED),
        (sonic.Dense("image"), IMAGES),
        (sonic.Dense("image", shape=(1, 2, 2)), IMAGES),
    ],
)
@pytest.mark.parametrize(
    "outputs",
    [{"y": ["a", "b"]}, {"y": None}, {"y": ["a"], "z": sonic.Output(["c"], splits="s")}],
)
def test_the_type_is_that_of_the_scores(layout: Any, array: ak.Array, outputs: Any) -> None:
    model = sonic.Model("m", {"x": layout}, outputs)
    traced = model(without_data(array))
    assert ak.backend(traced) == "typetracer"
    assert traced.type.content == model(array[:0]).type.content


def test_constituents_may_be_none() -> None:
    outputs = {"y": sonic.Output(["a"], per="constituent")}
    traced = sonic.Model("m", {"x": sonic.Padded("pf.pt", 4)}, outputs)(without_data(JETS))
    assert str(traced.type.content) == "var * var * ?{a: float32}"


def test_mistakes_are_found_without_data() -> None:
    array = without_data(JETS)
    with pytest.raises(FieldError, match="input 'x': no field 'ptt'; did you mean 'pt'"):
        sonic.Model("m", {"x": sonic.Row("ptt")}, {"y": None})(array)
    with pytest.raises(InputError, match="input 'x': field 'pt' has one number where a list"):
        sonic.Model("m", {"x": sonic.Padded("pt", 4)}, {"y": None})(without_data(JETS[0]))


class Analysis(sonic.SonicProcessor):
    def __init__(self, model: sonic.Model) -> None:
        self.models = {"top": model}

    def acquire(self, events: Any) -> dict[str, Any]:
        return {"top": events.FatJet}

    def overlap(self, events: Any) -> Any:
        return events.FatJet.tau1

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        return {"n": ak.sum(scores["top"].Top * scores.overlap)}


class ByConstituents(Analysis):
    def acquire(self, events: Any) -> dict[str, Any]:
        constituents = sonic.constituents(events)
        return {"top": constituent_features(events.FatJet, constituents)}


@pytest.fixture
def events() -> Any:
    return NanoEventsFactory.from_root(
        {str(DATA / "TTbar_1.root"): "Events"}, schemaclass=Schema, mode="virtual", entry_stop=100
    ).events()


def test_coffea_finds_the_branches_of_a_processor(events: Any) -> None:
    """And contacts no server: there is none."""
    layout = sonic.Row(["pt", sonic.Feature("msoftdrop", scale=0.1)])
    analysis = Analysis(sonic.Model("m", {"x": layout}, {"y": ["QCD", "Top"]}))
    branches = trace_with_typetracer(analysis.process, events, throw=True)
    assert branches == {"nFatJet", "FatJet_pt", "FatJet_msoftdrop", "FatJet_tau1"}


def test_a_column_that_sorts_is_read(events: Any) -> None:
    layout = sonic.Padded("eta", 4, sort_by="pt")
    analysis = Analysis(sonic.Model("m", {"x": layout}, {"y": ["QCD", "Top"]}))
    analysis.overlap = lambda events: 1.0  # type: ignore[method-assign]
    branches = trace_with_typetracer(analysis.process, events, throw=True)
    assert branches == {"nFatJet", "FatJet_eta", "FatJet_pt"}


def test_coffea_finds_the_branches_of_constituents(events: Any) -> None:
    model = sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")
    branches = trace_with_typetracer(ByConstituents(model).process, events, throw=True)
    assert branches == {
        "nFatJet",
        *(f"FatJet_{x}" for x in ("pt", "eta", "phi", "mass", "tau1")),
        *("nFatJetPFCand", "FatJetPFCand_jetIdx", "FatJetPFCand_pfCandIdx"),
        "nPFCand",
        *(f"PFCand_{x}" for x in ("pt", "eta", "phi", "mass", "pdgId")),
    }
