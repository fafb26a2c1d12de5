"""Plain arrays go in and come out, and what is meant is named where it is not what was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pandas as pd
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors

MODEL = sonic.Model("m", {"x": sonic.Row(["pt", "eta"])}, {"y": ["a", "b"]})
SEVERAL = sonic.Model(
    "several",
    {"x": sonic.Row("pt")},
    {
        "y": ["a"],
        "n": sonic.Output(dtype="int64"),
        "s": sonic.Output(dtype="string"),
        "v": sonic.Output(shape=(2,)),
    },
)
FRAME = pd.DataFrame({"pt": [1.0, 2.0, 3.0], "eta": [0.5, 0.0, -0.5], "kind": ["x", "y", "x"]})
FRAME.index = pd.Index([7, 8, 9], name="entry")


def several(inputs: Any) -> Any:
    x = inputs["x"]
    text = np.asarray([[f"{value:g}".encode()] for value in x[:, 0]], object)
    whole = np.where(x < 1e20, x, 0).astype(np.int64) + (x > 1e6)
    whole[x > 1e20] = np.iinfo(np.int64).max
    return {"y": 2 * x, "n": whole, "s": text, "v": np.hstack([x, -x])}


@pytest.fixture(autouse=True)
def server(sonic_server: Any) -> None:
    functions = {"m": lambda inputs: {"y": inputs["x"] * 2}, "several": several}
    sonic_server(MODEL, SEVERAL, functions=functions)


def test_data_frames_are_scored_as_such() -> None:
    scores = MODEL(FRAME)
    expected = pd.DataFrame({"a": [2.0, 4.0, 6.0], "b": [1.0, 0.0, -1.0]}, index=FRAME.index)
    pd.testing.assert_frame_equal(scores, expected.astype("float32"))
    assert scores.attrs["sonic"]["model"] == "m"
    some = MODEL(FRAME, mask=FRAME.pt > 1.5)
    assert some.a.isna().tolist() == [True, False, False]
    given = SEVERAL(FRAME, mask=FRAME.pt > 1.5)
    assert given.columns.tolist() == ["y_a", "n", "s", "v"]
    assert given.n.tolist()[1:] == [2.0, 3.0]
    assert given.s.tolist()[1:] == ["2", "3"]
    assert given.v.iloc[0] is None
    assert [*given.v.iloc[1]] == [2.0, -2.0]
    large = FRAME.assign(pt=[0.0, 2.0**53, 1.0])  # to which the model adds 1
    assert SEVERAL(large).n.tolist() == [0, 2**53 + 1, 1]
    for number in (2.0**53, 1e30):  # of which the model makes the largest integer
        large.loc[8, "pt"] = number
        with pytest.raises(errors.InputError, match="scores of type int64 beside None are float64"):
            SEVERAL(large, mask=large.pt > 0)
    assert MODEL(FRAME[:0]).shape == (0, 2)
    assert MODEL.pack(FRAME)["x"].tolist() == FRAME[["pt", "eta"]].to_numpy().tolist()
    beyond = pd.array([2**63, None, 1], "UInt64")
    assert MODEL.pack(FRAME.assign(id=beyond))["x"].tolist() == MODEL.pack(FRAME)["x"].tolist()
    swapped = MODEL.pack(FRAME.assign(pt=FRAME.pt.to_numpy().astype(">f4")))
    assert swapped["x"].tolist() == MODEL.pack(FRAME)["x"].tolist()
    assert sonic.Row("kind", dtype="string").pack(FRAME).tolist() == [[b"x"], [b"y"], [b"x"]]


def test_columns_of_one_name_are_refused(sonic_server: Any) -> None:
    twice = sonic.Model("twice", {"x": sonic.Row("pt")}, {"a": ["b_c"], "a_b": ["c"]})
    sonic_server(twice, functions={"twice": lambda inputs: {"a": inputs["x"], "a_b": inputs["x"]}})
    with pytest.raises(errors.ConfigError, match="have one name: a_b_c, a_b_c; rename a label"):
        twice(FRAME)


def test_columns_may_have_the_name_of_an_input() -> None:
    same = sonic.Model("m", {"x": sonic.Row(["x", "y"])}, MODEL.outputs)
    columns = {"x": np.asarray([1.0, 2.0]), "y": np.asarray([3, 4])}
    assert same.pack(columns)["x"].tolist() == [[1, 3], [2, 4]]
    assert same(columns)["b"].tolist() == [6.0, 8.0]
    assert same({"x": ak.zip(columns)}).b.tolist() == [6.0, 8.0]
    dotted = sonic.Model("m", {"Jet.PT": sonic.Row([("Jet.PT",)])}, MODEL.outputs)
    assert dotted.pack({"Jet.PT": np.asarray([1.0, 2.0])})["Jet.PT"].tolist() == [[1], [2]]


def test_rows_in_another_order_are_not_taken_by_position(tmp_path: Path) -> None:
    ordered = FRAME.sort_values("eta")
    folds = sonic.Folds([MODEL, MODEL])
    unlabelled = {name: FRAME[name].to_numpy() for name in ("pt", "eta")}
    assert MODEL(ordered, mask=(ordered.pt > 1.5)).a.isna().tolist() == [False, False, True]
    for refused in (
        lambda: MODEL(ordered, mask=FRAME.pt > 1.5),
        lambda: MODEL({"pt": FRAME.pt, "eta": ordered.eta}),
        lambda: folds(ordered, fold=FRAME.kind == "y"),
        lambda: folds(ordered, fold="kind2", events=FRAME.assign(kind2=0)),
        lambda: folds(dict(ordered.items()), fold=FRAME.kind == "y"),
        lambda: folds(unlabelled, fold=FRAME.kind == "y", mask=ordered.pt > 1.5),
        lambda: folds(unlabelled, fold=FRAME.kind == "y", version=ordered.pt.astype(int)),
        lambda: folds(sonic.Variations(up=ordered), fold=FRAME.kind == "y"),
        lambda: MODEL(sonic.Variations(up=ordered), mask=FRAME.pt > 1.5),
        lambda: MODEL(sonic.Variations(up=ordered), mask={"up": FRAME.pt > 1.5}),
        lambda: MODEL(sonic.Variations(up={"pt": FRAME.pt, "eta": ordered.eta})),
        lambda: MODEL.pack({"pt": FRAME.pt, "eta": ordered.eta}),
        lambda: MODEL.pack({"x": {"pt": FRAME.pt, "eta": ordered.eta}}),
        lambda: sonic.Row(["pt", "eta"]).pack({"pt": FRAME.pt, "eta": ordered.eta}),
        lambda: MODEL.export(
            dict(ordered.items()), tmp_path / "t.parquet", labels={"is_y": FRAME.kind == "y"}
        ),
        lambda: MODEL.export(ordered, tmp_path / "t.parquet", labels={"is_y": FRAME.kind == "y"}),
    ):
        with pytest.raises(errors.InputError, match="have other indices, as after sort_values"):
            refused()


def test_variations_do_not_lend_each_other_rows() -> None:
    two, three = np.asarray([1.0, 2.0]), np.asarray([1.0, 2.0, 3.0])
    varied = sonic.Variations(nominal={"pt": three, "eta": two}, up={"pt": two, "eta": three})
    with pytest.raises(errors.InputError, match=r"'nominal' have different .*'pt' 3, 'eta' 2"):
        MODEL(varied)
    of_inputs = {"n": {"x": {"pt": three, "eta": three}}, "u": {"x": {"pt": two, "eta": two}}}
    scores = MODEL(sonic.Variations(of_inputs))
    assert {name: each.b.tolist() for name, each in scores.items()} == {"n": [2, 4, 6], "u": [2, 4]}


def test_columns_of_an_input_are_traced_without_a_server() -> None:
    column = ak.Array(ak.Array([1.0]).layout.to_typetracer(forget_length=True))
    scores = MODEL({"x": {"pt": column, "eta": column}})
    assert str(scores.type) == "## * {a: float32, b: float32}"


@pytest.mark.parametrize("dtype", ["Int64", "Float32", "boolean", "object", "category"])
def test_columns_of_a_dict_are_read_as_those_of_a_data_frame(dtype: str) -> None:
    frame = pd.DataFrame({"pt": FRAME.pt, "n": pd.Series([1, None, 0], FRAME.index).astype(dtype)})
    for layout in (sonic.Row(["pt", "n"], missing=-9.0), sonic.Row("pt")):
        expected = layout.pack(frame)
        np.testing.assert_array_equal(layout.pack(dict(frame.items())), expected)
    inside = sonic.Row(["MET.pt", "MET.n"], missing=-9.0).pack({"MET": frame})
    assert inside.tolist() == [[1, 1], [2, -9], [3, 0]]
    model = sonic.Model("m", {"x": sonic.Row(["pt", "n"], missing=-9.0)}, {"y": ["a", "b"]})
    varied = model(sonic.Variations(nominal={"x": dict(frame.items())}))
    assert varied["nominal"].b.tolist() == [2, -18, 0]


def test_data_frames_have_variations_choices_and_missing_numbers() -> None:
    varied = MODEL(sonic.Variations(nominal=FRAME, up=FRAME[1:]))
    assert varied["up"].index.equals(FRAME.index[1:])
    choice = sonic.Choice({"x": MODEL, "y": MODEL}, by="kind")
    assert choice(FRAME).a.tolist() == [2.0, 4.0, 6.0]
    known = pd.Series([True, None, False], FRAME.index, dtype="boolean")
    assert MODEL(FRAME, mask=known).a.isna().tolist() == [False, True, True]
    with pytest.raises(errors.InputError, match="mask: expected an array, got set"):
        MODEL(FRAME, mask={True, False})  # in any order
    nullable = FRAME.assign(pt=pd.array([1, None, 3], "Int64"))
    filled = sonic.Row(["pt"], missing=-1.0).pack(nullable)
    assert filled.tolist() == [[1.0], [-1.0], [3.0]]
    with pytest.raises(errors.FieldError, match="no field 'ptt'; did you mean 'pt'"):
        sonic.Row("ptt").pack(FRAME)
    with pytest.raises(errors.FieldError, match="no field 'pt'; there are: 1"):
        MODEL({1: 2})
    for columns, what in (([0, 1], "strings as"), (["pt", "pt"], "different")):
        with pytest.raises(errors.InputError, match=f"whose columns have {what} names, got"):
            sonic.Row("pt").pack(pd.DataFrame([[1.0, 2.0]], columns=columns))
    # What no layout could read may stand beside.
    when = pd.to_datetime(["2026", "2027", "2028"]).tz_localize("UTC")
    beside = FRAME.assign(when=when, what=[object()] * 3)
    assert sonic.Row(["pt"]).pack(beside).tolist() == sonic.Row(["pt"]).pack(FRAME).tolist()


EVENTS = ak.Array([{"Jet": [{"pt": 1.0, "eta": 0.0}], "MET": {"pt": 3.0}, "run": 1}])


@pytest.mark.parametrize(
    ("objects", "hint"),
    [
        (EVENTS, r"Jet has them: give that, such as events\.Jet"),
        ({"nominal": EVENTS.Jet, "up": EVENTS.Jet}, r"give sonic\.Variations\(nominal=…, up=…\)"),
        ({"nominal": FRAME, "up": FRAME}, r"give sonic\.Variations\(nominal=…, up=…\)"),
        ({"Jet": EVENTS.Jet, "MET": EVENTS.MET}, r"such as events\.Jet"),
        ({"Jet": EVENTS.Jet}, r"such as events\.Jet"),
        (ak.Array(EVENTS.layout.to_typetracer(forget_length=True)), r"such as events\.Jet"),
    ],
)
def test_errors_name_the_array_that_was_meant(objects: Any, hint: str) -> None:
    with pytest.raises(errors.FieldError, match=f"no field 'pt'.*{hint}"):
        MODEL(objects)
    for others in (EVENTS[["MET", "run"]], [{"eta": 1.0}], FRAME[["eta"]], np.ones(2), {}):
        with pytest.raises(errors.FieldError, match="no field 'pt'") as caught:
            MODEL(others)
        assert "has them" not in str(caught.value)
