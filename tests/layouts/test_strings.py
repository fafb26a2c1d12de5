"""Strings are sent as they are, and come back."""

from __future__ import annotations

from functools import partial
from typing import Any

import awkward as ak
import pytest

import sonic_coffea as sonic
from sonic_coffea.layouts import bind_inputs

PARTICLES = [{"id": "e", "pt": 1.0}, {"id": "µ", "pt": 2.0}, {"id": "e", "pt": 0.5}]
JETS = ak.Array(
    [
        [{"name": "top", "pf": PARTICLES}, None],
        [],
        [{"name": "", "pf": []}, {"name": "qcd", "pf": PARTICLES[1:2]}],
    ]
)
E, MU = b"e", "µ".encode()

strings = partial(sonic.Padded, "pf.id", axis_order="L", dtype="string")


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (sonic.Row("name", dtype="string"), [[b"top"], [b""], [b"qcd"]]),
        (strings(2, sort_by="pf.pt"), [[MU, E], [b"", b""], [MU, b""]]),
        (strings(4, pad_mode="wrap"), [[E, MU, E, E], [b""] * 4, [MU] * 4]),
        (
            sonic.Bucketed("pf.id", (1, 4), fill="-", axis_order="LF", dtype=str),
            [[[E], [MU], [E], [b"-"]], [[b"-"]] * 4, [[MU], [b"-"], [b"-"], [b"-"]]],
        ),
        (sonic.Flat("pf.id", dtype="string"), [[E], [MU], [E], [MU]]),
        (
            sonic.Padded(["pf.id", "name"], 1, dtype="string"),
            [[[E], [b"top"]], [[b""], [b""]], [[MU], [b"qcd"]]],
        ),
    ],
)
def test_strings_go_as_they_are(layout: Any, expected: Any) -> None:
    for jets in (JETS, ak.to_packed(JETS), JETS[[0, 1, 2]]):
        tensor = layout.pack(jets)
        assert tensor.dtype == object
        assert tensor.tolist() == expected


def test_strings_come_back() -> None:
    row = sonic.Row("name", dtype="string")
    assert row.unpack(row.pack(JETS), JETS).tolist() == JETS[["name"]].tolist()
    particles = strings(2, sort_by="pf.pt")
    back = particles.unpack(particles.pack(JETS), JETS)
    # The third one is truncated.
    assert back["pf.id"].tolist() == [[["e", "µ", None], None], [], [[], ["µ"]]]


def test_requests_are_planned_by_the_longest_string() -> None:
    layout = sonic.Row(["name", "name"], dtype="string")
    (segment,) = bind_inputs({"x": layout}, JETS).segments
    assert segment.row_bytes == 2 * (4 + len("top"))
