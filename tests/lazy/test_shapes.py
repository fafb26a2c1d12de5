"""Layouts and outputs on dask-awkward arrays: types, columns and scores of eager ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import awkward as ak
import dask_awkward as dak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

PAIR = {"per": "constituent", "axes": 2}
JETS = sonic.Padded(["Jet.pt"], 3)
VECTOR = ["Jet.pt", "Jet.eta", "Jet.phi", "Jet.mass"]
TOKENS = sonic.Tokens({"Jet": sonic.Padded(["Jet.pt"], 3), "MET": sonic.Row(["MET.pt"])})
NUMBER = {"y": sonic.Output(shape=[1])}
ALL = {f"Jet.{name}" for name in ("pt", "eta", "phi", "mass")}
# Inputs, outputs, and the columns that are read.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "tokens": ({"x": TOKENS, "mask": sonic.Mask()}, {"y": ["a", "b"]}, {"Jet.pt", "MET.pt"}),
    "pairwise": ({"x": sonic.Pairwise(VECTOR, 3)}, NUMBER, ALL),
    "leading": (
        {"x": sonic.Row(["Jet[:2].pt", "MET.pt"], missing=0.0)},
        NUMBER,
        {"Jet.pt", "MET.pt"},
    ),
    "broadcast": ({"x": sonic.Padded(["Jet.pt", "MET.pt"], 3)}, NUMBER, {"Jet.pt", "MET.pt"}),
    "reference": (
        {"x": sonic.Padded([sonic.Feature("Muon.pt", index="Jet.muon")], 3, missing=0.0)},
        NUMBER,
        {"Muon.pt", "Jet.muon"},
    ),
    "expression": (
        {"x": sonic.Row([sonic.Feature("e", expression="MET.pt * 2")])},
        NUMBER,
        {"MET.pt"},
    ),
    "strings": (
        {"x": sonic.Padded("Jet.kind", 3, axis_order="L", dtype="string")},
        {"y": sonic.Output(dtype="string", per="constituent")},
        {"Jet.kind"},
    ),
    "shape": ({"x": JETS}, {"y": sonic.Output(shape=(2, 3))}, {"Jet.pt"}),
    "pairs": ({"x": JETS}, {"y": sonic.Output(**PAIR)}, {"Jet.pt"}),
    "choice": (
        {"x": JETS},
        {"y": sonic.Output(["q", "b"], choose="argmax", **PAIR), "z": ["a"]},
        {"Jet.pt"},
    ),
    "slot": (
        {"x": JETS},
        {"y": sonic.Output(["q"], "int64", per="constituent", choose="slot")},
        {"Jet.pt"},
    ),
}


def answers(model: sonic.Model, scale: float = 1.0) -> Any:
    """Return a function whose answers differ from row to row, and are of the declared shapes."""

    def function(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        x = inputs["x"]
        if x.dtype == object:
            return {"y": x}
        rows, length = len(x), 3
        start = x.reshape(rows, -1).sum(axis=1) * scale
        outputs = {}
        for name, output in model.outputs.items():
            axes = output.axes if output.per == "constituent" and output.choose != "slot" else 0
            shape = (length,) * axes + (output.last if output.choose is None else (1,))
            steps = np.arange(math.prod(shape)) * 0.37
            tensor = np.sin(start[:, None] + steps)
            if output.choose == "slot":
                tensor = np.argsort(x.reshape(rows, -1), axis=1)[:, :1]
            outputs[name] = tensor.reshape(rows, *shape).astype(output.dtype)
        return outputs

    return function


@pytest.fixture(scope="module")
def events() -> ak.Array:
    rng = np.random.default_rng(7)
    counts = rng.integers(0, 5, 60)
    number = int(counts.sum())
    fields: dict[str, Any] = {n: rng.normal(size=number) for n in ("eta", "phi", "other")}
    fields |= {"pt": rng.exponential(size=number) + 0.1, "mass": np.full(number, 0.1)}
    fields |= {"muon": rng.integers(-1, 1, number), "kind": rng.choice(["b", "charm", ""], number)}
    jets = ak.unflatten(ak.zip({name: ak.Array(column) for name, column in fields.items()}), counts)
    muons = ak.zip({"pt": ak.unflatten(rng.exponential(size=60), np.full(60, 1))})
    met = ak.zip({"pt": rng.exponential(size=60)})
    return ak.zip({"Jet": jets, "Muon": muons, "MET": met, "event": np.arange(60)}, depth_limit=1)


@pytest.fixture(scope="module")
def lazy(events: ak.Array, as_lazy: Any) -> Any:
    return as_lazy(events, 20)


@pytest.mark.parametrize("case", CASES)
def test_lazy_is_eager(case: str, lazy: Any) -> None:
    inputs, outputs, columns = CASES[case]
    model = sonic.Model("m", inputs, outputs)
    served = {"m": FakeModel.of(model, answers(model))}
    with FakeServer(served) as server, sonic.connect(server.url):
        scores = model(lazy)
        (read,) = dak.report_necessary_columns(scores).values()
        assert read == columns
        computed = scores.compute(scheduler="sync")
        eager = model(lazy.compute(scheduler="sync"))
        nothing = model(lazy[lazy.event < 0]).compute(scheduler="sync")
    assert ak.array_equal(computed, eager, dtype_exact=True)
    assert computed.type.content == eager.type.content == scores._meta.type.content
    assert ak.concatenate([nothing, eager]).type.content == eager.type.content


def test_lazy_versions_are_the_eager_ones(lazy: Any) -> None:
    model = sonic.Model("m", {"x": JETS}, {"y": ["a"]})
    served = FakeModel.of(model, answers(model), versions=("1", "2"))
    with FakeServer({"m": served}) as server, sonic.connect(server.url):
        scores = model(lazy, version=lazy.event % 2 + 1)
        whole = lazy.compute(scheduler="sync")
        eager = model(whole, version=whole.event % 2 + 1)
        assert ak.array_equal(scores.compute(scheduler="sync"), eager, dtype_exact=True)
        assert {request.version for request in server.requests} == {"1", "2"}


@pytest.mark.parametrize("named", [False, True])
def test_lazy_folds_are_the_eager_ones(lazy: Any, *, named: bool) -> None:
    models = [sonic.Model(f"m{k}", {"x": JETS}, {"y": ["a"]}) for k in range(2)]
    folds = sonic.Folds(models)
    served = {m.name: FakeModel.of(m, answers(m, k + 1.0)) for k, m in enumerate(models)}
    with FakeServer(served) as server, sonic.connect(server.url):
        objects = {"x": lazy} if named else lazy
        each, mean = folds(objects, fold=lazy.event % 2), folds(objects, fold=None)
        (read,) = dak.report_necessary_columns(each).values()
        assert read == {"Jet.pt", "event"}
        whole = lazy.compute(scheduler="sync")
        eager = folds(whole, fold=whole.event % 2)
        assert ak.array_equal(each.compute(scheduler="sync"), eager, dtype_exact=True)
        assert ak.array_equal(
            mean.compute(scheduler="sync"), folds(whole, fold=None), dtype_exact=True
        )
        assert each._meta.type.content == eager.type.content
        declared = sonic.Folds(models, fold="event % 2")(objects, events=lazy)
        (read,) = dak.report_necessary_columns(declared).values()
        assert read == {"Jet.pt", "event"}
        assert ak.array_equal(declared.compute(scheduler="sync"), eager, dtype_exact=True)
        masked = folds(objects, fold=dak.mask(lazy.event % 2, lazy.event > 3))
        computed = masked.compute(scheduler="sync")
        assert computed.tolist() == [None] * 4 + eager[4:].tolist()
        assert computed.type.content == masked._meta.type.content
        chosen = folds(objects, fold=lazy.event % 2, mask=lazy.event > 3, default=-1.0)
        eager = folds(whole, fold=whole.event % 2, mask=whole.event > 3, default=-1.0)
        assert ak.array_equal(chosen.compute(scheduler="sync"), eager, dtype_exact=True)
        assert ak.any(eager.a == -1.0, axis=None)
        with pytest.raises(errors.InputError, match="'fold=' is not lazy"):
            folds(lazy, fold=whole.event % 2)
