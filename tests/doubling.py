"""A model that doubles a number of each object, and what serves it and asks it."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer

MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})


def double(inputs: Any) -> dict[str, Any]:
    return {"y": 2 * inputs["x"]}


def served(function: Any = double, **options: Any) -> dict[str, FakeModel]:
    return {"m": FakeModel.of(MODEL, function, **options)}


def multiplier(factor: float = 2, **options: Any) -> FakeServer:
    """Return a server that multiplies by its own factor, which tells whose scores these are."""
    return FakeServer(served(lambda inputs: {"y": factor * inputs["x"]}), **options)


class Doubling(sonic.SonicProcessor):
    """Scores events as they are, by a model of its class, which a pickle does not have."""

    models = {"m": MODEL}  # noqa: RUF012  as users write it

    def acquire(self, events: Any) -> dict[str, Any]:
        return {"m": events}


def jets(*numbers: float) -> ak.Array:
    return ak.zip({"pt": np.asarray(numbers, np.float32)})


def twice(scores: ak.Array) -> list[float]:
    """Return the numbers that were doubled."""
    return (scores.twice / 2).tolist()
