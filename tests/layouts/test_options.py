"""Options of fields, padding and outputs, against numpy."""

from __future__ import annotations

import math
import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts import assemble, bind_inputs, trace

EVENTS = ak.Array(
    [
        {
            "Jet": [
                {"pt": 50.0, "eta": 0.5, "phi": 1.0, "mass": 5.0, "v": [1.0, 2.0]},
                {"pt": 30.0, "eta": -1.0, "phi": -2.0, "mass": 3.0, "v": [3.0, 4.0]},
            ],
            "MET": {"pt": 80.0},
        },
        {
            "Jet": [{"pt": 40.0, "eta": 2.0, "phi": 0.0, "mass": 4.0, "v": [5.0, 6.0]}],
            "MET": {"pt": 10.0},
        },
        {"Jet": [], "MET": {"pt": 20.0}},
    ]
)


def test_a_tuple_is_a_path_whose_names_hold_dots() -> None:
    delphes = ak.Array([{"Jet": [{"Jet.PT": 2.0}, {"Jet.PT": 1.0}]}, {"Jet": []}])
    layout = sonic.Padded([("Jet", "Jet.PT")], 2, sort_by=("Jet", "Jet.PT"), sort_ascending=True)
    assert layout.pack(delphes).tolist() == [[[1.0, 2.0]], [[0.0, 0.0]]]
    assert sonic.Row([("MET.pt",)]).pack({"MET.pt": ak.Array([1.0])}).tolist() == [[1.0]]
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout.columns == ("Jet.Jet.PT",)


def expression(text: str, **options: Any) -> sonic.Feature:
    return sonic.Feature("y", expression=text, **options)


def test_expressions_reduce_lists() -> None:
    fields = [expression(t) for t in ("num(Jet)", "sum(Jet.pt)", "sum(Jet.pt) / MET.pt")]
    assert sonic.Row(fields).pack(EVENTS).tolist() == [[2, 80, 1], [1, 40, 4], [0, 0, 0]]
    share = expression("Jet.pt / sum(Jet.pt)")
    assert sonic.Padded(share, 2).pack(EVENTS)[0, 0].tolist() == [0.625, 0.375]
    assert sonic.Row(expression("num(Jet[0].v)"), missing=-1).pack(EVENTS[:2]).tolist() == [
        [2],
        [2],
    ]


def test_expressions_pick_objects_and_know_vectors() -> None:
    fields = [expression(f"{name}(Jet[0], Jet[1])") for name in ("mass", "delta_r")]
    fields.append(expression("Jet[0].pt - Jet[1].pt"))
    tensor = sonic.Row(fields, "float64", missing=-1.0).pack(EVENTS)
    assert tensor[1:].tolist() == [[-1.0] * 3] * 2
    a, b = EVENTS.Jet[0].tolist()
    four = [
        np.asarray(
            [
                math.sqrt(v["pt"] ** 2 * math.cosh(v["eta"]) ** 2 + v["mass"] ** 2),
                v["pt"] * math.cos(v["phi"]),
                v["pt"] * math.sin(v["phi"]),
                v["pt"] * math.sinh(v["eta"]),
            ]
        )
        for v in (a, b)
    ]
    energy, *momentum = four[0] + four[1]
    mass = math.sqrt(energy**2 - sum(p**2 for p in momentum))
    np.testing.assert_allclose(tensor[0], [mass, math.hypot(1.5, 3.0), 20.0], rtol=1e-12)


def test_numbers_of_an_array_are_channels() -> None:
    layout = sonic.Padded(["Jet.pt", "Jet.v[:2]"], 2, axis_order="LF")
    expected = [[[50, 1, 2], [30, 3, 4]], [[40, 5, 6], [0, 0, 0]], [[0, 0, 0]] * 2]
    assert layout.pack(EVENTS).tolist() == expected


def test_an_array_beside_single_numbers_is_refused() -> None:
    regular = ak.with_field(EVENTS.Jet, ak.to_regular(EVENTS.Jet.v, axis=2), "v")
    with pytest.raises(InputError, match=r"'v' has an array of fixed length, 2, where.*'v\[:2\]'"):
        sonic.Padded(["pt", "v"], 2).pack(regular)


def test_the_candidates_of_the_leading_jet_are_a_row() -> None:
    jets = [[{"pf": [{"pt": 1.0}, {"pt": 2.0}]}, {"pf": [{"pt": 9.0}]}], [{"pf": [{"pt": 3.0}]}]]
    layout = sonic.Padded("Jet[0].pf.pt", 2)
    assert layout.pack(ak.Array([{"Jet": j} for j in jets])).tolist() == [[[1, 2]], [[3, 0]]]


def test_some_values_are_replaced() -> None:
    feature = sonic.Feature("x", replace={-1: 999}, scale=2.0)
    assert sonic.Row(feature).pack({"x": [-1, 3]}).tolist() == [[1998.0], [6.0]]
    with pytest.raises(ConfigError, match="expected replace="):
        sonic.Feature("x", replace={None: 1})


def test_rows_are_sorted_by_an_expression() -> None:
    by = sonic.Padded("Jet.pt", 2, sort_by="abs(Jet.eta)").pack(EVENTS)
    assert by[0, 0].tolist() == [30.0, 50.0]
    same = sonic.Padded("Jet.pt", 2, sort_by=expression("-Jet.pt")).pack(EVENTS)
    assert same[0, 0].tolist() == [30.0, 50.0]


@pytest.mark.parametrize(
    "feature",
    [
        sonic.Feature("x", shift=1.0, scale=2.0, upper=5.0),
        sonic.Feature("x", function="exp"),
        sonic.Feature("x", expression="x * 3 + 1"),
    ],
)
def test_padding_before_the_transformation_is_transformed(feature: Any) -> None:
    array = {"x": ak.Array([[1.0, 2.0], []])}
    filled = {"x": ak.Array([[1.0, 2.0, -0.5], [-0.5] * 3])}
    before = sonic.Padded(feature, 3, fill=-0.5, pad="before").pack(array)
    np.testing.assert_array_equal(before, sonic.Padded(feature, 3).pack(filled))


@pytest.mark.parametrize("options", [{}, {"sort_by": "Jet.pf.pt"}, {"pad_mode": "wrap"}])
def test_a_row_may_have_lists_of_constituents(options: dict[str, Any]) -> None:
    """Each list is padded as a row of its own."""
    jets = [[[1.0, 3.0, 2.0, 4.0], [5.0], []], [[7.0]], [], [[], [6.0, 8.0]]]
    numbers = ak.Array(jets)
    events = ak.zip({"Jet": ak.zip({"pf": ak.zip({"pt": numbers, "q": -numbers})}, depth_limit=2)})
    fields = ["Jet.pf.pt", sonic.Feature("Jet.pf.q", scale=2.0)]
    layout = sonic.Padded(fields, 3, -1.0, outer=2, axis_order="LF", **options)
    alone = sonic.Padded(fields, 3, -1.0, "LF", **options).pack(events)
    assert layout.row_shape(0) == (2, 3, 2)
    wanted = np.full((4, 2, 3, 2), -1.0)
    rows = iter(alone)
    for n, event in enumerate(jets):
        for j, row in enumerate(next(rows) for _ in event):
            if j < 2:
                wanted[n, j] = row
    np.testing.assert_array_equal(layout.pack(events), wanted)
    by_field = sonic.Padded(fields, 3, -1.0, outer=2, **options).pack(events)
    np.testing.assert_array_equal(by_field, np.moveaxis(wanted, -1, 1))
    inputs = bind_inputs({"x": layout, "mask": sonic.Mask(beside="x", axis_order="L")}, events)
    assert inputs.pack(0, 4)["mask"].tolist() == [[1, 1], [1, 0], [0, 0], [1, 1]]
    np.testing.assert_array_equal(inputs.pack(1, 3)["x"], wanted[1:3])
    with pytest.raises(InputError, match="'Jet.pf.pt' has one jagged axis where outer= needs"):
        layout.pack(events[0])
    with pytest.raises(ConfigError, match="has no inverse"):
        layout.unpack(wanted, events)


def test_infinite_numbers_become_limits_in_the_order_of_weaver() -> None:
    numbers = [math.inf, -math.inf, math.nan, 1.0]
    how: dict[str, Any] = {"scale": 2.0, "lower": -5.0, "upper": 5.0, "nonfinite": 0.5}
    weaver = sonic.Row(sonic.Feature("x", **how, nonfinite_last=True)).pack({"x": numbers})
    assert weaver[:, 0].tolist() == [5.0, -5.0, 0.5, 2.0]
    assert sonic.Row(sonic.Feature("x", **how)).pack({"x": numbers})[:3, 0].tolist() == [1.0] * 3


def test_a_mask_beside_a_row_is_one() -> None:
    layouts = {"met": sonic.Row("MET.pt"), "mask": sonic.Mask(beside="met", axis_order="L")}
    assert bind_inputs(layouts, EVENTS).pack(0, 3)["mask"].tolist() == [[1.0]] * 3


def test_equal_declarations_are_equal() -> None:
    assert sonic.Feature("x", shift=1) == sonic.Feature("x", shift=1.0)
    nan = sonic.Padded(sonic.Feature("x", nonfinite=float("nan")), 2, fill=float("nan"))
    assert pickle.loads(pickle.dumps(nan)) == nan
    assert hash(pickle.loads(pickle.dumps(nan))) == hash(nan)
    models = [
        sonic.Model("m", {"x": sonic.Padded(sonic.Feature("x", scale=s), 2, fill=s)}, {"y": None})
        for s in (1, 1.0, np.float32(1))
    ]
    assert len({model.config_hash for model in models}) == 1


def test_a_mask_of_records_reads_their_lists_alone() -> None:
    form = EVENTS.layout.form_with_key("node{id}")
    tracer, report = ak.typetracer.typetracer_with_report(form)
    model = {"mask": sonic.Mask(2, of="Jet")}, {"y": sonic.Output(["a"])}
    trace(*model, ak.Array(tracer))
    assert len(report.data_touched) == 1


@pytest.mark.parametrize("fields", [{"pt", "eta"}, {"pt": 1}])
def test_fields_without_an_order_are_refused(fields: Any) -> None:
    with pytest.raises(ConfigError, match="expected a list of fields"):
        sonic.Row(fields)


def test_constants_share_a_channel_by_their_place() -> None:
    parts = {"Jet": sonic.Padded(["pt", 2.0], 1), "MET": sonic.Row(["pt", 2.5])}
    assert sonic.Tokens(parts).pack(EVENTS)[0].tolist() == [[50.0, 2.0], [80.0, 2.5]]


def test_images_have_the_declared_shape() -> None:
    images = ak.Array(np.arange(24.0).reshape(2, 3, 4, 1))
    assert sonic.Dense("x", shape=(3, 4, 1)).pack({"x": images}).shape == (2, 3, 4, 1)
    assert sonic.Dense("x", shape=(1, 3, 4)).pack({"x": images[..., 0]}).shape == (2, 1, 3, 4)
    with pytest.raises(InputError, match=r"has \[3, 4, 1\] numbers a row, expected \[1, 3, 4\]"):
        sonic.Dense("x", shape=(1, 3, 4)).pack({"x": images})


@pytest.mark.parametrize("dtype", [">f4", "<f4", ">f8", ">i4"])
def test_any_byte_order_is_read_and_the_native_one_is_sent(dtype: str) -> None:
    array = {"x": ak.Array(np.asarray([1.0, 2.0], np.dtype(dtype).newbyteorder("=")))}
    tensor = sonic.Row("x", dtype=dtype).pack(array)
    assert tensor.dtype.isnative
    assert tensor.tolist() == [[1.0], [2.0]]


LISTS = ak.Array([[{"pt": 1.0}, {"pt": 3.0}], [], [{"pt": 2.0}]])


def scored(output: sonic.Output, tensor: Any, **layouts: Any) -> Any:
    inputs = bind_inputs(layouts or {"pf": sonic.Padded("pt", 3)}, LISTS)
    assembly = assemble("y", output, inputs)
    for row in (2, 0, 1):
        assembly.place(slice(row, row + 1), 1, {"y": tensor[row : row + 1]})
    return inputs.rows.unflatten(assembly.content()).tolist()


def test_labels_may_come_before_the_elements() -> None:
    output = sonic.Output(["a", "b"], per="constituent", axes=("labels", "pf"))
    tensor = np.arange(18.0, dtype=np.float32).reshape(3, 2, 3)
    expected = [[{"a": 0, "b": 3}, {"a": 1, "b": 4}], [], [{"a": 12, "b": 15}]]
    assert scored(output, tensor) == expected


def test_a_class_token_comes_with_the_elements() -> None:
    tensor = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    first = sonic.Output(per="constituent", axes=("1+pf",))
    assert scored(first, tensor) == [[0, 1, 2], [4], [8, 9]]
    last = sonic.Output(per="constituent", axes=("pf+1",))
    assert scored(last, tensor) == [[0, 1, 3], [7], [8, 11]]


def test_queries_and_pairs_of_two_inputs() -> None:
    queries = sonic.Output(per="constituent", axes=(2, "pf"))
    tensor = np.arange(18.0, dtype=np.float32).reshape(3, 2, 3)
    assert scored(queries, tensor) == [[[0, 1], [3, 4]], [[], []], [[12], [15]]]
    pairs = sonic.Output(per="constituent", axes=("pf", "sv"))
    layouts = {"pf": sonic.Padded("pt", 3), "sv": sonic.Padded("pt", 2, sort_by="pt")}
    tensor = np.arange(18.0, dtype=np.float32).reshape(3, 3, 2)
    assert scored(pairs, tensor, **layouts) == [[[1, 0], [3, 2]], [], [[12]]]


def test_scores_are_made_of_the_numbers() -> None:
    numbers = np.log(np.asarray([[1, 2, 5], [1, 1, 2], [4, 4, 2]], np.float32))
    soft = sonic.Output(["a", "b", "c"], function="softmax", groups={"ab": ["a", "b"], "c": "c"})
    for row, ab in zip(scored(soft, numbers), (3 / 8, 0.5, 0.8), strict=True):
        assert row == pytest.approx({"ab": ab, "c": 1 - ab}, rel=1e-6)
    by_slice = sonic.Output(groups={"bc": slice(1, 3)}, scale=2.0, shift=1.0)
    sums = [row["bc"] for row in scored(by_slice, np.ones((3, 3), np.float32))]
    assert sums == [6.0] * 3
    logistic = sonic.Output(function="sigmoid")
    assert scored(logistic, np.zeros((3, 1), np.float32)) == [0.5] * 3
    with pytest.raises(ConfigError, match="expected function to be 'softmax', 'sigmoid' or 'odds'"):
        sonic.Output(function="softmin")
    with pytest.raises(ConfigError, match="no label 'd'"):
        sonic.Output(["a"], groups={"x": ["d"]})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_of_half_precision_are_float32(dtype: str) -> None:
    numbers = np.ones((3, 2), sonic.Row("x", dtype=dtype).dtype)
    inputs = bind_inputs({"pf": sonic.Padded("pt", 3)}, LISTS)
    assembly = assemble("y", sonic.Output(["a", "b"], dtype), inputs)
    assembly.place(slice(0, 3), 3, {"y": numbers})
    assert "float32" in str(inputs.rows.unflatten(assembly.content()).type)
