"""Each option of fields, padding, tokens and strings packs what the examples say."""

from __future__ import annotations

import math
import pickle
from functools import partial
from typing import Any

import awkward as ak
import numpy as np
import pytest
import vector
from awkward.contents import ListArray, NumpyArray
from awkward.index import Index64

import sonic_coffea as sonic
from sonic_coffea import Bucketed, Flat, Mask, Padded, Pairwise, Row, Tokens
from sonic_coffea.layouts import bind_inputs

vector.register_awkward()
INF, NAN = math.inf, math.nan
JETS = [
    {"pt": 50.0, "eta": 0.5, "id": 3, "v": [1.0, 2.0]},
    {"pt": 30.0, "eta": -1.0, "id": 4, "v": [3.0, 4.0]},
]
EVENTS = ak.Array(
    [
        {"Jet": JETS, "MET": {"pt": 80.0}},
        {"Jet": [{"pt": 40.0, "eta": 2.0, "id": 5, "v": [5.0, 6.0]}], "MET": {"pt": 10.0}},
        {"Jet": [], "MET": {"pt": 20.0}},
    ]
)
DELPHES = ak.Array([{"Jet": [{"Jet.PT": 2.0}, {"Jet.PT": 1.0}]}, {"Jet": []}])
LINKED = ak.Array(
    [
        {"Jet": [{"pt": 5.0, "mu": 1}, {"pt": 3.0, "mu": -1}], "Muon": [{"pt": 1.0}, {"pt": 2.0}]},
        {"Jet": [{"pt": 4.0, "mu": 0}], "Muon": [{"pt": 7.0}]},
    ]
)
MUON = sonic.Row(["Jet.pt", sonic.Feature("Muon.pt", index="Jet.mu", scale=10.0)], missing=-1.0)
COVARIANCE = np.arange(24.0).reshape(4, 2, 3)
PF = ak.unflatten(
    ak.zip({"pt": np.arange(4.0), "cov": COVARIANCE[:, 0], "matrix": COVARIANCE}, depth_limit=1),
    [2, 0, 2],
)
FOUR_JETS = ak.to_regular(ak.zip({"pt": [[1.0, 2.0], [3.0, 4.0]]}))
WITH_FOUR = ak.zip({"jets": FOUR_JETS, "met": [9.0, 10.0]}, depth_limit=1)
OVERLAPPING = ListArray(
    Index64(np.asarray([0, 1])), Index64(np.asarray([3, 4])), NumpyArray(np.asarray([1.0, 2, 3, 4]))
)
NO_JET = ak.Array(
    [
        {"Jet": [{"pf": [{"pt": 1.0}, {"pt": 2.0}]}], "met": 7.0},
        {"Jet": [], "met": 8.0},
        {"Jet": [{"pf": []}], "met": 9.0},
    ]
)
LACK = ak.Array(
    [
        {"Jet": None, "MET": {"pt": 5.0}, "met": 1.0},
        {"Jet": [{"pt": 3.0}], "MET": None, "met": 2.0},
    ]
)
HOLES = ak.Array([[[1.0, None], [2.0, 3.0]], [[4.0]]])
LARGE = 2**60 + 1
MOMENTA = ak.zip(
    {k: np.arange(6.0) for k in "xt"} | {k: np.zeros(6) for k in "yz"}, with_name="Momentum4D"
)
CUT = ak.unflatten(MOMENTA, [1, 2, 3])[ak.Array([False, True, True])]


def x(*values: Any) -> dict[str, ak.Array]:
    return {"x": ak.Array(list(values))}


def feature(**options: Any) -> sonic.Feature:
    return sonic.Feature("x", **options)


def of(expression: str, **options: Any) -> sonic.Feature:
    return sonic.Feature("y", expression=expression, **options)


def wrong(**options: Any) -> sonic.Row:
    """A layout of what weaver and the CMS software treat in another order."""
    return sonic.Row(feature(scale=2.0, lower=-5.0, upper=5.0, nonfinite=0.5, **options))


OF_LEADING = ak.Array(
    [{"Jet": [{"pf": [{"pt": 1.0}, {"pt": 2.0}]}]}, {"Jet": [{"pf": [{"pt": 3.0}]}]}]
)
WITH_FLAVOUR = ak.Array(
    [{"Jet": [{"f": "b"}, {"f": "c"}], "era": None}, {"Jet": [], "era": "2018"}]
)
NO_STRING = ak.Array([{"j": [{"s": "a"}, {"s": None}, None]}, {"j": []}, {"j": None}])
SIGNS = {"x": ak.Array([[0, -1], []]), "s": ak.Array([["+"], []])}
PLANE = ak.Array([{"x": 3.0, "y": 4.0}, None, {"x": None, "y": 1.0}], with_name="Momentum2D")
MIXED = ak.concatenate(
    [ak.Array([[{"pt": 1.0}, None], []]), ak.Array([[{"pt": 2.0, "x": 1}, None], [None]])], axis=1
)
MISSING_MET = Tokens({"Jet": Padded("pt", 1), "MET": Row("pt", missing=-9.0)})
PACKED: list[tuple[Any, Any, Any]] = [
    # Objects that are picked, and may be missing.
    (Row("Jet[0].pt", missing=-1.0), ak.mask(EVENTS, [True, False, True]), [[50], [-1]]),
    (Padded("Jet[0].pf.pt", 2), OF_LEADING, [[[1, 2]], [[3, 0]]]),
    (
        Padded(["Jet[0].pf.pt", "met"], 2, missing=-1.0),
        NO_JET,
        [[[1, 2], [7, 7]], [[0, 0]] * 2, [[0, 0]] * 2],
    ),
    (Mask(2, of="Jet[0].pf", axis_order="L"), NO_JET, [[1, 1], [0, 0], [0, 0]]),
    (Row(["Jet[0].pt", "met"], missing=-9.0), LACK, [[-9, 1], [3, 2]]),
    (Row("MET.pt", missing=-9.0), LACK, [[5], [-9]]),
    (Row("Jet.pt", missing=-9.0), ak.zip({"Jet": MIXED}, depth_limit=1), [[1], [2]]),
    (Row("MET.pt", missing=-9.0), {"MET": LACK.MET}, [[5], [-9]]),
    (MISSING_MET, LACK[1:], [[[3], [-9]]]),
    # Arrays of fixed length.
    (
        Padded(["Jet.pt", "Jet.v[:2]"], 2, axis_order="LF"),
        EVENTS,
        [[[50, 1, 2], [30, 3, 4]], [[40, 5, 6], [0, 0, 0]], [[0, 0, 0]] * 2],
    ),
    (
        Padded(["pt", "cov"], 3),
        {"pt": PF.pt, "cov": ak.from_regular(PF.cov, axis=2)},
        np.stack([np.repeat(np.arange(4.0)[:, np.newaxis], 3, 1), COVARIANCE[:, 0]], 1),
    ),
    (
        Padded(["x", "met"], 2),
        {"x": ak.to_regular(ak.Array([[1, 2], [3, 4]])), "met": [7, 8]},
        [[[1, 2], [7, 7]], [[3, 4], [8, 8]]],
    ),
    (Row(["jets.pt", "met"]), WITH_FOUR, [[1, 9], [2, 9], [3, 10], [4, 10]]),
    # Names that hold dots, and properties of what was cut.
    (Padded([("Jet", "Jet.PT")], 2, sort_by=("Jet", "Jet.PT")), DELPHES, [[[2, 1]], [[0, 0]]]),
    (Row(["x", "pt"]), CUT, [[n, n] for n in range(1, 6)]),
    # References of jets in another order.
    (MUON, {"Jet": LINKED.Jet[:, ::-1], "Muon": LINKED.Muon}, [[3, -1], [5, 20], [4, 70]]),
    # NaN may be sent; the order of weaver's own training, and that of the CMS software.
    (
        Row(feature(nonfinite=NAN, scale=2.0, lower=-9.0, upper=9.0), "float16"),
        x(1.0, NAN, INF),
        [[2], [NAN], [NAN]],
    ),
    (wrong(nonfinite_last=True), x(INF, -INF, NAN, 1), [[5], [-5], [0.5], [2]]),
    (wrong(), x(INF, -INF, NAN, 1), [[1], [1], [1], [2]]),
    (Row(feature(replace={INF: 9}, within=(0, 10))), x(1.0, INF), [[1], [9]]),
    # Expressions.
    (
        Row([of(t) for t in ("num(Jet)", "sum(Jet.pt)", "sum(Jet.pt) / MET.pt")]),
        EVENTS,
        [[2, 80, 1], [1, 40, 4], [0, 0, 0]],
    ),
    (Padded(of("Jet.pt / sum(Jet.pt)"), 2), EVENTS[:1], [[[0.625, 0.375]]]),
    (Row(of("num(Jet[0].v)"), missing=-1), EVENTS, [[2], [2], [-1]]),
    (Row([of("Jet[0].pt - Jet[1].pt")], missing=-1.0), EVENTS, [[20], [-1], [-1]]),
    (
        Padded(of("x / y", scale=4.0, nonfinite=3.0), 1),
        {"x": ak.Array([[1.0], [1.0]]), "y": ak.Array([[2.0], [0.0]])},
        [[[2]], [[12]]],
    ),
    (
        Pairwise(feature(scale=3.0), 2, "x_i - x_j", sort_by="x"),
        x([1.0, 3.0, 2.0], [5.0]),
        [[[[0, 3], [-3, 0]]], [[[0, 0], [0, 0]]]],
    ),
    # None of a behaviour, and None that was cut away.
    (Padded("x", 3, 9, missing=NAN), x([None, 2.0], []), [[[NAN, 2, 9]], [[9, 9, 9]]]),
    (Row("pt", missing=-9), PLANE, [[5], [-9]]),
    (
        Padded("x", 2),
        {"x": HOLES[~ak.any(ak.is_none(HOLES, axis=2), axis=2)]},
        [[[2, 3]], [[4, 0]]],
    ),
    (Padded("x", 2), {"x": HOLES[[1]]}, [[[4, 0]]]),
    # Padding, and other orders of axes.
    (Padded(["x", "x"], 2, [NAN, -INF]), x([7]), [[[7, NAN], [7, -INF]]]),
    (Row("x", axis_order=""), x([3], [], [5]), [3, 5]),
    (Flat("x", axis_order="L"), x([2, 1], []), [2, 1]),
    (Padded("x", 3, sort_by="x"), {"x": ak.Array(OVERLAPPING)}, [[[3, 2, 1]], [[4, 3, 2]]]),
    (Mask(3, of="x", dtype="int8"), x(["a", "b"], []), [[[1, 1, 0]], [[0] * 3]]),
    (Mask(2, of="x", axis_order="LF"), x([NAN]), [[[1], [0]]]),
    # Strings that are missing, that are referred to, and of bytes.
    (
        Row(["Jet[:2].f", "era"], dtype="string", missing="?"),
        WITH_FLAVOUR,
        [[b"b", b"c", b"?"], [b"?", b"?", b"2018"]],
    ),
    (
        Padded([sonic.Feature("s", index="x")], 2, axis_order="L", dtype="string", missing="0"),
        SIGNS,
        [[b"+", b"0"], [b"", b""]],
    ),
    (
        Padded("j.s", 4, fill="-", dtype="string", missing="?", axis_order="L"),
        NO_STRING,
        [[b"a", b"?", b"?", b"-"], [b"-"] * 4],
    ),
    (Row("x", dtype="string"), x(b"\xff\x00", b""), [[b"\xff\x00"], [b""]]),
]


@pytest.mark.parametrize(("layout", "array", "expected"), PACKED)
def test_examples_are_packed(layout: Any, array: Any, expected: Any) -> None:
    tensor = layout.pack(array)
    assert tensor.dtype == layout.dtype
    if tensor.dtype == object:
        assert tensor.tolist() == expected
    else:
        np.testing.assert_allclose(tensor, np.asarray(expected), rtol=1e-6)
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_large_integers_are_exact() -> None:
    array = ak.unflatten(np.full(6, LARGE, np.uint64), [1, 1, 4])
    tensor = sonic.Padded("x", 2, dtype="int64").pack({"x": array})
    assert tensor.tolist() == [[[LARGE, 0]], [[LARGE, 0]], [[LARGE, LARGE]]]
    replaced = sonic.Row(feature(replace={-1: 0}), "int64").pack(x(-1, LARGE))
    assert replaced.tolist() == [[0], [LARGE]]


PARTICLES = [{"id": "e", "pt": 1.0}, {"id": "µ", "pt": 2.0}, {"id": "e", "pt": 0.5}]
STRINGS = ak.Array(
    [
        [{"name": "top", "pf": PARTICLES}, None],
        [],
        [{"name": "", "pf": []}, {"name": "qcd", "pf": PARTICLES[1:2]}],
    ]
)
E, MU = b"e", "µ".encode()

strings = partial(Padded, "pf.id", axis_order="L", dtype="string")


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Row("name", dtype="string"), [[b"top"], [b""], [b"qcd"]]),
        (strings(2, sort_by="pf.pt"), [[MU, E], [b"", b""], [MU, b""]]),
        (strings(4, pad_mode="wrap"), [[E, MU, E, E], [b""] * 4, [MU] * 4]),
        (
            Bucketed("pf.id", (1, 4), fill="-", axis_order="LF", dtype=str),
            [[[E], [MU], [E], [b"-"]], [[b"-"]] * 4, [[MU], [b"-"], [b"-"], [b"-"]]],
        ),
        (Flat("pf.id", dtype="string"), [[E], [MU], [E], [MU]]),
        (
            Padded(["pf.id", "name"], 1, dtype="string"),
            [[[E], [b"top"]], [[b""], [b""]], [[MU], [b"qcd"]]],
        ),
    ],
)
def test_strings_go_as_they_are(layout: Any, expected: Any) -> None:
    for jets in (STRINGS, ak.to_packed(STRINGS), STRINGS[[0, 1, 2]]):
        tensor = layout.pack(jets)
        assert tensor.dtype == object
        assert tensor.tolist() == expected


def test_strings_come_back() -> None:
    row = Row("name", dtype="string")
    assert row.unpack(row.pack(STRINGS), STRINGS).tolist() == STRINGS[["name"]].tolist()
    particles = strings(2, sort_by="pf.pt")
    back = particles.unpack(particles.pack(STRINGS), STRINGS)
    # The third one is truncated.
    assert back["pf.id"].tolist() == [[["e", "µ", None], None], [], [[], ["µ"]]]


def test_requests_are_planned_by_the_longest_string() -> None:
    layout = Row(["name", "name"], dtype="string")
    (segment,) = bind_inputs({"x": layout}, STRINGS).segments
    assert segment.row_bytes == 2 * (4 + len("top"))
