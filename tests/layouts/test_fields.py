"""Numbers of objects, events and what refers to others are packed as plain loops do."""

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
