from __future__ import annotations

import awkward as ak
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors


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


def test_constituents_that_are_missing() -> None:
    events = linked(("FatJetPFCand", "pfCandIdx", "PFCand"))
    with pytest.raises(errors.FieldError, match="no collection 'FatJets'; did you mean 'FatJet'"):
        sonic.constituents(events, "FatJets")
    with pytest.raises(errors.FieldError, match="no constituents of 'FatJet'.*since v15"):
        sonic.constituents(events[["FatJet", "PFCand"]])
