"""The constituents of jets, against loops over the file's branches."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
import uproot
from coffea.nanoevents import NanoEventsFactory

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.demo.analysis import Schema
from sonic_coffea.demo.samples import DATA


def linked(names: tuple[str, str, str]) -> ak.Array:
    """Events whose links are not in the order of the jets, and one that leads to no jet."""
    table, index, candidates = names
    links = ak.zip(
        {
            "jetIdx": ak.Array([[1, 0, 1, -1], [], [0]]),
            index: ak.Array([[2, 0, 1, 3], [], [1]]),
        }
    )
    return ak.zip(
        {
            "FatJet": ak.zip({"pt": ak.Array([[1.0, 2.0], [], [3.0, 4.0]])}),
            table: links,
            candidates: ak.zip({"pt": ak.Array([[10.0, 11.0, 12.0, 13.0], [14.0], [15.0, 16.0]])}),
        },
        depth_limit=1,
    )


@pytest.mark.parametrize(
    "names",
    [
        ("FatJetPFCand", "pfCandIdx", "PFCand"),
        ("FatJetPFCands", "pFCandsIdx", "PFCands"),
    ],
)
def test_constituents(names: tuple[str, str, str]) -> None:
    events = linked(names)
    expected = [[[10.0], [12.0, 11.0]], [], [[16.0], []]]
    assert sonic.constituents(events).pt.tolist() == expected
    chosen = sonic.constituents(events[[2, 0, 2]]).pt.tolist()
    assert chosen == [expected[2], expected[0], expected[2]]


@pytest.mark.parametrize("candidate", [-1, 1])
def test_links_that_lead_nowhere_are_refused(candidate: int) -> None:
    """Not to be taken for a candidate of another event."""
    links = ak.zip({"jetIdx": [[0], [0]], "pfCandIdx": [[1], [candidate]]})
    events = ak.zip(
        {
            "FatJet": ak.zip({"pt": ak.Array([[1.0], [2.0]])}),
            "FatJetPFCand": links,
            "PFCand": ak.zip({"pt": ak.Array([[10.0, 11.0], [12.0], [13.0]][:2])}),
        },
        depth_limit=1,
    )
    message = f"pfCandIdx {candidate} in event 1, which has 1 of 'PFCand'"
    with pytest.raises(errors.InputError, match=message) as caught:
        sonic.constituents(events)
    assert caught.value.events == (1, 2)


def test_constituents_that_are_missing() -> None:
    events = linked(("FatJetPFCand", "pfCandIdx", "PFCand"))
    with pytest.raises(errors.FieldError, match="no collection 'FatJets'; did you mean 'FatJet'"):
        sonic.constituents(events, "FatJets")
    with pytest.raises(errors.FieldError, match="no constituents of 'FatJet'.*since v15"):
        sonic.constituents(events[["FatJet", "PFCand"]])


@pytest.fixture(scope="module")
def sample() -> tuple[ak.Array, list[Any]]:
    """Events of the sample, and by loops over its branches what the jets are made of."""
    events = NanoEventsFactory.from_root(
        {str(DATA / "TTbar_1.root"): "Events"}, schemaclass=Schema, mode="virtual", entry_stop=150
    ).events()
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


def test_constituents_of_the_sample(sample: tuple[ak.Array, list[Any]]) -> None:
    events, expected = sample
    assert sum(map(len, expected)) > 100
    found = sonic.constituents(events)
    assert found.pt.tolist() == expected
    assert ak.num(found).tolist() == ak.num(events.FatJet).tolist()


@pytest.mark.parametrize(
    "chosen",
    [slice(20, 90), slice(None, None, -1), slice(3, None, 7), [5, 5, 140, 0], slice(0, 0)],
    ids=str,
)
def test_constituents_of_a_selection(sample: tuple[ak.Array, list[Any]], chosen: Any) -> None:
    events, expected = sample
    wanted = np.arange(len(expected))[chosen]
    found = sonic.constituents(events[chosen])
    assert found.pt.tolist() == [expected[i] for i in wanted]


def test_constituents_of_masked_events_twice_selected(sample: tuple[ak.Array, list[Any]]) -> None:
    events, expected = sample
    two = np.asarray([len(e) >= 2 for e in expected])
    found = sonic.constituents(events[two][::-1][:7])
    assert found.pt.tolist() == [e for e, keep in zip(expected, two, strict=True) if keep][:-8:-1]


def test_candidates_keep_their_behaviour(sample: tuple[ak.Array, list[Any]]) -> None:
    events, _ = sample
    vectors = ak.with_name(events.PFCand, "PtEtaPhiMLorentzVector")
    found = sonic.constituents(ak.with_field(events, vectors, "PFCand"))
    np.testing.assert_allclose(
        ak.flatten(found.px, axis=None), ak.flatten(found.pt * np.cos(found.phi), axis=None), 1e-6
    )


def test_no_field_of_a_candidate_is_read_before_it_is_used() -> None:
    log: list[Any] = []
    events = NanoEventsFactory.from_root(
        {str(DATA / "TTbar_1.root"): "Events"},
        schemaclass=Schema,
        mode="virtual",
        access_log=log,
        entry_stop=50,
    ).events()
    found = sonic.constituents(events)
    read = {entry.branch for entry in log}
    assert read <= {"nFatJet", "nFatJetPFCand", "nPFCand"} | {
        "FatJetPFCand_jetIdx",
        "FatJetPFCand_pfCandIdx",
    }
    log.clear()
    np.asarray(ak.flatten(found.eta, axis=None))
    assert {entry.branch for entry in log} == {"PFCand_eta"}
