"""Jets, and the scores of the tagger, compared with those of onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import awkward as ak
import numpy as np

import sonic_coffea as sonic


def random_jets(seed: int, *, events: int, constituents: float) -> ak.Array:
    """Return events with some jets, of which each has some constituents, as many on average."""
    rng = np.random.default_rng(seed)
    n_jets = rng.poisson(1.5, events)
    n_constituents = rng.poisson(constituents, n_jets.sum())
    total = n_constituents.sum()
    columns = {
        "pt": rng.exponential(size=total).astype(np.float32),
        "eta": rng.normal(size=total).astype(np.float32),
    }
    return ak.unflatten(ak.unflatten(ak.zip(columns), n_constituents), n_jets)


def same_scores(found: Any, expected: list[Any]) -> None:
    """Compare scores in lists, None in the same places, to 1e-6."""
    found = ak.Array(found)
    reference = ak.Array(expected)
    assert ak.num(found).tolist() == ak.num(reference).tolist()
    assert ak.all(ak.is_none(found, axis=1) == ak.is_none(reference, axis=1))
    np.testing.assert_allclose(
        np.asarray(ak.drop_none(ak.flatten(found))),
        np.asarray(ak.drop_none(ak.flatten(reference))),
        rtol=0,
        atol=1e-6,
    )


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores jets by pools; each score must be that of onnxruntime."""

    model: sonic.Model
    jets: ak.Array
    direct: list[Any]

    def __call__(self, pool: sonic.Pool, *, calls: int = 1, timeout_s: float = 60.0) -> None:
        """Score all jets once, or in several calls at a time."""
        self.check(*self.submit(*[pool] * calls), timeout_s=timeout_s)

    def submit(self, *pools: sonic.Pool) -> list[Any]:
        """Submit all jets to each of some pools."""
        return [self.model.submit(self.jets, pool=pool) for pool in pools]

    def check(self, *pendings: Any, timeout_s: float = 60.0) -> None:
        """Wait for the scores of some calls, and compare them."""
        for pending in pendings:
            same_scores(pending.result(timeout_s).top, self.direct)
