"""A model that doubles a number of each object, and what it is served and asked with."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel

MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})


def double(inputs: Any) -> dict[str, Any]:
    return {"y": 2 * inputs["x"]}


def served(function: Any = double, **options: Any) -> dict[str, FakeModel]:
    return {"m": FakeModel.of(MODEL, function, **options)}


def jets(*numbers: float) -> ak.Array:
    return ak.zip({"pt": np.asarray(numbers, np.float32)})


def twice(scores: ak.Array) -> list[float]:
    """Return the numbers that were doubled."""
    return (scores.twice / 2).tolist()
