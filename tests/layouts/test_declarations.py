"""What a declaration takes, and what it refuses at once: nothing is guessed, and nothing is raw."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields
from functools import partial
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
    *(0, -1, 1.5, "2", b"2", True, {"a": 2}, np.float64(2), ARRAY.astype(int), np.asarray(2)),
)
NOT_NAMES = (5, True, b"a", ["a"], {"a"}, {"a": 1}, np.asarray(["a", "b"]), object())
NOT_LISTS_OF_NAMES = (5, b"ab", {"a", "b"}, frozenset("ab"), {"a": 1, "b": 2}, [b"a"], [["a"]])
NOT_FIELDS = ({"a", "b"}, frozenset("ab"), {"a": 1, "b": 2}, b"a", [b"a"], [["a"]], [{"a"}], [""])
ARRAYS_OF_ARRAYS = (np.asarray([["a", "b"]]), np.asarray("a"))
NOT_A_CHOICE = (5, b"FL", ["FL"], ("F", "L"), {"FL"}, np.asarray(["FL"]), "NF", object())
NOT_A_TYPE = (
    *("float31", "floaty", "complex64", "U5", "M8[s]", "3f4", "f4,i4", "f4,,", "", b"float31"),
    *(5, {}, {"float32"}, {"float32": 1}, [("x", "f4")], ["float32"], ARRAY, bytes, object()),
)
NOT_FLAGS = (1, 1.0, True, ["onehot"], ("J", "M"), {"J", "M"}, ARRAY, b"number", "one", object())
NOT_ONE_FOR_EACH = (
    *({1.0, 2.0}, frozenset([1.0]), {"a": 1.0, "b": 2.0}, "1", b"12", 1j, 10**400),
    *([1.0], [1.0, 2.0, 3.0], [1.0, None], [1.0, "2"], [[1.0], [2.0]], [1.0, [2.0]], [1.0, ARRAY]),
    *(np.asarray([[1.0, 2.0]]), np.asarray([1.0, 2.0, 3.0]), np.asarray([])),
    *(np.asarray(["a", "b"]), np.asarray([1.0, 2j])),
)

# Each kind of option once: which options a declaration has is told by itself, below.
REFUSED: list[tuple[str, str, tuple[Any, ...]]] = [
    ("Padded", "fields", (*NOT_FIELDS, *ARRAYS_OF_ARRAYS)),
    ("Dense", "field", NOT_FIELDS),
    ("Row", "dtype", NOT_A_TYPE),
    ("Padded", "missing", NOT_ONE_FOR_EACH),
    ("Padded", "fill", NOT_ONE_FOR_EACH),
    ("Pairwise", "fill", ({1.0}, {"a": 1.0}, "1", [1.0, 2.0], [None], 1j, np.asarray([[1.0]]))),
    ("Tokens", "fill", (*NOT_NUMBERS, None)),
    ("Padded", "length", (*NOT_LENGTHS, None, [2], (2,), {2})),
    ("Mask", "length", [x for x in NOT_LENGTHS if not isinstance(x, np.ndarray)]),
    ("Pairwise", "length", (0, -1, 1.5, "2", True, None, {2, 4}, {2: 4}, (4, 2), [2.5], [[2]])),
    ("Bucketed", "lengths", (None, 2.0, "24", {2, 4}, {2: 4}, (4, 2), [], [2.5], [[2]], ARRAY)),
    ("Dense", "shape", (2, 2.0, "2", {2, 4}, {2: 4}, [2.5], [[2]], [0], [-1], ARRAY)),
    ("Padded", "sort_by", NOT_NAMES),
    ("Flat", "splits", NOT_NAMES),
    ("Mask", "of", NOT_NAMES),
    *((name, "axis_order", NOT_A_CHOICE) for name in ("Row", "Padded", "Pairwise", "Tokens")),
    (
        "Pairwise",
        "formulae",
        ({"a_i"}, {"a_i": 1}, 5, b"a_i", [5], [None], [], [["a_i"]], ["a_i +"]),
    ),
    ("Tokens", "flags", NOT_FLAGS),
    ("Tokens", "parts", ({}, [], {"J"}, {5: sonic.Row("a")}, {"J": "a"}, {"J": sonic.Flat("a")})),
    ("Tokens", "parts", (sonic.Row("a"), [sonic.Row("a")], "J", None, ARRAY)),
    *(("Feature", option, (*NOT_NUMBERS, None)) for option in ("shift", "scale")),
    *(("Feature", option, NOT_NUMBERS) for option in ("lower", "power")),
    ("Feature", "name", (*NOT_NAMES, None, "")),
    *(("Feature", option, NOT_NAMES) for option in ("expression", "index", "function")),
    ("Feature", "within", (1.0, (1,), (1, 2, 3), (2, 1), "12", {1, 2}, (1, "2"), (1, [2]))),
    ("Feature", "categories", (1, {}, {1, 2}, [1, 2], {"a": 1}, {1: "a"}, {1: None}, {None: 1})),
    ("Feature", "categories", ({1: ARRAY}, {1: [2]}, "ab", ARRAY, {1j: 1})),
    ("OneHot", "values", ({1, 2}, {1: 2}, 1, "12", b"12", [], [1, 1], ["a"], [None], [[1], [2]])),
    ("OneHot", "values", (np.asarray([[1, 2]]), np.asarray(1), np.asarray(["a"]), [1j])),
    ("Metadata", "name", (*NOT_NAMES, None, "", "a b", "1")),
    ("Output", "labels", (*NOT_LISTS_OF_NAMES, "ab", [1, 2], ["a", "a"], ["a", None])),
    ("Output", "labels", (ARRAY, np.asarray([["a", "b"]]), np.asarray("a"))),
    ("Output of constituents", "axes", (0, -1, 1.5, "2", [2], {2}, None, ARRAY)),
    *(
        (name, option.name, (object(), {2.5}))
        for name, (make, _) in DECLARED.items()
        if isinstance(make, type)
        for option in fields(make)
        if option.init and (make, option.name) != (sonic.Bucketed, "length")
    ),
]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        pytest.param(name, option, value, id=f"{name}-{option}-{type(value).__name__}-{number}")
        for name, option, values in REFUSED
        for number, value in enumerate(values)
    ],
)
def test_nonsense_is_refused_when_it_is_declared(name: str, option: str, value: Any) -> None:
    make, usual = DECLARED[name]
    make(**usual)
    with pytest.raises(ConfigError) as raised:
        make(**{**usual, option: value})
    assert raised.value.message


AB = (("a", "b"), np.asarray(["a", "b"]), np.asarray(["a", "b"], object), list(map(np.str_, "ab")))
INTEGERS = (np.int64, np.int8, np.uint16)
TWO = [integer(2) for integer in INTEGERS]
TWO_FOUR = [np.asarray([2, 4], integer) for integer in INTEGERS]
NEGATIVE = (
    *((-1, -2), [np.float32(-1), np.int8(-2)], np.asarray([-1, -2], np.int8)),
    *(np.asarray([-1.0, -2.0], ">f4"), np.asarray([-1.0, 0.0, -2.0])[::2]),
)
# Declarations, a value of an option, and other objects that mean the same.
SAME: list[tuple[str, str, Any, Any]] = [
    *((name, "fields", ["a", "b"], AB) for name in ("Row", "Flat", "Pairwise")),
    *((name, "fields", ["a", "b"], AB) for name in ("Padded", "Bucketed")),
    ("Row", "fields", ["a", "b"], [(field for field in "ab")]),
    ("Output", "labels", ["a", "b"], AB),
    *((name, "length", 2, TWO) for name in ("Padded", "Mask", "Pairwise")),
    ("Pairwise", "length", (2, 4), TWO_FOUR),
    ("Bucketed", "lengths", (2, 4), TWO_FOUR),
    ("Dense", "shape", (2, 4), TWO_FOUR),
    ("Output", "shape", (2, 4), [*TWO_FOUR, (np.int8(2), np.int8(4))]),
    *(
        ("Feature", option, 1.5, [np.float64(1.5), np.float16(1.5)])
        for option in ("shift", "scale", "lower", "upper", "power")
    ),
    ("Feature", "nonfinite", 2, [np.int16(2)]),
    *((name, "missing", [-1.0, -2.0], NEGATIVE) for name in ("Row", "Padded", "Flat")),
    ("Padded", "fill", [-1.0, -2.0], NEGATIVE),
    # Tensors have the byte order of the machine.
    *(
        (name, "dtype", "float32", (">f4", "<f4", np.dtype(">f4"), np.float32))
        for name, (make, _) in DECLARED.items()
        if isinstance(make, type) and name not in ("Tokens", "Feature")
    ),
    *(
        (name, option, text, [np.str_(text)])
        for name, option, text in (
            *(("Padded", "axis_order", "LF"), ("Padded", "sort_by", "a"), ("Flat", "splits", "s")),
            *(("Mask", "of", "b"), ("Pairwise", "formulae", "a_i"), ("Tokens", "flags", "number")),
            *(("Dense", "field", "x"), ("Feature", "name", "x"), ("Feature", "function", "log")),
            *(("OneHot", "name", "x"), ("Output", "dtype", "float64")),
        )
    ),
]


@pytest.mark.parametrize(("name", "option", "plain", "others"), SAME)
def test_values_of_other_types_mean_the_same(
    name: str, option: str, plain: Any, others: Any
) -> None:
    make, usual = DECLARED[name]
    wanted = make(**{**usual, option: plain})
    for other in others:
        declared = make(**{**usual, option: other})
        assert declared == wanted
        assert repr(declared) == repr(wanted)
        assert hash(declared) == hash(wanted)
        assert pickle.loads(pickle.dumps(declared)) == wanted


def test_tensors_of_another_byte_order_are_packed_in_that_of_the_machine() -> None:
    tensor = sonic.Row(["a", "b"], dtype=">i2").pack({"a": ak.Array([1]), "b": ak.Array([2])})
    assert tensor.dtype.isnative
    assert tensor.tolist() == [[1, 2]]


def test_declarations_do_not_change_with_the_array_they_were_made_of() -> None:
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


def test_equal_declarations_have_one_hash() -> None:
    nan = sonic.Padded(sonic.Feature("x", nonfinite=float("nan")), 2, fill=float("nan"))
    assert pickle.loads(pickle.dumps(nan)) == nan
    assert hash(pickle.loads(pickle.dumps(nan))) == hash(nan)
    feature = sonic.Feature("x", categories={1: 2, None: 0}, within=(None, 3))
    assert eval(repr(feature), {"Feature": sonic.Feature}) == feature  # noqa: S307
    hashes = {
        sonic.Model("m", {"x": make(**{**usual, **other})}, {"y": None}).config_hash
        for name in ("Padded", "Pairwise", "Tokens")
        for make, usual in [DECLARED[name]]
        for other in ({}, {}, {"fill": 3}, {"fill": 3.0}, {"fill": np.float32(3)})
    }
    assert len(hashes) == 6


NAN = float("nan")
ONE = sonic.Padded("a", 2)
VECTOR = ("px", "py", "pz", "e")
BYTES = {name: sonic.Padded("a", 2, dtype="int8") for name in "JM"}
BOOLS = {name: sonic.Row("a", "bool") for name in "JM"}
CONSTANT = sonic.Row(["a", 1.0])
WRAPPED = sonic.Padded("pt", 2, pad_mode="wrap")
MESSAGES: list[tuple[Callable[[], Any], str]] = [
    (lambda: sonic.Padded("pt", 0), "Padded: expected length to be a number of at least 1, got 0"),
    (lambda: sonic.Bucketed("a", lengths=(8, 4)), "a number of at least 1, or several that ascend"),
    (lambda: sonic.Bucketed("a", (1, 2), outer=2), "expected Padded where outer= is given"),
    (lambda: sonic.Row([]), "Row needs at least one field"),
    (lambda: sonic.Row([3]), "Row needs at least one field beside constants"),
    (lambda: sonic.Row(["a", float("nan")]), "expected field names, numbers or sonic.Feature, got"),
    (lambda: sonic.Row({"pt", "eta"}), "expected a list of fields"),
    (lambda: sonic.Row("pt", dtype="float31"), "did you mean 'float32'"),
    (lambda: sonic.Padded("a", 2, axis_order="NF"), "axis_order to be 'FL' or 'LF' or 'L'"),
    (lambda: sonic.Padded(["a", "b"], 2, axis_order="L"), "has no axis for several fields"),
    (lambda: sonic.Padded(["a", "b"], 2, fill=[1.0]), "one for each of 2 channels, got 1"),
    (lambda: sonic.Padded("x", 2, fill=300, dtype="uint8"), "uint8 cannot hold the fill 300"),
    (lambda: sonic.Padded("x", 2, fill=0.5, dtype="int32"), "int32 cannot hold the fill 0.5"),
    (lambda: sonic.Bucketed("x", fill=1e5, dtype="float16"), "float16 cannot hold the fill"),
    (lambda: sonic.Mask(2, of="a", beside="b"), "Mask: expected of='a' or beside='b', got both"),
    *(
        (partial(sonic.Dense, field), "Dense: one field is taken, as it is")
        for field in (sonic.Feature("x", expression="a"), "x[0]")
    ),
    (lambda: sonic.Feature("x[a]"), "expected a path that begins with a name, with indices"),
    (
        lambda: sonic.Feature("pt", lower=1.0, upper=0.0),
        r"lower and upper to be limits \(least, most\)",
    ),
    (lambda: sonic.Feature("x", power=2, function="log"), "function= or power=, got both"),
    (lambda: sonic.Feature("x", expression="a", index="b"), "expression= or index=, got both"),
    (lambda: sonic.Feature("x", within=(2, 1)), r"limits \(least, most\), got \(2, 1\)"),
    (lambda: sonic.Feature("x", function="logg"), "did you mean 'log'"),
    (lambda: sonic.Feature("x", expression="a +"), r"expression 'a \+' cannot be read"),
    (lambda: sonic.Feature("x", expression="logg(a)"), "no function 'logg'; did you mean 'log'"),
    (lambda: sonic.Feature("x", expression="a and b"), "write & and |"),
    (
        lambda: sonic.Feature("x", expression="a if b else c"),
        r"and where\(condition, value, other\) for if",
    ),
    (lambda: sonic.Feature("x", expression="a.__class__(b)"), "no function 'a.__class__'"),
    (lambda: sonic.Padded("a", 2, fill=0.0, dtype="string"), "fill to be a string"),
    (lambda: sonic.Row(["a", 1.0], dtype="string"), "strings are sent as they are"),
    (lambda: sonic.Row(sonic.Feature("a", scale=2.0), dtype="string"), "as they are"),
    (lambda: sonic.Padded("a", 2, sort_by="a", dtype="string"), "as they are, and sort nothing"),
    (lambda: sonic.Mask(2, of="a", dtype="string"), "Mask: expected dtype to be of numbers"),
    (lambda: sonic.Tokens({"a": sonic.Row("a", dtype="string")}), "layout of numbers"),
    (lambda: sonic.Tokens({"J": sonic.Bucketed("a", (2,))}), "part 'J': expected a Padded or"),
    (lambda: sonic.Row(["pt", "eta"], axis_order=""), "'' has no axis for several fields"),
    (lambda: sonic.Row(sonic.Feature("a", nonfinite=NAN), "int32"), "int32 cannot hold nonfinite="),
    (lambda: sonic.Feature("a", nonfinite_last=True), "nonfinite_last= needs nonfinite="),
    (lambda: sonic.Feature("x", replace={None: 1}), "expected replace to be a dict of numbers"),
    (lambda: sonic.Tokens(BOOLS, flags="number"), "bool cannot hold"),
    (lambda: sonic.Tokens({"M": sonic.Row("a", "int32")}, fill=0.5), "int32 cannot hold"),
    (
        lambda: sonic.Tokens({"J": ONE, "M": sonic.Row("a", "int8")}),
        "'M': expected dtype float32, a",
    ),
    (
        lambda: sonic.Tokens({"J": sonic.Padded(["a", "a"], 2), "M": ONE}),
        "'M' has fewer fields call",
    ),
    (
        lambda: sonic.Tokens({"J": sonic.Padded(["a", 1, 2], 1), "M": CONSTANT}),
        "belong together is",
    ),
    (lambda: sonic.Pairwise(["pt", "eta"], 3, "pq_i"), "no 'pq_i'; did you mean 'pt_i'"),
    (lambda: sonic.Pairwise(["x"], 3, "ln_kt"), "needs the fields of a four-vector"),
    (lambda: sonic.Pairwise(["a.x", "b.x"], 3, "x_i"), "last parts of the fields' names differ"),
    (lambda: sonic.Pairwise([*VECTOR, "a_px", "a_py", "a_pz", "a_e"], 3), "one four-vector"),
    (lambda: sonic.Pairwise([*VECTOR, "energy"], 3), "one four-vector"),
    (lambda: sonic.Pairwise(["a_px", "a_py", "a_pz", "a_e", "pt"], 3), "one four-vector"),
    (lambda: sonic.Pairwise(["x"], 3, "min(x_i)"), "min takes 2 or more by place, got 1"),
    *(
        (partial(sonic.Pairwise, ["x"], 3, text), "formula")
        for text in ("x_i.real", "[x_i]", "x_i if x_j else 0", "__import__('os')", "x_i <")
    ),
    (lambda: sonic.Pairwise(["x"], 3, "x_i", dtype="int32"), "not int32"),
    (lambda: sonic.Output(function="softmin"), "'softmax' or 'sigmoid' or 'odds'"),
    (lambda: sonic.Output(["a"], shape=(1,)), "labels or a shape"),
    (lambda: sonic.Output(axes=2), "and per='constituent', got axes=2"),
    (lambda: sonic.Output(choose="argmax"), "needs per='constituent'"),
    (lambda: chosen(shape=(2,)), "chooses constituents has .* neither a shape"),
    (lambda: chosen(dtype="string"), "neither a shape, strings"),
    (lambda: chosen(function="softmax"), "strings nor a function"),
    (lambda: chosen(choose="slot"), "of dtype='int64'"),
    (lambda: chosen(labels=["a"], axes=2), "a label for each of 2 axes, got a"),
    (lambda: sonic.Output(groups={"x": ["d"]}, labels=["a"]), "no label 'd'"),
    (lambda: sonic.Output(groups={"x": [1]}, labels=["a"]), "'x' has members beyond the 1 values"),
    (lambda: sonic.Output(groups={"x": [-4]}, shape=(3,)), "members beyond the 3 values"),
    (lambda: sonic.Output(groups={"x": slice(2, 9)}, shape=(3,)), "members beyond the 3 values"),
    (lambda: sonic.Output(groups={"x": slice(0, 3, 0)}), "expected groups to be a dict"),
    (lambda: sonic.Output(groups={"x": []}), "expected groups to be a dict"),
    (lambda: sonic.Output(groups=""), "expected groups to be a dict"),
    (lambda: sonic.Output(["a", "b"], over=["a"]), "over= needs a function, scale or shift"),
    (lambda: sonic.Output(shape=(), function="softmax"), "softmax needs several values"),
]


def chosen(**options: Any) -> sonic.Output:
    return sonic.Output(**{"per": "constituent", "choose": "argmax", **options})


@pytest.mark.parametrize(("make", "message"), MESSAGES)
def test_messages_say_what_was_expected(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
