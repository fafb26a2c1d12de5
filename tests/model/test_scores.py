"""Numbers computed after the network are declared and hashed, and are float32 everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ContractError
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


@pytest.mark.usefixtures("server")
def test_softmax_may_be_over_a_part_of_the_labels() -> None:
    soft = scores(function="softmax", over=["qcd", "top"])
    expected = np.exp(NUMBERS[:, :2]) / np.exp(NUMBERS[:, :2]).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(ak.to_numpy([soft.qcd, soft.top]).T, expected, rtol=1e-6)
    assert soft.w.tolist() == [4, 0, 5]
    by_slice = scores(function="softmax", over=slice(0, 2))
    assert by_slice.tolist() == soft.tolist()
    scaled = scores(scale=2.0, shift=1.0, over=["mass"])
    assert (scaled.mass.tolist(), scaled.w.tolist()) == ([19, 17, 15], [4, 0, 5])


@pytest.mark.usefixtures("server")
def test_odds_and_discriminants_are_computed() -> None:
    odds = scores(function="odds", over=["w", "mass"])
    assert odds.mass.tolist() == pytest.approx([-9 / 8, -8 / 7, -7 / 6])
    beside = scores(discriminants={"TvsQCD": "top / (top + qcd)", "twice": "2 * w"})
    assert beside.fields == [*LABELS, "TvsQCD", "twice"]
    assert beside.TvsQCD.tolist()[:2] == [0.75, 0.5]
    assert np.isnan(beside.TvsQCD[2])
    assert beside.twice.tolist() == [8, 0, 10]
    grouped = scores(
        groups={"QCD": ["qcd"], "sig": ["top", "w"]}, discriminants={"D": "sig / (sig + QCD)"}
    )
    assert grouped.fields == ["QCD", "sig", "D"]
    assert grouped.D.tolist() == pytest.approx([7 / 8, 0.5, 1.0])
    assert str(grouped.type) == "3 * {QCD: float32, sig: float32, D: float32}"
    for options in ({"groups": {"QCD": ["qcd"]}}, {"discriminants": {"D": "2 * w"}}):
        output = sonic.Output(LABELS, **options)
        nothing, some = map(echo(output), (OBJECTS[1:], OBJECTS))
        assert nothing.type.content == some.type.content


def test_the_hash_covers_what_is_computed_after_the_network() -> None:
    each: list[Any] = [
        {},
        {"function": "odds"},
        {"function": "odds", "over": ["w"]},
        {"discriminants": {"D": "top / (top + qcd)"}},
        {"discriminants": {"D": "top / (top + w)"}},
    ]
    assert len({echo(sonic.Output(LABELS, **options)).config_hash for options in each}) == len(each)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": "softmin"}, "softmax"),
        ({"over": ["tops"], "function": "odds"}, "no label 'tops'; did you mean 'top'"),
        ({"over": [4], "function": "odds"}, "over= has labels of an output or indices"),
        ({"labels": None, "over": [0], "function": "odds"}, "over= has labels of an output"),
        ({"discriminants": {"D": "tops / qcd"}}, "no score 'tops'; did you mean 'top'"),
        ({"discriminants": {"D": "sum(top)"}}, "no score 'top'"),
        ({"discriminants": {"D": "top /"}}, "discriminant 'top /' cannot be read"),
        ({"discriminants": {"top": "qcd"}}, "names of their own and expressions, got 'top'"),
        ({"discriminants": "top / qcd"}, "discriminants to be a dict of expressions"),
        ({"labels": None, "discriminants": {"D": "top"}}, "no score 'top'; there are none"),
        ({"dtype": "string", "discriminants": {"D": "top"}}, "has no function"),
    ],
)
def test_bad_computations_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sonic.Output(**{"labels": LABELS, **options})


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
    "constituents": (
        {"per": "constituent", "of": "pf"},
        lambda i: 2 * i["pf"][:, 0],
        [[[2.0, 0.5, None], []], [], None, [None, [1.0]]],
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


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_scores_are_float32_and_can_be_reduced(name: str, dtype: str) -> None:
    """So are those of chunks without rows, and those of a graph."""
    model, fake = model_of(name, dtype)
    with FakeServer({"m": fake}) as server, sonic.connect(server.url):
        scores, nothing = model(JETS), model(JETS[1:3])
    assert scores.tolist() == CASES[name][2]
    tracer = ak.Array(JETS.layout.to_typetracer(forget_length=True))
    traced = trace(model.inputs, model.outputs, tracer)
    together = ak.concatenate([nothing, scores])
    assert together.tolist() == nothing.tolist() + scores.tolist()
    for some in (scores, nothing, traced, together):
        assert "float16" not in str(some.type)
        assert "float32" in str(some.type)
        assert "union" not in str(some.type)
    for numbers in [scores[name] for name in scores.fields] or [scores]:
        flat = ak.drop_none(ak.flatten(numbers, axis=None))
        for reduce in (ak.sum, ak.max, ak.mean, ak.std):
            assert np.isfinite(reduce(numbers, axis=None))
        assert ak.sum(numbers, axis=None) == np.sum(flat.to_numpy())
        ak.sum(numbers, axis=-1), ak.argmax(numbers, axis=-1), ak.sort(numbers, axis=-1)


@pytest.mark.parametrize("dtype", HALVES)
def test_means_over_folds_are_of_float32(sonic_server: Any, dtype: str) -> None:
    output = sonic.Output(["a"], dtype=dtype)
    folds = [sonic.Model(f"m{n}", {"x": sonic.Row("pt")}, {"y": output}) for n in range(3)]
    functions = {
        model.name: lambda inputs, n=n: {"y": (inputs["x"] + n).astype(output.dtype)}
        for n, model in enumerate(folds)
    }
    sonic_server(*folds, functions=functions)
    objects = ak.Array([{"pt": 1.0}, {"pt": 2.5}])
    for fold, expected in ((None, [2.0, 3.5]), ([2, 0], [3.0, 2.5])):
        scores = sonic.Folds(folds)(objects, fold=fold)
        assert scores.a.tolist() == expected
        assert scores.a.type.content.primitive == "float32"


@pytest.mark.parametrize("dtype", HALVES)
def test_the_greatest_of_half_precision_is_chosen(sonic_server: Any, dtype: str) -> None:
    output = sonic.Output(dtype=dtype, per="constituent", choose="argmax")
    model = sonic.Model("m", {"pf": sonic.Padded("pf.x", 3)}, {"y": output})
    sonic_server(model, functions={"m": lambda i: {"y": i["pf"][:, 0].astype(output.dtype)}})
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
def test_unpacked_tensors_can_be_reduced(layout: Any, dtype: str) -> None:
    declared = layout(dtype)
    packed = declared.pack(JETS)
    assert packed.dtype.name == dtype
    back = declared.unpack(packed, JETS)
    while back.fields:
        back = back[back.fields[0]]
    assert "float16" not in str(back.type)
    assert float(ak.sum(back, axis=None)) == np.asarray(packed, np.float64).sum()


@pytest.mark.parametrize("length", [3, -1])
def test_labels_are_compared_where_they_are_declared(length: int) -> None:
    """They need not be the last axis, nor the elements a free one."""
    float32 = np.dtype("float32")
    fake = FakeModel(
        inputs={"x": (float32, (3,))},
        outputs={"y": (float32, (2, length))},
        function=lambda i: {"y": np.stack([i["x"], -i["x"]], axis=1)},
    )
    events = ak.Array([{"x": [1.0, 2.0]}, {"x": []}])
    layout = sonic.Padded("x", 3, axis_order="L")

    def model(*labels: str) -> sonic.Model:
        output = sonic.Output(list(labels), per="constituent", axes=("labels", "x"))
        return sonic.Model("m", {"x": layout}, {"y": output})

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
