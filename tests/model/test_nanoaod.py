"""The constituents of jets, against loops over the file's branches."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import awkward as ak
import numpy as np
import pytest
import uproot
from hypothesis import given
from hypothesis import strategies as st
from tests.nanoaod import sample as sample_of

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer


def linked(names: tuple[str, str, str]) -> ak.Array:
    """Events whose links are not in the order of the jets, and one that leads to no jet."""
    table, index, candidates = names
    links = {"jetIdx": [[1, 0, 1, -1], [], [0]], index: [[2, 0, 1, 3], [], [1]]}
    pt = {"FatJet": [[1.0, 2.0], [], [3.0, 4.0]]}
    pt |= {candidates: [[10.0, 11.0, 12.0, 13.0], [14.0], [15.0, 16.0]]}
    columns = {name: ak.zip({"pt": numbers}) for name, numbers in pt.items()}
    return ak.zip(columns | {table: ak.zip(links)}, depth_limit=1)


@pytest.mark.parametrize(
    ("names", "jets"),
    [
        (("FatJetPFCand", "pfCandIdx", "PFCand"), "FatJet"),
        (("FatJetPFCands", "pFCandsIdx", "PFCands"), "FatJet"),
        (("JetPFCandsAK8", "candIdx", "PFCands"), "FatJet"),
        (("FatJetSVs", "sVIdx", "SV"), "FatJet"),
        (("JetSVsAK15", "svIdx", "SV"), "FatJetAK15"),
    ],
)
def test_constituents_are_found_by_tables_of_all_releases(
    names: tuple[str, str, str], jets: str
) -> None:
    events = linked(names)
    events[jets] = events.FatJet
    of_jets = sonic.secondary_vertices if names[2] == "SV" else sonic.constituents
    expected = [[[10.0], [12.0, 11.0]], [], [[16.0], []]]
    assert of_jets(events, jets).pt.tolist() == expected
    chosen = of_jets(events[[2, 0, 2]], jets).pt.tolist()
    assert chosen == [expected[2], expected[0], expected[2]]


@pytest.mark.parametrize("candidate", [-2, 4])
def test_links_that_lead_nowhere_are_refused(candidate: int) -> None:
    """Not to be taken for a candidate of another event."""
    events = linked(("FatJetPFCand", "pfCandIdx", "PFCand"))
    events["FatJetPFCand", "pfCandIdx"] = ak.Array([[candidate, 0, 1, 3], [], [1]])
    message = f"pfCandIdx {candidate} in event 0, which has 4 of 'PFCand'"
    with pytest.raises(errors.InputError, match=message) as caught:
        sonic.constituents(events)
    assert caught.value.events == (0, 1)


@pytest.mark.parametrize("name", ["FatJet", "FatJetPFCand", "PFCand"])
def test_events_that_are_none_are_refused(name: str) -> None:
    events = linked(("FatJetPFCand", "pfCandIdx", "PFCand"))
    some = ak.with_field(events, ak.mask(events[name], [True, False, True]), name)
    for masked in (some, ak.mask(events, [True, False, True])):
        with pytest.raises(errors.InputError, match="is None; leave such events out") as caught:
            sonic.constituents(masked)
        assert caught.value.events == (1, 2)


def test_links_that_are_none_are_left_out() -> None:
    links = CANDIDATES.FatJetPFCand
    events = ak.with_field(CANDIDATES, ak.mask(links, links.pfCandIdx != 0), "FatJetPFCand")
    assert sonic.constituents(events).pt.tolist() == [[[], [12.0, 11.0]], [], [[16.0], []]]


def test_jets_that_are_none_have_empty_lists() -> None:
    """Not None: awkward 2.14 sorts wrongly what is beside a list that is None."""
    jets = CANDIDATES.FatJet
    events = ak.with_field(CANDIDATES, ak.mask(jets, jets.pt != 2), "FatJet")
    assert sonic.constituents(events).pt.tolist() == [[[10.0], []], [], [[16.0], []]]


def test_lists_of_one_length_are_taken_as_others() -> None:
    directions = {"eta": np.zeros((2, 2)), "phi": np.asarray([[0.0, 1.0], [2.0, 3.0]])}
    jets = ak.zip(directions)
    near = sonic.within_cone(jets, jets, 0.4)
    assert near.phi.tolist() == [[[0.0], [1.0]], [[2.0], [3.0]]]
    links = {"jetIdx": np.asarray([[1, 0], [0, 0]]), "pfCandIdx": np.asarray([[0, 1], [1, 0]])}
    collections = {"FatJet": jets, "FatJetPFCand": ak.zip(links), "PFCand": jets}
    of_jets = sonic.constituents(ak.zip(collections, depth_limit=1))
    assert of_jets.phi.tolist() == [[[1.0], [0.0]], [[3.0, 2.0], []]]
    with pytest.raises(errors.InputError, match="expected lists of records"):
        sonic.within_cone(jets[0], jets[0], 0.4)


@pytest.fixture(scope="module")
def sample() -> tuple[ak.Array, list[Any]]:
    """Events of the sample, and by loops over its branches what the jets are made of."""
    events = sample_of(entry_stop=150)
    with uproot.open(DATA / "TTbar_1.root") as file:
        names = ("nFatJet", "FatJetPFCand_jetIdx", "FatJetPFCand_pfCandIdx", "PFCand_pt")
        branches = [file["Events"][name].array(entry_stop=150).tolist() for name in names]
    expected = []
    for n, jets, candidates, pt in zip(*branches, strict=True):
        event: list[list[float]] = [[] for _ in range(n)]
        for jet, candidate in zip(jets, candidates, strict=True):
            if 0 <= jet < n:
                event[jet].append(pt[candidate])
        expected.append(event)
    return events, expected


def test_no_field_of_a_candidate_is_read_before_it_is_used() -> None:
    log: list[Any] = []

    def read() -> set[str]:
        return {getattr(entry, "branch", entry) for entry in log}

    candidates = sonic.constituents(sample_of(access_log=log, entry_stop=50))
    links = {"FatJetPFCand_jetIdx", "FatJetPFCand_pfCandIdx"}
    assert read() <= {"nFatJet", "nFatJetPFCand", "nPFCand"} | links
    log.clear()
    np.asarray(ak.flatten(candidates.eta, axis=None))
    assert read() == {"PFCand_eta"}


def calibrated(events: ak.Array) -> ak.Array:
    """Events whose jets have other pt, in the order of these, and a new field."""
    jets = events.FatJet
    jets = ak.with_field(jets, jets.pt * (0.5 + ak.local_index(jets.pt)), "pt")
    jets = jets[ak.argsort(jets.pt, ascending=False)]
    return ak.with_field(events, ak.with_field(jets, jets.pt > 400, "hard"), "FatJet")


CHANGES = {
    "calibrated": calibrated,
    "of later events, in lists of their own": lambda events: ak.with_field(
        events[5:],
        ak.unflatten(ak.flatten(events.FatJet[5:]), ak.num(events.FatJet[5:])),
        "FatJet",
    ),
    "cut": lambda events: ak.with_field(events, events.FatJet[events.FatJet.pt > 300], "FatJet"),
    "of some events, backwards": lambda events: calibrated(events[events.event % 2 == 0])[::-1],
    "twice": lambda events: ak.with_field(
        events, ak.concatenate([events.FatJet, events.FatJet], axis=1), "FatJet"
    ),
}


@pytest.mark.parametrize(
    ("mode", "is_kept"), [("virtual", True), ("virtual", False), ("eager", True)]
)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_jets_keep_their_constituents(mode: str, change: Any, is_kept: bool) -> None:
    file = sample_of(mode=mode, entry_stop=150)
    expected = sonic.constituents(file)
    events = file if is_kept else file[np.ones(len(file), np.bool_)]
    if not is_kept:
        del file
    # Noted by a field that travels with the jets, whatever becomes of them.
    jets = ak.with_field(events.FatJet, expected.pt, "expected")
    events = change(ak.with_field(events, jets, "FatJet"))
    candidates = sonic.constituents(events)
    assert candidates.pt.tolist() == events.FatJet.expected.tolist()
    assert ak.count(candidates.pt) > 1000


def test_candidates_that_were_cut_are_left_out(sample: tuple[ak.Array, list[Any]]) -> None:
    events, expected = sample
    events = ak.with_field(events, events.PFCand[events.PFCand.pt > 5], "PFCand")
    found = sonic.constituents(events).pt.tolist()
    assert found == [[[pt for pt in jet if pt > 5] for jet in jets] for jets in expected]


def test_vertices_by_a_table_follow_jets_that_noted_their_positions() -> None:
    events = linked(("FatJetSVs", "sVIdx", "SV"))
    jets = ak.with_field(events.FatJet, ak.local_index(events.FatJet, axis=1), "file_position")
    events = ak.with_field(events, jets[:, ::-1], "FatJet")
    expected = [[[12.0, 11.0], [10.0]], [], [[], [16.0]]]
    assert sonic.secondary_vertices(events).pt.tolist() == expected


def test_jets_whose_positions_are_not_known_are_refused(sample: tuple[ak.Array, list[Any]]) -> None:
    of_table = linked(("FatJetSVs", "sVIdx", "SV"))
    of_table["FatJet"] = of_table.FatJet[ak.argsort(-of_table.FatJet.pt)]
    jets = {name: sample[0].FatJet[name] + 0 for name in sample[0].FatJet.fields}
    smeared, without_event = sample[0][:], sample[0][:]
    smeared["FatJet"] = ak.zip({**jets, "eta": ak.full_like(jets["eta"], 0.1)})
    without_event["FatJet"] = ak.zip(jets)[:, ::-1]
    del without_event["event"]
    for events, find, reason in (
        (of_table, sonic.secondary_vertices, "do not know their file"),
        (smeared, sonic.constituents, "0 of them with the eta and phi"),
        (without_event, sonic.constituents, "without 'event'"),
    ):
        message = f"'FatJet' are not those of the file.*{reason}.*'file_position'. = ak.local_index"
        with pytest.raises(errors.InputError, match=message):
            find(events)


@pytest.mark.parametrize("is_kept", [True, False], ids=["file kept", "file gone"])
def test_indices_of_the_file_lead_to_the_same_object(is_kept: bool) -> None:
    events = sample_of(entry_stop=50)
    events = events if is_kept else events[np.ones(len(events), np.bool_)]
    pdg_id = sonic.Feature("PFCand.pdgId", index="FatJetPFCand.pfCandIdx")
    layout = sonic.Padded([pdg_id, "FatJetPFCand.jetIdx"], 64, missing=-9.0)
    expected = layout.pack(events)
    by_mass = events.PFCand[ak.argsort(events.PFCand.pt, axis=1, ascending=True)]
    events = ak.with_field(events, by_mass, "PFCand")
    if not is_kept:
        events["PFCand"] = ak.zip({name: by_mass[name] for name in by_mass.fields})
    np.testing.assert_array_equal(layout.pack(events), expected)
    electrons = events.PFCand[abs(events.PFCand.pdgId) == 11]
    electrons = ak.with_field(events, electrons, "PFCand")
    only = np.isin(expected[:, 0], [-11, 11, 0])
    assert 0 < only.sum() < only.size
    np.testing.assert_array_equal(layout.pack(electrons)[:, 0], np.where(only, expected[:, 0], -9))
    beyond = ak.with_field(electrons.FatJetPFCand, 9999, "pfCandIdx")
    with pytest.raises(errors.InputError, match=rf"event 1, which has {len(by_mass[1])} of"):
        layout.pack(ak.with_field(electrons, beyond, "FatJetPFCand"))
    # An index that the file does not have counts in the candidates as they are.
    mine = sonic.Feature("PFCand.pdgId", index="FatJetPFCand.first")
    links = ak.with_field(electrons.FatJetPFCand, 0, "first")
    some = ak.with_field(electrons, links, "FatJetPFCand")
    some = some[(ak.num(some.PFCand) > 0) & (ak.num(some.FatJetPFCand) > 0)]
    assert sonic.Padded([mine], 1).pack(some)[:, 0, 0].tolist() == some.PFCand.pdgId[:, 0].tolist()


def test_indices_of_parts_and_of_picked_objects_are_those_of_the_file() -> None:
    events = sample_of(entry_stop=50)
    electrons = events.PFCand[abs(events.PFCand.pdgId) == 11]
    cut = ak.with_field(events, electrons, "PFCand")
    index = "FatJetPFCand.pfCandIdx"
    pdg_id = sonic.Feature("PFCand.pdgId", index=index)
    expected = sonic.Padded(pdg_id, 64, missing=-9.0).pack(cut)[:, 0]
    of_part = sonic.Feature("PFCand.pdgId", index="pfCandIdx")
    tokens = sonic.Tokens({"FatJetPFCand": sonic.Padded(of_part, 64, missing=-9.0)})
    np.testing.assert_array_equal(tokens.pack(cut)[:, :, 0], expected)
    apart = {name: cut[name] for name in ("PFCand", "FatJetPFCand")}
    np.testing.assert_array_equal(tokens.pack(apart)[:, :, 0], expected)
    of_first = sonic.Feature("PFCand.pdgId", index="FatJetPFCand[0].pfCandIdx")
    first = np.where(ak.num(cut.FatJetPFCand) > 0, expected[:, 0], -9)
    assert {-9} < {*first.tolist()}
    np.testing.assert_array_equal(sonic.Row(of_first, missing=-9.0).pack(cut)[:, 0], first)


@pytest.mark.parametrize("mode", ["virtual", "eager"])
def test_indices_into_the_same_collection_are_those_of_the_file(mode: str) -> None:
    """The collection itself is given, and its paths begin with its fields."""
    events = sample_of(mode=mode, entry_stop=50)
    particles = events.GenPart
    mother = sonic.Feature("pdgId", index="genPartIdxMother")
    layout = sonic.Padded(mother, 64, missing=-9.0, axis_order="L")
    is_heavy = np.abs(particles.pdgId) > 4
    mothers = ak.fill_none(particles.parent.pdgId, -9)
    mothers = ak.where(np.abs(mothers) > 4, mothers, -9)[is_heavy]
    expected = ak.fill_none(ak.pad_none(mothers, 64, clip=True), 0)
    np.testing.assert_array_equal(layout.pack(particles[is_heavy]), expected.to_numpy())
    # Some have the directions of others, so that their order tells which they are.
    mother = sonic.Feature("GenPart.pdgId", index="GenPart.genPartIdxMother")
    of_events = sonic.Padded(mother, 64, missing=-9.0, axis_order="L")
    copied = ak.with_field(events, ak.to_packed(particles), "GenPart")
    np.testing.assert_array_equal(of_events.pack(copied), layout.pack(particles))


def test_variations_follow_the_indices_of_the_file() -> None:
    """What is not read by the model may tell where objects lie in the file."""
    events = sample_of(entry_stop=20)
    by_pt = events.PFCand[ak.argsort(events.PFCand.pt, axis=1, ascending=True)]
    varied = ak.with_field(events, by_pt, "PFCand")
    pdg_id = sonic.Feature("PFCand.pdgId", index="FatJetPFCand.pfCandIdx")
    model = sonic.Model("m", {"x": sonic.Padded(pdg_id, 64, missing=0.0)}, {"y": ["sum"]})
    weights = np.arange(64, dtype=np.float32)[:, np.newaxis]
    answers = FakeModel.of(model, lambda inputs: {"y": inputs["x"][:, 0] @ weights})
    with FakeServer({"m": answers}) as server, sonic.connect(server.url):
        expected = model(events)
        scores = model(sonic.Variations(nominal=varied, up=varied))
    assert scores["nominal"].tolist() == scores["up"].tolist() == expected.tolist()


def paired(jets: ak.Array) -> ak.Array:
    """The jets of two events in every other event."""
    counts = ak.to_numpy(ak.num(jets)).reshape(-1, 2).sum(axis=1)
    return ak.unflatten(ak.flatten(jets), np.stack([counts, 0 * counts], axis=1).ravel())


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (lambda jets: jets[np.roll(np.arange(len(jets)), 1)], "are of different events of the"),
        (paired, "an event has objects of several events"),
    ],
    ids=["of the event before", "of two events"],
)
def test_jets_of_other_events_have_no_constituents_here(mix: Any, message: str) -> None:
    events = sample_of(entry_stop=50)
    mixed = ak.with_field(events, mix(events.FatJet), "FatJet")
    events["FatJet"] = mix(events.FatJet)
    for jets in (mixed, events):
        with pytest.raises(errors.InputError, match=message):
            sonic.constituents(jets)


def test_events_are_told_apart_by_integers_that_no_float_holds() -> None:
    file = sample_of(entry_stop=50)
    file["event"] = file.event + np.uint64(2**60)
    jets = ak.zip({name: file.FatJet[name] * 1 for name in ("pt", "eta", "phi", "mass")})
    found = sonic.constituents(ak.with_field(file, jets[:, ::-1], "FatJet"))
    assert found.pt.tolist() == sonic.constituents(file).pt[:, ::-1].tolist()


def read_without_data(events: ak.Array) -> set[tuple[Any, ...]]:
    """Return the columns that a lazy graph reads for the vertices, whose type it has."""
    form = ak.to_packed(events).layout.form_with_key_path()
    traced, report = ak.typetracer.typetracer_with_report(form, highlevel=True)
    vertices = sonic.secondary_vertices(traced)
    assert vertices.type.content == sonic.secondary_vertices(events).type.content
    return {key for key in map(ast.literal_eval, report.data_touched) if len(key) > 1}


def test_columns_of_the_table_are_fields() -> None:
    """But for indices; and a vertex that the file does not store is left out."""
    events = linked(("FatJetSVs", "sVIdx", "SV"))
    links = events.FatJetSVs
    links["sVIdx"] = ak.Array([[2, -1, 1, 3], [], [1]])
    for name in ("costhetasvpv", "pt", "sVIdxG", "jetIdxG"):
        links[name] = ak.local_index(links.jetIdx) + 10 * np.arange(3)
    events["FatJetSVs"] = links
    pt = [[[], [12.0, 11.0]], [], [[16.0], []]]
    for chosen in (slice(None), slice(None, None, -1), [2, 0]):
        vertices = sonic.secondary_vertices(events[chosen])
        assert vertices.fields == ["pt", "costhetasvpv"]
        expected = ak.Array([[[], [0, 2]], [], [[20], []]])[chosen]
        assert vertices.costhetasvpv.tolist() == expected.tolist()
        assert vertices.pt.tolist() == [pt[n] for n in np.arange(3)[chosen]]
    assert read_without_data(events) == {("FatJetSVs", None, name) for name in ("jetIdx", "sVIdx")}


def test_constituents_with_columns_keep_their_behaviour(sample: tuple[ak.Array, list[Any]]) -> None:
    events, expected = sample
    table = ak.with_field(events.FatJetPFCand, 2 * events.FatJetPFCand.pfCandIdx, "btagEtaRel")
    vectors = ak.with_name(events.PFCand, "PtEtaPhiMLorentzVector")
    vectors = ak.with_field(vectors, ak.local_index(vectors.pt), "number")
    events = ak.with_field(ak.with_field(events, vectors, "PFCand"), table, "FatJetPFCand")[::2]
    candidates = sonic.constituents(events)
    assert candidates.pt.tolist() == expected[::2]
    x = ak.flatten(candidates.pt * np.cos(candidates.phi), axis=None)
    np.testing.assert_allclose(ak.flatten(candidates.px, axis=None), x, 1e-6)
    assert candidates.btagEtaRel.tolist() == (2 * candidates.number).tolist()
    jets = ak.with_field(events.FatJet, candidates, "pf")
    assert sonic.Padded(["pf.pt", "pf.btagEtaRel"], 3).pack(jets).shape[1:] == (2, 3)


directions = st.lists(
    st.lists(st.tuples(st.floats(-1, 1, width=32), st.floats(-3.125, 3.125, width=32)), max_size=4),
    min_size=1,
    max_size=4,
)


def objects(plain: list[list[tuple[float, float]]], events: int) -> ak.Array:
    """Objects of as many events, each with a number of its own."""
    plain = (plain * events)[:events]
    counts = [len(event) for event in plain]
    eta, phi = ([direction[k] for event in plain for direction in event] for k in (0, 1))
    columns = {"eta": eta, "phi": phi, "id": range(sum(counts))}
    return ak.unflatten(ak.zip({k: np.asarray(v, np.float32) for k, v in columns.items()}), counts)


@given(directions, directions, st.floats(0.1, 3.0), st.booleans())
def test_objects_within_a_cone_are_those_that_loops_find(
    jets: Any, others: Any, radius: float, backwards: bool
) -> None:
    chosen = slice(None, None, -1 if backwards else 1)
    axes, around = objects(jets, 4)[chosen], objects(others, 4)[chosen]
    expected = []
    for event_jets, event_others in zip(axes.tolist(), around.tolist(), strict=True):
        of_event = []
        for jet in event_jets:
            inside = []
            for candidate in event_others:
                turns = [jet["phi"] - candidate["phi"] + k * 2 * np.pi for k in (-1, 0, 1)]
                square = (jet["eta"] - candidate["eta"]) ** 2 + min(map(abs, turns)) ** 2
                if abs(square - radius**2) < 1e-9:  # as rounding has it
                    return
                if square < radius**2:
                    inside.append(candidate["id"])
            of_event.append(inside)
        expected.append(of_event)
    assert sonic.within_cone(axes, around, radius).id.tolist() == expected


def test_cones_of_jets_that_are_none() -> None:
    chosen = ak.mask(JETS, JETS.id != 1)
    inside = sonic.within_cone(chosen, JETS, 0.4).id
    assert inside.tolist() == [[[0, 1], []], [[2, 3], [2, 3]]]


CANDIDATES = linked(("FatJetPFCand", "pfCandIdx", "PFCand"))
JETS = objects([[(0.0, 0.0), (0.1, 0.0)]], 2)


@pytest.mark.parametrize(
    ("error", "message", "function", "arguments"),
    [
        (errors.FieldError, "'FatJets'; did you mean 'FatJ", sonic.constituents, ["FatJets"]),
        (errors.FieldError, "'FatJets'; did you mean 'FatJ", sonic.secondary_vertices, ["FatJets"]),
        (errors.FieldError, "no collection 'SV'", sonic.secondary_vertices, []),
        (errors.FieldError, "no collection 'LostTrack'", sonic.lost_tracks, ["FatJet"]),
        (errors.InputError, "of the same events, got 2 and 1", sonic.within_cone, [JETS[:1], 0.4]),
        (errors.InputError, "records with eta and phi, got", sonic.within_cone, [None, 0.4]),
        (errors.InputError, "records with eta and phi, got", sonic.within_cone, [JETS.id, 0.4]),
        (errors.ConfigError, "radius to be a number, got None", sonic.within_cone, [JETS, None]),
        *(
            (errors.ConfigError, "a radius above 0, got", sonic.within_cone, [JETS, radius])
            for radius in (0, -0.4, float("nan"))
        ),
    ],
)
def test_what_is_missing_is_named(error: Any, message: str, function: Any, arguments: Any) -> None:
    with pytest.raises(error, match=message):
        function(JETS if function is sonic.within_cone else CANDIDATES, *arguments)


def test_other_tables_and_radii_are_not_guessed() -> None:
    with pytest.raises(errors.FieldError, match="no constituents of 'FatJet'.*since v15"):
        sonic.constituents(CANDIDATES[["FatJet", "PFCand"]])
    renamed = ak.zip({"Fat": CANDIDATES.FatJet, "SV": CANDIDATES.PFCand}, depth_limit=1)
    with pytest.raises(errors.ConfigError, match="radius of 'Fat' is not known; give radius="):
        sonic.secondary_vertices(renamed, "Fat")


def test_vertices_and_tracks_of_the_sample(sample: tuple[ak.Array, list[Any]]) -> None:
    """Of the right radius, and ready for a layout."""
    events = sample[0]
    vertices = objects([[(0.0, 0.0), (1.0, 2.0)], []], len(events))
    events = ak.with_field(ak.with_field(events, vertices, "SV"), vertices, "LostTrack")
    for jets, radius in (("Jet", 0.4), ("FatJet", 0.8)):
        expected = sonic.within_cone(events[jets], vertices, radius)
        assert sonic.secondary_vertices(events, jets).id.tolist() == expected.id.tolist()
        assert sonic.lost_tracks(events, jets).id.tolist() == expected.id.tolist()
    wide = sonic.secondary_vertices(events, radius=9.0)
    assert ak.all(ak.num(wide, axis=2) == ak.num(vertices))
    jets = ak.with_field(events.FatJet, expected, "sv")
    assert sonic.Padded(["sv.eta", "sv.phi"], 3).pack(jets).shape[1:] == (2, 3)


def test_vertices_without_data_read_directions() -> None:
    """And no other field of a vertex."""
    directed = objects([[(0.0, 0.0)]], 3)
    by_cone = ak.zip({"FatJet": directed, "SV": directed}, depth_limit=1)
    eta_phi = {(name, None, k) for name in ("FatJet", "SV") for k in ("eta", "phi")}
    assert read_without_data(by_cone) == eta_phi


@pytest.mark.parametrize("mode", ["eager", "virtual"])
@pytest.mark.parametrize("is_copied", [False, True])
def test_jets_that_are_set_in_place_keep_their_constituents(mode: str, is_copied: bool) -> None:
    """Though coffea takes the events in which they are for those of the file."""
    events = sample_of(mode=mode, entry_stop=50)
    jets, expected = events.FatJet, sonic.constituents(events).pt
    kept = abs(jets.eta) < 1.0
    jets = jets[kept][:, ::-1]
    if is_copied:
        jets = ak.zip({name: jets[name] * 1 for name in ("pt", "eta", "phi", "mass")})
    events["FatJet"] = jets
    assert sonic.constituents(events).pt.tolist() == expected[kept][:, ::-1].tolist()


class Forgetful(dict[str, Any]):
    """A cache of buffers that keeps none, and counts what is read."""

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()

    def __setitem__(self, key: str, value: Any) -> None:
        self.read[key] += 1


def test_columns_are_read_once() -> None:
    cache = Forgetful()
    events = sample_of(buffer_cache=cache)
    jets = events.FatJet
    jets["pf"] = sonic.constituents(events)
    inputs = {
        "pf": sonic.Padded(["pf.pt", "pf.eta", "pt"], 8),
        "mask": sonic.Mask(8),
        "jet": sonic.Row(["pt", "mass"]),
    }
    sonic.Model("m", inputs, {"y": ["a"]}).pack(jets)
    # Counts of objects are read for the file, too, whatever was set in the events since.
    assert all("/offsets/" in key for key, times in cache.read.items() if times > 1)
    assert len(cache.read) > 6
