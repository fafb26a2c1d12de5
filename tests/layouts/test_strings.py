"""Strings in the layouts that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import awkward as ak
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors

PARTICLES = [{"id": "e", "pt": 1.0}, {"id": "µ", "pt": 2.0}, {"id": "e", "pt": 0.5}]
JETS = ak.Array(
    [
        [{"name": "top", "pf": PARTICLES}, None],
        [],
        [{"name": "", "pf": []}, {"name": "qcd", "pf": PARTICLES[1:2]}],
    ]
)
E, MU = b"e", "µ".encode()

CASES = {
    "row": (sonic.Row("name", dtype="string"), [[b"top"], [b""], [b"qcd"]]),
    "padded": (
        sonic.Padded("pf.id", 2, axis_order="L", dtype="string", sort_by="pf.pt"),
        [[MU, E], [b"", b""], [MU, b""]],
    ),
    "bucketed": (
        sonic.Bucketed("pf.id", (1, 4), fill="-", axis_order="LF", dtype=str),
        [[[E], [MU], [E], [b"-"]], [[b"-"]] * 4, [[MU], [b"-"], [b"-"], [b"-"]]],
    ),
    "wrap": (
        sonic.Padded("pf.id", 4, axis_order="L", dtype="string", pad_mode="wrap"),
        [[E, MU, E, E], [b""] * 4, [MU] * 4],
    ),
    "flat": (
        sonic.Flat("pf.id", None, merge_rows=True, dtype="string"),
        [[E], [MU], [E], [MU]],
    ),
    "beside": (
        sonic.Padded(["pf.id", "name"], 1, dtype="string"),
        [[[E], [b"top"]], [[b""], [b""]], [[MU], [b"qcd"]]],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [lambda a: a, ak.to_packed, lambda a: a[[0, 1, 2]]])
def test_strings_go_as_they_are(case: str, kind: Callable[[Any], Any]) -> None:
    layout, expected = CASES[case]
    tensor = layout.pack(kind(JETS))
    assert tensor.dtype == object
    assert tensor.tolist() == expected


def test_strings_come_back() -> None:
    row = sonic.Row("name", dtype="string")
    assert row.unpack(row.pack(JETS), JETS).tolist() == JETS[["name"]].tolist()
    particles = sonic.Padded("pf.id", 2, dtype="string", sort_by="pf.pt")
    back = particles.unpack(particles.pack(JETS), JETS)
    # The third one is truncated.
    assert back["pf.id"].tolist() == [[["e", "µ", None], None], [], [[], ["µ"]]]


def test_what_stands_for_missing_strings() -> None:
    events = ak.Array(
        [
            {"Jet": [{"f": "b", "i": 0}, {"f": "c", "i": -1}], "era": None, "Muon": [{"q": "+"}]},
            {"Jet": [], "era": "2018", "Muon": []},
        ]
    )
    row = sonic.Row(["Jet[:2].f", "era"], dtype="string", missing="?")
    assert row.pack(events).tolist() == [[b"b", b"c", b"?"], [b"?", b"?", b"2018"]]
    referred = sonic.Feature("Muon.q", index="Jet.i")
    flat = sonic.Padded([referred], 2, axis_order="L", dtype="string", missing="0")
    assert flat.pack(events).tolist() == [[b"+", b"0"], [b"", b""]]
    with pytest.raises(errors.InputError, match="None"):
        sonic.Padded("w", 2, dtype="string").pack({"w": ak.Array([["a", None]])})


def test_bytestrings_are_strings_that_need_no_text() -> None:
    words = ak.Array([b"\xff\x00", b""])
    assert sonic.Row("w", dtype="string").pack({"w": words}).tolist() == [[b"\xff\x00"], [b""]]


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (sonic.Padded("pf.pt", 2, dtype="string"), "holds float64 where strings are sent"),
        (sonic.Padded("pf.id", 2), "holds strings; expected numbers"),
        (sonic.Padded("pf.id", 2, dtype="string", sort_by="name"), "strings"),
    ],
)
def test_numbers_are_no_strings(layout: Any, problem: str) -> None:
    with pytest.raises(errors.InputError, match=problem):
        layout.pack(JETS)


@pytest.mark.parametrize(
    ("declare", "problem"),
    [
        (lambda: sonic.Padded("a", 2, fill=0.0, dtype="string"), "fill to be a string"),
        (lambda: sonic.Row("a", missing=0.0, dtype="string"), "missing to be a string"),
        (lambda: sonic.Padded("a", 2, fill=""), "fill to be a number"),
        (lambda: sonic.Row(["a", 1.0], dtype="string"), "strings are sent as they are"),
        (lambda: sonic.Row(sonic.Feature("a", scale=2.0), dtype="string"), "as they are"),
        (lambda: sonic.Padded("a", 2, sort_by="a", dtype="string"), "not sorted by strings"),
        (lambda: sonic.Dense("a", dtype="string"), "sent by Row, Padded, Bucketed and Flat"),
        (lambda: sonic.Mask(2, of="a", dtype="string"), "Mask holds numbers"),
        (lambda: sonic.Pairwise("a", 2, dtype="string"), "Pairwise holds numbers"),
        (lambda: sonic.Tokens({"a": sonic.Row("a", dtype="string")}), "no strings"),
        (
            lambda: sonic.Output(dtype="string", per="constituent", choose="argmax"),
            "numbers, and no strings",
        ),
    ],
)
def test_what_cannot_be_done_with_strings(declare: Callable[[], Any], problem: str) -> None:
    with pytest.raises(errors.ConfigError, match=problem):
        declare()


def test_requests_are_planned_by_the_longest_string() -> None:
    from sonic_coffea.layouts import bind_inputs

    layout = sonic.Row(["name", "name"], dtype="string")
    (segment,) = bind_inputs({"x": layout}, JETS).segments
    assert segment.row_bytes == 2 * (4 + len("top"))
