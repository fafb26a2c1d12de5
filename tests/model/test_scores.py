"""Numbers computed after the network are declared and hashed, and are float32 everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ContractError
from sonic_coffea.layouts import trace
from sonic_coffea.testing import FakeModel, FakeServer

LABELS = ["qcd", "top", "w", "mass"]
NUMBERS = np.asarray([[1, 3, 4, 9], [2, 2, 0, 8], [0, 0, 5, 7]], np.float32)
OBJECTS = ak.Array([[dict(zip(LABELS, row, strict=True)) for row in NUMBERS.tolist()], []])


def echo(output: sonic.Output) -> sonic.Model:
    return sonic.Model("m", {"x": sonic.Row(LABELS)}, {"y": output})


def same(inputs: Any) -> dict[str, Any]:
    return {"y": inputs["x"]}


@pytest.fixture
def server(sonic_server: Any) -> Any:
    """A server that answers with the numbers that are sent."""
    return sonic_server(echo(sonic.Output(LABELS)), functions={"m": same}, retry_timeout_s=0.1)


def scores(**options: Any) -> Any:
    return echo(sonic.Output(LABELS, **options))(OBJECTS)[0]


def numbers_of(record: Any) -> Any:
    return np.stack([ak.to_numpy(record[name]) for name in record.fields], axis=1)


@pytest.mark.usefixtures("server")
def test_functions_are_of_all_labels_or_of_some() -> None:
    each = np.exp(NUMBERS)
    soft = scores(function="softmax", groups={"ab": ["qcd", "top"], "c": "w", "d": slice(3, 4)})
    grouped = np.add.reduceat(each, [0, 2, 3], axis=1) / each.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(numbers_of(soft), grouped, rtol=1e-6)
    logistic = scores(function="sigmoid")
    np.testing.assert_allclose(numbers_of(logistic), each / (1 + each), rtol=1e-6)
    some = scores(function="softmax", over=["qcd", "top"])
    expected = each[:, :2] / each[:, :2].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(numbers_of(some[["qcd", "top"]]), expected, rtol=1e-6)
    assert some.w.tolist() == [4, 0, 5]
    assert scores(function="softmax", over=slice(0, 2)).tolist() == some.tolist()
    scaled = scores(scale=2.0, shift=1.0, over=["mass"])
    assert (scaled.mass.tolist(), scaled.w.tolist()) == ([19, 17, 15], [4, 0, 5])
    odds = scores(function="odds", over=["w", "mass"])
    assert odds.mass.tolist() == pytest.approx([-9 / 8, -8 / 7, -7 / 6])


@pytest.mark.usefixtures("server")
def test_discriminants_are_computed_of_labels_and_groups() -> None:
    beside = scores(discriminants={"TvsQCD": "top / (top + qcd)", "twice": "2 * w"})
    assert beside.fields == [*LABELS, "TvsQCD", "twice"]
    assert beside.TvsQCD.tolist()[:2] == [0.75, 0.5]
    assert np.isnan(beside.TvsQCD[2])
    assert beside.twice.tolist() == [8, 0, 10]
    grouped = scores(
        groups={"QCD": ["qcd"], "sig": ["top", "w"]}, discriminants={"D": "sig / (sig + QCD)"}
    )
    assert grouped.D.tolist() == pytest.approx([7 / 8, 0.5, 1.0])
    assert str(grouped.type) == "3 * {QCD: float32, sig: float32, D: float32}"
    dots = sonic.Output(["a.b", *LABELS[1:]], discriminants={"d": "a.b + top"})
    assert echo(dots)(OBJECTS)[0].d.tolist() == [4, 4, 0]
    for options in ({"groups": {"QCD": ["qcd"]}}, {"discriminants": {"D": "2 * w"}}):
        output = sonic.Output(LABELS, **options)
        nothing, some = map(echo(output), (OBJECTS[1:], OBJECTS))
        assert nothing.type.content == some.type.content


def test_discriminants_of_small_integers_do_not_wrap_around() -> None:
    output = sonic.Output(["a", "b"], "uint8", discriminants={"d": "a - b", "s": "a + b"})
    scores = ak.Array(output.content(np.asarray([[1, 255]], np.uint8)))
    assert scores.tolist() == [{"a": 1, "b": 255, "d": -254.0, "s": 256.0}]


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


CASES: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Any]] = {
    "labels": (
        {"labels": ["a", "b"]},
        lambda i: np.concatenate([i["x"], 2 * i["x"]], axis=1),
        [[{"a": 1.5, "b": 3.0}, {"a": 3.0, "b": 6.0}], [], None, [None, {"a": -2.0, "b": -4.0}]],
    ),
    "constituents": (
        {"per": "constituent", "of": "pf"},
        lambda i: 2 * i["pf"][:, 0],
        [[[2.0, 0.5, None], []], [], None, [None, [1.0]]],
    ),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_scores_are_float32_and_can_be_reduced(sonic_server: Any, name: str, dtype: str) -> None:
    """So are those of chunks without rows, and those of a graph."""
    options, function, expected = CASES[name]
    model = sonic.Model("m", INPUTS, {"y": sonic.Output(dtype=dtype, **options)})

    def served(inputs: Any) -> dict[str, Any]:
        return {"y": function(inputs).astype(model.outputs["y"].dtype)}

    sonic_server(model, functions={"m": served})
    scores, nothing = model(JETS), model(JETS[1:3])
    assert scores.tolist() == expected
    tracer = ak.Array(JETS.layout.to_typetracer(forget_length=True))
    traced = trace(model.inputs, model.outputs, tracer)
    together = ak.concatenate([nothing, scores])
    assert together.tolist() == nothing.tolist() + scores.tolist()
    for some in (scores, nothing, traced, together):
        assert "float16" not in str(some.type)
        assert "union" not in str(some.type)
    for numbers in [scores[name] for name in scores.fields] or [scores]:
        for reduce in (ak.sum, ak.max, ak.mean, ak.std):
            assert np.isfinite(reduce(numbers, axis=None))


@pytest.mark.parametrize("length", [3, -1])
def test_labels_are_compared_where_they_are_declared(length: int) -> None:
    """They need not be the last axis, nor the elements a free one."""
    fake = FakeModel(
        inputs={"x": ("float32", (3,))},
        outputs={"y": ("float32", (2, length))},
        function=lambda i: {"y": np.stack([i["x"], -i["x"]], axis=1)},
    )

    def model(*labels: str) -> sonic.Model:
        output = sonic.Output(list(labels), per="constituent", axes=("labels", "x"))
        return sonic.Model("m", {"x": sonic.Padded("x", 3, axis_order="L")}, {"y": output})

    events = ak.Array([{"x": [1.0, 2.0]}, {"x": []}])
    with FakeServer({"m": fake}) as server, sonic.connect(server.url):
        scores = model("p", "q")(events)
        with pytest.raises(ContractError, match="declared with shape"):
            model("p", "q", "r")(events)
    assert scores.tolist() == [[{"p": 1.0, "q": -1.0}, {"p": 2.0, "q": -2.0}], []]


@pytest.mark.parametrize("members", [slice(2, None), slice(-2, None), slice(0, 2), [0, 3]])
def test_groups_of_lost_rows_are_none(server: FakeServer, members: Any) -> None:
    """Whether the server has told how many values there are, or nobody has."""
    grouped = echo(sonic.Output(groups={"some": members}))
    assert grouped(OBJECTS).some[0].tolist() == NUMBERS[:, members].sum(axis=1).tolist()
    server.fail(grpc.StatusCode.INVALID_ARGUMENT, "no", times=100)
    assert grouped(OBJECTS, on_error="mask").tolist() == [[None] * 3, []]
    server.stop()
    with sonic.connect(server.url, retry_timeout_s=0.2):  # another pool, which knows no model
        assert grouped(OBJECTS, on_error="mask").tolist() == [[None] * 3, []]
