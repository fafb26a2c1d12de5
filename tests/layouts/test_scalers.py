"""Channels are scaled as a fitted scaler does it."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pandas as pd
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError

TRAINED = pd.DataFrame({"pt": [20.0, 50.0, 90.0], "eta": [-2.0, 0.5, 1.0], "one": [1.0, 1.0, 1.0]})
SEEN = TRAINED.to_numpy() * [1.5, 1.2, 1.0]
STATISTICS = {"pt": {"mean": 50, "std": 20, "count": 3}, "eta": {"min": -2.0, "max": 2.0}}


def new(name: str, **options: Any) -> Any:
    """Return a scaler of scikit-learn; importing it takes each process of tests two seconds."""
    return getattr(import_module("sklearn.preprocessing"), name)(**options)


def rows(features: Any) -> Any:
    return sonic.Row(features).pack(ak.zip(dict(zip(TRAINED, SEEN.T, strict=True))))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StandardScaler", {}),
        ("StandardScaler", {"with_mean": False}),
        ("StandardScaler", {"with_std": False}),
        ("MinMaxScaler", {}),
        ("MinMaxScaler", {"feature_range": (-1, 1), "clip": True}),
        ("MaxAbsScaler", {}),
        ("RobustScaler", {}),
    ],
)
def test_channels_are_scaled_as_a_scaler_of_scikit_learn_does(
    name: str, options: dict[str, Any]
) -> None:
    scaler = new(name, **options)
    named = sonic.Scaled(scaler.fit(TRAINED))
    expected = scaler.transform(pd.DataFrame(SEEN, columns=TRAINED.columns))
    np.testing.assert_allclose(rows(named), expected, rtol=1e-5, atol=1e-6)
    assert sonic.Scaled(scaler.fit(TRAINED.to_numpy()), list(TRAINED)) == named


def test_statistics_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "scaler.json"
    file.write_text(json.dumps(STATISTICS))
    features = sonic.Scaled(file)
    assert features == sonic.Scaled(STATISTICS)
    np.testing.assert_allclose(rows(features)[:, 0], (SEEN[:, 0] - 50) / 20)
    np.testing.assert_allclose(rows(features)[:, 1], (SEEN[:, 1] + 2) / 4)
    declared = tmp_path / "model.yaml"
    fields = f"fields: {{scaler: {file}, fields: [pt, eta]}}"
    declared.write_text(
        f"{{model: m, inputs: {{x: {{layout: Row, {fields}}}}}, outputs: {{y: [a]}}}}"
    )
    assert sonic.Model.from_yaml(declared).inputs["x"] == sonic.Row(features)
    renamed = sonic.Scaled(file, {"eta": "Jet.absEta"})
    assert [feature.name for feature in renamed] == ["pt", "Jet.absEta"]


def test_statistics_are_found_by_name() -> None:
    """In the order of the fields; those of other names need not be usable."""
    statistics = {"unused": 3, **STATISTICS, "Muon.pt": {"mean": 5.0, "std": 2.0}}
    clipped = sonic.Feature("eta", upper=0.9, nonfinite=0.0)
    eta, first, second, muon = sonic.Scaled(statistics, [clipped, "Jet[:2].pt", "Muon[0].pt"])
    assert eta == sonic.Feature("eta", shift=-2.0, scale=0.25, upper=0.9, nonfinite=0.0)
    assert first == sonic.Feature("Jet[0].pt", shift=50.0, scale=0.05)
    assert second == sonic.Feature("Jet[1].pt", shift=50.0, scale=0.05)
    assert muon == sonic.Feature("Muon[0].pt", shift=5.0, scale=0.5)


def fitted(seen: Any) -> Any:
    return new("StandardScaler").fit(seen)


FITTED, UNNAMED = partial(fitted, TRAINED), partial(fitted, SEEN)
EITHER = "'pt': expected either mean and std, or min and max"


@pytest.mark.parametrize(
    ("scaler", "fields", "message"),
    [
        (FITTED, ["eta", "pt", "one"], "'pt', 'eta', 'one'; got 'eta', .*; expected this order"),
        (FITTED, ["pt", "eta"], "has 3 features: 'pt', 'eta', 'one'; got 'pt', 'eta';"),
        (FITTED, {"phi": "Jet.phi"}, r"features: 'pt', 'eta', 'one'; got \['phi'\]"),
        (FITTED, ["pt", sonic.Feature("eta", scale=2.0), "one"], "without a scale of its own"),
        (UNNAMED, None, "3 features: without names; got no fields; name its fields"),
        (partial(new, "StandardScaler"), None, "the StandardScaler is not fitted"),
        (partial(new, "QuantileTransformer"), None, "a QuantileTransformer.*ONNX file"),
        ("no.json", None, "cannot read the file of statistics 'no.json' on .*: No such file"),
        ({"pt": {"mean": 1.0}}, None, EITHER),
        ({"pt": {"mean": 1, "std": 1, "max": 3}}, None, EITHER),
        ({"pt": {"mean": 1, "std": "2"}}, None, EITHER),
        ({"pt": {"min": 1, "max": 1}}, None, "with a finite width, got"),
        (STATISTICS, ["eta", "phi"], "no statistics of 'phi'; there are: eta, pt"),
        (STATISTICS, ["Jet.pt", "Muon.pt"], "of 'pt' cannot be both of 'Jet.pt' and of 'Muon.pt'"),
        (STATISTICS, {"pt": "Jet[:2].pt"}, r"has 2 features: .* got 'Jet\[0\].pt', .*; expected"),
        ({"pt": 3}, None, "either mean and std, or min and max, .* got 3"),
    ],
)
def test_scalers_that_cannot_be_used(scaler: Any, fields: Any, message: str) -> None:
    scaler = scaler() if callable(scaler) else scaler
    with pytest.raises(ConfigError, match=message):
        sonic.Scaled(scaler, fields)
