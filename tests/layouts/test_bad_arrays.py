"""Arrays that a layout cannot pack are refused, and the error names the field and the event."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import IndexedOptionArray, RegularArray, UnionArray
from awkward.index import Index8, Index64

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts import bind_inputs, declared

JETS = ak.Array(
    [
        [
            {"pt": 50.0, "eta": 0.5, "pf": [{"pt": 1.0}, {"pt": 2.0}, {"pt": 3.0}]},
            {"pt": 30.0, "eta": -1.0, "pf": []},
        ],
        [],
        [{"pt": 40.0, "eta": 2.0, "pf": [{"pt": 7.0}]}],
    ]
)
EVENTS = ak.Array(
    [
        {"Jet": [{"pt": 50.0, "id": 3}, {"pt": 30.0, "id": 4}], "MET": {"pt": 80.0}, "x": None},
        {"Jet": [], "MET": {"pt": 10.0}, "x": 2.0},
    ]
)
INF, NAN = float("inf"), float("nan")


def x(values: Any, y: Any = None) -> dict[str, ak.Array]:
    columns = {"x": values} if y is None else {"x": values, "y": y}
    return {name: ak.Array(column) for name, column in columns.items()}


def union(*arrays: ak.Array) -> ak.Array:
    """One element of each, as a union."""
    tags = np.arange(len(arrays), dtype=np.int8)
    index = Index64(np.zeros(len(arrays), np.int64))
    return ak.Array(UnionArray(Index8(tags), index, [a.layout for a in arrays]))


def feature(**options: Any) -> sonic.Feature:
    return sonic.Feature("x", **options)


def computed(expression: str) -> sonic.Feature:
    return sonic.Feature("y", expression=expression)


ROW, PADDED = sonic.Row("x"), sonic.Padded("x", 2)
TWO = sonic.Padded(["x", "y"], 2)
IN_16 = sonic.Row("Jet[:1].pt", "int16", missing=0.0)
LEADING = ak.Array(
    [{"Jet": [{"pt": p} for p in event]} for event in ([1, 2, NAN], [3, INF], [1e9])]
)
TIMES_100 = sonic.Padded(feature(scale=100.0), 2, dtype="int8")
FEW, FEW_OR_0 = (
    feature(categories={211: 1, -211: 2}, **options) for options in ({}, {"nonfinite": 0.0})
)
NO_CATEGORY = "'x' is 22 in event 2, which is none of its categories 211, -211"
NO_JET = r"has no Jet\[{}\] in event {};.* say what stands for it"
OF_LEADING = sonic.Padded("Jet[0].pf.pt", 2)
NO_PF = {"Jet": ak.Array([[{"pf": [{"pt": 1.0}]}], []])}
PICKED_TWICE = ak.Array([{"Jet": [{"pf": [{"y": [1.0]}]}]}, {"Jet": []}])
MUON = sonic.Row(["Jet.pt", sonic.Feature("Muon.pt", index="Jet.mu", scale=10.0)], missing=-1.0)
NONE_ALLOWED = sonic.Row(MUON.features)
LINKED = ak.Array([[{"pt": 5.0, "mu": 1}, {"pt": 3.0, "mu": -1}], [{"pt": 4.0, "mu": 0}]])
MUONS = ak.Array([[{"pt": 1.0}, {"pt": 2.0}], [{"pt": 7.0}]])
NONE_OR_7 = ak.Array([[None], [{"pt": 7.0}]])
MISSING = ak.Array([[{"q": 2.0, "pf": [{"pt": 1.0}]}, {"q": None, "pf": [{"pt": 5.0}]}], []])

LEPTONS = ak.Array([{"MET": {"pt": 9.0}, "mu": {"pt": 3.0}}, {"MET": {"pt": 8.0}, "mu": None}])
LOG_OF_0 = sonic.Row(sonic.Feature("mu.pt", function="log"), missing=0.0, pad="before")
IN_A_UNION = ak.concatenate([ak.Array([{"m": 1.0}]), ak.Array([{"m": None, "x": 1}])])
BY_X = sonic.Padded("y", 2, sort_by="x")
STRINGS = sonic.Padded("x", 2, dtype="string")

IMAGE = np.ones((2, 3, 4))
SHAPE = sonic.Dense("x", IMAGE.shape)
WITH_NONE = IndexedOptionArray(Index64(np.asarray([0, -1])), ak.Array(IMAGE[:1, :2, :2]).layout)
LARGE = 2**62 + 1
NO_TYPE = union(ak.Array(np.asarray([LARGE], np.uint64)), ak.Array(np.asarray([-LARGE])))
BEYOND = {"x": np.asarray([2**63 + 1], np.uint64)}
RECORDS_OF_MANY_FIELDS = ak.zip({f"field_{i}": [1.0] for i in range(100)} | {"pt": [1.0]})

BAD: list[tuple[Any, Any, str]] = [
    (ROW, JETS[0, 0], r"got Record; array\[i : i \+ 1\] is an array of one record"),
    (ROW, {"x": np.array([1.0, None])}, r"got ndarray of object \[2\]; ak.from_iter makes"),
    # Fields that are not there, or are no numbers.
    (sonic.Row("ptt"), JETS, "no field 'ptt'; did you mean 'pt'"),
    (sonic.Row("pf.et"), JETS, r"no field 'et' \(in 'pf.et'\)"),
    (sonic.Row("j.pt"), {"j.pt": ak.Array([1.0])}, r"no field 'j' .*, as in \[\('j.pt',\)\]"),
    (sonic.Row("x.v[2]"), x(ak.Array([{"v[2]": 1.0}])), r"no field 'v' .* \[\('x', 'v\[2\]'\)\]"),
    (sonic.Row("pf"), JETS, "is a record; expected one of its fields; there are: pt"),
    (sonic.Row(computed("pt / c")), JETS, "no field 'c'"),
    (ROW, x(["a", "b"]), "has type string; expected numbers"),
    (sonic.Dense("pt"), JETS, "without axes of fixed length"),
    # Other structures.
    (sonic.Padded("pt", 2), JETS[0], "one number where a list is needed"),
    (sonic.Row("Jet[0].pt"), {"Jet": RECORDS_OF_MANY_FIELDS}, "has one record"),
    (sonic.Padded("pt[0]", 2), {"pt": RECORDS_OF_MANY_FIELDS}, "has one record"),
    (sonic.Padded("Jet.pt", 2, sort_by="MET.pt"), EVENTS, "'MET.pt', by which .* of the whole row"),
    (TWO, x([[1.0], [2.0]], [[1.0], [2.0, 3.0]]), "same objects .the first .* is in event 1"),
    *((sonic.Row(["x", "y"]), x([some], [some, 2.0]), "1 and 2 events") for some in (1.0, None)),
    (
        SHAPE,
        x(np.zeros((5, 3, 4, 2))),
        r"\[\[3\], \[4\], \[2\]\], expected \[2, 3, 4\]; np.moveaxis",
    ),
    (SHAPE, x([IMAGE.tolist(), IMAGE.T.tolist()]), "field 'x'"),
    (SHAPE, x(np.zeros((5, 2))), r"lengths \[\[2\]\], expected \[2, 3, 4\]"),
    # None.
    (sonic.Dense("x", (2, 2, 2)), x(ak.Array(RegularArray(WITH_NONE, 2))), "field 'x' has None"),
    (PADDED, x([[1.0, None]]), "'x' has None in event 0; remove it"),
    (sonic.Row(["Jet[0].pt", "MET.pt"]), EVENTS, NO_JET.format(0, 1)),
    (sonic.Row("Jet[:2].pt"), LEADING, NO_JET.format(1, 2)),
    (OF_LEADING, NO_PF, NO_JET.format(0, 1)),
    (sonic.Padded("Jet[0].pf[0].y", 2), PICKED_TWICE, NO_JET.format(0, 1)),
    (sonic.Padded(computed("pf.pt / q"), 2), MISSING, "'q' has None .* say what stands for it"),
    (sonic.Row("m"), IN_A_UNION, "'m' has None in event 1"),
    (sonic.Row(["x", "y"]), x([[1.0], [None]], [[1.0], [4.0]]), "'x' has None in event 1"),
    (sonic.Row(["MET.pt", "mu.pt"]), LEPTONS, "'mu.pt' has None in event 1"),
    (LOG_OF_0, LEPTONS, "'mu.pt' is NaN or infinite after log in event 1"),
    # Numbers that are not finite; a transformation does not hide it.
    (PADDED, x([[1.0], [], [2.0, NAN]]), "field 'x' is NaN or infinite in event 2"),
    (sonic.Flat(feature(power=0.5)), x([[1.0], [-3.0]]), "after power 0.5 in event 1"),
    (sonic.Row(feature(function="tanh")), x([1.0, INF]), "NaN or infinite after tanh in event 1"),
    (sonic.Row(feature(upper=9.0), "int32"), x([1.0, INF]), "is NaN or infinite in event 1"),
    (sonic.Row(computed("x % 0"), "int64"), x([1, 0]), "field 'y' is NaN or infinite in event 0"),
    (sonic.Row(["x", computed("(-8) ** 0.5")]), x([1.0]), "expression"),
    (sonic.Row(computed("x * 10 ** 400")), x([1.0]), "field 'y'|expression"),
    (sonic.Row(computed("x % 2")), BEYOND, "'x' is 9223372036854775809, and .* int64"),
    (BY_X, x([[1.0], [NAN]], [[1], [2]]), "'x'.* is None, NaN or infinite"),
    # Numbers that the type cannot hold.
    (sonic.Row("x", "bool"), x([1, 7]), "is 7 in event 1, which bool cannot hold"),
    (PADDED, x([[1.0], [1e300]]), r"is 1e\+300 in event 1, which float32 cannot hold"),
    (IN_16, LEADING, r"'Jet\[0\].pt' is 1000000000.0 in event 2.*int16 cannot"),
    (TIMES_100, x([[1], [-5]]), "is -500.0 after its transformation in event 1, which int8 cannot"),
    (TIMES_100, x([[0.3], [0.29]]), "is 28.9.* in event 1, which int8 .* as in expression='round"),
    (sonic.Row(feature(nonfinite=NAN, scale=1e38)), x([1e3]), "float32 cannot hold"),
    # numpy's type for both is a float, which rounds them.
    (sonic.Row("x", "int64"), x(NO_TYPE), "field 'x' mixes types .*uint64.*int64"),
    (sonic.Row(feature(scale=4.0), "int64"), x([1.0, 2.0**61]), "in event 1, which int64 cannot"),
    # Categories and references.
    *((sonic.Padded(few, 2), x([[211], [], [22]]), NO_CATEGORY) for few in (FEW, FEW_OR_0)),
    (sonic.Row(feature(categories={1: 5, None: 0})), x([1.0, NAN]), "NaN or infinite in event 1"),
    (NONE_ALLOWED, {"Jet": LINKED, "Muon": MUONS}, "'Jet.mu' refers to no 'Muon.pt' in event 0"),
    (MUON, {"Jet": LINKED, "Muon": MUONS[:, :0]}, "is 1 in event 0, .* has 0 of .* not over all"),
    (MUON, {"Jet": LINKED[::-1], "Muon": NONE_OR_7}, "is 1 in event 1, .* has 1 of 'Muon.pt'"),
    (MUON, {"Jet": LINKED, "Muon": MUONS[:1]}, "in each of 2 events, .* mask= leaves"),
    # Strings.
    (STRINGS, x([[1.0]]), "has type float64; expected strings"),
    (sonic.Padded("x", 2, dtype="string", sort_by="y"), x([["a"]], ["b"]), "string"),
]


@pytest.mark.parametrize(("layout", "array", "message"), BAD)
def test_arrays_that_cannot_be_packed_are_refused(layout: Any, array: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        layout.pack(array)
    assert len(str(raised.value)) < 400


def test_failed_formulae_name_their_event() -> None:
    jets = ak.Array([[{"x": [1.0, 2.0]}], [{"x": [3.0, 0.0]}]])
    with pytest.raises(InputError, match=r"formula 'log\(x_i\)' is NaN.*in event 1") as raised:
        sonic.Pairwise("x", 2, ["x_j", "log(x_i)"]).pack(jets)
    assert raised.value.rows == (1, 2)
    # Beyond the cut, nothing is computed.
    assert sonic.Pairwise("x", 1, "log(x_i)").pack(jets).shape == (2, 1, 1, 1)


@pytest.mark.parametrize(
    "array", [union(ak.Array([[1.0]]), ak.Array([1.0])), union(ak.Array([[1.0]]), ak.Array(["a"]))]
)
def test_unions_of_lists_and_others_are_refused(array: ak.Array) -> None:
    for layout in (PADDED, ROW, sonic.Mask(2, of="x"), sonic.Flat("x")):
        for nested in (array, ak.Array(RegularArray(array.layout, 2))):
            with pytest.raises(InputError, match="field 'x' .*(mixes types|holds strings)"):
                layout.pack({"x": nested})


LAYOUTS = {
    "pt": (sonic.Row("pt"), sonic.Dense("pt", (1,)), sonic.Row(computed("pt + 1"))),
    "pf": (
        *(sonic.Row("pf[0].x"), sonic.Padded("pf.x", 2, sort_by="pf.x"), sonic.Mask(2, of="pf")),
        *(sonic.Flat("pf.x"), sonic.Tokens({"pf": sonic.Padded("pf.x", 2)})),
    ),
}
RECORDS = ak.Array([{"pt": 1.0, "pf": [{"x": 1.0}]}, {"pt": 2.0, "pf": []}])


@pytest.mark.parametrize(
    ("field", "layout"), [(field, layout) for field in LAYOUTS for layout in LAYOUTS[field]]
)
def test_only_arrays_are_packed(field: str, layout: Any) -> None:
    for pack in (layout.pack, sonic.Model("m", {"in": layout}, {"y": ["a"]}).pack):
        with pytest.raises(InputError, match="one record"):
            pack(RECORDS[0])
        for other in (None, 5, "pt", b"pt", object(), {1, 2}, (n for n in "ab")):
            with pytest.raises(InputError):
                pack(other)
    for column in (None, 5, 1.5, object(), RECORDS[0], np.float32(1), {1, 2}):
        with pytest.raises(InputError):
            layout.pack({field: column})


PF = ak.zip({"pt": np.arange(4.0), "cov": np.arange(12.0).reshape(4, 3)}, depth_limit=1)
CONSTITUENTS = ak.unflatten(PF, [2, 0, 2])
WITH_ARRAYS = ak.zip({"pf": CONSTITUENTS, "m": [5.0, 6.0, 7.0]}, depth_limit=1)
ARRAYS = {
    "constituents of jets": WITH_ARRAYS,
    "constituents of jets of events": ak.unflatten(WITH_ARRAYS, [2, 1]),
    "no rows": WITH_ARRAYS[:0],
}


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize(
    "layout",
    [
        sonic.Padded(["pf.pt", "pf.cov"], 3),
        sonic.Padded("pf.pt", 3, sort_by="pf.cov"),
        sonic.Flat(["pf.pt", "pf.cov"]),
        sonic.Row(["pf.pt", "pf.cov"]),
        sonic.Tokens({"pf": sonic.Padded(["pt", "cov"], 3)}),
        sonic.Padded(["pf.pt", computed("2 * pf.cov + pf.pt")], 3),
    ],
)
def test_arrays_beside_single_numbers_are_refused(layout: Any, array: str) -> None:
    """Else constituents would become rows."""
    with pytest.raises(InputError, match=r"field '(pf\.)?cov' has an array of fixed length"):
        layout.pack(ARRAYS[array])


@pytest.mark.parametrize("expression", ["where(pt > 4)", "np.where(pt)", "round(pt, n)"])
def test_expressions_of_another_length_are_refused(expression: str) -> None:
    """What lies behind the result in memory would be packed with it."""
    jets = {"pt": ak.Array([[5.0, 3.0], [], [7.0]]), "n": ak.Array([[1, 1], [], [1]])}
    for layout in (sonic.Row, lambda field: sonic.Padded(["pt", field], 2), sonic.Flat):
        with pytest.raises((ConfigError, InputError), match=r"where|expression"):
            layout(computed(expression)).pack(jets)


PF_2 = sonic.Padded("pf.pt", 2)
SWAPPED = {"a": JETS[:, :2], "b": ak.concatenate([JETS[:2], JETS[1:2]])}
BESIDE_AA = {"a": PF_2, "m": sonic.Mask(beside="aa")}
# Pairs are asked for by the layout: lists in lists are lists as any others.
PAIRS = {"pf": sonic.Padded("x", 4), "v": sonic.Padded("y", 4)}
INPUTS: list[tuple[dict[str, Any], Any, str]] = [
    ({"a": sonic.Row("ptt")}, JETS, "input 'a': no field 'ptt'"),
    ({"a": sonic.Row("pt")}, {"a": JETS.pt}, "no field 'pt', as the array has none; give"),
    ({n: sonic.Row("pt") for n in "ab"}, {"a": JETS, "aa": JETS}, "no input 'aa'; did"),
    ({"a": sonic.Row("pt"), "m": sonic.Mask(2)}, JETS, "input 'm': Mask needs of="),
    (BESIDE_AA, JETS, "got beside 'aa'; did you mean 'a'"),
    ({"a": sonic.Row("pt"), "b": PF_2}, SWAPPED, "'a' and input 'b' .* difference is in event 2"),
    (PAIRS, x([[1.0], []], [[[1.0]], []]), "same objects.*are sent by sonic.Padded"),
    (
        {"m": sonic.Row("mu.pt"), "v": sonic.Row("MET.pt")},
        LEPTONS,
        r"in event 1, where one is None.; leave out what lacks one, as in model\(ak.mask",
    ),
    # The length of the longest row would depend on which others are sent.
    *(
        ({"m": sonic.Mask(of="pf"), "r": sonic.Row("pt"), **others}, JETS, f"'m': {message}")
        for others, message in (
            ({}, "Mask needs a length.*no input is padded"),
            ({"x": sonic.Flat("pf.pt")}, "Mask needs a length.*no input is padded"),
            ({"x": PF_2, "y": sonic.Padded("pf.pt", 3)}, "Mask needs .*the inputs have several"),
        )
    ),
]


@pytest.mark.parametrize(("layouts", "array", "message"), INPUTS)
def test_inputs_that_fail_are_named(layouts: Any, array: Any, message: str) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        bind_inputs(layouts, array)


def test_masks_without_a_length_have_no_shape() -> None:
    with pytest.raises(ConfigError, match="Mask needs a length"):
        declared({"m": sonic.Mask(of="pt")})
