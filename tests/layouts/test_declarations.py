"""What a declaration takes, and what it refuses at once: nothing is guessed, and nothing is raw."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError

Declare = Callable[..., Any]

AB: dict[str, Any] = {"fields": ["a", "b"]}
PARTS = {"J": sonic.Padded(["a", "b"], 2), "M": sonic.Padded("a", 1)}
# What is declared, with options that are as usual.
DECLARED: dict[str, tuple[Declare, dict[str, Any]]] = {
    "Row": (sonic.Row, AB),
    "Padded": (sonic.Padded, {**AB, "length": 2}),
    "Bucketed": (sonic.Bucketed, {**AB, "lengths": (1, 2)}),
    "Flat": (sonic.Flat, AB),
    "Dense": (sonic.Dense, {"field": "a", "shape": (2,)}),
    "Mask": (sonic.Mask, {"length": 2, "of": "a"}),
    "Pairwise": (sonic.Pairwise, {**AB, "length": 2, "formulae": ["a_i - b_j"]}),
    "Tokens": (sonic.Tokens, {"parts": PARTS}),
    "Feature": (sonic.Feature, {"name": "a"}),
    "OneHot": (sonic.OneHot, {"name": "a", "values": [1, 2]}),
    "Metadata": (sonic.Metadata, {"name": "a"}),
    "Output": (sonic.Output, {}),
    "Output of constituents": (sonic.Output, {"per": "constituent"}),
}

ARRAY = np.asarray([1.0, 2.0])
NOTHING_TAKES = (object(), {2.5}, {1.0, 2.0}, {b"a": 1}, 1j, b"x", [["a"], [1.0]], [object()])
NOT_NUMBERS = ("1", [1.0], ARRAY, 10**400)
NOT_ONE_FOR_EACH = (
    *({"a": 1.0, "b": 2.0}, "1", 10**400, [1.0], [1.0, None], [1.0, "2"]),
    *(np.asarray([[1.0, 2.0]]), np.asarray(["a", "b"]), np.asarray([1.0, 2j])),
)

# Each kind of option once, beside what no option takes.
REFUSED: list[tuple[str, str, tuple[Any, ...]]] = [
    ("Padded", "fields", ({"a": 1, "b": 2}, [{"a"}], [""], np.asarray("a"))),
    ("Row", "dtype", ("floaty", "complex64", "U5", "3f4", "f4,i4", "f4,,", "", 5, [("x", "f4")])),
    *(("Padded", option, NOT_ONE_FOR_EACH) for option in ("missing", "fill")),
    ("Padded", "length", (0, 1.5, "2", True, None, [2], np.float64(2), np.asarray(2))),
    ("Pairwise", "length", (0, None, (4, 2), [2.5])),
    ("Bucketed", "lengths", (None, 2.0, "24", {2: 4}, (4, 2), [], ARRAY)),
    ("Dense", "shape", (2, "2", {2: 4}, [2.5], [0], ARRAY)),
    ("Padded", "sort_by", (5, ["a"], np.asarray(["a", "b"]))),
    ("Pairwise", "formulae", ({"a_i": 1}, 5, [None], [])),
    ("Tokens", "flags", (True, ["onehot"], "one")),
    ("Tokens", "parts", ({}, {5: sonic.Row("a")}, {"J": "a"}, {"J": sonic.Flat("a")}, None)),
    *(("Feature", option, (*NOT_NUMBERS, None)) for option in ("shift", "scale")),
    *(("Feature", option, NOT_NUMBERS) for option in ("lower", "power")),
    ("Feature", "name", (5, ["a"], None, "")),
    ("Feature", "within", (1.0, (1,), (1, 2, 3), (2, 1), "12", (1, "2"))),
    ("Feature", "categories", (1, {}, [1, 2], {"a": 1}, {1: "a"}, {1: None}, {None: 1}, "ab")),
    ("OneHot", "values", ({1: 2}, 1, "12", [], [1, 1], ["a"], [None], np.asarray([[1, 2]]))),
    ("Metadata", "name", (None, "", "a b", "1")),
    ("Output", "labels", (5, {"a": 1}, "ab", ["a", "a"], ["a", None], ARRAY)),
    ("Output of constituents", "axes", (0, 1.5, "2", None)),
    *(
        (name, option.name, NOTHING_TAKES)
        for name, (make, _) in DECLARED.items()
        if isinstance(make, type)
        for option in fields(make)
        if option.init and (make, option.name) != (sonic.Bucketed, "length")
    ),
]


@pytest.mark.parametrize(("name", "option", "values"), REFUSED)
def test_nonsense_is_refused_when_it_is_declared(name: str, option: str, values: Any) -> None:
    make, usual = DECLARED[name]
    make(**usual)
    for value in values:
        with pytest.raises(ConfigError):
            make(**{**usual, option: value})


NAMES = (
    ("a", "b"),
    np.asarray(["a", "b"]),
    np.asarray(["a", "b"], object),
    list(map(np.str_, "ab")),
)
INTEGERS = (np.int64, np.int8, np.uint16)
TWO_FOUR = [np.asarray([2, 4], integer) for integer in INTEGERS]
NEGATIVE = (
    *((-1, -2), [np.float32(-1), np.int8(-2)], np.asarray([-1, -2], np.int8)),
    *(np.asarray([-1.0, -2.0], ">f4"), np.asarray([-1.0, 0.0, -2.0])[::2]),
)
# Declarations, a value of an option, and other objects that mean the same.
SAME: list[tuple[str, str, Any, Any]] = [
    *((name, "fields", ["a", "b"], NAMES) for name in ("Row", "Padded", "Pairwise")),
    ("Row", "fields", ["a", "b"], [(field for field in "ab")]),
    ("Output", "labels", ["a", "b"], NAMES),
    *((name, "length", 2, [i(2) for i in INTEGERS]) for name in ("Padded", "Mask", "Pairwise")),
    *((n, o, (2, 4), TWO_FOUR) for n, o in (("Pairwise", "length"), ("Bucketed", "lengths"))),
    *((name, "shape", (2, 4), TWO_FOUR) for name in ("Dense", "Output")),
    *(("Feature", o, 1.5, [np.float64(1.5), np.float16(1.5)]) for o in ("shift", "lower", "power")),
    ("Feature", "nonfinite", 2, [np.int16(2)]),
    *(("Padded", option, [-1.0, -2.0], NEGATIVE) for option in ("missing", "fill")),
    # Tensors have the byte order of the machine.
    *((n, "dtype", "float32", (">f4", np.dtype(">f4"), np.float32)) for n in ("Row", "Output")),
    *(("Padded", o, text, [np.str_(text)]) for o, text in (("axis_order", "LF"), ("sort_by", "a"))),
    *(("Feature", o, text, [np.str_(text)]) for o, text in (("name", "x"), ("function", "log"))),
    ("Pairwise", "formulae", "a_i", [np.str_("a_i")]),
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


def test_declarations_do_not_change_with_the_array_they_were_made_of() -> None:
    values, shape, names = np.asarray([-1.0, -2.0]), np.asarray([1, 2]), ["a", "b"]
    layout = sonic.Padded(names, 2, fill=values, missing=values)
    output = sonic.Output(shape=shape)
    values[:], shape[:] = 7, 7
    names.append("c")
    assert layout == sonic.Padded(["a", "b"], 2, fill=[-1, -2], missing=[-1, -2])
    assert output == sonic.Output(shape=(1, 2))


def test_equal_declarations_have_one_hash() -> None:
    nan = sonic.Padded(sonic.Feature("x", nonfinite=float("nan")), 2, fill=float("nan"))
    assert pickle.loads(pickle.dumps(nan)) == nan
    assert hash(pickle.loads(pickle.dumps(nan))) == hash(nan)
    feature = sonic.Feature("x", categories={1: 2, None: 0}, within=(None, 3))
    assert eval(repr(feature), {"Feature": sonic.Feature}) == feature  # noqa: S307


NAN = float("nan")
ONE = sonic.Padded("a", 2)
TOKENS_OF = {
    "type": {"J": ONE, "M": sonic.Row("a", "int8")},
    "fewer": {"J": sonic.Padded(["a", "a"], 2), "M": ONE},
    "constants": {"J": sonic.Padded(["a", 1, 2], 1), "M": sonic.Row(["a", 1.0])},
}
BOOLS = {name: sonic.Row("a", "bool") for name in "JM"}
VECTOR = ("px", "py", "pz", "e")
SEVERAL_VECTORS = ([*VECTOR, "a_px", "a_py", "a_pz", "a_e"], [*VECTOR, "energy"])


feature = partial(partial, sonic.Feature, "x")
row, tokens, output = (partial(partial, make) for make in (sonic.Row, sonic.Tokens, sonic.Output))
chosen = partial(output, per="constituent", choose="argmax")
model = partial(partial, sonic.Model, "m", inputs={"x": sonic.Row("pt")}, outputs={"y": None})
computed = partial(output, labels=["qcd", "top"])
padded = partial(partial, sonic.Padded, length=2)


def pairwise(fields: Any, *formulae: str, **options: Any) -> Declare:
    return partial(sonic.Pairwise, fields, 3, *formulae, **options)


MESSAGES: list[tuple[Declare, str]] = [
    (padded("pt", length=0), "Padded: expected length to be a number of at least 1, got 0"),
    (partial(sonic.Bucketed, "a", (8, 4)), "a number of at least 1, or several that ascend"),
    (partial(sonic.Bucketed, "a", (1, 2), outer=2), "expected Padded where outer= is given"),
    (row([]), "Row needs at least one field"),
    (row([3]), "Row needs at least one field beside constants"),
    (row(["a", True]), "expected field names, numbers or sonic.Feature, got True"),
    *((row(["a", value]), "Row: expected a finite number, got") for value in (NAN, 10**400)),
    (row("pt", "float31"), "did you mean 'float32'"),
    (padded("a", axis_order="NF"), "axis_order to be 'FL' or 'LF' or 'L'"),
    (padded(["a", "b"], axis_order="L"), "has no axis for several fields"),
    (padded(["a", "b"], fill=[1.0]), "one for each of 2 channels, got 1"),
    (padded("x", fill=300, dtype="uint8"), "uint8 cannot hold the fill 300"),
    (padded("x", fill=2**53 + 1, dtype="int64"), "int64 cannot hold the fill 9007199254740993"),
    (partial(sonic.Row, ["x", 2**53 + 1], "int64"), "expected field names, numbers .* got 9007199"),
    (partial(sonic.Bucketed, "x", fill=1e5, dtype="float16"), "float16 cannot hold the fill"),
    (row(sonic.Feature("a", nonfinite=NAN), "int32"), "int32 cannot hold nonfinite="),
    (partial(sonic.Mask, 2, of="a", beside="b"), "Mask: expected of='a' or beside='b', got both"),
    *(
        (partial(sonic.Dense, field), "Dense: one field is taken, as it is")
        for field in ("x[0]", feature(index="i")(), feature(expression="x * metadata(y)")())
    ),
    (partial(sonic.Feature, "x[a]"), "expected a path that begins with a name, with indices"),
    (feature(lower=1.0, upper=0.0), r"lower and upper to be limits \(lower, upper\)"),
    (feature(within=(NAN, 1)), r"limits \(lower, upper\), got \(nan, 1\)"),
    (feature(shift=NAN), "expected shift to be a finite number, got nan"),
    (feature(scale=float("inf")), "expected scale to be a finite number, got inf"),
    (feature(power=2, function="log"), "function= or power=, got both"),
    (feature(expression="a", index="b"), "expression= or index=, got both"),
    (feature(expression="logg(a)"), "no function 'logg'; did you mean 'log'"),
    (feature(expression="a if b else c"), r"and where\(condition, value, other\) for if"),
    (feature(expression="a.__class__(b)"), "no function 'a.__class__'"),
    *((feature(expression=x * 10_000 + "b"), "too long or too deep") for x in ("a + ", "-")),
    (feature(expression="sum(a.b * 2)"), r"as in sum\(Jet.pt\), got 'a.b \* 2'; compute this with"),
    (feature(expression="metadata('b')"), r"as in metadata\(year\), got \"'b'\""),
    (partial(sonic.Feature, "x[:3].y"), "a slice is for the fields of a layout"),
    (feature(nonfinite_last=True), "nonfinite_last= needs nonfinite="),
    (feature(replace={None: 1}), "expected replace to be a dict of numbers"),
    (feature(categories={math.nan: 1, None: 0}), "expected categories to be a dict of numbers"),
    (padded("a", fill=0.0, dtype="string"), "fill to be a string"),
    (row(["a", 1.0], "string"), "strings are sent as they are"),
    (row(sonic.Feature("a", scale=2.0), "string"), "as they are"),
    (padded("a", sort_by="a", dtype="string"), "as they are, and sort nothing"),
    (padded("a.b", sort_by=("a", "b"), dtype="string"), "as they are, and sort nothing"),
    (partial(sonic.Feature, ("a", 1.0, "b")), "or a tuple of names and indices, got"),
    (partial(sonic.Mask, 2, of="a", dtype="string"), "Mask: expected dtype to be of numbers"),
    (tokens({"a": sonic.Row("a", dtype="string")}), "layout of numbers"),
    (tokens({"J": sonic.Bucketed("a", (2,))}), "part 'J': expected a Padded or"),
    (tokens(BOOLS, flags="number"), "bool cannot hold"),
    (tokens({"M": sonic.Row("a", "int32")}, fill=0.5), "int32 cannot hold"),
    (tokens(TOKENS_OF["type"]), "'M': expected dtype float32, a"),
    (tokens(TOKENS_OF["fewer"]), "'M' has fewer fields call"),
    (tokens(TOKENS_OF["constants"]), "belong together is"),
    (pairwise(["pt", "eta"], "pq_i"), "no 'pq_i'; did you mean 'pt_i'"),
    (pairwise(["x"], "ln_kt"), "needs the fields of a four-vector"),
    (pairwise(["a.x", "b.x"], "x_i"), "last parts of the fields' names differ"),
    *((pairwise(fields), "one four-vector") for fields in SEVERAL_VECTORS),
    (pairwise(["x"], "min(x_i)"), "min is of a list, which a formula does not read"),
    (pairwise(["x"], "arctan2(x_i)"), "arctan2 takes 2 by place, got 1"),
    *((pairwise(["x"], f), "formula") for f in ("x_i.real", "[x_i]", "x_i if x_j else 0", "x_i <")),
    (pairwise(["x"], "x_i", dtype="int32"), "not int32"),
    (output(function="softmin"), "'softmax' or 'sigmoid' or 'odds'"),
    (output(scale=NAN), "Output: expected scale to be a finite number, got nan"),
    (output(["a"], shape=(1,)), "labels or a shape"),
    (output(axes=2), "and per='constituent', got axes=2"),
    *((output(axes=(n, "x")), "axis has an input's elements") for n in (0, True, "+", "1+")),
    (output(choose="argmax"), "needs per='constituent'"),
    (output(per="constituent", of="sv", axes=("pf",)), "of= is one of the inputs that axes= names"),
    (chosen(shape=(2,)), "chooses constituents has .* neither a shape"),
    (chosen(dtype="string"), "neither a shape, strings"),
    (chosen(function="softmax"), "strings nor a function"),
    (chosen(choose="slot"), "of dtype='int64'"),
    (chosen(labels=["a"], axes=2), "a label for each of 2 axes, got a"),
    (output(["a"], groups={"x": ["d"]}), "no label 'd'"),
    (output(["a", "b"], groups={"x": ["b", "a", "b"]}), r"each value once, got \('b', 'a', 'b'\)"),
    (output(["a", "b"], function="softmax", over=["a", 0]), "each value once, got"),
    (output(shape=(3,), groups={"x": [-4]}), "members beyond the 3 values"),
    *(
        (output(shape=(3,), groups={"x": slice(2, stop)}), "members beyond the 3 values")
        for stop in (2, 9)
    ),
    *((output(groups=g), "groups to be a dict") for g in ({"x": slice(0, 3, 0)}, {"x": []}, "")),
    (output(["a", "b"], over=["a"]), "over= needs a function, scale or shift"),
    *(
        (output(**one, function="softmax"), "softmax needs several values")
        for one in ({"shape": ()}, {"shape": (3, 1)}, {"labels": ["a"]})
    ),
    (output(["a", "b"], function="softmax", over=["b"]), "softmax needs several values"),
    (computed(over=["tops"], function="odds"), "no label 'tops'; did you mean 'top'"),
    (computed(over=[2], function="odds"), "over= has labels of an output or indices"),
    (computed(labels=None, over=[0], function="odds"), "over= has labels of an output"),
    (computed(discriminants={"D": "tops / qcd"}), "no score 'tops'; did you mean 'top'"),
    (computed(discriminants={"D": "sum(top)"}), "sum is of a list, which a discr"),
    (computed(discriminants={"D": "top /"}), "discriminant 'top /' cannot be read"),
    (computed(discriminants={"top": "qcd"}), "names of their own and expressions, got 'top'"),
    (computed(discriminants={"D": 5}), "names of their own and expressions, got 'D': 5"),
    (computed(discriminants="top / qcd"), "discriminants to be a dict of expressions"),
    (computed(labels=None, discriminants={"D": "top"}), "no score 'top'; there are none"),
    *(
        (computed(dtype="string", **how), "has no function")
        for how in ({"discriminants": {"D": "top"}}, {"groups": {"D": ["top"]}})
    ),
    (model(inputs={}), "a dict for inputs, .* got {}"),
    (model(inputs={"x": ["pt"]}), "expected a layout such as sonic.Padd"),
    (model(inputs=sonic.Row(["pt"])), "a dict for inputs, .* got Row"),
    (model(outputs=["a"]), "a dict for outputs, .* got .'a'"),
    (model(parameters=[1]), "a dict for parameters, got"),
    (model(parameters={"priority": 1}), "'priority' is not free; declare priority="),
    (model(parameters={"timeout": 1}), "declare .*server_timeout_s="),
    (model(parameters={"sequence_id": 1}), "sequences are not supported"),
    (model(parameters={"a": [1]}), "'a': expected a bool, int, float or str, got \\[1\\]"),
    (model(parameters={1: 2}), "parameter 1: expected a name of type str"),
    (model(parameters={"a": 2**63}), "parameter 'a': expected an integer of 64 bits, got 92233720"),
    (model(priority=2**63), "parameter 'priority': expected an integer of 64 bits"),
    (model(priority=0), "priority of 1 or more, got 0"),
    *(
        (model(server_timeout_s=value), "server_timeout_s above 0 s and below .*, got")
        for value in (0.0, "20", 1e13, float("inf"), NAN)
    ),
]


@pytest.mark.parametrize(("declare", "message"), MESSAGES)
def test_messages_say_what_was_expected(declare: Declare, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare()
