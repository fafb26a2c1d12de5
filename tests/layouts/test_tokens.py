"""Several collections are one sequence, whose answers lead back to each of them."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import FieldError
from sonic_coffea.layouts import ByRow, bind_inputs, trace

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
    short = sonic.Tokens({"Jet": sonic.Padded(["pt", "eta"], 3), "MET": sonic.Row(["pt"])})
    full = sonic.Tokens({"Jet": sonic.Padded(["Jet.pt", "Jet.eta"], 3), "MET": sonic.Row("MET.pt")})
    np.testing.assert_array_equal(short.pack(EVENTS), full.pack(EVENTS))
    apart = {"Jet": EVENTS.Jet, "MET": EVENTS.MET}
    np.testing.assert_array_equal(short.pack(apart), full.pack(EVENTS))
    np.testing.assert_array_equal(full.pack(apart), full.pack(EVENTS))
    free = sonic.Tokens(
        {"jets": sonic.Padded(["Jet.pt", "Jet.eta"], 3), "met": sonic.Row("MET.pt")}
    )
    np.testing.assert_array_equal(free.pack(EVENTS), full.pack(EVENTS))
    both = ak.with_field(EVENTS, EVENTS.Jet.pt, "pt")
    with pytest.raises(FieldError, match="part 'Jet': field 'pt' is one of the record and one of"):
        short.pack(both)
    with pytest.raises(FieldError, match="part 'Jet': no field 'ptt'.*did you mean 'pt'"):
        sonic.Tokens({"Jet": sonic.Padded("ptt", 3)}).pack(EVENTS)


@pytest.mark.parametrize("chosen", [slice(None), np.asarray([2, 0])])
def test_masks_counts_and_answers_are_by_token(chosen: Any) -> None:
    inputs = {
        "tokens": sonic.Tokens(PARTS),
        "mask": sonic.Mask(beside="tokens"),
    }
    bound = bind_inputs(inputs, EVENTS)
    assert bound.count_elements() == (5 + 3, 1, 4 + 3)
    rows = bound.only(np.arange(3)[chosen])
    present = np.asarray([[1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1]])
    assert rows.pack(0, len(rows))["mask"][:, 0].tolist() == present[chosen].tolist()
    output = sonic.Output(["a", "b"], per="constituent", of="tokens")
    assembly = ByRow("y", output, bound)
    answer = np.arange(3 * 6 * 2, dtype=np.float32).reshape(3, 6, 2)
    for row in (2, 0, 1):
        assembly.place(slice(row, row + 1), 1, {"y": answer[row : row + 1]})
    scores = bound.rows.unflatten(assembly.content())
    assert scores.Jet.a.to_list() == [[0, 2], [], [24, 26, 28, None]]
    assert scores.Lepton.b.to_list() == [[7], [], [31, 33]]
    assert scores.MET.a.to_list() == [10, 22, 34]
    empty = ByRow("y", sonic.Output(per="constituent"), bind_inputs(inputs, EVENTS[:0]))
    assert (
        str(empty.content().form.type)
        == "{Jet: var * float32, Lepton: var * float32, MET: float32}"
    )


CHOSEN = [
    # The places of Jet are 0 to 2, of Lepton 3 and 4, of MET 5.
    ([5, 9, 8, 1, 8, 2], {"Jet": 1, "Lepton": None, "MET": None}),
    ([9, 9, 9, 9, 9, -1], {"Jet": None, "Lepton": None, "MET": 0}),
    ([1, 2, 3, 4, 5, 0], {"Jet": None, "Lepton": 1, "MET": None}),
]


@pytest.mark.parametrize("sort_by", [None, "-Jet.pt"])
@pytest.mark.parametrize("labels", [None, ["best"]])
@pytest.mark.parametrize("choose", ["argmax", "slot"])
def test_choices_name_the_collection_and_the_index(
    sort_by: str | None, labels: list[str] | None, choose: str
) -> None:
    jets = sonic.Padded(["Jet.pt", "Jet.eta"], 3, sort_by=sort_by)
    parts = {**PARTS, "Jet": jets}
    bound = bind_inputs({"tokens": sonic.Tokens(parts)}, EVENTS)
    dtype = "float32" if choose == "argmax" else "int64"
    output = sonic.Output(labels, dtype, per="constituent", choose=choose)
    answer = np.asarray([scores for scores, _ in CHOSEN], np.float32)
    if choose == "slot":
        answer = np.asarray([[1], [5], [4]])
    assembly = ByRow("y", output, bound)
    for row in (2, 0, 1):
        assembly.place(slice(row, row + 1), 1, {"y": answer[row : row + 1]})
    result = bound.rows.unflatten(assembly.content())
    chosen = result if labels is None else result.best
    expected = [dict(record) for _, record in CHOSEN]
    if sort_by is not None:
        expected[0]["Jet"] = 0
    assert chosen.to_list() == expected
    assert EVENTS.Lepton.pt[ak.singletons(chosen.Lepton)].to_list() == [
        [],
        [],
        [EVENTS.Lepton.pt[2, 1]],
    ]
    # A place of padding is not chosen.
    assembly.place(slice(1, 2), 1, {"y": np.full_like(answer[:1], -1)})
    if choose == "slot":
        assert bound.rows.unflatten(assembly.content()).tolist()[1] in (
            {"Jet": None, "Lepton": None, "MET": None},
            {"best": {"Jet": None, "Lepton": None, "MET": None}},
        )
    traced = trace(
        {"tokens": sonic.Tokens(parts)},
        {"y": output},
        ak.Array(EVENTS.layout.to_typetracer(forget_length=True)),
    )
    assert str(traced.type.content) == str(result.type.content)


def test_assignments_choose_tokens_of_several_collections() -> None:
    bound = bind_inputs({"tokens": sonic.Tokens(PARTS)}, EVENTS)
    output = sonic.Output(["a", "b"], per="constituent", axes=2, choose="argmax")
    scores = np.zeros((3, 6, 6), np.float32)
    scores[0, 0, 3], scores[1, 5, 5], scores[2, 4, 2] = 1, 1, 1
    scores[0, 2, 2] = scores[1, 0, 0] = 2  # of padding
    assembly = ByRow("y", output, bound)
    assembly.place(slice(0, 3), 3, {"y": scores})
    result = bound.rows.unflatten(assembly.content())
    assert result.a.Jet.to_list() == [0, None, None]
    assert result.b.Jet.to_list() == [None, None, 2]
    assert result.a.Lepton.to_list() == [None, None, 1]
    assert result.b.Lepton.to_list() == [0, None, None]
    assert result.a.MET.to_list() == result.b.MET.to_list() == [None, 0, None]


def named(name: str, value: str) -> sonic.Feature:
    return sonic.Feature(name, expression=value)


NUMBERED = ak.Array([{"J": [{"constant": 3.0, "0": 4.0, "5": 5.0}], "M": {"pt": 1.0}}])
TOKENS: dict[str, tuple[Any, ak.Array, Any]] = {
    "one channel for each category": (
        {
            "Jet": sonic.Padded([sonic.OneHot("Jet.eta", [0.5, 1])], 1),
            "Lepton": sonic.Padded([sonic.OneHot("Lepton.eta", [2, 0.5])], 1),
        },
        EVENTS[:1],
        [[[1, 0, -9], [0, -9, 1]]],
    ),
    "fields of one name in their order": (
        {
            "Jet": sonic.Padded([sonic.Feature("Jet.pt", scale=3.0), "Jet.pt"], 1),
            "Lepton": sonic.Padded([sonic.Feature("Lepton.pt", scale=2.0), "Lepton.pt"], 1),
        },
        EVENTS[:1],
        [[[150, 50], [60, 30]]],
    ),
    "several constants in their order": (
        {
            "Jet": sonic.Padded([1.0, "pt", 0.5], 1, fill=[-1.0, -2.0, -3.0]),
            "Lepton": sonic.Padded(["pt", 2.5, 2.5], 1),
            "MET": sonic.Row(["phi"]),
        },
        EVENTS[:2],
        [
            [[1, 50, 0.5, -9], [2.5, 30, 2.5, -9], [-9, -9, -9, 1.5]],
            [[-1, -2, -3, -9], [0, 0, 0, -9], [-9, -9, -9, -2]],
        ],
    ),
    "constants with a name": (
        {
            "Jet": sonic.Padded(["pt", named("kind", "1.0")], 1),
            "MET": sonic.Row(["pt", named("other", "1.0"), named("kind", "2.5")]),
        },
        EVENTS[:1],
        [[[50, 1, -9], [20, 2.5, 1]]],
    ),
    **{
        f"a field called {name}": (
            {"J": sonic.Padded([name], 1), "M": sonic.Row(["pt", 1.0, 2.5])},
            NUMBERED,
            [[[value, -9, -9, -9], [-9, 1, 1, 2.5]]],
        )
        for name, value in (("constant", 3.0), ("0", 4.0), ("5", 5.0))
    },
}


@pytest.mark.parametrize("order", ["LF", "FL"])
@pytest.mark.parametrize("case", TOKENS)
def test_channels_of_one_name_are_shared(case: str, order: str) -> None:
    parts, events, expected = TOKENS[case]
    tensor = sonic.Tokens(parts, fill=-9.0, axis_order=order).pack(events)
    assert (tensor if order == "LF" else tensor.transpose(0, 2, 1)).tolist() == expected
