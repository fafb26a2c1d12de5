"""Each option of fields, padding and tokens packs what the examples say."""

from __future__ import annotations

import math
import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest
import vector
from awkward.contents import ListArray, NumpyArray
from awkward.index import Index64

import sonic_coffea as sonic

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
IDS = {"x": ak.Array([[211, -211], [], [22]])}
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


PACKED: dict[str, tuple[Any, Any, Any]] = {
    # Paths.
    "of a leading object of events that are there": (
        sonic.Row("Jet[0].pt", missing=-1.0),
        ak.mask(EVENTS, [True, False, True]),
        [[50], [-1]],
    ),
    "of the lists of a leading object": (
        sonic.Padded("Jet[0].pf.pt", 2),
        ak.Array([{"Jet": [{"pf": [{"pt": 1.0}, {"pt": 2.0}]}]}, {"Jet": [{"pf": [{"pt": 3.0}]}]}]),
        [[[1, 2]], [[3, 0]]],
    ),
    "of the lists of a leading object that may lack": (
        sonic.Padded(["Jet[0].pf.pt", "met"], 2, missing=-1.0),
        NO_JET,
        [[[1, 2], [7, 7]], [[0, 0]] * 2, [[0, 0]] * 2],
    ),
    "a mask of the lists of a leading object": (
        sonic.Mask(2, of="Jet[0].pf", axis_order="L"),
        NO_JET,
        [[1, 1], [0, 0], [0, 0]],
    ),
    "the first of a list that may lack": (sonic.Row("Jet[0].pt", missing=-9.0), LACK, [[-9], [3]]),
    "the first of a list beside another number": (
        sonic.Row(["Jet[0].pt", "met"], missing=-9.0),
        LACK,
        [[-9, 1], [3, 2]],
    ),
    "an object that may lack": (sonic.Row("MET.pt", missing=-9.0), LACK, [[5], [-9]]),
    "an object of a dict that may lack": (
        sonic.Row("MET.pt", missing=-9.0),
        {"MET": LACK.MET},
        [[5], [-9]],
    ),
    "tokens of an object that may lack": (
        sonic.Tokens({"Jet": sonic.Padded("pt", 1), "MET": sonic.Row("pt", missing=-9.0)}),
        LACK[1:],
        [[[3], [-9]]],
    ),
    "numbers of an array": (
        sonic.Padded(["Jet.pt", "Jet.v[:2]"], 2, axis_order="LF"),
        EVENTS,
        [[[50, 1, 2], [30, 3, 4]], [[40, 5, 6], [0, 0, 0]], [[0, 0, 0]] * 2],
    ),
    "numbers of the row beside lists": (
        sonic.Padded(["pt", "cov"], 3),
        {"pt": PF.pt, "cov": ak.from_regular(PF.cov, axis=2)},
        np.stack([np.repeat(np.arange(4.0)[:, np.newaxis], 3, 1), COVARIANCE[:, 0]], 1),
    ),
    "numbers of the row beside its array": (
        sonic.Padded(["x", "met"], 2),
        {"x": ak.to_regular(ak.Array([[1, 2], [3, 4]])), "met": [7, 8]},
        [[[1, 2], [7, 7]], [[3, 4], [8, 8]]],
    ),
    "a fixed number of objects": (
        sonic.Row(["jets.pt", "met"]),
        WITH_FOUR,
        [[1, 9], [2, 9], [3, 10], [4, 10]],
    ),
    "names that hold dots": (
        sonic.Padded([("Jet", "Jet.PT")], 2, sort_by=("Jet", "Jet.PT")),
        DELPHES,
        [[[2, 1]], [[0, 0]]],
    ),
    "a property of what was cut": (sonic.Row(["x", "pt"]), CUT, [[n, n] for n in range(1, 6)]),
    # References.
    "references of jets in another order": (
        MUON,
        {"Jet": LINKED.Jet[:, ::-1], "Muon": LINKED.Muon},
        [[3, -1], [5, 20], [4, 70]],
    ),
    # Transformations.
    "limits before a function": (
        sonic.Padded(feature(function="log", within=(1.0, 16.0)), 3, fill=-1.0),
        x([0.0, 4.0, 100.0], [-3.0]),
        [[[0, math.log(4), math.log(16)]], [[0, -1, -1]]],
    ),
    "a power": (sonic.Flat(feature(power=0.5, within=(0, None), scale=2)), x([4, -3]), [[4], [0]]),
    "replaced": (sonic.Row(feature(replace={-1: 999}, scale=2.0)), x(-1, 3), [[1998], [6]]),
    "nonfinite": (
        sonic.Padded(feature(nonfinite=-5.0, scale=2.0), 2),
        x([1.0], [2.0, -INF]),
        [[[2, 0]], [[4, -10]]],
    ),
    "NaN is sent": (
        sonic.Row(feature(nonfinite=NAN, scale=2.0, lower=-9.0, upper=9.0), "float16"),
        x(1.0, NAN, INF),
        [[2], [NAN], [NAN]],
    ),
    "infinities in the order of weaver": (
        wrong(nonfinite_last=True),
        x(INF, -INF, NAN, 1),
        [[5], [-5], [0.5], [2]],
    ),
    "infinities in that of CMSSW": (wrong(), x(INF, -INF, NAN, 1), [[1], [1], [1], [2]]),
    "infinity replaced": (
        sonic.Row(feature(replace={INF: 9}, within=(0, 10))),
        x(1.0, INF),
        [[1], [9]],
    ),
    "categories": (
        sonic.Padded(feature(categories={211: 1, -211: 2, 22: 3}), 2, dtype="int64"),
        IDS,
        [[[1, 2]], [[0, 0]], [[3, 0]]],
    ),
    "other categories": (
        sonic.Flat(feature(categories={211: 1, None: 9}, scale=0.5)),
        IDS,
        [[0.5], [4.5], [4.5]],
    ),
    "one channel for each": (
        sonic.Flat([sonic.OneHot("x", [22, 211])]),
        IDS,
        [[0, 1], [0, 0], [1, 0]],
    ),
    # Expressions.
    "lists are reduced": (
        sonic.Row([of(t) for t in ("num(Jet)", "sum(Jet.pt)", "sum(Jet.pt) / MET.pt")]),
        EVENTS,
        [[2, 80, 1], [1, 40, 4], [0, 0, 0]],
    ),
    "shares of a sum": (
        sonic.Padded(of("Jet.pt / sum(Jet.pt)"), 2),
        EVENTS[:1],
        [[[0.625, 0.375]]],
    ),
    "lists of a leading object are counted": (
        sonic.Row(of("num(Jet[0].v)"), missing=-1),
        EVENTS,
        [[2], [2], [-1]],
    ),
    "objects are picked": (
        sonic.Row([of("Jet[0].pt - Jet[1].pt")], missing=-1.0),
        EVENTS,
        [[20], [-1], [-1]],
    ),
    "an expression is transformed": (
        sonic.Padded(of("x / y", scale=4.0, nonfinite=3.0), 1),
        {"x": ak.Array([[1.0], [1.0]]), "y": ak.Array([[2.0], [0.0]])},
        [[[2]], [[12]]],
    ),
    "sorted by an expression": (
        sonic.Padded("Jet.pt", 2, sort_by="abs(Jet.eta)"),
        EVENTS[:1],
        [[[30, 50]]],
    ),
    "pairs of sorted features": (
        sonic.Pairwise(feature(scale=3.0), 2, "x_i - x_j", sort_by="x"),
        x([1.0, 3.0, 2.0], [5.0]),
        [[[[0, 3], [-3, 0]]], [[[0, 0], [0, 0]]]],
    ),
    # None.
    "None is NaN": (
        sonic.Padded("x", 3, 9, missing=NAN),
        x([None, 2.0], []),
        [[[NAN, 2, 9]], [[9, 9, 9]]],
    ),
    "None of one channel for each": (
        sonic.Row([sonic.OneHot("x", [1, -1])], missing=-9),
        x(1, None, -1),
        [[1, 0], [-9, -9], [0, 1]],
    ),
    "None of a union": (
        sonic.Row("m", missing=-9),
        ak.concatenate(
            [
                ak.Array([{"m": 1.0}, None]),
                ak.Array([{"m": None, "x": 1}, None, {"m": 2.0, "x": 2}]),
            ]
        ),
        [[1], [-9], [2]],
    ),
    "None of a behaviour": (
        sonic.Row("pt", missing=-9),
        ak.Array([{"x": 3.0, "y": 4.0}, None, {"x": None, "y": 1.0}], with_name="Momentum2D"),
        [[5], [-9]],
    ),
    "None that was cut away": (
        sonic.Padded("x", 2),
        {"x": HOLES[~ak.any(ak.is_none(HOLES, axis=2), axis=2)]},
        [[[2, 3]], [[4, 0]]],
    ),
    "None of another event": (sonic.Padded("x", 2), {"x": HOLES[[1]]}, [[[4, 0]]]),
    # Padding.
    "a fill for each field": (
        sonic.Padded(["x", "x"], 2, fill=[-1, 9]),
        x([7]),
        [[[7, -1], [7, 9]]],
    ),
    "a fill of NaN": (sonic.Padded("x", 2, fill=NAN), x([1], [2, 3]), [[[1, NAN]], [[2, 3]]]),
    "a fill of infinity": (
        sonic.Padded("x", 2, fill=-INF),
        x([1], []),
        [[[1, -INF]], [[-INF] * 2]],
    ),
    "a row of one number": (sonic.Row("x", axis_order=""), x([3], [], [5]), [3, 5]),
    "a list of numbers": (sonic.Flat("x", axis_order="L"), x([2, 1], []), [2, 1]),
    "rows that overlap": (
        sonic.Padded("x", 3, sort_by="x"),
        {"x": ak.Array(OVERLAPPING)},
        [[[3, 2, 1]], [[4, 3, 2]]],
    ),
    "a mask of strings": (
        sonic.Mask(3, of="x", dtype="int8"),
        x(["a", "b"], []),
        [[[1, 1, 0]], [[0] * 3]],
    ),
    "a mask of records": (
        sonic.Mask(2, of="x", axis_order="L"),
        x([{"a": 1}], []),
        [[1, 0], [0, 0]],
    ),
    "a mask in another order": (sonic.Mask(2, of="x", axis_order="LF"), x([NAN]), [[[1], [0]]]),
    # Strings.
    "strings that are missing": (
        sonic.Row(["Jet[:2].f", "era"], dtype="string", missing="?"),
        ak.Array([{"Jet": [{"f": "b"}, {"f": "c"}], "era": None}, {"Jet": [], "era": "2018"}]),
        [[b"b", b"c", b"?"], [b"?", b"?", b"2018"]],
    ),
    "strings that are referred to": (
        sonic.Padded(
            [sonic.Feature("s", index="x")], 2, axis_order="L", dtype="string", missing="0"
        ),
        {"x": ak.Array([[0, -1], []]), "s": ak.Array([["+"], []])},
        [[b"+", b"0"], [b"", b""]],
    ),
    "strings that are None": (
        sonic.Padded("j.s", 4, fill="-", dtype="string", missing="?", axis_order="L"),
        ak.Array([{"j": [{"s": "a"}, {"s": None}, None]}, {"j": []}, {"j": None}]),
        [[b"a", b"?", b"?", b"-"], [b"-"] * 4],
    ),
    "bytestrings": (sonic.Row("x", dtype="string"), x(b"\xff\x00", b""), [[b"\xff\x00"], [b""]]),
}


@pytest.mark.parametrize("case", PACKED)
def test_examples_are_packed(case: str) -> None:
    layout, array, expected = PACKED[case]
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
