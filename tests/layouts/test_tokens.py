"""Several collections are one sequence, whose answers lead back to each of them."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import FieldError
from sonic_coffea.layouts import bind_inputs

EVENTS = ak.Array(
    [
        {
            "Jet": [{"pt": 50.0, "eta": 0.5, "btag": 0.9}, {"pt": 40.0, "eta": -1.0, "btag": 0.1}],
            "Lepton": [{"pt": 30.0, "eta": 2.0}],
            "MET": {"pt": 20.0, "phi": 1.5},
        },
        {"Jet": [], "Lepton": [], "MET": {"pt": 9.0, "phi": -2.0}},
        {
            "Jet": [{"pt": p, "eta": 0.1, "btag": 0.5} for p in (90.0, 80.0, 70.0, 60.0)],
            "Lepton": [{"pt": 25.0, "eta": 0.0}, {"pt": 15.0, "eta": 1.0}],
            "MET": {"pt": 33.0, "phi": 0.25},
        },
    ]
)
PARTS = {
    "Jet": sonic.Padded(["Jet.pt", "Jet.eta", "Jet.btag"], 3, fill=[0.0, -9.0, -1.0]),
    "Lepton": sonic.Padded(["Lepton.eta", "Lepton.pt"], 2),
    "MET": sonic.Row(["MET.pt", "MET.phi"]),
}


def test_fields_may_be_named_within_their_collection() -> None:
    def tokens(jet: str, met: str, *names: str) -> sonic.Tokens:
        parts = sonic.Padded([f"{jet}pt", f"{jet}eta"], 3), sonic.Row(f"{met}pt")
        return sonic.Tokens(dict(zip(names, parts, strict=True)))

    short, full = tokens("", "", "Jet", "MET"), tokens("Jet.", "MET.", "Jet", "MET")
    expected = full.pack(EVENTS)
    apart = {"Jet": EVENTS.Jet, "MET": EVENTS.MET}
    for layout, array in ((short, EVENTS), (short, apart), (full, apart)):
        np.testing.assert_array_equal(layout.pack(array), expected)
    free = tokens("Jet.", "MET.", "jets", "met").pack(EVENTS)
    np.testing.assert_array_equal(free, expected)
    both = ak.with_field(EVENTS, EVENTS.Jet.pt, "pt")
    with pytest.raises(FieldError, match="part 'Jet': field 'pt' is one of the record and one of"):
        short.pack(both)
    with pytest.raises(FieldError, match="part 'Jet': no field 'ptt'.*did you mean 'pt'"):
        sonic.Tokens({"Jet": sonic.Padded("ptt", 3)}).pack(EVENTS)


def test_masks_and_counts_are_by_token() -> None:
    bound = bind_inputs({"x": sonic.Tokens(PARTS), "mask": sonic.Mask(beside="x")}, EVENTS)
    assert bound.count_elements() == (5 + 3, 1, 4 + 3)
    present = [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1]]
    assert bound.only(np.asarray([2, 0])).pack(0, 2)["mask"][:, 0].tolist() == present


def one(*fields: Any, **options: Any) -> sonic.Padded:
    return sonic.Padded(list(fields), 1, **options)


NUMBERED = ak.Array([{"J": [{"constant": 3.0}], "M": {"pt": 1.0}}])
TWICE = sonic.Feature("2 * constant", expression="2 * constant")
CALLED = {"J": one("constant", TWICE), "M": sonic.Row(["pt", 1.0, 2.5])}
ETA = {"Jet": one(sonic.OneHot("eta", [0.5, 1])), "Lepton": one(sonic.OneHot("eta", [2, 0.5]))}
CONSTANTS = {
    "Jet": one(1.0, "pt", 0.5, fill=[-1.0, -2.0, -3.0]),
    "Lepton": one("pt", 2.5, 2.5),
    "MET": sonic.Row(["phi"]),
}
SHARED: dict[str, tuple[Any, ak.Array, Any]] = {
    "one channel for each category": (ETA, EVENTS[:1], [[[1, 0, -9], [0, -9, 1]]]),
    "several constants in their order": (
        CONSTANTS,
        EVENTS[:2],
        [
            [[1, 50, 0.5, -9], [2.5, 30, 2.5, -9], [-9, -9, -9, 1.5]],
            [[-1, -2, -3, -9], [0, 0, 0, -9], [-9, -9, -9, -2]],
        ],
    ),
    "a field called constant": (CALLED, NUMBERED, [[[3, 6, -9, -9, -9], [-9, -9, 1, 1, 2.5]]]),
}


@pytest.mark.parametrize("case", SHARED)
def test_channels_of_one_name_are_shared(case: str) -> None:
    parts, events, expected = SHARED[case]
    assert sonic.Tokens(parts, fill=-9.0).pack(events).tolist() == expected
