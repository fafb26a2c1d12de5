"""Pairs of a row's elements, against plain loops."""

from __future__ import annotations

import math
import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, FieldError, InputError
from sonic_coffea.layouts import bind_inputs, trace
from sonic_coffea.model import Model

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
    """ln kt, ln z, ln delta R and ln m² by the book."""
    y = [0.5 * math.log((v["energy"] + v["pz"]) / (v["energy"] - v["pz"])) for v in (a, b)]
    pt = [math.hypot(v["px"], v["py"]) for v in (a, b)]
    dphi = abs(math.atan2(a["py"], a["px"]) - math.atan2(b["py"], b["px"]))
    delta = math.hypot(y[0] - y[1], min(dphi, 2 * math.pi - dphi))
    m2 = (a["energy"] + b["energy"]) ** 2 - sum((a[k] + b[k]) ** 2 for k in ("px", "py", "pz"))
    numbers = min(pt) * delta, min(pt) / max(sum(pt), EPS), delta, m2
    return [math.log(max(number, EPS)) for number in numbers]


def expected(rows: Any, length: int, of: Any, channels: int, fill: float = 0.0) -> np.ndarray:
    out = np.full((len(rows), channels, length, length), fill)
    for n, row in enumerate(rows):
        for i, a in enumerate(row[:length]):
            for j, b in enumerate(row[:length]):
                out[n, :, i, j] = of(a, b)
    return out


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from([CARTESIAN, ("pt", "eta", "phi", "mass"), ("pt", "eta", "phi", "energy")]),
    st.sampled_from([0.0, -7.5]),
    st.integers(0, 99),
)
def test_a_four_vector_makes_the_four_quantities(
    counts: list[int], length: int, fields: Any, fill: float, seed: int
) -> None:
    jets = vectors(counts, seed)
    tensor = sonic.Pairwise(fields, length, fill=fill).pack(jets)
    assert tensor.dtype == np.float32
    wanted = expected(jets.to_list(), length, of_pair, 4, fill)
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


FORMULAE = {
    "abs(pt_i - pt_j)": lambda a, b: abs(a["pt"] - b["pt"]),
    "pt_i - 2 * eta_j": lambda a, b: a["pt"] - 2 * b["eta"],
    "log(max(pt_i / pt_j, 1e-3))": lambda a, b: math.log(max(a["pt"] / b["pt"], 1e-3)),
    "wrap(phi_i - phi_j)": lambda a, b: math.remainder(a["phi"] - b["phi"], 2 * math.pi),
    "(eta_i - eta_j)**2 + sin(phi_i) * cos(phi_j)": lambda a, b: (
        (a["eta"] - b["eta"]) ** 2 + math.sin(a["phi"]) * math.cos(b["phi"])
    ),
    "-min(pt_i, pt_j) ** 1.5": lambda a, b: -(min(a["pt"], b["pt"]) ** 1.5),
    "arctan2(eta_i, pt_j) + sqrt(pt_i) - exp(-pt_j)": lambda a, b: (
        math.atan2(a["eta"], b["pt"]) + math.sqrt(a["pt"]) - math.exp(-b["pt"])
    ),
    "tanh(eta_i) + sinh(eta_j) * cosh(eta_i) + log1p(pt_j)": lambda a, b: (
        math.tanh(a["eta"]) + math.sinh(b["eta"]) * math.cosh(a["eta"]) + math.log1p(b["pt"])
    ),
    "z - kt / (1 + pt_i)": lambda a, b: (
        math.exp(of_pair(a, b)[1])
        - (math.exp(of_pair(a, b)[0]) if a is not b else 0.0) / (1 + a["pt"])
    ),
}


@pytest.mark.parametrize("formula", FORMULAE)
def test_formulae_of_ones_own(formula: str) -> None:
    jets = vectors([3, 0, 5, 1])
    rows = [[dict(v) for v in row] for row in jets.to_list()]
    layout = sonic.Pairwise(["pt", "eta", "phi", "mass"], 4, formulae=formula, dtype="float64")
    of = FORMULAE[formula]
    wanted = expected(rows, 4, lambda a, b: [of(a, b)], 1)
    np.testing.assert_allclose(layout.pack(jets), wanted, rtol=1e-9, atol=1e-9)


def test_names_may_have_a_beginning_and_others_stand_beside() -> None:
    jets = vectors([2, 3])
    named = ak.zip({f"part_{k}": jets[k] for k in CARTESIAN} | {"charge": jets.eta})
    fields = [f"pf.part_{k}" for k in CARTESIAN]
    nested = ak.zip({"pf": named}, depth_limit=1)
    np.testing.assert_array_equal(
        sonic.Pairwise(fields, 3).pack(nested), sonic.Pairwise(CARTESIAN, 3).pack(jets)
    )
    more = sonic.Pairwise([*fields, "pf.charge"], 3, ["ln_kt", "charge_i * charge_j"])
    assert more.pack(nested).shape == (2, 2, 3, 3)


def test_what_a_feature_does_comes_first_and_elements_may_be_sorted() -> None:
    jets = ak.Array([{"x": [1.0, 3.0, 2.0]}, {"x": [5.0]}])
    tripled = sonic.Feature("x", scale=3.0)
    layout = sonic.Pairwise(tripled, 2, "x_i - x_j", sort_by="x")
    assert layout.pack(jets).tolist() == [[[[0, 3], [-3, 0]]], [[[0, 0], [0, 0]]]]


def pairs_of(jets: ak.Array) -> ak.Array:
    """``rows * var * var * {d, s}`` of all pairs."""
    a, b = ak.unzip(ak.cartesian([jets, jets], nested=True))
    return ak.zip({"d": a.pt - b.pt, "s": ak.values_astype(a.eta + b.eta, "float32")})


@pytest.mark.parametrize("counts", [[3, 0, 2, 5], [0, 0], [1], []])
@pytest.mark.parametrize("order", ["CLL", "LLC"])
def test_pairs_may_be_stored(counts: list[int], order: str) -> None:
    jets = vectors(counts)
    tensor = sonic.Pairwise(["d", "s"], 3, fill=[-1.0, 2.0], axis_order=order).pack(pairs_of(jets))
    if order == "LLC":
        tensor = tensor.transpose(0, 3, 1, 2)
    for channel, (of, fill) in enumerate(
        [(lambda a, b: a["pt"] - b["pt"], -1.0), (lambda a, b: a["eta"] + b["eta"], 2.0)]
    ):
        wanted = expected(jets.to_list(), 3, lambda a, b, of=of: [of(a, b)], 1, fill)
        np.testing.assert_allclose(tensor[:, [channel]], wanted, rtol=1e-5, atol=1e-5)


def test_stored_pairs_that_are_none() -> None:
    for array, match in [
        (ak.Array([[[1.0, 2.0], [3.0]]]), "list of 1 pairs in one of 2 in event 0"),
        (ak.Array([[1.0, 2.0]]), "one jagged axis where Pairwise needs i x j"),
        (ak.Array([[[1.0], None]]), "has None where Pairwise"),
        (ak.Array([[[math.nan]]]), "NaN or infinite in event 0"),
    ]:
        with pytest.raises(InputError, match=match):
            sonic.Pairwise("d", 3).pack({"d": array})


@pytest.mark.parametrize("fields", [CARTESIAN, ("pt", "eta", "phi", "mass")])
def test_pairs_of_two_collections(fields: Any) -> None:
    first, second = vectors([3, 0, 2, 5, 1]), vectors([1, 2, 0, 4, 3], seed=2)
    events = ak.zip({"Jet": first, "Muon": second}, depth_limit=1)
    named = [[f"{name}.{field}" for field in of] for name, of in [("Jet", fields), ("Muon", PTS)]]
    layout = sonic.Pairwise(
        named[0], 4, fill=-7.5, other=sonic.Padded(named[1], 3, sort_by="Muon.pt")
    )
    wanted = np.full((5, 4, 4, 3), -7.5)
    for n, row in enumerate(events.to_list()):
        others = sorted(row["Muon"], key=lambda muon: -muon["pt"])
        for i, a in enumerate(row["Jet"][:4]):
            for j, b in enumerate(others[:3]):
                wanted[n, :, i, j] = of_pair(a, b)
    np.testing.assert_allclose(layout.pack(events), wanted, rtol=1e-4, atol=1e-4)
    bound = bind_inputs({"v": layout}, events)
    np.testing.assert_array_equal(bound.pack(1, 4)["v"], layout.pack(events)[1:4])
    counts = ak.to_numpy(ak.num(events.Jet))
    sent = int(np.minimum(counts, 4).sum())
    assert bound.count_elements() == (sent, int(counts.sum()) - sent, 5 * 4 - sent)
    assert layout.columns == (*named[0], *named[1])
    with pytest.raises(InputError, match=r"'Jet.px?t?' and field 'Muon.pt'.*(same objects)"):
        layout.pack({"Jet": events.Jet, "Muon": events.Muon[:4]})


PTS = ("pt", "eta", "phi", "mass")


def test_stored_pairs_of_two_collections() -> None:
    first, second = vectors([3, 0, 2, 5, 1]), vectors([1, 2, 0, 4, 3], seed=2)
    a, b = ak.unzip(ak.cartesian([first, second], nested=True))
    array = {"d": a.pt - b.pt}
    wanted = np.full((5, 1, 4, 3), 2.0)
    for n, rows in enumerate(array["d"].to_list()):
        for i, row in enumerate(rows[:4]):
            wanted[n, 0, i, : len(row)] = row[:3]
    layout = sonic.Pairwise("d", 4, fill=2.0, other=3)
    np.testing.assert_allclose(layout.pack(array), wanted, rtol=1e-6)
    with pytest.raises(InputError, match="declare other="):
        sonic.Pairwise("d", 4).pack(array)
    with pytest.raises(InputError, match="2 pairs beside one of 1 in event 1.*one number of j"):
        layout.pack({"d": ak.Array([[[1.0]], [[1.0], [1.0, 2.0]]])})


@pytest.mark.parametrize("pairs", [[[1.0, 2.0, 300.0]], [[1.0, 2.0], [300.0, 1.0]]])
def test_stored_pairs_that_are_not_sent_may_be_anything(pairs: Any) -> None:
    array = ak.Array([[], pairs])
    layout = sonic.Pairwise("d", 1, dtype="int8", other=2)
    np.testing.assert_array_equal(layout.pack({"d": array})[:, 0, 0], [[0, 0], [1, 2]])
    with pytest.raises(InputError, match="300.0 in event 1, which int8 cannot hold") as caught:
        sonic.Pairwise("d", 2, dtype="int8", other=3).pack({"d": array})
    assert caught.value.rows is None


def test_other_elements_that_are_none() -> None:
    for other, match in [
        (0, "Padded or a length, got 0"),
        (True, "Padded or a length, got True"),
        (["pt"], "Padded or a length"),
        (4, "pairs that formulae compute have a layout"),
        (sonic.Padded("pt", 2, pad_mode="wrap"), "leave out the rest"),
        (sonic.Padded("pt", 2, fill=1.0), "leave out the rest"),
    ]:
        with pytest.raises(ConfigError, match=match):
            sonic.Pairwise("x", 3, "x_i", other=other)
    with pytest.raises(ConfigError, match="have a length as their other"):
        sonic.Pairwise("x", 3, other=sonic.Padded("y", 2))
    with pytest.raises(ConfigError, match="no 'x_j'; did you mean 'y_j'"):
        sonic.Pairwise("x", 3, "x_i - x_j", other=sonic.Padded("y", 2))


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no 'pq_i'; did you mean 'pt_i'"):
        sonic.Pairwise(["pt", "eta"], 3, "pq_i")
    with pytest.raises(ConfigError, match="need the fields of a four-vector"):
        sonic.Pairwise(["x"], 3, "ln_kt")
    with pytest.raises(ConfigError, match="no function 'lag'; did you mean 'log'"):
        sonic.Pairwise(["x"], 3, "lag(x_i)")
    with pytest.raises(ConfigError, match="min takes 2 or more, got 1"):
        sonic.Pairwise(["x"], 3, "min(x_i)")
    for formula in ("x_i.real", "[x_i]", "x_i if x_j else 0", "'x'", "__import__('os')", "x_i <"):
        with pytest.raises(ConfigError, match="formula"):
            sonic.Pairwise(["x"], 3, formula)
    with pytest.raises(ConfigError, match="not int32"):
        sonic.Pairwise(CARTESIAN, 3, dtype="int32")
    with pytest.raises(ConfigError, match="axis_order to be 'CLL' or 'LLC'"):
        sonic.Pairwise(CARTESIAN, 3, axis_order="FL")
    with pytest.raises(ConfigError, match="one for each of 4 channels"):
        sonic.Pairwise(CARTESIAN, 3, fill=[1.0, 2.0])
    with pytest.raises(ConfigError, match="not sorted"):
        sonic.Pairwise("d", 3, sort_by="d")
    with pytest.raises(FieldError):
        sonic.Pairwise("d", 3).pack(vectors([1]))


def test_what_cannot_be_sent_is_an_error() -> None:
    jets = ak.Array([[{"x": [1.0, 2.0]}], [{"x": [3.0, 0.0]}]])
    with pytest.raises(InputError, match=r"formula 'log\(x_i\)' is NaN.*in event 1") as raised:
        sonic.Pairwise("x", 2, ["x_j", "log(x_i)"]).pack(jets)
    assert raised.value.rows == (1, 2)
    # Beyond the cut, nothing is computed.
    assert sonic.Pairwise("x", 1, "log(x_i)").pack(jets).shape == (2, 1, 1, 1)
    with pytest.raises(InputError, match="field 'x' is NaN"):
        sonic.Pairwise("x", 2, "x_i").pack(ak.Array([{"x": [math.nan]}]))


def test_buckets_counts_and_a_mask_beside() -> None:
    jets = vectors([1, 4, 2, 9])
    inputs = {
        "v": sonic.Pairwise(CARTESIAN, [2, 4]),
        "x": sonic.Bucketed(["pt"], [2, 4]),
        "m": sonic.Mask(beside="v"),
    }
    bound = bind_inputs(inputs, jets)
    assert [(s.start, s.stop, s.bucket) for s in bound.segments] == [(0, 2, 0), (2, 4, 1)]
    tensors = bound.pack(2, 4)
    assert {k: t.shape for k, t in tensors.items()} == {
        "v": (2, 4, 4, 4),
        "x": (2, 1, 4),
        "m": (2, 1, 4),
    }
    np.testing.assert_array_equal(tensors["m"], np.ones((2, 1, 4)))
    only = bind_inputs({"v": inputs["v"]}, jets)
    assert only.count_elements() == (1 + 4 + 2 + 4, 9 - 4, 1)


def test_a_declaration_can_be_pickled_compared_and_traced() -> None:
    layout = sonic.Pairwise(CARTESIAN, 3)
    assert pickle.loads(pickle.dumps(layout)) == layout
    model = Model("m", {"v": layout}, {"y": None})
    assert (
        model.config_hash
        != Model("m", {"v": sonic.Pairwise(CARTESIAN, 4)}, {"y": None}).config_hash
    )
    form = vectors([2, 1]).layout.form_with_key("node{id}")
    tracer, report = ak.typetracer.typetracer_with_report(form)
    trace(model.inputs, model.outputs, ak.Array(tracer))
    assert len(report.data_touched) == 5


def test_pairs_are_asked_for_by_the_layout() -> None:
    """Lists that are as long as the list that they are in are lists as any others."""
    jets = vectors([3, 0, 2, 5])
    pairs = pairs_of(jets)
    flat = ak.flatten(pairs)
    for layout in (sonic.Padded("d", 4), sonic.Flat("d"), sonic.Bucketed(["d", "s"], [2, 4])):
        np.testing.assert_array_equal(layout.pack(pairs), layout.pack(flat))
        assert bind_inputs({"x": layout, "m": sonic.Mask(4)}, pairs).rows.events == 4
    assert sonic.Pairwise("d", 4).pack(pairs).shape == (4, 1, 4, 4)
    # Another input has fewer levels.
    with pytest.raises(InputError, match=r"same objects.*there is sonic.Pairwise"):
        bind_inputs(
            {"pf": sonic.Padded("pt", 4), "v": sonic.Padded("d", 4)}, {"pf": jets, "v": pairs}
        )


@pytest.mark.parametrize(
    "counts",
    [
        [[2, 2], [], [1]],
        [[3, 3, 2], [1]],
        [[1]],
        [[2, 2], [2, 1]],
        [],
        [[0, 0, 0]],
        # By chance, in a chunk of few events.
        [[3, 3, 3], [2, 2], [1], [2, 2], [2, 2]],
        # Two jets of two subjets, in each event.
        [[2, 2]] * 20,
        [[3, 3, 3], []] * 10,
        [[2, 2], [0], [1]] * 10,
    ],
)
def test_constituents_are_not_taken_for_pairs(counts: list[list[int]]) -> None:
    array = ak.Array([[{"pt": [1.0] * n} for n in event] for event in counts] or [[{"pt": [1.0]}]])
    assert len(sonic.Padded("pt", 2).pack(array)) == sum(map(len, counts)) or not counts


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 12]),
    st.booleans(),
)
def test_a_chunk_is_packed_as_the_whole_is(sizes: list[int], step: int, others: bool) -> None:
    """Whatever its lists look like; here each is as long as the list that it is in."""
    rows = [[[float(i)] * size for i in range(size)] for size in sizes]
    if others:
        rows[-1] = [[1.0], [2.0, 3.0, 4.0]]
    array = ak.Array([*rows, [[1.0]]])[: len(rows)]
    for layout in (
        sonic.Padded("x", 2, fill=-1.0),
        sonic.Flat("x"),
        sonic.Mask(3, of="x"),
        sonic.Tokens({"x": sonic.Padded("x", 2)}),
    ):
        whole = layout.pack({"x": array})
        chunks = [array[start : start + step] for start in range(0, len(array), step)]
        each = [layout.pack({"x": chunk}) for chunk in chunks]
        np.testing.assert_array_equal(np.concatenate(each), whole)
