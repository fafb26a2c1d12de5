"""What is computed after the network is declared, hashed, and the same everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

LABELS = ["qcd", "top", "w", "mass"]
NUMBERS = np.asarray([[1, 3, 4, 9], [2, 2, 0, 8], [0, 0, 5, 7]], np.float32)
OBJECTS = ak.Array([[dict(zip(LABELS, row, strict=True)) for row in NUMBERS.tolist()], []])


@pytest.fixture
def pool() -> Iterator[sonic.Pool]:
    served = FakeModel.of(echo(sonic.Output(LABELS)), lambda inputs: {"y": inputs["x"]})
    with FakeServer({"m": served}) as server, sonic.connect(server.url) as connected:
        yield connected


def echo(output: sonic.Output) -> sonic.Model:
    return sonic.Model("m", {"x": sonic.Row(LABELS)}, {"y": output})


def scores(pool: sonic.Pool, **options: Any) -> Any:
    return echo(sonic.Output(LABELS, **options))(OBJECTS, pool=pool)[0]


def test_softmax_over_a_part_of_the_labels(pool: sonic.Pool) -> None:
    soft = scores(pool, function="softmax", over=["qcd", "top"])
    expected = np.exp(NUMBERS[:, :2]) / np.exp(NUMBERS[:, :2]).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(ak.to_numpy([soft.qcd, soft.top]).T, expected, rtol=1e-6)
    assert soft.w.tolist() == [4, 0, 5]
    by_slice = scores(pool, function="softmax", over=slice(0, 2))
    assert by_slice.tolist() == soft.tolist()
    scaled = scores(pool, scale=2.0, shift=1.0, over=["mass"])
    assert (scaled.mass.tolist(), scaled.w.tolist()) == ([19, 17, 15], [4, 0, 5])


def test_odds_and_discriminants(pool: sonic.Pool) -> None:
    odds = scores(pool, function="odds", over=["w", "mass"])
    assert odds.mass.tolist() == pytest.approx([-9 / 8, -8 / 7, -7 / 6])
    beside = scores(pool, discriminants={"TvsQCD": "top / (top + qcd)", "twice": "2 * w"})
    assert beside.fields == [*LABELS, "TvsQCD", "twice"]
    assert beside.TvsQCD.tolist()[:2] == [0.75, 0.5]
    assert np.isnan(beside.TvsQCD[2])
    assert beside.twice.tolist() == [8, 0, 10]
    grouped = scores(
        pool, groups={"QCD": ["qcd"], "sig": ["top", "w"]}, discriminants={"D": "sig / (sig + QCD)"}
    )
    assert grouped.fields == ["QCD", "sig", "D"]
    assert grouped.D.tolist() == pytest.approx([7 / 8, 0.5, 1.0])
    assert str(grouped.type) == "3 * {QCD: float32, sig: float32, D: float32}"
    for options in ({"groups": {"QCD": ["qcd"]}}, {"discriminants": {"D": "2 * w"}}):
        output = sonic.Output(LABELS, **options)
        nothing, some = (echo(output)(each, pool=pool) for each in (OBJECTS[1:], OBJECTS))
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
        ({"discriminants": "top / qcd"}, "expected discriminants as a dict of expressions"),
        ({"labels": None, "discriminants": {"D": "top"}}, "no score 'top'; there are none"),
        ({"dtype": "string", "discriminants": {"D": "top"}}, "has no function"),
    ],
)
def test_scores_that_cannot_be_computed(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sonic.Output(**{"labels": LABELS, **options})
