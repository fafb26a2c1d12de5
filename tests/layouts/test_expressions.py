"""Expressions compute one number for each element, as numpy does, and are checked as declared."""

from __future__ import annotations

import math
from typing import Any

import awkward as ak
import numpy as np
import pytest
import vector

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, InputError

NAMES = (
    "abs arccos arccosh arcsin arcsinh arctan arctanh ceil cos cosh exp expm1 floor isfinite log "
    "log10 log1p log2 round sign sin sinh sqrt tan tanh"
)
ONE = NAMES.split()
OF_TWO = ("arctan2(a, b)", "delta_phi(a, b)", "hypot(a, b)", "maximum(a, b)", "minimum(a, b, c)")
OF_THREE = ("clip(a, b, c)", "where(a, b, c)")
VALUES = np.asarray([0.1, 0.25, 0.5, 0.75])


def feature(expression: str) -> sonic.Feature:
    return sonic.Feature("y", expression=expression)


def computed(expression: str, **columns: Any) -> np.ndarray[Any, Any]:
    layout = sonic.Row(feature(expression), dtype="float64")
    tensor: np.ndarray[Any, Any] = layout.pack({name: ak.Array(c) for name, c in columns.items()})
    return tensor[:, 0]


@pytest.mark.parametrize(
    "call",
    [
        *("log()", "log(a, b)", "round()", "round(a, 1, 2)", "arctan2(a)", "arctan2(a, b, c)"),
        *("delta_phi(a)", "delta_r(a)", "mass(a, b, c)", "hypot(a)", "maximum(a)", "minimum()"),
        *("clip(a, b)", "where(a)", "where(a, b)", "where(a, b, c, d)", "sum(a, b)", "max()"),
    ],
)
def test_the_number_of_arguments_is_checked_when_it_is_declared(call: str) -> None:
    name, _, arguments = call.removesuffix(")").partition("(")
    with pytest.raises(ConfigError, match=f"{name} takes .*got {len(arguments.split())}"):
        feature(f"1 + np.{call}")


@pytest.mark.parametrize("name", [*ONE, "sign_log"])
def test_functions_of_one_argument_are_those_of_numpy(name: str) -> None:
    def sign_log(x: Any) -> Any:
        return np.copysign(np.log(1 + abs(x)), x)

    values = VALUES + (name == "arccosh")  # which begins at 1
    expected = getattr(np, name, sign_log)(values)
    for text in (f"{name}(x)", f"np.{name}(x)"):
        np.testing.assert_allclose(computed(text, x=values), expected, rtol=1e-14)
    if name != "round":  # of features
        many = sonic.Padded(sonic.Feature("many", function=name), 5, dtype="float64")
        packed = many.pack({"many": ak.Array([values])})
        np.testing.assert_allclose(packed[0, 0, :4], expected, rtol=1e-14)


COLUMNS = {
    "a": np.asarray([1.0, 5.0], np.float32),
    "b": np.asarray([3.0, -2.0]),
    "c": [4.0, 0.0],
    "flag": [True, False],
    "u": np.asarray([10, 200], np.uint8),
}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a + 2 * b - 1", [6.0, 0.0]),
        ("-a // 2 ** b", [-1.0, -20.0]),
        ("log(a) * np.sqrt(c)", [0.0, 0.0]),
        ("1 <= a < 5", [1.0, 0.0]),
        ("(a > 1) & flag | ~flag", [0.0, 1.0]),
        ("where(flag, a, -b)", [1.0, 2.0]),
        ("u - 200", [-190.0, 0.0]),
        ("delta_phi(a * 3, -3 * a)", [6 - 2 * math.pi, 30 - 10 * math.pi]),
        ("np.pi * a", [math.pi, 5 * math.pi]),
        ("maximum(a, b, c, 4.5)", [4.5, 5.0]),
        ("np.minimum(a, 0, b, c, -1)", [-1.0, -2.0]),
        ("hypot(a, b, c, 2)", [math.hypot(1, 3, 4, 2), math.hypot(5, -2, 0, 2)]),
        ("arctan2(b, a)", [math.atan2(3, 1), math.atan2(-2, 5)]),
        ("clip(b, 0, a)", [1.0, 0.0]),
        ("round(a / 7, 2)", [0.14, 0.71]),
        ("round(11 * a, -1)", [10.0, 60.0]),
    ],
)
def test_expressions_are_those_of_python(expression: str, expected: list[float]) -> None:
    np.testing.assert_allclose(computed(expression, **COLUMNS), expected, rtol=1e-6, atol=1e-7)
    jagged = {
        name: ak.unflatten(np.append(column, column[:1]), [2, 0, 1])
        for name, column in COLUMNS.items()
    }
    padded = sonic.Padded(feature(expression), 2, dtype="float64").pack(jagged)
    np.testing.assert_allclose(padded[0, 0], expected, rtol=1e-6, atol=1e-7)
    nothing = {name: ak.Array(np.asarray(column)[:0]) for name, column in COLUMNS.items()}
    assert sonic.Row(feature(expression)).pack(nothing).shape == (0, 1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "bool"])
def test_arrays_are_not_written_to(dtype: str) -> None:
    before = np.asarray([1, 0, 1, 1]).astype(dtype)
    columns = {name: before.copy() for name in "abcd"}
    for expression in (*(f"{name}(a)" for name in ONE), *OF_TWO, *OF_THREE, "+a", "a"):
        row = sonic.Feature("y", expression=expression, nonfinite=0.0, scale=2.0)
        try:
            sonic.Row([row, "a"]).pack({name: ak.Array(c) for name, c in columns.items()})
        except InputError:
            assert dtype == "bool"  # numpy does not negate it, for example
    for column in columns.values():
        np.testing.assert_array_equal(column, before)


@pytest.mark.parametrize(
    ("expression", "of_minus_3"),
    [("a * a", 9), ("a + a", -6), ("-2 - a", 1), ("a**2", 9), ("a * (b > 0) * 2", -6)],
)
def test_integers_that_wrap_around_are_refused(expression: str, of_minus_3: float) -> None:
    row, large = sonic.Row(feature(expression), "float64"), 2**63 - 1
    assert row.pack({"a": [-3], "b": [1]}).tolist() == [[of_minus_3]]
    with pytest.raises(InputError, match=r"an integer is too large for int64; begin with 1.0 \*"):
        row.pack({"a": [1, large], "b": [1, 1]})
    assert sonic.Row(feature("1.0 * a * a"), "float64").pack({"a": [large]}) == [[2.0**126]]


@pytest.mark.parametrize(
    ("expression", "of_minus_3_and_2"),
    [
        ("-a", [3.0, -2.0]),
        ("abs(a)", [3.0, 2.0]),
        ("a // -1", [3.0, -2.0]),
        ("round(a, -1)", [0.0, 0.0]),
    ],
)
def test_the_least_integer_is_not_negated(expression: str, of_minus_3_and_2: list[float]) -> None:
    """Nor is it rounded to one that is less."""
    assert computed(expression, a=[-3, 2]).tolist() == of_minus_3_and_2
    with pytest.raises(InputError, match="an integer is too large for int64"):
        computed(expression, a=[np.iinfo(np.int64).min])


def test_zero_is_negated() -> None:
    assert np.signbit(computed("-a", a=[0.0]))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_sums_that_wrap_around_are_refused(dtype: type) -> None:
    large, total = np.iinfo(dtype).max, sonic.Row(feature("sum(a)"), "float64")
    assert total.pack({"a": np.asarray([[3, 4]], dtype)}).tolist() == [[7.0]]
    with pytest.raises(InputError, match="field 'a' has a sum that u?int64 cannot hold"):
        total.pack({"a": np.asarray([[large, 1]], dtype)})


def test_sums_of_conditions_are_refused() -> None:
    columns = {"a": [1.0, 3.0], "b": [3.0, 3.0]}
    with pytest.raises(InputError, match=r"write \| for or, or 1 \* .* how many conditions hold"):
        sonic.Row(feature("(a > 2) + (b > 2)")).pack(columns)
    count = sonic.Row(feature("1 * (a > 2) + (b > 2)"))
    assert count.pack(columns).tolist() == [[1], [2]]


def test_conditions_and_float16_are_computed_in_more_than_16_bits() -> None:
    """numpy takes the logarithm of True, and squares a float16, in float16."""
    columns = {"a": np.asarray([300.0, 0.1], np.float16), "b": [True, False]}
    first, second = columns["a"].astype(float)
    for expression, expected in {
        "exp(b)": [math.e, 1],
        "log1p(a > 1)": [math.log(2), 0],
        "hypot(b, a > 1)": [math.sqrt(2), 0],
        "a * a": [first**2, second**2],
        "exp(a / 100)": [math.exp(first / 100), math.exp(second / 100)],
    }.items():
        np.testing.assert_allclose(computed(expression, **columns), expected, rtol=1e-6)
    assert computed("~(max(b, a > 1))", **columns).tolist() == [0, 1]


UNREADABLE = ("", "pt\0", "pt eta", "pt;1", "pt @ eta", "pt << 2", "pt[0] if 1 else 2", "'a'", "1j")


@pytest.mark.parametrize("expression", UNREADABLE)
def test_expressions_that_cannot_be_read_are_refused(expression: str) -> None:
    with pytest.raises(ConfigError, match=r"feature 'y'|expression"):
        sonic.Row(feature(expression))


def test_the_mass_of_two_fast_objects_is_that_of_their_sum() -> None:
    """Energies of a TeV in float32 leave no digit of a mass of some GeV."""
    rng = np.random.default_rng(1)
    names = ("pt", "eta", "phi", "mass")
    columns = rng.uniform((900, 2.0, 1.0, 0.1), (1100, 2.01, 1.01, 0.2), (2, 50, 4))
    pair = [dict(zip(names, jets.astype(np.float32).T, strict=True)) for jets in columns]
    a, b = (vector.zip({n: c.astype(np.float64) for n, c in jets.items()}) for jets in pair)
    expected = (a + b).mass
    mass_of = sonic.Row([sonic.Feature("m", expression="mass(a, b)")])
    got = mass_of.pack(ak.zip(dict(zip("ab", map(ak.zip, pair), strict=True)), depth_limit=1))[:, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "text", ["a > 1 & b", "a > 1 & b > 2", "(a == 1 | b == 2)", "abs(~a & b < 2)", "a & 4 != 0"]
)
def test_bits_beside_a_comparison_need_brackets(text: str) -> None:
    with pytest.raises(ConfigError, match="brackets around each side"):
        feature(text)


def test_bits_in_brackets_are_compared() -> None:
    a, b = [1, 2, 6], [3, 0, 5]
    lines = "(a &  # a bit\n 4) != 0", "((a > 1) & \\\n b) > 0"
    for text in ("(a > 1) & (b > 2)", "a > (1 & b)", "((a>1)&(b>2)) == 1", *lines):
        expected = eval(text, {"a": np.asarray(a), "b": np.asarray(b)})  # noqa: S307
        assert computed(text, a=a, b=b).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["max", "min", "sum", "mean"])
def test_a_number_of_a_list_is_nan_where_one_of_the_list_is(name: str) -> None:
    lists = ak.Array([[1.0, math.nan, None], [math.nan], [3.0, None, 3.0]])
    text = f"where(isfinite({name}(x)), 1, 0)"
    assert computed(text, x=lists).tolist() == [0, 0, 1]
    assert computed(f"1 * {name}(x)", x=lists[2:]).tolist() == [6 if name == "sum" else 3]
    with pytest.raises(InputError, match="'y' is NaN or infinite in event 0"):
        computed(f"{name}(x)", x=ak.values_astype(lists, np.float32))
