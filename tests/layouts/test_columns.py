"""Of events, only the columns that are named are read; without data, the type is that of scores."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from coffea.nanoevents.trace import trace_with_typetracer
from tests.nanoaod import sample

import sonic_coffea as sonic
from sonic_coffea.demo.features import constituent_features
from sonic_coffea.demo.samples import DATA
from sonic_coffea.errors import FieldError, InputError
from sonic_coffea.layouts import ByRow, bind_inputs, trace

JETS = ak.Array(
    [[{"pt": 50.0, "pf": [{"pt": 1.0, "eta": 0.0}]}, {"pt": 30.0, "pf": []}], []],
)


def without_data(array: ak.Array) -> ak.Array:
    return ak.Array(ak.to_layout(array).to_typetracer(forget_length=True))


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
    def __init__(self, model: sonic.Model, acquire: Any) -> None:
        self.models = {"top": model}
        self.objects = acquire

    def acquire(self, events: Any) -> dict[str, Any]:
        return {"top": self.objects(events)}

    def overlap(self, events: Any) -> Any:
        return events.FatJet.tau1

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        del events
        return {"n": ak.sum(scores["top"].Top) + ak.sum(scores.overlap)}


def scores_of(layout: Any) -> sonic.Model:
    return sonic.Model("m", {"x": layout}, {"y": ["QCD", "Top"]})


CONSTITUENT_BRANCHES = (
    "FatJet_pt FatJet_eta FatJet_phi FatJet_mass nFatJetPFCand FatJetPFCand_jetIdx nPFCand "
    "FatJetPFCand_pfCandIdx PFCand_pt PFCand_eta PFCand_phi PFCand_mass PFCand_pdgId"
)


@pytest.fixture
def events() -> Any:
    return sample(entry_stop=100)


@pytest.mark.parametrize(
    ("model", "acquire", "branches"),
    [
        (
            scores_of(sonic.Row(["pt", sonic.Feature("msoftdrop", scale=0.1)])),
            lambda events: events.FatJet,
            "FatJet_pt FatJet_msoftdrop",
        ),
        # Records that differ, so that they are a union.
        (
            scores_of(sonic.Row(["pt", "eta"])),
            lambda events: ak.concatenate([events.FatJet, events.Jet], axis=1),
            "FatJet_pt FatJet_eta nJet Jet_pt Jet_eta",
        ),
        (
            scores_of(sonic.Padded("eta", 4, sort_by="pt")),
            lambda events: events.FatJet,
            "FatJet_eta FatJet_pt",
        ),
        (
            sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json"),
            lambda events: constituent_features(events.FatJet, sonic.constituents(events)),
            CONSTITUENT_BRANCHES,
        ),
    ],
)
def test_coffea_finds_the_branches_of_a_processor(
    events: Any, model: sonic.Model, acquire: Any, branches: str
) -> None:
    """And contacts no server: there is none."""
    traced = trace_with_typetracer(Analysis(model, acquire).process, events, throw=True)
    assert traced == {"nFatJet", "FatJet_tau1", *branches.split()}


def test_only_the_named_columns_are_read() -> None:
    log: list[Any] = []

    def branches() -> set[str]:
        return {getattr(entry, "branch", entry) for entry in log}

    array = sample(access_log=log, entry_stop=200)
    sonic.Row(["pt", "msoftdrop"]).pack(array.FatJet)
    assert branches() == {"nFatJet", "FatJet_pt", "FatJet_msoftdrop"}
    constituents = sonic.constituents(array)
    log.clear()
    sonic.Padded("eta", 8).pack(constituents)
    assert branches() == {"PFCand_eta"}


class Shared(ak.Array):
    """Objects with a number that depends on the others of their list."""

    @property
    def part(self) -> Any:
        return self.pt / ak.sum(self.pt, axis=-1)


def test_properties_are_computed_in_the_lists_of_their_objects() -> None:
    behavior = {("*", "Shared"): Shared}
    jets = ak.Array([[1.0, 3.0], [], [2.0]])
    jets = ak.zip({"pt": jets}, with_name="Shared", behavior=behavior)
    events = ak.zip({"Jet": jets, "met": [1, 2, 3]}, depth_limit=1, behavior=behavior)
    assert sonic.Row("part").pack(jets).tolist() == [[0.25], [0.75], [1.0]]
    assert sonic.Row("part").pack(jets[jets.pt > 1]).tolist() == [[1.0], [1.0]]
    masked = ak.mask(jets, jets.pt > 1)
    assert sonic.Row("part").pack(masked).tolist() == [[1.0], [1.0]]
    for array in (events, {"Jet": jets}):
        assert sonic.Padded("Jet.part", 2).pack(array).tolist() == [
            [[0.25, 0.75]],
            [[0.0, 0.0]],
            [[1.0, 0.0]],
        ]


@pytest.mark.parametrize("mode", ["virtual", "eager"])
def test_metadata_of_the_chunk_is_a_channel(mode: str) -> None:
    metadata = {"year": "2018", "isMC": True, "dataset": "ttbar"}
    events = sample(mode=mode, entry_stop=20, metadata=metadata)
    year = sonic.Metadata("year", shift=2016)
    layout = sonic.Row([year, "FatJet.pt", sonic.Metadata("isMC")])
    assert layout.columns == ("FatJet.pt",)
    tensor = layout.pack(events)
    assert len(tensor) == ak.count(events.FatJet.pt)
    assert {(row[0], row[2]) for row in tensor.tolist()} == {(2.0, 1.0)}
    of_jets = sonic.Row([year, sonic.Feature("later", expression="pt * metadata(year)")])
    for jets in (events.FatJet, {"pt": events.FatJet.pt, "eta": events.FatJet.eta}):
        assert of_jets.pack(jets)[:, 0].tolist() == [2.0] * len(tensor)
    assert sonic.Padded(["FatJet.pt", year], 2).pack(events).shape == (20, 2, 2)
    assert sonic.Row(year).pack(events).tolist() == [[2.0]] * 20
    with pytest.raises(
        FieldError, match="the events' metadata have no 'yaer'; did you mean 'year'"
    ):
        sonic.Row(["FatJet.pt", sonic.Metadata("yaer")]).pack(events)
    with pytest.raises(InputError, match="'dataset' of .* is 'ttbar'; expected a number"):
        sonic.Row(["FatJet.pt", sonic.Metadata("dataset")]).pack(events)
    with pytest.raises(InputError, match="metadata have no 'year'; give coffea's events"):
        sonic.Row(["pt", year]).pack(ak.Array([{"pt": 1.0}]))
    traced = ak.Array(events.FatJet.layout.to_typetracer(forget_length=True), attrs=events.attrs)
    inputs = {"x": sonic.Row(["pt", year])}
    assert str(trace(inputs, {"y": sonic.Output()}, traced).type.content) == "var * float32"


@pytest.mark.parametrize("mode", ["virtual", "eager"])
def test_scores_attach_to_events_and_survive(mode: str, tmp_path: Any) -> None:
    array = sample(mode=mode, entry_stop=50)
    inputs = bind_inputs({"x": sonic.Row("pt")}, array.FatJet)
    output = ByRow("out", sonic.Output(["qcd", "top"]), inputs)
    n = len(inputs.rows)
    output.place(slice(0, n), n, {"out": np.arange(2 * n, dtype=np.float32).reshape(n, 2)})
    scores = inputs.rows.unflatten(output.content())
    array["FatJet", "top"] = scores
    assert ak.flatten(array.FatJet.top.qcd).tolist() == list(range(0, 2 * n, 2))
    sliced = array[10:20]
    assert sliced.FatJet.top.top.tolist() == scores.top[10:20].tolist()
    ak.to_parquet(ak.zip({"top": array.FatJet.top.top}), tmp_path / "jets.parquet")
    assert ak.from_parquet(tmp_path / "jets.parquet").top.tolist() == scores.top.tolist()


def traced(array: ak.Array) -> tuple[ak.Array, Any]:
    """The array without data, and what reports which of its buffers are read."""
    form, report = ak.typetracer.typetracer_with_report(array.layout.form_with_key("node{id}"))
    return ak.Array(form), report


@pytest.mark.parametrize(
    ("layout", "read"),
    [
        (sonic.Row(["Jet[:2].pt", "MET.pt"], missing=0.0), {"Jet.pt", "MET.pt"}),
        (
            sonic.Padded(["Jet.pt", "MET.pt", sonic.OneHot("Jet.id", [3])], 2),
            {"Jet.pt", "Jet.id", "MET.pt"},
        ),
        (sonic.Row(sonic.Feature("y", expression="Jet.pt / MET.pt")), {"Jet.pt", "MET.pt"}),
    ],
)
def test_columns_that_are_read_are_known_without_data(layout: Any, read: set[str]) -> None:
    events = ak.Array([{"Jet": [{"pt": 50.0, "id": 3}], "MET": {"pt": 80.0}}])
    tracer, report = traced(events)
    model = sonic.Model("m", {"in": layout}, {"y": ["a"]})
    assert model(tracer).type.content == model(events[:0]).type.content
    assert report.data_touched
    assert set(layout.columns) == read


@pytest.mark.parametrize(
    ("layouts", "buffers"),
    [
        ({"mask": sonic.Mask(2, of="pf")}, 2),
        (
            {
                "v": sonic.Pairwise(["pf.pt"], 3, "pt_i"),
                "t": sonic.Tokens({"pf": sonic.Padded("pf.pt", 3)}, flags="onehot"),
            },
            3,
        ),
    ],
)
def test_lists_are_read_with_their_fields_alone(layouts: Any, buffers: int) -> None:
    tracer, report = traced(JETS)
    scores = trace(layouts, {"y": sonic.Output(["ttH", "tt"])}, tracer)
    assert str(scores.type) == "## * var * {ttH: float32, tt: float32}"
    assert len(report.data_touched) == buffers
