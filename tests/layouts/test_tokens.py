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


def scored(output: sonic.Output, answer: Any, parts: Any = None) -> ak.Array:
    """Place the answers of one row after the other."""
    bound = bind_inputs({"tokens": sonic.Tokens(parts or PARTS)}, EVENTS)
    assembly = ByRow("y", output, bound)
    for row in (2, 0, 1):
        assembly.place(slice(row, row + 1), 1, {"y": answer[row : row + 1]})
    return bound.rows.unflatten(assembly.content())


def test_masks_and_counts_are_by_token() -> None:
    bound = bind_inputs({"x": sonic.Tokens(PARTS), "mask": sonic.Mask(beside="x")}, EVENTS)
    assert bound.count_elements() == (5 + 3, 1, 4 + 3)
    present = [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1]]
    assert bound.only(np.asarray([2, 0])).pack(0, 2)["mask"][:, 0].tolist() == present


@pytest.mark.parametrize("length", [2, 9])
def test_masks_of_another_length_have_the_first_tokens(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = np.empty

    def used(*shape: Any, **options: Any) -> Any:
        memory = empty(*shape, **options)
        memory.fill(7)
        return memory

    # New memory often has zeros, which would hide places that nobody has written.
    monkeypatch.setattr(np, "empty", used)
    inputs = {"x": sonic.Tokens(PARTS), "mask": sonic.Mask(length, beside="x")}
    tokens = np.asarray([[1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1]])
    whole = np.pad(tokens, ((0, 0), (0, 3)))
    masks = bind_inputs(inputs, EVENTS).pack(0, 3)["mask"][:, 0]
    assert masks.tolist() == whole[:, :length].tolist()


def test_answers_are_by_token() -> None:
    answer = np.arange(3 * 6 * 2, dtype=np.float32).reshape(3, 6, 2)
    scores = scored(sonic.Output(["a", "b"], per="constituent", of="tokens"), answer)
    assert scores.Jet.a.to_list() == [[0, 2], [], [24, 26, 28, None]]
    assert scores.Lepton.b.to_list() == [[7], [], [31, 33]]
    assert scores.MET.a.to_list() == [10, 22, 34]
    nothing = bind_inputs({"tokens": sonic.Tokens(PARTS)}, EVENTS[:0])
    empty = ByRow("y", sonic.Output(per="constituent"), nothing).content().form.type
    assert str(empty) == "{Jet: var * float32, Lepton: var * float32, MET: float32}"


# The places of Jet are 0 to 2, of Lepton 3 and 4, of MET 5. A place of padding is not chosen.
CHOSEN = [
    ([5, 9, 8, 1, 8, 2], 1, {"Jet": 0, "Lepton": None, "MET": None}),
    ([9, 9, 9, 9, 9, -1], 5, {"Jet": None, "Lepton": None, "MET": 0}),
    ([1, 2, 3, 4, 5, 0], 4, {"Jet": None, "Lepton": 1, "MET": None}),
]
NONE = dict.fromkeys(PARTS)


@pytest.mark.parametrize("labels", [None, ["best"]])
@pytest.mark.parametrize("choose", ["argmax", "slot"])
def test_choices_name_the_collection_and_the_index(labels: list[str] | None, choose: str) -> None:
    parts = {**PARTS, "Jet": sonic.Padded(["Jet.pt", "Jet.eta"], 3, sort_by="-Jet.pt")}
    scores, slots, records = zip(*CHOSEN, strict=True)
    dtype = "float32" if choose == "argmax" else "int64"
    answer = np.asarray(scores if choose == "argmax" else slots, dtype).reshape(3, -1)
    output = sonic.Output(labels, dtype, per="constituent", choose=choose)
    result = scored(output, answer, parts)
    chosen = result if labels is None else result.best
    assert chosen.to_list() == list(records)
    picked = EVENTS.Lepton.pt[ak.singletons(chosen.Lepton)].to_list()
    assert picked == [[], [], [EVENTS.Lepton.pt[2, 1]]]
    if choose == "slot":
        outside = scored(output, np.full_like(answer, -1), parts).to_list()
        assert outside == [NONE if labels is None else {"best": NONE}] * 3
    tracer = ak.Array(EVENTS.layout.to_typetracer(forget_length=True))
    traced = trace({"tokens": sonic.Tokens(parts)}, {"y": output}, tracer)
    assert str(traced.type.content) == str(result.type.content)


def test_assignments_choose_tokens_of_several_collections() -> None:
    scores = np.zeros((3, 6, 6), np.float32)
    scores[0, 0, 3], scores[1, 5, 5], scores[2, 4, 2] = 1, 1, 1
    scores[0, 2, 2] = scores[1, 0, 0] = 2  # of padding
    output = sonic.Output(["a", "b"], per="constituent", axes=2, choose="argmax")
    assert scored(output, scores).to_list() == [
        {"a": {**NONE, "Jet": 0}, "b": {**NONE, "Lepton": 0}},
        {"a": {**NONE, "MET": 0}, "b": {**NONE, "MET": 0}},
        {"a": {**NONE, "Lepton": 1}, "b": {**NONE, "Jet": 2}},
    ]


def one(*fields: Any, **options: Any) -> sonic.Padded:
    return sonic.Padded(list(fields), 1, **options)


NUMBERED = ak.Array([{"J": [{"constant": 3.0}], "M": {"pt": 1.0}}])
CALLED = {"J": one("constant"), "M": sonic.Row(["pt", 1.0, 2.5])}
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
    "a field called constant": (CALLED, NUMBERED, [[[3, -9, -9, -9], [-9, 1, 1, 2.5]]]),
}


@pytest.mark.parametrize("case", SHARED)
def test_channels_of_one_name_are_shared(case: str) -> None:
    parts, events, expected = SHARED[case]
    assert sonic.Tokens(parts, fill=-9.0).pack(events).tolist() == expected
