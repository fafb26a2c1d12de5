"""Numbers of events beside those of objects, and references, are packed as plain loops do.

None is not sent, or is replaced.
"""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layouts import nodes

import sonic_coffea as sonic
from sonic_coffea.errors import InputError

NUMBER = nodes.Leaf("float32", st.integers(-40, 40).map(lambda n: n / 4))
SIGN, INDEX = (nodes.Leaf("int32", st.integers(-1, most)) for most in (1, 2))
CANDIDATE = {"x": ("option", NUMBER), "q": (SIGN,), "at": (INDEX,)}
JET = {"m": (NUMBER,), "pf": ("list", CANDIDATE)}
EVENT = {"met": (NUMBER,), "some": ("option", NUMBER), "hits": (3, NUMBER)}
events = nodes.arrays(({"jets": ("list", "option", JET), **EVENT},))


def check(tensor: Any, expected: list[Any], *axes: int) -> None:
    wanted = np.asarray(expected, np.float32).reshape(-1, *axes)
    np.testing.assert_array_equal(tensor, wanted)


@given(events, st.integers(1, 4))
def test_constituents_beside_numbers_of_events_and_what_is_computed(
    array: ak.Array, length: int
) -> None:
    rows = [
        [
            [
                -7.0 if c["x"] is None else c["x"],
                event["met"],
                -9.0 if event["some"] is None else event["some"],
                1.5,
                float(c["q"] == 1),
                float(c["q"] == -1),
                -1.0 if c["x"] is None else c["x"] * jet["m"] - event["met"],
                -2.0 if c["at"] < 0 else event["hits"][c["at"]],
            ]
            for c in sorted(jet["pf"], key=lambda c: c["q"])
        ]
        for event in array.to_list()
        for jet in event["jets"]
        if jet is not None
    ]
    one_hot = sonic.OneHot("jets.pf.q", [1, -1])
    computed = sonic.Feature("y", expression="jets.pf.x * jets.m - met")
    referred = sonic.Feature("hits", index="jets.pf.at")
    fields = ["jets.pf.x", "met", "some", 1.5, one_hot, computed, referred]
    how: dict[str, Any] = {"missing": [-7, 0, -9, 0, 0, 0, -1, -2], "sort_by": "-jets.pf.q"}
    layout = sonic.Padded(fields, length, fill=3.0, axis_order="LF", **how)
    filled = [(parts + [[3.0] * 8] * length)[:length] for parts in rows]
    check(layout.pack(array), filled, length, 8)
    flat = sonic.Flat(fields, **how).pack(array)
    check(flat, [part for parts in rows for part in parts], 8)


def test_lists_that_are_not_there_are_padded() -> None:
    """Also beside numbers of the objects, and if no event has a list."""
    events = ak.Array([{"Jet": [{"m": 5.0, "pf": [{"x": 1.0}]}]}, {"Jet": []}])
    layout = sonic.Padded(["Jet.pf.x", "Jet.m"], 2, fill=-1.0, outer=1, axis_order="LF")
    nothing = [[[-1.0, -1.0]] * 2]
    assert layout.pack(events).tolist() == [[[[1.0, 5.0], [-1.0, -1.0]]], nothing]
    assert layout.pack(events[1:]).tolist() == [nothing]
    first = sonic.Padded("Jet[0].pf.x", 2, missing=0.0)
    scores = first.unpack(first.pack(events), events)
    assert str(scores.type) == '2 * var * {"Jet[0].pf.x": float32}'
    log = sonic.Padded(sonic.Feature("Jet.pf.x", function="log"), 1, pad="before", outer=1)
    with pytest.raises(InputError, match=r"fill 0.0, padded before .* after log in event 1"):
        log.pack(events)


def test_missing_numbers_of_empty_lists_are_refused_only_where_they_pad() -> None:
    events = {"x": ak.Array([[3.0], []]), "met": ak.Array([1.0, None])}
    of_event = sonic.Feature("y", expression="x - met")
    assert sonic.Padded(of_event, 1).pack(events).tolist() == [[[2.0]], [[0.0]]]
    assert sonic.Flat(of_event).pack(events).tolist() == [[2.0]]
    with pytest.raises(InputError, match="padded before .* 'met' has None in event 1"):
        sonic.Padded(of_event, 1, pad="before").pack(events)
