"""None in every place: objects that are None are not sent, and numbers that are None replaced."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import Content, UnmaskedArray
from hypothesis import given
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea.errors import InputError
from sonic_coffea.layouts import trace


def kind(name: str, array: ak.Array) -> ak.Array:
    """Return the same array with other nodes that say what is None."""

    def changed(node: Content, **_: Any) -> Content | None:
        if node.is_option:
            node = node.to_IndexedOptionArray64()
            if name != "indexed":
                node = node.to_ByteMaskedArray(valid_when=name == "bytes")
            if name == "bits":
                node = node.to_BitMaskedArray(valid_when=True, lsb_order=True)
            return node.copy(content=ak.transform(changed, node.content, highlevel=False))
        if name == "nothing is None" and node.is_numpy:
            return UnmaskedArray(node)
        return None

    return ak.Array(ak.transform(changed, array.layout, highlevel=False))


KINDS = ("indexed", "bytes", "not bytes", "bits")

OBJECTS = [
    [{"pt": 1.0, "eta": 5}, {"pt": None, "eta": 6}, None],
    [],
    None,
    [None],
    [{"pt": 4.0, "eta": None}, {"pt": None, "eta": None}],
]
SENT = [[1.0, 5.0], [-9.0, 6.0], [4.0, -8.0], [-9.0, -8.0]]
BACK = [
    [{"pt": 1.0, "eta": 5.0}, {"pt": -9.0, "eta": 6.0}, None],
    [],
    None,
    [None],
    [{"pt": 4.0, "eta": -8.0}, {"pt": -9.0, "eta": -8.0}],
]


@pytest.mark.parametrize("name", KINDS)
def test_objects_that_are_none_are_not_sent_and_come_back_as_none(name: str) -> None:
    array = kind(name, ak.Array(OBJECTS))
    layout = sonic.Row(["pt", "eta"], missing=[-9, -8])
    assert layout.pack(array).tolist() == SENT
    assert layout.unpack(layout.pack(array), array).tolist() == BACK
    nested = {"jets": array}
    within = sonic.Row(["jets.pt", "jets.eta"], missing=[-9, -8])
    assert within.pack(nested).tolist() == SENT
    assert within.pack(ak.Array(nested)).tolist() == SENT


@pytest.mark.parametrize("name", KINDS)
def test_events_that_are_none_are_not_sent(name: str) -> None:
    events = [{"pt": 1.0}, None, {"pt": None}, {"pt": 3.0}]
    array = kind(name, ak.Array(events))
    layout = sonic.Row("pt", missing=-9)
    assert layout.pack(array).tolist() == [[1.0], [-9.0], [3.0]]
    back = layout.unpack(layout.pack(array), array)
    assert back.tolist() == [{"pt": 1.0}, None, {"pt": -9.0}, {"pt": 3.0}]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("column", "sent"),
    [
        ([1.0, None, 3.0], [[1.0], [-9.0], [3.0]]),
        ([None, 2], [[-9.0], [2.0]]),
        ([None, True, False], [[-9.0], [1.0], [0.0]]),
        ([[1.0, None], [], [None]], [[1.0], [-9.0], [-9.0]]),
        ([[1.0, None], None, [None]], [[1.0], [-9.0], [-9.0]]),
        ([[[1.0, None], []], [], [[None]]], [[1.0], [-9.0], [-9.0]]),
    ],
)
def test_a_number_of_a_plain_array_that_is_none_is_replaced(
    column: Any, sent: Any, name: str
) -> None:
    """As it is in a field of records; the row is sent."""
    array = {"pt": kind(name, ak.Array(column))}
    layout = sonic.Row("pt", missing=-9)
    assert layout.pack(array).tolist() == sent
    assert layout.pack(ak.Array(array)).tolist() == sent
    back = layout.unpack(layout.pack(array), array).pt
    assert ak.flatten(back, axis=None).tolist() == [row[0] for row in sent]
    assert ak.num(back, axis=0) == len(column)


@pytest.mark.parametrize("name", KINDS)
def test_numbers_that_are_all_none_are_replaced(name: str) -> None:
    array = kind(name, ak.Array([1.0, None, None])[1:])
    for arrays in ({"pt": array}, ak.Array({"pt": array})):
        assert sonic.Row("pt", missing=-9).pack(arrays).tolist() == [[-9.0], [-9.0]]


@given(st.lists(st.tuples(*[st.one_of(st.none(), st.integers(-9, 9))] * 2), max_size=5))
def test_columns_of_a_dict_are_sent_as_those_of_records(pairs: list[tuple[Any, Any]]) -> None:
    first, second = (ak.Array([*(p[i] for p in pairs), None, 5])[: len(pairs)] for i in (0, 1))
    layout = sonic.Row(["a", "b"], missing=[-10.0, -11.0])
    wanted = [[-10.0 if a is None else a, -11.0 if b is None else b] for a, b in pairs]
    for arrays in ({"a": first, "b": second}, ak.Array({"a": first, "b": second})):
        packed = layout.pack(arrays)
        np.testing.assert_array_equal(packed, np.asarray(wanted, np.float32).reshape(-1, 2))
        back = layout.unpack(packed, arrays)
        assert [list(row.values()) for row in back.tolist()] == wanted


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        (sonic.Feature("y", expression="2 * pt"), [[2.0], [-9.0], [6.0]]),
        (sonic.Feature("y", expression="pt + x"), [[5.0], [-9.0], [-9.0]]),
        (sonic.Feature("pt", scale=3.0, shift=1.0), [[0.0], [-9.0], [6.0]]),
        (sonic.Feature("pt", function="sqrt", power=None), [[1.0], [-9.0], [3.0**0.5]]),
        (sonic.Feature("pt", categories={1: 10, 3: 30}), [[10.0], [-9.0], [30.0]]),
        (sonic.Feature("many", index="at"), [[8.0], [-9.0], [-9.0]]),
        ("many[0]", [[7.0], [-9.0], [6.0]]),
        ("many[-1]", [[8.0], [-9.0], [6.0]]),
    ],
)
@pytest.mark.parametrize("beside", [None, "x", "all"])
def test_what_is_made_of_a_number_that_is_none_is_missing(
    field: Any, sent: Any, beside: str | None
) -> None:
    arrays = {
        "pt": ak.Array([1.0, None, 3.0]),
        "x": ak.Array([4.0, 5.0, None]),
        "all": ak.Array([1.0, 2.0, 3.0]),
        "at": ak.Array([1, -1, None]),
        "many": ak.Array([[7.0, 8.0], [], [6.0]]),
    }
    behind = {None: [[], [], []], "x": [[4.0], [5.0], [-9.0]], "all": [[1.0], [2.0], [3.0]]}
    layout = sonic.Row([field, *([beside] if beside else [])], missing=-9, dtype="float64")
    expected = [[*row, *other] for row, other in zip(sent, behind[beside], strict=True)]
    for given_as in (arrays, ak.Array(arrays)):
        np.testing.assert_allclose(layout.pack(given_as), expected, rtol=1e-14)


@pytest.mark.parametrize("given_as", [dict, ak.Array])
def test_each_channel_of_a_value_that_is_none_is_missing(given_as: Any) -> None:
    arrays = given_as({"q": ak.Array([1, None, -1])})
    layout = sonic.Row([sonic.OneHot("q", [1, -1])], missing=-9)
    assert layout.pack(arrays).tolist() == [[1.0, 0.0], [-9.0, -9.0], [0.0, 1.0]]


@pytest.mark.parametrize("name", KINDS)
def test_strings_that_are_none_are_replaced(name: str) -> None:
    layout = sonic.Row(["s", "t"], dtype="string", missing=["?", "!"])
    records = [{"s": "a", "t": "b"}, {"s": None, "t": "c"}, None, {"s": "d", "t": None}]
    array = kind(name, ak.Array(records))
    assert layout.pack(array).tolist() == [[b"a", b"b"], [b"?", b"c"], [b"d", b"!"]]
    present = array[[0, 1, 3]]
    assert layout.pack({"s": present.s, "t": present.t}).tolist() == layout.pack(array).tolist()
    back = layout.unpack(layout.pack(array), array)
    assert back.tolist() == [
        {"s": "a", "t": "b"},
        {"s": "?", "t": "c"},
        None,
        {"s": "d", "t": "!"},
    ]
    jagged = ak.Array([{"j": [{"s": "a"}, {"s": None}, None]}, {"j": []}, {"j": None}])
    padded = sonic.Padded("j.s", 4, fill="-", dtype="string", missing="?", axis_order="L")
    assert padded.pack(kind(name, jagged)).tolist() == [
        [b"a", b"?", b"?", b"-"],
        [b"-"] * 4,
    ]


JETS = [
    [{"m": 1.0, "pf": [{"x": 1.0}, {"x": None}, None]}, None, {"m": None, "pf": []}],
    None,
    [],
    [{"m": 4.0, "pf": [None]}, {"m": None, "pf": [{"x": 5.0}]}],
]


@pytest.mark.parametrize("name", KINDS)
def test_none_among_and_above_constituents(name: str) -> None:
    array = kind(name, ak.Array(JETS))
    fields, missing = ["pf.x", "m"], [-1.0, -2.0]
    padded = sonic.Padded(fields, 3, fill=9.0, missing=missing)
    assert padded.pack(array).tolist() == [
        [[1.0, -1.0, -1.0], [1.0, 1.0, 1.0]],
        [[9.0, 9.0, 9.0], [9.0, 9.0, 9.0]],
        [[-1.0, 9.0, 9.0], [4.0, 9.0, 9.0]],
        [[5.0, 9.0, 9.0], [-2.0, 9.0, 9.0]],
    ]
    np.testing.assert_array_equal(
        sonic.Bucketed(fields, (3,), fill=9.0, missing=missing).pack(array), padded.pack(array)
    )
    flat = sonic.Flat(fields, missing=missing).pack(array)
    assert flat.tolist() == [[1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0], [-1.0, 4.0], [5.0, -2.0]]
    mask = sonic.Mask(3, of="pf").pack(array)
    assert mask[:, 0].sum(axis=1).tolist() == [3.0, 0.0, 1.0, 1.0]
    with pytest.raises(InputError, match="None"):
        sonic.Padded(fields, 3).pack(array)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("given_as", [dict, ak.Array])
def test_parts_of_tokens_with_numbers_that_are_none(name: str, given_as: Any) -> None:
    met, jets = ak.Array([1.0, None, 3.0]), ak.Array([[1.0, None], [], [None]])
    arrays = given_as({"met": kind(name, met), "jets": kind(name, jets)})
    parts = {"J": sonic.Padded("jets", 2, missing=-8), "M": sonic.Row("met", missing=-9)}
    assert sonic.Tokens(parts).pack(arrays).tolist() == [
        [[1.0, 0.0], [-8.0, 0.0], [0.0, 1.0]],
        [[0.0, 0.0], [0.0, 0.0], [0.0, -9.0]],
        [[-8.0, 0.0], [0.0, 0.0], [0.0, 3.0]],
    ]
    model = sonic.Model(
        "m", {"j": sonic.Padded("jets", 2, missing=-8), "m": parts["M"]}, {"y": ["a"]}
    )
    packed = model.pack(arrays)
    assert packed["m"].tolist() == [[1.0], [-9.0], [3.0]]
    assert packed["j"].shape == (3, 1, 2)


@pytest.mark.parametrize("array", [[1.0, 2.0], [[1.0], [2.0]]])
def test_arrays_in_which_something_might_be_none(array: Any) -> None:
    optional = kind("nothing is None", ak.Array(array))
    for given_as in (dict, ak.Array):
        arrays = given_as({"pt": optional})
        for missing in (None, -9):
            packed = sonic.Row("pt", missing=missing).pack(arrays)
            assert packed.tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("missing", [None, -9.0])
@pytest.mark.parametrize(
    "objects",
    [
        [{"pt": 1.0}, {"pt": 2.0}],
        [{"pt": 1.0}, None],
        [[{"pt": 1.0}, None], []],
        [[{"pt": 1.0}], None],
        [[{"pt": 1.0}, {"pt": None}], []],
        [{"pt": 1.0}, {"pt": None}],
    ],
)
def test_a_traced_type_is_the_type_of_the_scores(objects: Any, missing: float | None) -> None:
    """Whatever may be None: else partitions would differ from what a graph says of them."""
    array = ak.Array(objects)
    layout = sonic.Row("pt", missing=missing)
    try:
        back = layout.unpack(layout.pack(array), array)
    except InputError:
        assert missing is None
        return
    form = array.layout.form_with_key("node{id}")
    tracer, _ = ak.typetracer.typetracer_with_report(form)
    traced = trace({"x": layout}, {"y": sonic.Output(["pt"])}, ak.Array(tracer))
    assert traced.layout.form.type == back.layout.form.type
