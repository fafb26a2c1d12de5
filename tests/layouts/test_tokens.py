"""Several collections in one sequence, against plain loops."""

from __future__ import annotations

import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, FieldError, InputError
from sonic_coffea.layouts import assemble, bind_inputs, trace

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


def test_fields_of_one_name_belong_together_in_their_order() -> None:
    log = sonic.Feature("Jet.pt", function="log")
    parts = {
        "Jet": sonic.Padded([log, "Jet.pt"], 1),
        "Lepton": sonic.Padded([sonic.Feature("Lepton.pt", scale=2.0), "Lepton.pt"], 1),
    }
    tensor = sonic.Tokens(parts).pack(EVENTS[:1])
    np.testing.assert_allclose(tensor[0], [[np.log(50.0), 50.0], [60.0, 30.0]], rtol=1e-6)
    with pytest.raises(ConfigError, match="'Jet' and 'MET' have 2 and 1 fields called 'pt'"):
        sonic.Tokens({"Jet": parts["Jet"], "MET": sonic.Row("MET.pt")})


def test_categories_have_channels_of_their_own() -> None:
    parts = {
        "Jet": sonic.Padded([sonic.OneHot("Jet.eta", [0.5, 1])], 1),
        "Lepton": sonic.Padded([sonic.OneHot("Lepton.eta", [2, 0.5])], 1),
    }
    assert sonic.Tokens(parts).pack(EVENTS[:1]).tolist() == [[[1, 0, 0], [0, 0, 1]]]


@pytest.mark.parametrize("order", ["LF", "FL"])
def test_tokens_that_are_repeated_have_their_numbers_of_the_event(order: str) -> None:
    """Flags are those of tokens alone, which are padded as declared."""
    events = ak.Array(
        [
            {"Jet": [{"a": 1, "b": 2.0}, {"a": 3, "b": 4.0}], "MET": {"b": 9.0}, "ht": 5.0},
            {"Jet": [], "MET": {"b": 8.0}, "ht": 6.0},
            {"Jet": [{"a": 7, "b": 0.5}] * 5, "MET": {"b": 7.0}, "ht": 7.0},
        ]
    )
    jets = sonic.Padded(["Jet.a", "Jet.b", "ht"], 3, -1, pad_mode="wrap")
    tokens = sonic.Tokens(
        {"MET": sonic.Row(["MET.b"]), "Jet": jets}, flags="number", axis_order=order
    )
    tensor = tokens.pack(events)
    assert (tensor if order == "LF" else tensor.transpose(0, 2, 1)).tolist() == [
        [[9, 0, 0, 1], [2, 1, 5, 2], [4, 3, 5, 2], [2, 1, 5, 0]],
        [[8, 0, 0, 1], *[[-1, -1, -1, 0]] * 3],
        [[7, 0, 0, 1], *[[0.5, 7, 7, 2]] * 3],
    ]


@pytest.mark.parametrize("chosen", [slice(None), np.asarray([2, 0])])
def test_a_mask_the_counts_and_answers_by_token(chosen: Any) -> None:
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
    assembly = assemble("y", output, bound)
    answer = np.arange(3 * 6 * 2, dtype=np.float32).reshape(3, 6, 2)
    for row in (2, 0, 1):
        assembly.place(slice(row, row + 1), 1, {"y": answer[row : row + 1]})
    scores = bound.rows.unflatten(assembly.content())
    assert scores.Jet.a.to_list() == [[0, 2], [], [24, 26, 28, None]]
    assert scores.Lepton.b.to_list() == [[7], [], [31, 33]]
    assert scores.MET.a.to_list() == [10, 22, 34]
    empty = assemble("y", sonic.Output(per="constituent"), bind_inputs(inputs, EVENTS[:0]))
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


@pytest.mark.parametrize("sort_by", [None, "Jet.pt"])
@pytest.mark.parametrize("labels", [None, ["best"]])
@pytest.mark.parametrize("choose", ["argmax", "slot"])
def test_a_choice_names_the_collection_and_the_index(
    sort_by: str | None, labels: list[str] | None, choose: str
) -> None:
    jets = sonic.Padded(["Jet.pt", "Jet.eta"], 3, sort_by=sort_by, sort_ascending=True)
    parts = {**PARTS, "Jet": jets}
    bound = bind_inputs({"tokens": sonic.Tokens(parts)}, EVENTS)
    dtype = "float32" if choose == "argmax" else "int64"
    output = sonic.Output(labels, dtype, per="constituent", choose=choose)
    answer = np.asarray([scores for scores, _ in CHOSEN], np.float32)
    if choose == "slot":
        answer = np.asarray([[1], [5], [4]])
    assembly = assemble("y", output, bound)
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


def test_an_assignment_chooses_tokens_of_several_collections() -> None:
    bound = bind_inputs({"tokens": sonic.Tokens(PARTS)}, EVENTS)
    output = sonic.Output(["a", "b"], per="constituent", axes=2, choose="argmax")
    scores = np.zeros((3, 6, 6), np.float32)
    scores[0, 0, 3], scores[1, 5, 5], scores[2, 4, 2] = 1, 1, 1
    scores[0, 2, 2] = scores[1, 0, 0] = 2  # of padding
    assembly = assemble("y", output, bound)
    assembly.place(slice(0, 3), 3, {"y": scores})
    result = bound.rows.unflatten(assembly.content())
    assert result.a.Jet.to_list() == [0, None, None]
    assert result.b.Jet.to_list() == [None, None, 2]
    assert result.a.Lepton.to_list() == [None, None, 1]
    assert result.b.Lepton.to_list() == [0, None, None]
    assert result.a.MET.to_list() == result.b.MET.to_list() == [None, 0, None]


def test_nonsense_is_refused_by_name() -> None:
    for parts, match in [
        ({}, "a dict of collections"),
        ({"Jet": sonic.Flat("pt")}, "part 'Jet': expected a Padded or a Row layout, got Flat"),
        (
            {"Jet": sonic.Padded("pt", 2), "MET": sonic.Row("pt", dtype="int32")},
            "'Jet' has dtype float32, part 'MET' int32",
        ),
    ]:
        with pytest.raises(ConfigError, match=match):
            sonic.Tokens(parts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="flags 'onehot' or 'number'"):
        sonic.Tokens(PARTS, flags="one")
    with pytest.raises(ConfigError, match="expected flags of Jet, Lepton, MET, got Jet"):
        sonic.Tokens(PARTS, flags={"Jet": 1})
    with pytest.raises(ConfigError, match="axis_order to be 'LF' or 'FL'"):
        sonic.Tokens(PARTS, axis_order="F")
    with pytest.raises(ConfigError, match="int32 cannot hold"):
        sonic.Tokens({"MET": sonic.Row("pt", dtype="int32")}, fill=0.5)
    bad = ak.Array([{"Jet": [{"pt": np.nan}]}])
    with pytest.raises(InputError, match="field 'pt' is NaN"):
        sonic.Tokens({"Jet": sonic.Padded("pt", 2)}).pack(bad)


def test_a_declaration_can_be_pickled_compared_and_traced() -> None:
    tokens = sonic.Tokens(PARTS, flags="onehot")
    assert pickle.loads(pickle.dumps(tokens)) == tokens
    assert tokens != sonic.Tokens(PARTS, flags="number")
    model = sonic.Model("m", {"t": tokens}, {"y": ["ttH", "tt"]})
    assert (
        model.config_hash != sonic.Model("m", {"t": sonic.Tokens(PARTS)}, model.outputs).config_hash
    )
    tracer, report = ak.typetracer.typetracer_with_report(EVENTS.layout.form_with_key("node{id}"))
    scores = trace(model.inputs, model.outputs, ak.Array(tracer))
    assert str(scores.type) == "## * {ttH: float32, tt: float32}"
    assert len(report.data_touched) == 9


@pytest.mark.parametrize("axis_order", ["LF", "FL"])
@pytest.mark.parametrize("second", [2.0, 2.5, 1, 3.0, 1e-3, -7, np.float32(0.5)])
@pytest.mark.parametrize("first", [1.0, 0.25, -1])
def test_constants_share_a_channel_whatever_they_are(
    first: Any, second: Any, axis_order: str
) -> None:
    parts = {"Jet": sonic.Padded(["pt", first], 2), "MET": sonic.Row(["pt", second])}
    tokens = sonic.Tokens(parts, axis_order=axis_order)
    packed = tokens.pack(EVENTS[:2])
    expected = [
        [[50.0, first], [40.0, first], [20.0, second]],
        [[0.0, 0.0], [0.0, 0.0], [9.0, second]],
    ]
    by_token = packed if axis_order == "LF" else packed.transpose(0, 2, 1)
    np.testing.assert_array_equal(by_token, np.asarray(expected, np.float32))
    back = tokens.unpack(packed, EVENTS[:2])
    np.testing.assert_array_equal(back.Jet.pt[0], [50.0, 40.0])
    np.testing.assert_array_equal(back.MET.pt, [20.0, 9.0])


def test_several_constants_are_told_apart_by_their_order() -> None:
    parts = {
        "Jet": sonic.Padded([1.0, "pt", 0.5], 1, fill=[-1.0, -2.0, -3.0]),
        "Lepton": sonic.Padded(["pt", 2.5, 2.5], 1),
        "MET": sonic.Row(["phi"]),
    }
    packed = sonic.Tokens(parts, fill=-9.0).pack(EVENTS[:2])
    expected = [
        [[1.0, 50.0, 0.5, -9.0], [2.5, 30.0, 2.5, -9.0], [-9.0, -9.0, -9.0, 1.5]],
        [[-1.0, -2.0, -3.0, -9.0], [0.0, 0.0, 0.0, -9.0], [-9.0, -9.0, -9.0, -2.0]],
    ]
    assert packed.tolist() == expected


def test_as_many_constants_belong_together() -> None:
    with pytest.raises(ConfigError, match="which belong together is not known"):
        sonic.Tokens({"Jet": sonic.Padded(["pt", 1.0, 2.0], 1), "MET": sonic.Row(["pt", 1.0])})


def test_constants_that_are_named_share_the_channel_of_their_name() -> None:
    first, second = (sonic.Feature("kind", expression=number) for number in ("1.0", "2.5"))
    other = sonic.Feature("other", expression="1.0")
    parts = {"Jet": sonic.Padded(["pt", first], 1), "MET": sonic.Row(["pt", other, second])}
    packed = sonic.Tokens(parts).pack(EVENTS[:1])
    assert packed.tolist() == [[[50.0, 1.0, 0.0], [20.0, 2.5, 1.0]]]


def test_a_field_called_as_constants_might_be_has_its_own_channel() -> None:
    events = ak.Array([{"J": [{"constant": 3.0, "0": 4.0, "5": 5.0}], "M": {"pt": 1.0}}])
    for name, value in (("constant", 3.0), ("0", 4.0), ("5", 5.0)):
        parts = {"J": sonic.Padded([name], 1), "M": sonic.Row(["pt", 1.0, 2.5])}
        packed = sonic.Tokens(parts, fill=-9.0).pack(events)
        assert packed.tolist() == [[[value, -9.0, -9.0, -9.0], [-9.0, 1.0, 1.0, 2.5]]]
