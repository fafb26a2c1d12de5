"""What the oracle does not draw: each option packs what the example says."""

from __future__ import annotations

import math
import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest
import vector
from awkward.contents import ListArray, NumpyArray, UnionArray
from awkward.index import Index8, Index64

import sonic_coffea as sonic
from sonic_coffea import Feature, Flat, Mask, Padded, Row
from sonic_coffea.errors import InputError
from sonic_coffea.layouts import bind_inputs

vector.register_awkward()
INF, NAN = math.inf, math.nan
JETS = [{"pt": 50.0, "v": [1.0, 2.0]}, {"pt": 30.0, "v": [3.0, 4.0]}]


class Doubled(ak.Array):  # type: ignore[misc]
    """Objects with others as a property, which is no field."""

    @property
    def doubled(self) -> Any:
        return ak.zip({"pt": 2 * self.pt})

    @property
    def leading(self) -> Any:
        return self.pt[:, :1]

    @property
    def filled(self) -> Any:
        return ak.fill_none(self.pt, 9.0, axis=-1)

    @property
    def other(self) -> Any:
        return ak.mask(self.filled, ak.fill_none(self.pt != 1.0, True))


DOUBLED = {
    "a": ak.Array(
        ak.with_name([[{"pt": 1.0}, {"pt": 2.0}], [{"pt": 3.0}]], "Doubled").layout,
        behavior={("*", "Doubled"): Doubled},
    ),
    "b": ak.Array([[{"i": 1}], [{"i": 0}]]),
}
OF_SOME = ak.mask(DOUBLED["a"], DOUBLED["a"].pt != 2.0)
EVENTS = ak.Array(
    [
        {"Jet": JETS, "MET": {"pt": 80.0}},
        {"Jet": [{"pt": 40.0, "v": [5.0, 6.0]}], "MET": {"pt": 10.0}},
        {"Jet": [], "MET": {"pt": 20.0}},
    ]
)
DELPHES = ak.Array([{"Jet": [{"Jet.PT": 2.0}, {"Jet.PT": 1.0}]}, {"Jet": []}])
LINKED = ak.Array([[{"pt": 3.0, "mu": -1}, {"pt": 5.0, "mu": 1}], [{"pt": 4.0, "mu": 0}]])
MUONS = ak.Array([[{"pt": 1.0}, {"pt": 2.0}], [{"pt": 7.0}]])
MUON = Row(["Jet.pt", sonic.Feature("Muon.pt", index="Jet.mu", scale=10.0)], missing=-1.0)
OVERLAPPING = ListArray(
    Index64(np.asarray([0, 1])), Index64(np.asarray([3, 4])), NumpyArray(np.asarray([1.0, 2, 3, 4]))
)
OF_TWO_KINDS = UnionArray(
    Index8(np.asarray([0, 1], np.int8)),
    Index64(np.asarray([0, 0])),
    [NumpyArray(np.asarray([[1, 2, 3]])), ak.Array([[4, 5]]).layout],
)
BEYOND = ListArray(*(Index64(np.asarray([9])) for _ in "ab"), ak.Array([[1.0]]).layout)
NO_JET = ak.Array(
    [
        {"Jet": [{"pf": [{"pt": 1.0}, {"pt": 2.0}]}], "met": 7.0},
        {"Jet": [], "met": 8.0},
        {"Jet": [{"pf": []}], "met": 9.0},
    ]
)
OF_NONE = ak.Array([{"Jet": [{"x": [1, 2]}]}, {"Jet": []}, {"Jet": [{"x": None}]}])
LACK = ak.Array(
    [{"Jet": None, "MET": {"pt": 5.0}, "met": 1.0}, {"Jet": [{"pt": 3.0}], "MET": None, "met": 2.0}]
)
MUON_OF_JET = ak.Array(
    [
        {"Jet": [{"mu": {"pt": 5.0}}]},
        {"Jet": []},
        {"Jet": [{"mu": None}]},
        {"Jet": [{"mu": {"pt": 6.0}}]},
    ]
)
WITH_FLAVOUR = ak.Array(
    [{"Jet": [{"f": "b"}, {"f": "µ"}], "era": None}, {"Jet": [], "era": "2018"}]
)
SIGNS = {"x": ak.Array([[0, -1, None], []]), "s": ak.Array([["+"], []])}
UNKNOWN = {"x": ak.Array([[], []]), "y": ak.Array([[], []])}
PLANE = ak.Array([{"x": 3.0, "y": 4.0}, None, {"x": None, "y": 1.0}], with_name="Momentum2D")
DIRECTIONS = ak.Array(
    [[{"eta": 0.5, "phi": 1.0}, {"eta": -1.0, "phi": -2.0}], [{"eta": 2, "phi": 0}]]
)
BYTES = {"a": np.asarray([1.5, -3.0], ">f4"), "b": np.asarray([1, -2], ">i8")}
SMALL = {"x": np.asarray([5], np.int16)}
TWO_JETS, THREE_JETS = (
    ak.to_regular(ak.zip({"pt": [numbers], **others}))
    for numbers, others in (([1.0, 2.0], {"id": 5}), ([3.0, 4.0, 5.0], {}))
)
SOME_JETS = ak.concatenate(
    [ak.mask(TWO_JETS, [True]), ak.mask(TWO_JETS, [False]), ak.mask(THREE_JETS, [True])]
)
IMAGE = [[1, 3], [5, 4]]
LARGE = 2**60 + 1
LISTS_OF_LARGE = {"x": ak.unflatten(np.full(4, LARGE, np.uint64), [1, 3])}


def x(*values: Any) -> dict[str, ak.Array]:
    return {"x": ak.Array(list(values))}


def feature(**options: Any) -> sonic.Feature:
    return sonic.Feature("x", **options)


def of(expression: str, **options: Any) -> sonic.Feature:
    return sonic.Feature("y", expression=expression, **options)


SUMS = [of(text) for text in ("num(Jet)", "sum(Jet.pt)", "sum(Jet.pt) / MET.pt")]
EXTREMES = [of(text) for text in ("max(Jet.pt)", "min(Jet.pt)", "max(MET.pt, max(Jet.pt))")]
PACKED: list[tuple[Any, Any, Any]] = [
    # Objects that are picked, and may be missing.
    (
        Padded(["Jet[0].pf.pt", "met"], 2, missing=-1.0),
        NO_JET,
        [[[1, 2], [7, 7]], [[0, 0]] * 2, [[0, 0]] * 2],
    ),
    (Mask(2, of="Jet[0].pf", axis_order="L"), NO_JET, [[1, 1], [0, 0], [0, 0]]),
    (Padded("Jet[0].x", 2, missing=-1.0), OF_NONE, [[[1, 2]], [[0, 0]]]),
    (Row(["Jet[0].pt", "met"], missing=-9.0), LACK, [[-9, 1], [3, 2]]),
    (Row("MET.pt", missing=-9.0), LACK, [[5], [-9]]),
    (Row(sonic.Feature("MET.pt", 1.0, 2.0), missing=-9.0, pad="before"), LACK, [[8], [-20]]),
    (
        Row(feature(replace={1: 5}), "int64", missing=1, pad="before"),
        {"x": ak.Array([LARGE, None])},
        [[LARGE], [5]],
    ),
    (Row(feature(scale=2.0), missing=0.5, pad="before"), x(1, None), [[2], [1]]),
    (Row("pt", missing=-9), PLANE, [[5], [-9]]),
    (Row("Jet[0].mu.pt"), MUON_OF_JET, [[5], [6]]),
    (Row(["Jet[0].mu.pt", "Jet[-1].mu.pt"]), MUON_OF_JET, [[5, 5], [6, 6]]),
    # Numbers of events, and arrays of fixed length.
    (
        Padded(["Jet.pt", "Jet.v[:2]"], 2, axis_order="LF"),
        EVENTS,
        [[[50, 1, 2], [30, 3, 4]], [[40, 5, 6], [0, 0, 0]], [[0, 0, 0]] * 2],
    ),
    (sonic.Dense("x"), {"x": np.asarray([IMAGE])}, [IMAGE]),
    (sonic.Dense(of("2 * max(x)"), (2,)), {"x": np.asarray([IMAGE])}, [[6, 10]]),
    (Row(["Jet.pt", "MET.pt"]), {"Jet": TWO_JETS, "MET": EVENTS.MET[:1]}, [[1, 80], [2, 80]]),
    # Lists of records that differ, as of several files, and of numbers.
    (Padded("pt", 3), ak.concatenate([TWO_JETS, THREE_JETS]), [[[1, 2, 0]], [[3, 4, 5]]]),
    (Row("Jet[-1].pt", missing=0), {"Jet": SOME_JETS}, [[2], [0], [5]]),
    (Padded("x", 3), {"x": ak.Array(OF_TWO_KINDS)}, [[[1, 2, 3]], [[4, 5, 0]]]),
    # Names that hold dots, and references of jets in another order.
    (Padded([("Jet", "Jet.PT")], 2, sort_by=("Jet", "Jet.PT")), DELPHES, [[[2, 1]], [[0, 0]]]),
    (MUON, {"Jet": LINKED[:, ::-1], "Muon": MUONS}, [[5, 20], [3, -1], [4, 70]]),
    (
        MUON,
        {"Jet": LINKED[:, ::-1], "Muon": ak.mask(MUONS, MUONS.pt != 2.0)},
        [[5, -1], [3, -1], [4, 70]],
    ),
    (
        Row([sonic.Feature("Muon.pt", index="num"), sonic.Feature("n", expression="num(Muon.pt)")]),
        {"Muon": MUONS, "num": np.asarray([1, 0])},
        [[2, 2], [7, 1]],
    ),
    (
        Row(sonic.Feature(("a.Muon", "pt"), index="Jet[-1].mu")),
        {"Jet": LINKED, "a.Muon": MUONS},
        [[2], [7]],
    ),
    (Row(sonic.Feature("a.doubled.pt", index="b.i")), DOUBLED, [[4], [6]]),
    # Of an event that is None, a property is not missing: there is no row.
    (
        Row("a[0].filled", missing=-1.0),
        ak.mask(ak.zip({"a": OF_SOME}, depth_limit=1), [False, True]),
        [[3]],
    ),
    # A property with other lists than the objects, of which one is None.
    (
        Padded("a.leading", 2, missing=-1.0),
        {"a": OF_SOME},
        [[[1, 0]], [[3, 0]]],
    ),
    # A property with a number where the object is None, and with None where the object is not.
    (
        Padded(["a.pt", "a.other"], 2, missing=-1.0),
        {"a": OF_SOME},
        [[[1, -1], [-1, 9]], [[3, 0], [3, 0]]],
    ),
    (
        Padded("x", 2, sort_by=sonic.Feature("y", index="i")),
        {"x": ak.Array([[3, 4]]), "i": ak.Array([[0, 1]]), "y": ak.Array([[1.0, 2.0]])},
        [[[4, 3]]],
    ),
    # NaN and infinity, where they are asked for.
    (Row(feature(nonfinite=NAN, upper=9.0), "float16"), x(1.0, NAN, INF), [[1], [NAN], [NAN]]),
    (Row(feature(replace={INF: 9}, within=(0, 10))), x(1.0, INF), [[1], [9]]),
    (Row(feature(nonfinite=-1.0, within=(0, 10))), x(NAN, INF), [[-1], [10]]),
    (Row(feature(replace={-1: 1e-6})), {"x": np.asarray([2, -1], "float16")}, [[2], [1e-6]]),
    (Row(feature(function="log"), missing=-9), x(1.0, None), [[0], [-9]]),
    (Padded("x", 3, 9, missing=NAN), x([None, 2.0], []), [[[NAN, 2, 9]], [[9, 9, 9]]]),
    (Padded(["x", "x"], 2, [NAN, -INF]), x([7]), [[[7, NAN], [7, -INF]]]),
    # Expressions.
    (Row(SUMS), EVENTS, [[2, 80, 1], [1, 40, 4], [0, 0, 0]]),
    (Padded(of("Jet.pt / sum(Jet.pt)"), 2), EVENTS[:1], [[[0.625, 0.375]]]),
    (Row(of("num(Jet[0].v)"), missing=-1), EVENTS, [[2], [2], [-1]]),
    (Row(EXTREMES, missing=-1), EVENTS, [[50, 30, 80], [40, 40, 40], [-1, -1, -1]]),
    (Padded(of("max(Jet.pt) - Jet.pt"), 2), EVENTS, [[[0, 20]], [[0, 0]], [[0, 0]]]),
    (Padded(of("x / (x - 1)", scale=4.0, nonfinite=3.0), 1), x([2.0], [1.0]), [[[8]], [[12]]]),
    (
        Row(of("delta_r(Jet[0], Jet[1])"), missing=-1.0),
        {"Jet": DIRECTIONS},
        [[math.hypot(1.5, 3.0)], [-1.0]],
    ),
    # What pads is transformed beside numbers of the row.
    (
        Padded(of("(x - y) / y"), 2, pad="before"),
        {"x": ak.Array([[], [3.0]]), "y": ak.Array([2.0, 6.0])},
        [[[-1, -1]], [[-0.5, -1]]],
    ),
    (
        Padded(["Jet.pt", sonic.Feature("Muon.pt", index="Jet[0].mu")], 2, missing=8, pad="before"),
        {"Jet": LINKED[:, ::-1], "Muon": MUONS},
        [[[5, 3], [2, 2]], [[4, 0], [7, 7]]],
    ),
    # Names in tuples, and expressions that are no path.
    (Row([("Jet", np.int64(0), "pt"), ("Jet", 0, "pt")], missing=0), EVENTS[:1], [[50, 50]]),
    (Padded("x", 2, sort_by="2. * x"), x([1.0, 2.0]), [[[2, 1]]]),
    # Other orders of axes, lists that share elements, and bytes in another order.
    (Row("x", axis_order=""), x([3], [], [5]), [3, 5]),
    (Flat("x", axis_order="L"), x([2, 1], []), [2, 1]),
    (Padded("x", 3, sort_by="x"), {"x": ak.Array(OVERLAPPING)}, [[[3, 2, 1]], [[4, 3, 2]]]),
    (Padded("x", 3), {"x": ak.Array(BEYOND)}, np.zeros((0, 1, 3))),
    (Row(["a", "b"]), BYTES, [[1.5, 1.0], [-3.0, -2.0]]),
    (Row("x", "uint8"), x(0.0, 255.0), [[0], [255]]),
    # Integers that no float holds.
    (Padded("x", 2, dtype="int64"), LISTS_OF_LARGE, [[[LARGE, 0]], [[LARGE, LARGE]]]),
    (Row(feature(replace={-1: 0}), "int64"), x(-1, LARGE), [[0], [LARGE]]),
    (Row("x", "uint64"), x(0, LARGE), [[0], [LARGE]]),
    (Row(feature(categories={5: 2**24 + 1}, lower=0), "int64"), SMALL, [[2**24 + 1]]),
    (Row(feature(replace={5: -(2**24) - 1}), "int64"), SMALL, [[-(2**24) - 1]]),
    # Strings that are picked, that are referred to, and of bytes.
    (
        Row(["Jet[:2].f", "era"], dtype="string", missing="?"),
        WITH_FLAVOUR,
        [[b"b", "µ".encode(), b"?"], [b"?", b"?", b"2018"]],
    ),
    (
        Padded([sonic.Feature("s", index="x")], 4, axis_order="L", dtype="string", missing="0"),
        SIGNS,
        [[b"+", b"0", b"0", b""], [b""] * 4],
    ),
    (Row("x", dtype="string"), x(b"\xff\x00", b""), [[b"\xff\x00"], [b""]]),
    # Nothing, of a type that nobody knows.
    (Padded(["x", "y"], 2), UNKNOWN, np.zeros((2, 2, 2))),
    (Padded("x", 2), x(), np.zeros((0, 1, 2))),
]


@pytest.mark.parametrize(("layout", "array", "expected"), PACKED)
def test_examples_are_packed(layout: Any, array: Any, expected: Any) -> None:
    tensor = layout.pack(array)
    assert tensor.dtype == layout.dtype
    if tensor.dtype.kind == "f":
        np.testing.assert_allclose(tensor, np.asarray(expected), rtol=1e-6)
    else:
        assert tensor.tolist() == expected
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_requests_are_planned_by_the_longest_string() -> None:
    layout = Row(["x", "x"], dtype="string")
    (segment,) = bind_inputs({"x": layout}, {"x": x("qcd", "", "µ")}).segments
    assert segment.row_bytes == 2 * (4 + len("qcd"))


# Arrays of fixed shape are sent in the declared shape, and in no other with as many numbers.


@pytest.mark.parametrize("declared", [(3, 4), (1, 3, 4), (3, 4, 1), (3, 1, 4)])
def test_axes_of_one_are_added(declared: tuple[int, ...]) -> None:
    """Of one channel, channels first and channels last are the same numbers in the same order."""
    images = np.arange(60, dtype=np.float32).reshape(5, 3, 4)
    tensor = sonic.Dense("x", declared).pack({"x": images})
    np.testing.assert_array_equal(tensor, images.reshape(5, *declared))


@pytest.mark.parametrize("declared", [(2, 4, 3), (4, 3, 2), (24,), (2, 12), (2, 2, 3, 2), (24, 1)])
def test_other_shapes_are_refused(declared: tuple[int, ...]) -> None:
    images = np.zeros((5, 2, 3, 4), np.float32)
    for column in (images, ak.from_regular(ak.Array(images), axis=None)):
        with pytest.raises(InputError, match=rf"field 'x' .*expected \[{declared[0]}.*"):
            sonic.Dense("x", declared).pack({"x": column})


@pytest.mark.parametrize("counts", [[1, 1], [2, 0]])
def test_axes_of_length_one_are_no_lists_of_one_object(counts: list[int]) -> None:
    """Otherwise, rows would be events in chunks whose events all have one object."""
    images = ak.unflatten(ak.Array({"x": np.ones((2, 3, 4), np.float32)}), counts)
    layout = sonic.Dense("x", (1, 3, 4))
    tensor = layout.pack(images)
    assert tensor.shape == (2, 1, 3, 4)
    assert str(layout.unpack(tensor, images).type) == "2 * var * 1 * 3 * 4 * float32"


@pytest.mark.parametrize(
    ("value", "tensor"),
    [
        (1.0, np.ma.masked_greater([[[1.0, 2.0]], [[3.0, 4.0]]], 2.0)),
        ("a", np.asarray([[["a", "b"]], [["c", "d"]]], object)),
        ("a", np.asarray([[[b"a", None]], [[b"c", b"d"]]], object)),
        ("a", np.asarray([[[b"a", b"b"]], [[b"c", b"d"]]])),
        (1.0, np.asarray([[[1.0, None]], [[3.0, 4.0]]], object)),
    ],
)
def test_values_that_pack_does_not_make_are_not_unpacked(value: Any, tensor: Any) -> None:
    layout = Padded("v", 2, dtype="string" if value == "a" else "float32")
    with pytest.raises(InputError, match="values without a mask, and strings of type bytes"):
        layout.unpack(tensor, ak.Array({"v": [[value, value]] * 2}))


def test_channels_of_one_name_are_unpacked_one_by_one() -> None:
    events = ak.Array([{"pt": 3.0, "pt_1": 5.0}, {"pt": 4.0, "pt_1": 6.0}])
    layout = Row(["pt", Feature("pt", scale=10), "pt_1", 7, 7])
    values = layout.unpack(layout.pack(events), events)
    assert values.fields == ["pt", "pt_2", "pt_1", "7.0", "7.0_1"]
    assert [values[name].tolist() for name in ("pt", "pt_2", "pt_1")] == [[3, 4], [30, 40], [5, 6]]
    assert values["7.0"].tolist() == values["7.0_1"].tolist() == [7, 7]


@pytest.mark.parametrize("options", [{"lower": 0}, {"shift": 1}, {"categories": {7: 2**60 + 1}}])
def test_integers_that_a_transformation_rounds_are_refused(options: Any) -> None:
    array = {"v": np.asarray([7 if "categories" in options else 2**60 + 1])}
    with pytest.raises(InputError, match="int64 cannot hold, or float64 rounds; transform it"):
        Row(Feature("v", **options), "int64").pack(array)
    kept = Row(Feature("v", replace={7: 2**60 + 1}), "int64").pack({"v": np.asarray([7])})
    assert kept.tolist() == [[2**60 + 1]]
