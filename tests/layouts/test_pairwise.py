"""Pairs of a row's elements have the numbers that plain loops compute."""

from __future__ import annotations

import itertools
import math
from typing import Any

import awkward as ak
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sonic_coffea as sonic

CARTESIAN = ("px", "py", "pz", "energy")
EPS = 1e-8


def vectors(counts: list[int], seed: int = 1) -> ak.Array:
    """``rows * var * {px, py, pz, energy, pt, eta, phi, mass}``."""
    rng = np.random.default_rng(seed)
    n = sum(counts)
    pt, eta, phi = rng.exponential(20.0, n) + 0.1, rng.uniform(-3, 3, n), rng.uniform(-3.1, 3.1, n)
    mass = rng.uniform(0.0, 5.0, n)
    px, py, pz = pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)
    energy = np.sqrt(px**2 + py**2 + pz**2 + mass**2)
    columns = {"px": px, "py": py, "pz": pz, "energy": energy}
    columns |= {"pt": pt, "eta": eta, "phi": phi, "mass": mass}
    return ak.unflatten(ak.zip(columns), np.asarray(counts, np.int64))


def of_pair(a: dict[str, float], b: dict[str, float]) -> list[float]:
    """ln kt, ln z, ln delta R and ln m² by the book, and z."""
    y = [0.5 * math.log((v["energy"] + v["pz"]) / (v["energy"] - v["pz"])) for v in (a, b)]
    pt = [math.hypot(v["px"], v["py"]) for v in (a, b)]
    dphi = abs(math.atan2(a["py"], a["px"]) - math.atan2(b["py"], b["px"]))
    delta = math.hypot(y[0] - y[1], min(dphi, 2 * math.pi - dphi))
    m2 = (a["energy"] + b["energy"]) ** 2 - sum((a[k] + b[k]) ** 2 for k in ("px", "py", "pz"))
    numbers = min(pt) * delta, min(pt) / max(sum(pt), EPS), delta, m2
    return [*(math.log(max(number, EPS)) for number in numbers), numbers[1]]


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from([CARTESIAN, ("pt", "eta", "phi", "mass"), ("pt", "eta", "phi", "energy")]),
    st.sampled_from([0.0, -7.5]),
    st.integers(0, 99),
)
def test_four_vectors_make_the_four_quantities(
    counts: list[int], length: int, fields: Any, fill: float, seed: int
) -> None:
    jets = vectors(counts, seed)
    default = sonic.Pairwise(fields, length, fill=fill)
    tensor = sonic.Pairwise(fields, length, [*default.formulae, "z"], fill).pack(jets)
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(default.pack(jets), tensor[:, :4])
    wanted = np.full((len(counts), 5, length, length), fill)
    for n, row in enumerate(jets.to_list()):
        for (i, a), (j, b) in itertools.product(enumerate(row[:length]), repeat=2):
            wanted[n, :, i, j] = of_pair(a, b)
    # Of an element with itself, kt and delta R are eps; m² is a difference of large numbers.
    np.testing.assert_allclose(tensor, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pz", [1e9, -1e9])
def test_rapidity_is_finite_where_energy_is_the_momentum(pz: float) -> None:
    """As rounding leaves it; forwards it is weaver's, which writes it otherwise."""
    vector = {"px": 1.0, "py": 0.0, "pz": pz, "energy": 1e9}
    nothing = dict.fromkeys(vector, 0.0)
    layout = sonic.Pairwise(CARTESIAN, 2, formulae="ln_delta_r", dtype="float64")
    packed = layout.pack(ak.Array([[vector, nothing]]))
    rapidity = 0.5 * math.log(1 + 2 * 1e9 / max(1e9 - 1e9, 1e-20))
    expected = math.log(rapidity)
    np.testing.assert_allclose(packed[0, 0], [[math.log(EPS), expected], [expected, math.log(EPS)]])


def test_names_may_have_a_beginning_and_others_stand_beside() -> None:
    jets = vectors([2, 0, 3])
    named = ak.zip({f"part_{k}": jets[k] for k in CARTESIAN} | {"raw_px": -jets.px})
    fields = [f"pf.part_{k}" for k in CARTESIAN]
    nested = ak.zip({"pf": named}, depth_limit=1)
    alone = sonic.Pairwise(CARTESIAN, 3).pack(jets)
    for some in (fields, ["pf.raw_px", *fields], [*fields, "pf.raw_px"]):
        np.testing.assert_array_equal(sonic.Pairwise(some, 3).pack(nested), alone)
