"""Inputs of one model have the same rows, lengths of their own, and masks beside them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts import bind_inputs, declared


def test_elements_are_counted_and_weighed_by_the_bucket_of_their_row() -> None:
    counts = [(3, 0), (13, 1), (100, 9)]
    array = ak.Array([{"pf": [1.0] * n, "sv": [1.0] * m, "met": 1.0} for n, m in counts])
    layouts = {
        "pf": sonic.Bucketed("pf", (12, 24)),
        "pf mask": sonic.Mask(beside="pf"),
        "sv": sonic.Bucketed("sv", (1, 4)),
        "met": sonic.Row("met"),
        "met mask": sonic.Mask(beside="met", axis_order="L"),
    }
    inputs = bind_inputs(layouts, array)
    sent, there, places = 3 + (13 + 1) + (24 + 4), 3 + (13 + 1) + (100 + 9), 13 + 28 + 28
    assert inputs.count_elements() == (sent, there - sent, places - sent)
    assert [s.row_bytes for s in inputs.segments] == [4 * (2 * 12 + 1 + 2), 4 * (2 * 24 + 4 + 2)]
    assert inputs.pack(0, 1)["met mask"].tolist() == [[1]]
    flat = {"with offsets": sonic.Flat("sv"), "without": sonic.Flat("sv", None)}
    (segment,) = bind_inputs(flat, array).segments
    assert segment.row_bytes.tolist() == [8 + 4 * 2 * n for _, n in counts]


def test_declared_tensors_have_the_shape_of_a_row() -> None:
    layouts = {
        "x": sonic.Flat(["a", "b"], "splits"),
        "y": sonic.Bucketed("a"),
        "row": sonic.Row("a", axis_order=""),
        "flat": sonic.Flat("a", axis_order="L"),
    }
    shapes = {name: shape for name, (_, shape) in declared(layouts).items()}
    without_axes = dict.fromkeys(("splits", "row", "flat", "row_splits"), ())
    assert shapes == {"x": (2,), "y": (1, -1), **without_axes}


def test_rows_may_have_lists_of_constituents() -> None:
    """Each list is padded as a row of its own."""
    jets = [[[1.0, 3.0, 2.0, 4.0], [5.0], []], [[7.0]], [], [[], [6.0, 8.0]]]
    numbers = ak.Array(jets)
    events = ak.zip({"Jet": ak.zip({"pf": ak.zip({"pt": numbers, "q": -numbers})}, depth_limit=2)})
    fields = ["Jet.pf.pt", sonic.Feature("Jet.pf.q", scale=2.0)]
    layout = sonic.Padded(fields, 3, -1.0, outer=2, axis_order="LF", sort_by="Jet.pf.pt")
    alone = sonic.Padded(fields, 3, -1.0, "LF", sort_by="Jet.pf.pt").pack(events)
    assert layout.row_shape(0) == (2, 3, 2)
    wanted = np.full((4, 2, 3, 2), -1.0)
    rows = iter(alone)
    for n, event in enumerate(jets):
        for j, row in enumerate(next(rows) for _ in event):
            if j < 2:
                wanted[n, j] = row
    np.testing.assert_array_equal(layout.pack(events), wanted)
    by_field = sonic.Padded(fields, 3, -1.0, outer=2, sort_by="Jet.pf.pt").pack(events)
    np.testing.assert_array_equal(by_field, np.moveaxis(wanted, -1, 1))
    inputs = bind_inputs({"x": layout, "mask": sonic.Mask(beside="x", axis_order="L")}, events)
    assert inputs.pack(0, 4)["mask"].tolist() == [[1, 1], [1, 0], [0, 0], [1, 1]]
    np.testing.assert_array_equal(inputs.pack(1, 3)["x"], wanted[1:3])
    # As after ak.mask that leaves all jets, or not.
    masked = ak.with_field(events, ak.mask(events.Jet, ak.num(events.Jet.pf, axis=2) >= 0), "Jet")
    np.testing.assert_array_equal(layout.pack(masked), wanted)
    masked = ak.with_field(events, ak.mask(events.Jet, ak.num(events.Jet.pf, axis=2) > 0), "Jet")
    with pytest.raises(InputError, match=r"'Jet.pf.pt' has None among its lists; use ak.drop_none"):
        layout.pack(masked)
    with pytest.raises(InputError, match="'Jet.pf.pt' has no lists of lists, which outer= needs"):
        layout.pack(events[0])
    with pytest.raises(ConfigError, match="has no inverse"):
        layout.unpack(wanted, events)


def test_padding_that_cannot_be_sent_is_refused() -> None:
    log = sonic.Padded(sonic.Feature("x", function="log"), 2, pad="before")
    with pytest.raises(InputError, match=r"^fill 0.0, padded .*: field 'x' is .* in event 1"):
        log.pack({"x": ak.Array([[1, 1], [1]])})
    assert log.pack({"x": ak.Array([[1, 1]])}).shape == (1, 1, 2)
    of_list = sonic.Feature("x", expression="x * y")
    with pytest.raises(InputError, match="reads numbers of the whole list"):
        sonic.Padded(of_list, 2, pad="before", outer=3).pack(
            {"x": ak.Array([[[1.0], [2.0]]]), "y": ak.Array([[3.0, 4.0]])}
        )


@pytest.mark.parametrize("source", ["float32", "float64", "int16", "int64"])
def test_transformations_are_those_of_numpy_bit_by_bit(source: str) -> None:
    values = (np.random.default_rng(1).normal(size=1000) * 50).astype(source)
    feature = sonic.Feature("x", shift=1.7, scale=0.031, lower=-1.0, upper=0.9)
    real = np.result_type(values.dtype, np.float32)
    expected = (values.astype(real) - real.type(1.7)) * real.type(0.031)
    expected = np.clip(expected, real.type(-1.0), real.type(0.9)).astype(np.float32)
    tensor = sonic.Padded(feature, 10).pack({"x": ak.unflatten(values, 10)})
    np.testing.assert_array_equal(tensor.reshape(-1), expected)


@pytest.mark.parametrize("layout", [sonic.Row, sonic.Flat])
@pytest.mark.parametrize("number", [6, 70_000])
def test_channels_of_one_kind_are_transformed_as_each_of_them_alone(
    layout: Any, number: int
) -> None:
    rng = np.random.default_rng(1)
    columns = {
        "real": rng.normal(size=number).astype(np.float32) * 3,
        "double": rng.normal(size=number) * 3,
        "whole": rng.integers(-3, 3, number),
    }
    columns["real"][:3] = np.inf, -np.inf, np.nan
    each: list[dict[str, Any]] = [
        {"shift": 0.1},
        {"shift": 0.3},
        {"shift": 0.1, "scale": 1.7, "lower": -1.0},
        {"shift": 0.3, "scale": 0.7, "upper": 1.0},
        {"scale": 1.7, "lower": -1.0, "upper": 1.0, "nonfinite_last": True},
        {"scale": 0.7, "lower": -2.0, "upper": 2.0, "nonfinite_last": True},
        {"function": "tanh", "scale": 3.0},
        {"function": "abs", "scale": 5.0},
        {"categories": {0: 1, None: 2}},
    ]
    by_name = [
        [sonic.Feature(name, nonfinite=0.1 * n, **options) for n, options in enumerate(each)]
        for name in columns
    ]
    # Side by side, there are those of one kind and type, and those of one kind and other types.
    features = [*chain(*by_name), *chain(*zip(*by_name, strict=True))]
    arrays = {name: ak.unflatten(column, 1) for name, column in columns.items()}
    array = columns if layout is sonic.Row else arrays
    alone = [layout(feature).pack(array)[:, 0] for feature in features]
    np.testing.assert_array_equal(layout(features).pack(array), np.stack(alone, axis=1))


def test_each_of_the_channels_that_are_transformed_together_is_checked() -> None:
    array = {"x": np.asarray([1.0, 2.0], np.float32), "y": np.asarray([1e30, np.inf], np.float32)}

    def row(**options: Any) -> sonic.Row:
        return sonic.Row([sonic.Feature("x", **options), sonic.Feature("y", **options)])

    for options in ({"upper": 1.0}, {"shift": 1.0}, {"lower": -1.0, "upper": 1.0}):
        with pytest.raises(InputError, match="^field 'y' is NaN or infinite in event 1"):
            row(**options).pack(array)
    unlimited = row(scale=1e30, lower=0.0, upper=np.inf, nonfinite=0.0)
    with pytest.raises(InputError, match="^field 'y' is inf after .* in event 0, which float32"):
        unlimited.pack(array)
    limits = {"lower": -1.0, "upper": 1.0, "nonfinite": 1e300, "nonfinite_last": True}
    for too_large in (row(**limits), sonic.Row(sonic.Feature("y", **limits))):
        with pytest.raises(InputError, match="^field 'y' is inf after .* in event 1, which float"):
            too_large.pack({"x": array["x"], "y": np.asarray([1.0, np.nan], np.float32)})


def test_integers_without_a_transformation_stay_exact() -> None:
    array = {"x": np.asarray([2**60 + 1]), "y": np.asarray([2**60 + 3])}
    features = [sonic.Feature(name, nonfinite=0.0) for name in array]
    assert sonic.Row(features, "int64").pack(array).tolist() == [[2**60 + 1, 2**60 + 3]]
    features[1] = sonic.Feature("y", nonfinite=0.0, function="log2")
    assert sonic.Row(features, "int64").pack(array).tolist() == [[2**60 + 1, 60]]
