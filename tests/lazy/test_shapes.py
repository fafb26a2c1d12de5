"""Layouts and outputs on dask-awkward arrays: types, columns and scores of eager ones."""

from __future__ import annotations

from typing import Any

import awkward as ak
import dask_awkward as dak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

PAIR = {"per": "constituent", "axes": 2}
JETS = sonic.Padded(["Jet.pt"], 3)
VECTOR = ["Jet.pt", "Jet.eta", "Jet.phi", "Jet.mass"]
TOKENS = sonic.Tokens({"Jet": sonic.Padded(["Jet.pt"], 3), "MET": sonic.Row(["MET.pt"])})
NUMBER = {"y": sonic.Output(shape=[1])}
ALL = {f"Jet.{name}" for name in ("pt", "eta", "phi", "mass")}
DOUBLED = sonic.Row(sonic.Feature("e", expression="MET.pt * 2"))
LEADING = sonic.Row(["Jet[:2].pt", "MET.pt"], missing=0.0)
REFERENCE = sonic.Padded([sonic.Feature("Muon.pt", index="Jet.muon")], 3, missing=0.0)
STRINGS = sonic.Padded("Jet.kind", 3, axis_order="L", dtype="string")
OF_STRINGS = sonic.Output(dtype="string", per="constituent")
CHOSEN = sonic.Output(["q", "b"], choose="argmax", **PAIR)
SLOT = sonic.Output(["q"], "int64", per="constituent", choose="slot")
PT = {"Jet.pt"}
# Inputs, outputs, and the columns that are read.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "tokens": ({"x": TOKENS, "mask": sonic.Mask()}, {"y": ["a", "b"]}, {"Jet.pt", "MET.pt"}),
    "pairwise": ({"x": sonic.Pairwise(VECTOR, 3)}, NUMBER, ALL),
    "leading": ({"x": LEADING}, NUMBER, {"Jet.pt", "MET.pt"}),
    "broadcast": ({"x": sonic.Padded(["Jet.pt", "MET.pt"], 3)}, NUMBER, {"Jet.pt", "MET.pt"}),
    "reference": ({"x": REFERENCE}, NUMBER, {"Muon.pt", "Jet.muon"}),
    "expression": ({"x": DOUBLED}, NUMBER, {"MET.pt"}),
    "strings": ({"x": STRINGS}, {"y": OF_STRINGS}, {"Jet.kind"}),
    "shape": ({"x": JETS}, {"y": sonic.Output(shape=(2, 3))}, PT),
    "pairs": ({"x": JETS}, {"y": sonic.Output(**PAIR)}, PT),
    "choice": ({"x": JETS}, {"y": CHOSEN, "z": ["a"]}, PT),
    "slot": ({"x": JETS}, {"y": SLOT}, PT),
}


def of_pairs(inputs: Any) -> Any:
    x = inputs["x"]
    return {"y": np.sin(x.swapaxes(1, 2) + 2 * x)[..., np.newaxis], "z": x[:, 0, :1]}


# What makes answers that differ from row to row, where that is not the default.
FUNCTIONS: dict[str, Any] = {
    "strings": lambda inputs: {"y": inputs["x"]},
    "pairs": of_pairs,
    "choice": of_pairs,
    "slot": lambda inputs: {"y": np.argsort(inputs["x"][:, 0], axis=1)[:, :1]},
}


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
    served = {"m": FakeModel.of(model, FUNCTIONS.get(case))}
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
    served = FakeModel.of(model, versions=("1", "2"))
    with FakeServer({"m": served}) as server, sonic.connect(server.url):
        scores = model(lazy, version=lazy.event % 2 + 1)
        whole = lazy.compute(scheduler="sync")
        eager = model(whole, version=whole.event % 2 + 1)
        assert ak.array_equal(scores.compute(scheduler="sync"), eager, dtype_exact=True)
        assert {request.version for request in server.requests} == {"1", "2"}


FOLDED: dict[str, Any] = {
    "each": lambda events: {"fold": events.event % 2},
    "mean": lambda _: {"fold": None},
    "formula": lambda events: {"fold": "event % 2", "events": events},
    "masked fold": lambda events: {"fold": ak.mask(events.event % 2, events.event > 3)},
    "mask": lambda events: {"fold": events.event % 2, "mask": events.event > 3, "default": -1.0},
}


@pytest.mark.parametrize("case", FOLDED)
@pytest.mark.parametrize("named", [False, True])
def test_lazy_folds_are_the_eager_ones(lazy: Any, case: str, *, named: bool) -> None:
    models = [sonic.Model(f"m{k}", {"x": JETS}, {"y": ["a"]}) for k in range(2)]
    folds = sonic.Folds(models)
    served = {
        m.name: FakeModel.of(m, lambda inputs, k=k: {"y": inputs["x"][:, 0, :1] + k})
        for k, m in enumerate(models)
    }
    with FakeServer(served) as server, sonic.connect(server.url):
        scores = folds({"x": lazy} if named else lazy, **FOLDED[case](lazy))
        (read,) = dak.report_necessary_columns(scores).values()
        assert read == ({"Jet.pt"} if case == "mean" else {"Jet.pt", "event"})
        whole, computed = lazy.compute(scheduler="sync"), scores.compute(scheduler="sync")
        eager = folds(whole, **FOLDED[case](whole))
        assert ak.array_equal(computed, eager, dtype_exact=True)
        assert scores._meta.type.content == eager.type.content
        if case == "each":
            with pytest.raises(errors.InputError, match="'the folds' is not lazy"):
                folds(lazy, fold=whole.event % 2)
            with pytest.raises(errors.InputError, match="is not lazy, as others are"):
                folds({"x": whole} if named else whole, fold=lazy.event % 2)


def test_shapes_that_graphs_have_not_promised_are_refused(lazy: Any) -> None:
    model = sonic.Model("m", {"x": JETS}, {"y": None})
    promised = sonic.Model("m", {"x": JETS}, {"y": sonic.Output(shape=(4,))})
    with FakeServer({"m": FakeModel.of(promised)}) as server, sonic.connect(server.url):
        scores = model(lazy)
        with pytest.raises(errors.ContractError, match=r"as sonic.Output\(shape=\(4,\)"):
            scores.compute(scheduler="sync")
        assert promised(lazy).compute(scheduler="sync").type == promised(lazy.compute()).type
