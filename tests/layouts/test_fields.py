"""Numbers of objects, events and what refers to others are packed as plain loops do.

None is not sent, or is replaced.
"""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import ByteMaskedArray, ListArray, NumpyArray
from awkward.index import Index8, Index64
from hypothesis import given
from hypothesis import strategies as st
from tests.layouts import nodes
from tests.nanoaod import sample

import sonic_coffea as sonic
from sonic_coffea.errors import InputError
from sonic_coffea.layouts import bind_inputs

NAN = float("nan")
NUMBER = nodes.Leaf("float32", st.integers(-40, 40).map(lambda n: n / 4))
SIGN, INDEX = (nodes.Leaf("int32", st.integers(-1, most)) for most in (1, 2))
CANDIDATE = {"x": ("option", NUMBER), "q": (SIGN,), "at": (INDEX,)}
JET = {"m": (NUMBER,), "maybe": ("option", NUMBER), "pf": ("list", CANDIDATE)}
EVENT = {"met": (NUMBER,), "some": ("option", NUMBER), "hits": (3, NUMBER)}
events = nodes.arrays(({"jets": ("list", "option", JET), **EVENT},))


def jets_of(event: Any) -> list[Any]:
    return [jet for jet in event["jets"] if jet is not None]


def check(tensor: Any, expected: list[Any], *axes: int) -> None:
    wanted = np.asarray(expected, np.float32).reshape(-1, *axes)
    np.testing.assert_array_equal(tensor, wanted)


@given(events, st.integers(1, 4), st.booleans())
def test_constituents_beside_numbers_of_jets_and_events(
    array: ak.Array, length: int, sort: bool
) -> None:
    rows = []
    for event in array.to_list():
        for jet in jets_of(event):
            parts = [
                [
                    -7.0 if c["x"] is None else c["x"],
                    jet["m"],
                    -8.0 if jet["maybe"] is None else jet["maybe"],
                    event["met"],
                    -9.0 if event["some"] is None else event["some"],
                    1.5,
                    float(c["q"] == 1),
                    float(c["q"] == -1),
                    -1.0 if c["x"] is None else c["x"] * jet["m"] - event["met"],
                    -2.0 if c["at"] < 0 else event["hits"][c["at"]],
                ]
                for c in (sorted(jet["pf"], key=lambda c: c["q"]) if sort else jet["pf"])
            ]
            rows.append(parts)
    fields = [
        "jets.pf.x",
        "jets.m",
        "jets.maybe",
        "met",
        "some",
        1.5,
        sonic.OneHot("jets.pf.q", [1, -1]),
        sonic.Feature("y", expression="jets.pf.x * jets.m - met"),
        sonic.Feature("hits", index="jets.pf.at"),
    ]
    absent = [-7.0, 0.0, -8.0, 0.0, -9.0, 0.0, 0.0, 0.0, -1.0, -2.0]
    by: dict[str, Any] = {"sort_by": "-jets.pf.q"} if sort else {}
    for mode in ("constant", "wrap"):
        layout = sonic.Padded(
            fields, length, fill=3.0, axis_order="LF", pad_mode=mode, missing=absent, **by
        )
        expected = []
        for parts in rows:
            padding = [parts[k % len(parts)] for k in range(length)] if parts else []
            behind = padding[len(parts) :] if mode == "wrap" else []
            behind = behind or [[3.0] * 10] * max(0, length - len(parts))
            expected.append((parts + behind)[:length])
        check(layout.pack(array), expected, length, 10)
    flat = sonic.Flat(fields, missing=absent, **by).pack(array)
    check(flat, [part for parts in rows for part in parts], 10)


@given(events)
def test_jets_beside_numbers_of_events_and_of_leading_constituents(array: ak.Array) -> None:
    expected = [
        [
            jet["m"],
            5.0 if jet["maybe"] is None else jet["maybe"],
            event["met"],
            7.0 if not jet["pf"] else jet["pf"][0]["q"],
            8.0 if not jet["pf"] else jet["pf"][-1]["q"],
            9.0 if len(jet["pf"]) < 2 else jet["pf"][1]["q"],
        ]
        for event in array.to_list()
        for jet in jets_of(event)
    ]
    fields = ["jets.m", "jets.maybe", "met"]
    fields += ["jets.pf[0].q", "jets.pf[-1].q", "jets.pf[1].q"]
    layout = sonic.Row(fields, missing=[0, 5, 0, 7, 8, 9])
    check(layout.pack(array), expected, 6)


@given(events)
def test_leading_objects_beside_numbers_of_events(array: ak.Array) -> None:
    expected = []
    for event in array.to_list():
        masses = [NAN if jet is None else jet["m"] for jet in [*event["jets"], None, None][:2]]
        quotient = masses[1] - event["met"]
        some = NAN if event["some"] is None else event["some"]
        expected.append([*masses, event["met"], quotient, some])
    difference = sonic.Feature("y", expression="jets[1].m - met")
    layout = sonic.Row(["jets[:2].m", "met", difference, "some"], missing=NAN)
    check(layout.pack(array), expected, 5)


def test_constituents_of_nanoaod_stand_beside_numbers_of_their_jet() -> None:
    events = sample(entry_stop=30)
    jets = ak.with_field(events.FatJet, sonic.constituents(events), "parts")
    linked = sonic.Padded(["parts.pt", "pt", "parts.pdgId"], 4).pack(jets)
    parts, leading = ak.flatten(jets.parts.pt), ak.flatten(jets.pt)
    for i in range(len(leading)):
        here = parts[i][:4]
        assert linked[i, 0, : len(here)].tolist() == here.tolist()
        assert linked[i, 1, : len(here)].tolist() == [leading[i]] * len(here)


def test_lists_that_are_not_there_are_padded() -> None:
    """Also beside numbers of the objects, and if no event has a list."""
    events = ak.Array([{"Jet": [{"m": 5.0, "pf": [{"x": 1.0}]}]}, {"Jet": []}])
    layout = sonic.Padded(["Jet.pf.x", "Jet.m"], 2, fill=-1.0, outer=1, axis_order="LF")
    nothing = [[[-1.0, -1.0]] * 2]
    assert layout.pack(events).tolist() == [[[[1.0, 5.0], [-1.0, -1.0]]], nothing]
    assert layout.pack(events[1:]).tolist() == [nothing]
    log = sonic.Padded(sonic.Feature("Jet.pf.x", function="log"), 1, pad="before", outer=1)
    with pytest.raises(InputError, match=r"fill 0.0, padded before .* after log in event 1"):
        log.pack(events)


@pytest.mark.parametrize("hidden", [NAN, float("inf")])
def test_what_none_hides_may_be_anything(hidden: float) -> None:
    numbers = NumpyArray(np.asarray([1.0, hidden, 3.0]))
    mask = Index8(np.asarray([1, 0, 1], np.int8))
    column = ak.Array(ByteMaskedArray(mask, numbers, valid_when=True))
    layout = sonic.Row(sonic.Feature("x", scale=2.0), missing=-1)
    assert layout.pack({"x": column}).tolist() == [[2.0], [-1.0], [6.0]]
    lists = ak.Array(ListArray(Index64(np.asarray([2, 0])), Index64(np.asarray([3, 1])), numbers))
    assert sonic.Padded("x", 2).pack({"x": lists}).tolist() == [[[3.0, 0.0]], [[1.0, 0.0]]]


def test_numbers_of_another_byte_order_are_read() -> None:
    columns = {"a": np.asarray([1.5, -3.0], ">f4"), "b": np.asarray([1, -2], ">i8")}
    assert sonic.Row(["a", "b"]).pack(columns).tolist() == [[1.5, 1.0], [-3.0, -2.0]]


def test_events_of_rows_are_counted_in_the_array_that_was_passed() -> None:
    array = ak.Array([None, [[1.0], [2.0, 3.0]], [], [[], None, [4.0]]])
    rows = bind_inputs({"x": sonic.Row("pt")}, {"pt": array})
    assert [rows.events_of(i, i + 1) for i in range(4)] == [(1, 2), (1, 2), (1, 2), (3, 4)]
    assert rows.events_of(0, 4) == (1, 4)
    assert rows.events_of(2, 2) == (0, 0)


maybe = st.none() | st.integers(-9, 9)


@given(st.lists(st.tuples(maybe, maybe), max_size=5))
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
        (sonic.Feature("y", expression="2 * pt"), [2.0, -9.0, 6.0]),
        (sonic.Feature("y", expression="pt + x"), [5.0, -9.0, -9.0]),
        (sonic.Feature("pt", scale=3.0, shift=1.0), [0.0, -9.0, 6.0]),
        (sonic.Feature("pt", function="sqrt"), [1.0, -9.0, 3.0**0.5]),
        (sonic.Feature("pt", categories={1: 10, 3: 30}), [10.0, -9.0, 30.0]),
        (sonic.Feature("many", index="at"), [8.0, -9.0, -9.0]),
        ("many[0]", [7.0, -9.0, 6.0]),
        ("many[-1]", [8.0, -9.0, 6.0]),
    ],
)
def test_fields_made_of_none_are_missing(field: Any, sent: list[float]) -> None:
    arrays = {
        "pt": ak.Array([1.0, None, 3.0]),
        "x": ak.Array([4.0, 5.0, None]),
        "at": ak.Array([1, -1, None]),
        "many": ak.Array([[7.0, 8.0], [], [6.0]]),
    }
    behind = [4.0, 5.0, -9.0]
    for given_as in (arrays, ak.Array(arrays)):
        alone = sonic.Row([field], missing=-9, dtype="float64").pack(given_as)
        np.testing.assert_allclose(alone[:, 0], sent, rtol=1e-14)
        beside = sonic.Row([field, "x"], missing=-9, dtype="float64").pack(given_as)
        np.testing.assert_allclose(beside, np.stack([sent, behind], 1), rtol=1e-14)


def test_unpacked_rows_are_none_where_the_objects_are() -> None:
    union = ak.concatenate([ak.Array([{"m": 1.0}, None]), ak.Array([{"m": None, "x": 1}, None])])
    layout = sonic.Row("m", missing=-9)
    assert layout.unpack(layout.pack(union), union).m.tolist() == [1.0, None, -9.0, None]
    names = ak.Array([{"s": "a"}, {"s": None}, None])
    strings = sonic.Row("s", dtype="string", missing="?")
    assert strings.unpack(strings.pack(names), names).s.tolist() == ["a", "?", None]
