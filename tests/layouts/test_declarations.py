"""What a declaration takes, and what it refuses at once: nothing is guessed, and nothing is raw."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError

Declare = Callable[..., Any]

ROW: dict[str, Any] = {"fields": ["a", "b"]}
PADDED: dict[str, Any] = {"fields": ["a", "b"], "length": 2}
BUCKETED: dict[str, Any] = {"fields": ["a", "b"], "lengths": (1, 2)}
DENSE: dict[str, Any] = {"field": "a", "shape": (2,)}
MASK: dict[str, Any] = {"length": 2, "of": "a"}
PAIRWISE: dict[str, Any] = {"fields": ["a", "b"], "length": 2, "formulae": ["a_i - b_j"]}
TOKENS: dict[str, Any] = {"parts": {"J": sonic.Padded(["a", "b"], 2), "M": sonic.Padded("a", 1)}}

DECLARED: dict[str, tuple[Declare, dict[str, Any]]] = {
    "Row": (sonic.Row, ROW),
    "Padded": (sonic.Padded, PADDED),
    "Bucketed": (sonic.Bucketed, BUCKETED),
    "Flat": (sonic.Flat, ROW),
    "Dense": (sonic.Dense, DENSE),
    "Mask": (sonic.Mask, MASK),
    "Pairwise": (sonic.Pairwise, PAIRWISE),
    "Tokens": (sonic.Tokens, TOKENS),
    "Feature": (sonic.Feature, {"name": "a"}),
    "OneHot": (sonic.OneHot, {"name": "a", "values": [1, 2]}),
    "Metadata": (sonic.Metadata, {"name": "a"}),
    "Output": (sonic.Output, {}),
    "Output of constituents": (sonic.Output, {"per": "constituent"}),
}

ARRAY = np.asarray([1.0, 2.0])
NOT_NUMBERS = ("1", b"1", [1.0], {1.0}, {1.0: 2.0}, ARRAY, 1j, 10**400, object())
NOT_LENGTHS = (
    0,
    -1,
    1.5,
    "2",
    b"2",
    True,
    np.float64(2),
    ARRAY.astype(int),
    np.asarray(2),
    {"a": 2},
)
NOT_NAMES = (5, True, b"a", ["a"], {"a"}, {"a": 1}, np.asarray(["a", "b"]), object())
NOT_LISTS_OF_NAMES = (5, b"ab", {"a", "b"}, frozenset("ab"), {"a": 1, "b": 2}, [b"a"], [["a"]])
NOT_FIELDS = ({"a", "b"}, frozenset("ab"), {"a": 1, "b": 2}, b"a", [b"a"], [["a"]], [{"a"}], [""])
ARRAYS_OF_ARRAYS = (np.asarray([["a", "b"]]), np.asarray("a"))
NOT_AN_ORDER = (
    5,
    ["F", "L"],
    ("F", "L"),
    {"FL"},
    b"FL",
    np.asarray(["FL"]),
    np.asarray(["F", "L"]),
)
NOT_A_TYPE = (
    "float31",
    "floaty",
    "complex64",
    "U5",
    "M8[s]",
    "3f4",
    "f4,i4",
    "f4,,",
    "",
    b"float31",
    5,
    {},
    {"float32"},
    {"float32": 1},
    [("x", "f4")],
    ["float32"],
    ARRAY,
    bytes,
    object(),
)
NOT_FLAGS = (1, 1.0, True, ["onehot"], ("J", "M"), {"J", "M"}, ARRAY, b"number", "one", object())
NOT_ONE_FOR_EACH = (
    {1.0, 2.0},
    frozenset([1.0]),
    {"a": 1.0, "b": 2.0},
    "1",
    b"12",
    [1.0],
    [1.0, 2.0, 3.0],
    [1.0, None],
    [1.0, "2"],
    [[1.0], [2.0]],
    [1.0, [2.0]],
    [1.0, ARRAY],
    1j,
    10**400,
    np.asarray([[1.0, 2.0]]),
    np.asarray([1.0, 2.0, 3.0]),
    np.asarray(["a", "b"]),
    np.asarray([1.0, 2j]),
    np.asarray([]),
)

REFUSED: list[tuple[str, str, tuple[Any, ...]]] = [
    *((name, "fields", NOT_FIELDS) for name in ("Row", "Padded", "Bucketed", "Flat", "Pairwise")),
    *((name, "fields", ARRAYS_OF_ARRAYS) for name in ("Row", "Padded", "Flat", "Pairwise")),
    ("Dense", "field", NOT_FIELDS),
    *((name, "dtype", NOT_A_TYPE) for name in ("Row", "Padded", "Bucketed", "Flat", "Dense")),
    *((name, "dtype", NOT_A_TYPE) for name in ("Mask", "Pairwise", "Output")),
    *((name, "missing", NOT_ONE_FOR_EACH) for name in ("Row", "Padded", "Bucketed", "Flat")),
    *((name, "fill", NOT_ONE_FOR_EACH) for name in ("Padded", "Bucketed")),
    ("Pairwise", "fill", ({1.0}, {"a": 1.0}, "1", [1.0, 2.0], [None], 1j, np.asarray([[1.0]]))),
    ("Tokens", "fill", (*NOT_NUMBERS, None)),
    ("Padded", "length", NOT_LENGTHS),
    ("Mask", "length", [x for x in NOT_LENGTHS if not isinstance(x, np.ndarray)]),
    ("Padded", "length", (None, [2], (2,), {2})),
    (
        "Pairwise",
        "length",
        (0, -1, 1.5, "2", True, None, {2}, {2, 4}, {2: 4}, (4, 2), [2.5], [[2]]),
    ),
    ("Bucketed", "lengths", (None, 2.0, "24", {2, 4}, {2: 4}, (4, 2), [], [2.5], [[2]], ARRAY)),
    ("Dense", "shape", (2, 2.0, "2", {2, 4}, {2: 4}, [2.5], [[2]], [0], [-1], ARRAY)),
    ("Output", "shape", (2, 2.0, "2", {2, 4}, {2: 4}, [2.5], [[2]], [0], [-1], ARRAY)),
    *((name, "sort_by", NOT_NAMES) for name in ("Padded", "Bucketed", "Flat")),
    *((name, "sort_ascending", ("no", 2, None, [True], ARRAY)) for name in ("Padded", "Bucketed")),
    ("Flat", "sort_ascending", ("no", 2, None, [True], ARRAY)),
    ("Flat", "merge_rows", ("no", 2, None, [True], ARRAY)),
    *(("Flat", option, NOT_NAMES) for option in ("splits", "batch", "refers_to")),
    *(("Mask", option, NOT_NAMES) for option in ("of", "beside")),
    *((name, "axis_order", NOT_AN_ORDER) for name in ("Row", "Padded", "Bucketed", "Flat")),
    *((name, "axis_order", NOT_AN_ORDER) for name in ("Mask", "Pairwise", "Tokens")),
    *(
        (name, "pad_mode", (5, b"wrap", ["wrap"], {"wrap"}, ARRAY))
        for name in ("Padded", "Bucketed")
    ),
    (
        "Pairwise",
        "formulae",
        ({"a_i"}, {"a_i": 1}, 5, b"a_i", [5], [None], [], [["a_i"]], ["a_i +"]),
    ),
    ("Pairwise", "eps", (*NOT_NUMBERS, None, 0.0, -1.0, float("nan"), float("inf"))),
    ("Pairwise", "other", (0, -1, 1.5, True, "2", {2}, [2], ARRAY, sonic.Row("a"))),
    ("Tokens", "flags", NOT_FLAGS),
    ("Tokens", "flags", ({"J": 1}, {"J": 1, "M": "2"}, {"J": 1, "M": None}, {"J": 1, "M": ARRAY})),
    ("Tokens", "flags", ({"J": 1, "M": 1j}, {1: 1, "M": 1}, {"J": 1, "M": 2, "K": 3})),
    ("Tokens", "parts", ({}, [], {"J"}, {5: sonic.Row("a")}, {"J": "a"}, {"J": sonic.Flat("a")})),
    ("Tokens", "parts", (sonic.Row("a"), [sonic.Row("a")], "J", None, ARRAY)),
    *(("Feature", option, (*NOT_NUMBERS, None)) for option in ("shift", "scale")),
    *(("Feature", option, NOT_NUMBERS) for option in ("lower", "upper", "nonfinite", "power")),
    ("Feature", "name", (*NOT_NAMES, None, "")),
    *(("Feature", option, NOT_NAMES) for option in ("expression", "index", "function")),
    ("Feature", "within", (1.0, (1,), (1, 2, 3), (2, 1), "12", {1, 2}, (1, "2"), (1, [2]), ARRAY)),
    ("Feature", "categories", (1, {}, {1, 2}, [1, 2], {"a": 1}, {1: "a"}, {1: None}, {None: 1})),
    ("Feature", "categories", ({1: ARRAY}, {1: [2]}, "ab", ARRAY, {1j: 1})),
    ("OneHot", "values", ({1, 2}, {1: 2}, 1, "12", b"12", [], [1, 1], ["a"], [None], [[1], [2]])),
    ("Metadata", "name", (*NOT_NAMES, None, "", "a b", "1")),
    ("OneHot", "values", (np.asarray([[1, 2]]), np.asarray(1), np.asarray(["a"]), [1j])),
    ("Output", "labels", (*NOT_LISTS_OF_NAMES, "ab", [1, 2], ["a", "a"], ["a", None])),
    ("Output", "labels", (ARRAY, np.asarray([["a", "b"]]), np.asarray("a"))),
    ("Output", "per", (*NOT_NAMES, "jet")),
    ("Output", "splits", NOT_NAMES),
    *(("Output of constituents", option, NOT_NAMES) for option in ("of", "choose")),
    ("Output of constituents", "axes", (0, -1, 1.5, "2", [2], {2}, None, ARRAY)),
]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        pytest.param(name, option, value, id=f"{name}-{option}-{type(value).__name__}-{number}")
        for name, option, values in REFUSED
        for number, value in enumerate(values)
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_declared(
    name: str, option: str, value: Any
) -> None:
    make, usual = DECLARED[name]
    make(**usual)
    with pytest.raises(ConfigError) as raised:
        make(**{**usual, option: value})
    assert raised.value.message


TEXTS: list[tuple[str, str, str]] = [
    ("Row", "axis_order", "FL"),
    ("Padded", "axis_order", "LF"),
    ("Padded", "pad_mode", "wrap"),
    ("Padded", "sort_by", "a"),
    ("Flat", "axis_order", "FL"),
    ("Flat", "splits", "s"),
    ("Flat", "batch", "b"),
    ("Mask", "of", "b"),
    ("Mask", "axis_order", "L"),
    ("Pairwise", "axis_order", "LLC"),
    ("Pairwise", "formulae", "a_i"),
    ("Tokens", "axis_order", "FL"),
    ("Tokens", "flags", "number"),
    ("Dense", "field", "x"),
    ("Feature", "name", "x"),
    ("Feature", "function", "log"),
    ("Feature", "expression", "a + b"),
    ("Feature", "index", "i"),
    ("OneHot", "name", "x"),
    ("Output", "splits", "s"),
    ("Output of constituents", "of", "x"),
    ("Output of constituents", "choose", "argmax"),
    *((name, "dtype", "float64") for name in ("Row", "Padded", "Flat", "Dense", "Mask", "Output")),
]


@pytest.mark.parametrize(("name", "option", "text"), TEXTS)
def test_strings_of_numpy_are_strings(name: str, option: str, text: str) -> None:
    make, usual = DECLARED[name]
    plain, of_numpy = (make(**{**usual, option: kind(text)}) for kind in (str, np.str_))
    assert repr(of_numpy) == repr(plain)
    assert of_numpy == plain
    assert hash(of_numpy) == hash(plain)


@pytest.mark.parametrize("name", ["Row", "Padded", "Bucketed", "Flat", "Pairwise"])
@pytest.mark.parametrize(
    "several",
    [
        ("a", "b"),
        np.asarray(["a", "b"]),
        np.asarray(["a", "b"], object),
        [np.str_("a"), np.str_("b")],
        (name for name in "ab"),
    ],
)
def test_fields_may_be_any_list_that_has_an_order(name: str, several: Any) -> None:
    if not isinstance(several, (tuple, list, np.ndarray)):
        several = (field for field in ("a", "b"))
    make, usual = DECLARED[name]
    declared = make(**{**usual, "fields": several})
    assert repr(declared) == repr(make(**usual))
    assert pickle.loads(pickle.dumps(declared)) == make(**usual)


def test_labels_may_be_strings_of_numpy() -> None:
    wanted = sonic.Output(["qcd", "top"])
    for labels in (("qcd", "top"), np.asarray(["qcd", "top"]), [np.str_("qcd"), "top"]):
        assert sonic.Output(labels) == wanted
        assert repr(sonic.Output(labels)) == repr(wanted)


LISTS = ak.Array({"a": [[1.0], [2.0, 3.0]], "b": [[4.0], [5.0, None]]})
ONE_FOR_EACH = [
    [-1.0, -2.0],
    (-1, -2),
    [np.float32(-1), np.int8(-2)],
    np.asarray([-1.0, -2.0]),
    np.asarray([-1, -2], np.int8),
    np.asarray([-1.0, -2.0], ">f4"),
    np.asarray([-1.0, 0.0, -2.0])[::2],
]


@pytest.mark.parametrize("values", ONE_FOR_EACH)
def test_one_for_each_field_may_be_an_array(values: Any) -> None:
    packed = {
        "Padded": [[[1.0, -1.0], [4.0, -2.0]], [[2.0, 3.0], [5.0, -2.0]]],
        "Flat": [[1.0, 4.0], [2.0, 5.0], [3.0, -2.0]],
        "Row": [[1.0, 4.0], [2.0, 5.0], [3.0, -2.0]],
    }
    for name, expected in packed.items():
        make, usual = DECLARED[name]
        options = {"fill": values} if name == "Padded" else {}
        layout = make(**usual, missing=values, **options)
        assert layout.pack(LISTS).tolist() == expected
        plain = {option: [-1.0, -2.0] for option in ("missing", *options)}
        assert layout == make(**usual, **plain)
        assert repr(layout) == repr(make(**usual, **plain))
        assert hash(layout) == hash(make(**usual, **plain))


def test_a_declaration_does_not_change_with_the_array_it_was_made_of() -> None:
    values, shape = np.asarray([-1.0, -2.0]), np.asarray([1, 2])
    layout = sonic.Padded(["a", "b"], 2, fill=values, missing=values)
    image, output = sonic.Dense("a", shape), sonic.Output(shape=shape)
    names = ["a", "b"]
    row = sonic.Row(names)
    values[:], shape[:] = 7, 7
    names.append("c")
    assert layout == sonic.Padded(["a", "b"], 2, fill=[-1, -2], missing=[-1, -2])
    assert (image, output) == (sonic.Dense("a", (1, 2)), sonic.Output(shape=(1, 2)))
    assert row == sonic.Row(["a", "b"])


@pytest.mark.parametrize("kind", [int, np.int64, np.int8, np.uint16])
def test_lengths_may_be_integers_of_numpy(kind: Any) -> None:
    for make, (name, option) in (
        (lambda n: n, ("Padded", "length")),
        (lambda n: n, ("Mask", "length")),
        (lambda n: n, ("Pairwise", "length")),
        (lambda n: [n, kind(4)], ("Bucketed", "lengths")),
        (lambda n: np.asarray([n, 4], kind), ("Bucketed", "lengths")),
        (lambda n: np.asarray([n, 4], kind), ("Pairwise", "length")),
        (lambda n: np.asarray([n, 4], kind), ("Dense", "shape")),
        (lambda n: (n, kind(4)), ("Output", "shape")),
    ):
        declare, usual = DECLARED[name]
        value = make(kind(2))
        plain = 2 if np.ndim(value) == 0 else (2, 4)
        declared, wanted = (declare(**{**usual, option: v}) for v in (value, plain))
        assert declared == wanted
        assert repr(declared) == repr(wanted)


@pytest.mark.parametrize(
    ("option", "number"),
    [("shift", 1.5), ("scale", 2), ("lower", 1.5), ("upper", 3), ("nonfinite", 0.5), ("power", 2)],
)
def test_numbers_may_be_of_numpy(option: str, number: float) -> None:
    plain = sonic.Feature("a", **{option: number})
    for kind in (np.float64, np.float32, np.int16 if number == int(number) else np.float16):
        of_numpy = sonic.Feature("a", **{option: kind(number)})
        assert of_numpy == plain
        assert hash(of_numpy) == hash(plain)
        assert float(getattr(of_numpy, option)) == number
        assert "np." not in repr(of_numpy)


@pytest.mark.parametrize("code", ["f2", "f4", "f8", "i2", "i4", "i8", "u2", "u4", "u8"])
@pytest.mark.parametrize("order", [">", "<", "="])
@pytest.mark.parametrize("as_type", [str, np.dtype])
def test_tensors_have_the_byte_order_of_the_machine(code: str, order: str, as_type: Any) -> None:
    dtype = as_type(order + code)
    native = np.dtype(code)
    jagged, events = {"a": [[1, 2], [3]], "b": [[4, 5], [6]]}, {"a": [1, 2], "b": [3, 4]}
    cases: list[tuple[str, Any, Any]] = [
        ("Row", events, [[1, 3], [2, 4]]),
        ("Padded", jagged, [[[1, 2], [4, 5]], [[3, 0], [6, 0]]]),
        ("Bucketed", jagged, [[[1, 2], [4, 5]], [[3, 0], [6, 0]]]),
        ("Flat", jagged, [[1, 4], [2, 5], [3, 6]]),
        ("Dense", {"a": np.asarray([[1, 2], [3, 4]])}, [[1, 2], [3, 4]]),
        ("Mask", jagged, [[[1, 1]], [[1, 0]]]),
    ]
    if native.kind == "f":
        cases.append(("Pairwise", jagged, [[[[-3, -4], [-2, -3]]], [[[-3, 0], [0, 0]]]]))
    for name, columns, expected in cases:
        make, usual = DECLARED[name]
        layout = make(**usual, dtype=dtype)
        tensor = layout.pack({field: ak.Array(column) for field, column in columns.items()})
        assert tensor.dtype == native
        assert tensor.dtype.isnative
        assert tensor.tolist() == expected
        assert layout == make(**usual, dtype=native)
    tokens = sonic.Tokens({"J": sonic.Padded(["a", "b"], 2, dtype=dtype)})
    packed = tokens.pack({field: ak.Array(column) for field, column in jagged.items()})
    assert packed.dtype.isnative
    assert packed.tolist() == [[[1, 4], [2, 5]], [[3, 6], [0, 0]]]
    assert sonic.Output(["a"], dtype=dtype) == sonic.Output(["a"], dtype=native)


@pytest.mark.parametrize("dtype", ["floaty", "float31", "flaot32"])
def test_an_unknown_type_is_answered_with_the_nearest(dtype: str) -> None:
    for make, usual in DECLARED.values():
        if make not in (sonic.Feature, sonic.OneHot, sonic.Metadata, sonic.Tokens):
            with pytest.raises(ConfigError, match=f"{dtype}.*did you mean 'float"):
                make(**usual, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [
        ("int8", {"J": 1, "M": 128}),
        ("int8", {"J": 1, "M": -129}),
        ("uint8", {"J": 1, "M": -1}),
        ("uint8", {"J": 256, "M": 1}),
        ("int32", {"J": 1, "M": 0.5}),
        ("bool", {"J": 1, "M": 2}),
        ("bool", "number"),
        ("float16", {"J": 1, "M": 70000}),
        ("bfloat16", {"J": 1, "M": 1e39}),
        ("float32", {"J": 1, "M": 1e39}),
    ],
)
def test_flags_beyond_the_type_are_refused(dtype: str, flags: Any) -> None:
    parts = {name: sonic.Padded("a", 2, dtype=dtype) for name in ("J", "M")}
    with pytest.raises(ConfigError, match=f"{dtype} cannot hold"):
        sonic.Tokens(parts, flags=flags)


def test_flags_of_numpy_are_numbers() -> None:
    parts = TOKENS["parts"]
    tokens = sonic.Tokens(parts, flags={"J": np.float32(1), "M": np.int8(2)})
    assert tokens == sonic.Tokens(parts, flags={"J": 1, "M": 2})
    assert tokens == sonic.Tokens(parts, flags={"M": 2, "J": 1})
