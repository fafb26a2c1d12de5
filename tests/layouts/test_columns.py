"""Of events, only the columns that are named are read; without data, the type is that of scores."""

from __future__ import annotations

import ast
from typing import Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import NumpyArray
from coffea.nanoevents.trace import trace_with_typetracer
from tests.nanoaod import sample

import sonic_coffea as sonic
from sonic_coffea.demo.features import constituent_features
from sonic_coffea.demo.samples import DATA
from sonic_coffea.errors import FieldError, InputError
from sonic_coffea.layouts import bind_inputs
from sonic_coffea.testing import FakeModel, FakeServer

JETS = ak.Array([[{"m": 5.0, "pf": [{"pt": 1.0, "id": 3}]}, {"m": 3.0, "pf": []}], []])


def scores_of(layout: Any) -> sonic.Model:
    return sonic.Model("m", {"x": layout}, {"y": ["QCD", "Top"]})


LINKED_BRANCHES = (
    "nFatJet FatJet_pt FatJet_eta FatJet_phi FatJet_mass nFatJetPFCand FatJetPFCand_jetIdx nPFCand "
    "FatJetPFCand_pfCandIdx PFCand_pt"
)


def of_copied(events: Any) -> Any:
    """The constituents of jets that only their directions tell."""
    jets = ak.zip({name: events.FatJet[name] * 1 for name in ("pt", "eta", "phi", "mass")})
    return sonic.constituents(ak.with_field(events, jets, "FatJet"))


def renamed(events: Any) -> Any:
    """Events with a column of the file in a collection of another name."""
    return ak.with_field(events, ak.zip({"pt": events.PFCand.pt}), "Candidate")


REFERRED = sonic.Feature("Candidate.pt", index="FatJetPFCand.pfCandIdx")


@pytest.mark.parametrize(
    ("model", "acquire", "branches"),
    [
        # Records that differ, so that they are a union.
        (
            scores_of(sonic.Row(["pt", sonic.Feature("eta", scale=0.1)])),
            lambda events: ak.concatenate([events.FatJet, events.Jet], axis=1),
            "nFatJet FatJet_pt FatJet_eta nJet Jet_pt Jet_eta",
        ),
        (
            scores_of(sonic.Padded("eta", 4, sort_by="pt")),
            lambda events: events.FatJet,
            "nFatJet FatJet_eta FatJet_pt",
        ),
        (
            sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json"),
            lambda events: constituent_features(events.FatJet, sonic.constituents(events)),
            f"{LINKED_BRANCHES} PFCand_eta PFCand_phi PFCand_mass PFCand_pdgId",
        ),
        (
            scores_of(sonic.Padded("pt", 4)),
            of_copied,
            f"{LINKED_BRANCHES} run luminosityBlock event",
        ),
        (
            scores_of(sonic.Padded(REFERRED, 4)),
            renamed,
            "nFatJetPFCand FatJetPFCand_pfCandIdx nPFCand PFCand_pt",
        ),
    ],
)
def test_coffea_finds_the_branches_of_a_model(
    model: sonic.Model, acquire: Any, branches: str
) -> None:
    """And contacts no server: there is none."""

    def process(events: Any) -> Any:
        return ak.sum(model(acquire(events)).Top)

    traced = trace_with_typetracer(process, sample(entry_stop=100), throw=True)
    assert traced == {*branches.split()}


def test_variations_with_an_index_read_the_collections_of_the_model() -> None:
    log: list[Any] = []
    events = sample(access_log=log, entry_stop=50)
    referred = sonic.Feature("PFCand.pt", index="FatJetPFCand.pfCandIdx")
    model = sonic.Model("m", {"x": sonic.Padded(referred, 4)}, {"y": ["a"]})
    with FakeServer({"m": FakeModel.of(model)}) as server, sonic.connect(server.url):
        scores = model(sonic.Variations(nominal=events, up=events[::-1]))
        assert scores["up"].a.tolist() == scores["nominal"].a.tolist()[::-1]
        assert scores["nominal"].a.tolist() == model(events).a.tolist()
    read = {getattr(entry, "branch", entry).partition("_")[0] for entry in log}
    known = {"PFCand", "FatJetPFCand", "run", "luminosityBlock", "event"}
    assert {name.removeprefix("n") for name in read} <= known


class Shared(ak.Array):
    """Objects with a number that depends on the others of their list."""

    @property
    def part(self) -> Any:
        return self.pt / ak.sum(self.pt, axis=-1)


def test_properties_are_computed_in_the_lists_of_their_objects() -> None:
    behavior = {("*", "Shared"): Shared}
    jets = ak.Array([[1.0, 3.0], [], [2.0], [6.0, 2.0]])
    jets = ak.zip({"pt": jets[::-1]}, with_name="Shared", behavior=behavior)
    events = ak.zip({"Jet": jets, "met": [1, 2, 3, 4]}, depth_limit=1, behavior=behavior)
    last = sonic.Feature("y", expression="Jet[-1].part * met")
    layout = sonic.Row(["Jet[0].part", last], missing=-1.0)
    expected = [[0.75, 0.25], [1.0, 2.0], [-1.0, -1.0], [0.25, 3.0]]
    for array in (events, {"Jet": jets, "met": events.met}):
        assert layout.pack(array).tolist() == expected
    in_lists = [[[0.75, 0.25]], [[1.0, 0.0]], [[0.0, 0.0]], [[0.25, 0.75]]]
    for array in (events, {"Jet": jets}):
        assert sonic.Padded("Jet.part", 2).pack(array).tolist() == in_lists
    for cut in (jets[jets.pt > 2], ak.mask(jets, jets.pt > 2)):
        assert sonic.Row("part").pack(cut).tolist() == [[1.0], [1.0]]
    some = layout.pack(ak.mask(events, [True, False, True, True]))
    assert some.tolist() == [expected[0], *expected[2:]]  # an event that is None is not sent
    with pytest.raises(FieldError, match=r"no field 'share' \(in 'Jet\[0\].share'\)"):
        sonic.Row("Jet[0].share").pack(events)
    without = ak.zip({"eta": [1.0]}, with_name="Shared", behavior=behavior)
    with pytest.raises(InputError, match="field 'part' cannot be computed: no field named 'pt'"):
        sonic.Row("part").pack(without)


def test_metadata_of_the_chunk_is_a_channel() -> None:
    metadata = {"year": "2018", "isMC": True, "dataset": "ttbar", "part": "2016_1"}
    events = sample(entry_stop=20, metadata=metadata)
    year = sonic.Metadata("year", shift=2016)
    layout = sonic.Row([year, "FatJet.pt", sonic.Metadata("isMC")])
    assert layout.columns == ("FatJet.pt",)
    tensor = layout.pack(events)
    assert len(tensor) == ak.count(events.FatJet.pt)
    assert {(row[0], row[2]) for row in tensor.tolist()} == {(2.0, 1.0)}
    kept = ak.Array([{"pt": 9.0}, None])  # as after ak.mask
    kept = ak.with_parameter(kept, "metadata", metadata)
    assert sonic.Row(["pt", year]).pack(kept).tolist() == [[9, 2]]
    of_jets = sonic.Row([year, sonic.Feature("later", expression="pt * metadata(year)")])
    for jets in (events.FatJet, {"pt": events.FatJet.pt}):
        assert of_jets.pack(jets)[:, 0].tolist() == [2.0] * len(tensor)
    assert sonic.Padded(["FatJet.pt", year], 2).pack(events).shape == (20, 2, 2)
    assert sonic.Row(year).pack(events).tolist() == [[2.0]] * 20
    for name, message in (
        ("yaer", "the events' metadata have no 'yaer'; did you mean 'year'"),
        ("part", "'part' of .* is '2016_1'; expected a number"),
        ("dataset", "'dataset' of .* is 'ttbar'; expected a number; add one to the fileset"),
    ):
        with pytest.raises(InputError, match=message):
            sonic.Row(["FatJet.pt", sonic.Metadata(name)]).pack(events)
    with pytest.raises(InputError, match="metadata have no 'year'; give coffea's events"):
        sonic.Row(["pt", year]).pack(ak.Array([{"pt": 1.0}]))
    other = sample(entry_stop=20, metadata={**metadata, "year": "2017"})
    with pytest.raises(InputError, match="metadata have no 'year'; give .* of one file"):
        sonic.Row(["FatJet.pt", year]).pack(mixed := ak.concatenate([events, other]))
    model = sonic.Model("m", {"x": sonic.Row(["FatJet.pt", year])}, {"y": None})
    with pytest.raises(InputError, match="metadata have no 'year'; give .* of one file"):
        model(sonic.Variations(nominal=mixed, up=mixed))
    model = sonic.Model("m", {"x": sonic.Row(["pt", year])}, {"y": None})
    with pytest.raises(InputError, match="variations have different metadata"):
        model(sonic.Variations(nominal=events.FatJet, up=other.FatJet))
    referred = sonic.Feature("PFCand.pt", index="FatJetPFCand.pfCandIdx")
    model = sonic.Model("m", {"x": sonic.Padded(referred, 4)}, {"y": None})
    with pytest.raises(InputError, match="variations are of several files"):
        model(sonic.Variations(nominal=events, up=other))
    traced = ak.Array(events.FatJet.layout.to_typetracer(forget_length=True), attrs=events.attrs)
    inputs = {"x": sonic.Row(["pt", year])}
    assert str(sonic.Model("m", inputs, {"y": None})(traced).type.content) == "var * float32"


PADDED = sonic.Padded(["pf.pt", "m", sonic.OneHot("pf.id", [3])], 2)
TOKENS = sonic.Tokens({"pf": sonic.Padded("pf.pt", 3)}, flags="onehot")


@pytest.mark.parametrize(
    ("layout", "read"),
    [
        (sonic.Row(["pf[:2].pt", "m"], missing=0.0), {"pf", "pf.pt", "m"}),
        (sonic.Row(sonic.Feature("y", expression="2 / m")), {"m"}),
        (PADDED, {"pf", "pf.pt", "pf.id", "m"}),
        (sonic.Mask(2, of="pf"), {"pf"}),
        (sonic.Row(sonic.Feature("n", expression="num(pf)")), {"pf"}),
        (
            sonic.Row(sonic.Feature("n", expression="m * sum(pf.pt) / num(pf.id)")),
            {"pf", "pf.pt", "m"},
        ),
        (sonic.Pairwise(["pf.pt"], 3, "pt_i"), {"pf", "pf.pt"}),
        (TOKENS, {"pf", "pf.pt"}),
    ],
)
def test_graphs_read_the_lists_and_columns_that_are_named(layout: Any, read: set[str]) -> None:
    form = JETS.layout.form_with_key_path()
    tracer, report = ak.typetracer.typetracer_with_report(form, highlevel=True)
    scores = sonic.Model("m", {"x": layout}, {"y": ["ttH", "tt"]})(tracer)
    assert str(scores.type) == "## * var * {ttH: float32, tt: float32}"
    paths = {".".join(filter(None, ast.literal_eval(key))) for key in report.data_touched}
    assert paths - {""} == read


class Tagged(ak.Array):  # type: ignore[misc]
    """Objects with a number as a property, which is None for some."""

    @property
    def tag(self) -> Any:
        return ak.mask(self.pt, self.pt > 1.0)


@pytest.mark.parametrize("path", ["Jet.tag", "Jet[0].tag", "tag"])
def test_graphs_have_the_type_of_a_property_with_none(path: str) -> None:
    """A number that is None, and is filled, is no object that is None."""
    jets = ak.with_name([[{"pt": 1.0}, {"pt": 2.0}], [{"pt": 3.0}]], "Tagged")
    records = jets if path == "tag" else ak.zip({"Jet": jets}, depth_limit=1)
    array = ak.Array(records.layout, behavior={("*", "Tagged"): Tagged})
    layout = sonic.Row(path, missing=-1.0)
    tracer = ak.Array(array.layout.to_typetracer(forget_length=True), behavior=array.behavior)
    traced = sonic.Model("m", {"x": layout}, {"y": None})(tracer)
    rows = bind_inputs({"x": layout}, array).rows
    computed = rows.unflatten(NumpyArray(np.zeros(len(rows), np.float32)))
    assert str(traced.type.content) == str(computed.type.content)
