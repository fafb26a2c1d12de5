"""Fields that have an array of fixed length for each object, beside those that have a number."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import InputError

COVARIANCE = np.arange(24.0).reshape(4, 2, 3)
PF = ak.zip({"pt": np.arange(4.0), "cov": COVARIANCE[:, 0], "matrix": COVARIANCE}, depth_limit=1)
CONSTITUENTS = ak.unflatten(PF, [2, 0, 2])
JETS = ak.zip({"pf": CONSTITUENTS, "m": [5.0, 6.0, 7.0]}, depth_limit=1)
EVENTS = ak.unflatten(JETS, [2, 1])

ARRAYS = {
    "constituents of jets": JETS,
    "constituents of jets of events": EVENTS,
    "a dict of records": {"pf": CONSTITUENTS},
    "chosen": JETS[::-1][::-1],
}


@pytest.mark.parametrize("name", ["pf.cov", "pf.matrix"])
@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize(
    "layout",
    [
        lambda name: sonic.Padded(["pf.pt", name], 3),
        lambda name: sonic.Padded([name, "pf.pt"], 3),
        lambda name: sonic.Padded("pf.pt", 3, sort_by=name),
        lambda name: sonic.Bucketed(["pf.pt", name], (2, 4)),
        lambda name: sonic.Flat(["pf.pt", name]),
        lambda name: sonic.Row(["pf.pt", name]),
        lambda name: sonic.Tokens({"pf": sonic.Padded(["pf.pt", name], 3)}),
        lambda name: sonic.Tokens({"pf": sonic.Padded(["pt", name.split(".")[1]], 3)}),
        lambda name: sonic.Pairwise(["pf.pt", name], 3, "pt_i - pt_j"),
        lambda name: sonic.Padded(
            ["pf.pt", sonic.Feature("y", expression=f"2 * {name} + pf.pt")], 3
        ),
        lambda name: sonic.Padded([sonic.Feature("y", expression=f"2 * {name} + pf.pt")], 3),
    ],
)
def test_constituents_do_not_become_rows(layout: Any, array: str, name: str) -> None:
    with pytest.raises(InputError, match=r"field '(pf\.)?(cov|matrix)' has an array"):
        layout(name).pack(ARRAYS[array])


def test_of_columns_of_a_dict_too() -> None:
    columns = {"pt": CONSTITUENTS.pt, "cov": CONSTITUENTS.cov}
    for layout in (
        sonic.Padded(["pt", "cov"], 3),
        sonic.Flat(["pt", "cov"]),
        sonic.Row(["pt", "cov"]),
    ):
        with pytest.raises(InputError, match="field 'cov' has an array of fixed length"):
            layout.pack(columns)


def test_no_rows_are_refused_as_any_others() -> None:
    with pytest.raises(InputError, match="field 'pf.cov' has an array of fixed length"):
        sonic.Padded(["pf.pt", "pf.cov"], 3).pack(JETS[:0])


def test_an_array_alone_has_its_numbers_as_elements() -> None:
    packed = sonic.Padded("pf.cov", 3).pack(JETS)
    np.testing.assert_array_equal(packed[:, 0], COVARIANCE[:, 0])
    np.testing.assert_array_equal(sonic.Dense("pf.matrix").pack(JETS), COVARIANCE)


def test_numbers_of_an_array_are_named_one_by_one() -> None:
    packed = sonic.Row(["pf.pt", "pf.cov[:3]"]).pack(JETS)
    expected = np.concatenate([np.arange(4.0)[:, np.newaxis], COVARIANCE[:, 0]], axis=1)
    np.testing.assert_array_equal(packed, expected)
    fields = {"pt": CONSTITUENTS.pt, "c0": CONSTITUENTS.cov[..., 0], "c2": CONSTITUENTS.cov[..., 2]}
    packed = sonic.Padded(["pt", "c0", "c2"], 2).pack(fields)
    assert packed.tolist() == [
        [[0.0, 1.0], [0.0, 6.0], [2.0, 8.0]],
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        [[2.0, 3.0], [12.0, 18.0], [14.0, 20.0]],
    ]


def test_the_numbers_are_elements_where_they_are_asked_for() -> None:
    pf = ak.zip(
        {"pt": CONSTITUENTS.pt, "cov": ak.from_regular(CONSTITUENTS.cov, axis=2)}, depth_limit=2
    )
    packed = sonic.Padded(["pt", "cov"], 3).pack(pf)
    np.testing.assert_array_equal(packed[:, 1], COVARIANCE[:, 0])
    np.testing.assert_array_equal(packed[:, 0], np.repeat(np.arange(4.0)[:, np.newaxis], 3, axis=1))


@pytest.mark.parametrize("regular", [False, True])
def test_a_number_of_the_row_beside_its_array_is_repeated(regular: bool) -> None:
    hits = ak.Array([[1.0, 2.0], [3.0, 4.0]])
    hits = ak.to_regular(hits) if regular else hits
    for arrays in ({"hits": hits, "met": [7.0, 8.0]}, ak.Array({"hits": hits, "met": [7.0, 8.0]})):
        packed = sonic.Padded(["hits", "met"], 2).pack(arrays)
        assert packed.tolist() == [[[1.0, 2.0], [7.0, 7.0]], [[3.0, 4.0], [8.0, 8.0]]]


def test_collections_of_a_fixed_number_of_objects_are_collections() -> None:
    """Four jets in each event: their axis is not one of a field."""
    jets = ak.to_regular(ak.zip({"pt": [[1.0, 2.0], [3.0, 4.0]], "m": [[5.0, 6.0], [7.0, 8.0]]}))
    events = ak.zip({"jets": jets, "met": [9.0, 10.0]}, depth_limit=1)
    assert sonic.Row(["jets.pt", "jets.m", "met"]).pack(events).tolist() == [
        [1.0, 5.0, 9.0],
        [2.0, 6.0, 9.0],
        [3.0, 7.0, 10.0],
        [4.0, 8.0, 10.0],
    ]
    packed = sonic.Padded(["jets.pt", "met"], 2).pack(events)
    assert packed.tolist() == [[[1.0, 2.0], [9.0, 9.0]], [[3.0, 4.0], [10.0, 10.0]]]
