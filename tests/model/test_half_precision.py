"""Outputs of half precision come back as float32, which awkward can reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.layouts import trace
from sonic_coffea.testing import FakeModel, FakeServer

HALVES = ("float16", "bfloat16")
JETS = ak.Array(
    [
        [{"pt": 1.5, "pf": [{"x": 1.0}, {"x": 0.25}, {"x": 4.0}]}, {"pt": 3.0, "pf": []}],
        [],
        None,
        [None, {"pt": -2.0, "pf": [{"x": 0.5}]}],
    ]
)
INPUTS = {"x": sonic.Row("pt"), "pf": sonic.Padded("pf.x", 2)}


def pairs(inputs: Any) -> Any:
    return inputs["pf"][:, 0, :, np.newaxis] + inputs["pf"]


CASES: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Any]] = {
    "labels": (
        {"labels": ["a", "b"]},
        lambda i: np.concatenate([i["x"], 2 * i["x"]], axis=1),
        [[{"a": 1.5, "b": 3.0}, {"a": 3.0, "b": 6.0}], [], None, [None, {"a": -2.0, "b": -4.0}]],
    ),
    "a number": ({}, lambda i: i["x"], [[1.5, 3.0], [], None, [None, -2.0]]),
    "an array": (
        {"shape": (2, 1)},
        lambda i: np.stack([i["x"], 2 * i["x"]], axis=1),
        [[[[1.5], [3.0]], [[3.0], [6.0]]], [], None, [None, [[-2.0], [-4.0]]]],
    ),
    "constituents": (
        {"per": "constituent", "of": "pf"},
        lambda i: 2 * i["pf"][:, 0],
        [[[2.0, 0.5, None], []], [], None, [None, [1.0]]],
    ),
    "labels of constituents": (
        {"labels": ["a"], "per": "constituent"},
        lambda i: 2 * i["pf"].transpose(0, 2, 1),
        [[[{"a": 2.0}, {"a": 0.5}, None], []], [], None, [None, [{"a": 1.0}]]],
    ),
    "pairs": (
        {"per": "constituent", "axes": 2},
        pairs,
        [[[[2.0, 1.25, None], [1.25, 0.5, None], [None] * 3], []], [], None, [None, [[1.0]]]],
    ),
    "a new collection": (
        {"labels": ["a"], "splits": "splits"},
        lambda i: np.repeat(i["x"], 2, axis=0),
        [[[{"a": 1.5}] * 2, [{"a": 3.0}] * 2], [], None, [None, [{"a": -2.0}] * 2]],
    ),
}


def model_of(name: str, dtype: str) -> tuple[sonic.Model, FakeModel]:
    options, function, _ = CASES[name]
    model = sonic.Model("m", INPUTS, {"y": sonic.Output(dtype=dtype, **options)})
    half = model.outputs["y"].dtype

    def served(inputs: Any) -> dict[str, Any]:
        answer = {"y": function(inputs).astype(half)}
        if "splits" in options:
            answer["splits"] = 2 * np.arange(len(inputs["x"]) + 1)
        return answer

    fake = FakeModel.of(model, served)
    if "splits" in options:
        outputs = {**fake.outputs, "splits": (np.dtype(np.int64), ())}
        fake = FakeModel(inputs=fake.inputs, outputs=outputs, function=served)
    return model, fake


def numbers_of(scores: ak.Array) -> list[ak.Array]:
    return [scores[name] for name in scores.fields] or [scores]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_scores_are_float32_and_can_be_reduced(name: str, dtype: str) -> None:
    model, fake = model_of(name, dtype)
    with FakeServer({"m": fake}) as server, sonic.connect(server.url):
        scores = model(JETS)
    assert scores.tolist() == CASES[name][2]
    assert "float16" not in str(scores.type)
    assert "float32" in str(scores.type)
    for numbers in numbers_of(scores):
        flat = ak.drop_none(ak.flatten(numbers, axis=None))
        for reduce in (ak.sum, ak.max, ak.min, ak.mean, ak.std, ak.prod):
            assert np.isfinite(reduce(numbers, axis=None))
        assert ak.sum(numbers, axis=None) == np.sum(flat.to_numpy())
        ak.sum(numbers, axis=-1), ak.argmax(numbers, axis=-1), ak.sort(numbers, axis=-1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_without_rows_scores_have_the_type_of_other_chunks(name: str, dtype: str) -> None:
    model, fake = model_of(name, dtype)
    with FakeServer({"m": fake}) as server, sonic.connect(server.url):
        nothing, something = model(JETS[1:3]), model(JETS)
    assert "float16" not in str(nothing.type)
    assert "float32" in str(nothing.type)
    together = ak.concatenate([nothing, something])
    assert together.tolist() == nothing.tolist() + something.tolist()
    assert "union" not in str(together.type)
    assert np.isfinite(sum(ak.sum(numbers, axis=None) for numbers in numbers_of(together)))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_traced_output_is_float32(dtype: str) -> None:
    tracer, _ = ak.typetracer.typetracer_with_report(JETS.layout.form_with_key("node{id}"))
    for name in CASES:
        model, _ = model_of(name, dtype)
        traced = trace(model.inputs, model.outputs, ak.Array(tracer))
        assert "float16" not in str(traced.type)
        assert "float32" in str(traced.type)


@pytest.mark.parametrize("dtype", HALVES)
def test_means_over_folds_are_of_float32(dtype: str) -> None:
    output = sonic.Output(["a"], dtype=dtype)
    folds = [sonic.Model(f"m{n}", {"x": sonic.Row("pt")}, {"y": output}) for n in range(3)]

    def served(number: int) -> FakeModel:
        return FakeModel.of(
            folds[number], lambda inputs: {"y": (inputs["x"] + number).astype(output.dtype)}
        )

    servers = {f"m{number}": served(number) for number in range(3)}
    objects = ak.Array([{"pt": 1.0}, {"pt": 2.5}])
    with FakeServer(servers) as server, sonic.connect(server.url):
        both = sonic.Folds(folds)
        mean, chosen = both(objects, fold=None), both(objects, fold=[2, 0])
    assert mean.a.tolist() == [2.0, 3.5]
    assert chosen.a.tolist() == [3.0, 2.5]
    for scores in (mean, chosen):
        assert scores.a.type.content.primitive == "float32"


@pytest.mark.parametrize("dtype", HALVES)
def test_the_greatest_of_half_precision_is_chosen(dtype: str) -> None:
    output = sonic.Output(dtype=dtype, per="constituent", choose="argmax")
    model = sonic.Model("m", {"pf": sonic.Padded("pf.x", 3)}, {"y": output})
    fake = FakeModel.of(model, lambda i: {"y": i["pf"][:, 0].astype(output.dtype)})
    with FakeServer({"m": fake}) as server, sonic.connect(server.url):
        assert model(JETS).tolist() == [[2, None], [], None, [None, 0]]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "layout",
    [
        lambda dtype: sonic.Row(["pt"], dtype=dtype),
        lambda dtype: sonic.Padded("pf.x", 2, dtype=dtype),
        lambda dtype: sonic.Flat("pf.x", dtype=dtype),
        lambda dtype: sonic.Tokens({"t": sonic.Padded("pf.x", 2, dtype=dtype)}),
    ],
)
def test_what_is_unpacked_can_be_reduced(layout: Any, dtype: str) -> None:
    declared = layout(dtype)
    packed = declared.pack(JETS)
    assert packed.dtype.name == dtype
    back = declared.unpack(packed, JETS)
    total = sum(float(number) for number in np.asarray(packed, np.float64).ravel())
    while back.fields:
        back = back[back.fields[0]]
    assert "float16" not in str(back.type)
    assert float(ak.sum(back, axis=None)) == total
