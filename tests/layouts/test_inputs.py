"""What is no array of objects is an error of the package, whatever it is."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import InputError

LAYOUTS = {
    "Row": sonic.Row("pt"),
    "leading": sonic.Row("pf[0].x"),
    "Padded": sonic.Padded("pf.x", 2),
    "sorted": sonic.Padded("pf.x", 2, sort_by="pf.x"),
    "Bucketed": sonic.Bucketed("pf.x", (1, 2)),
    "Flat": sonic.Flat("pf.x"),
    "Mask": sonic.Mask(2, of="pf"),
    "Dense": sonic.Dense("pt", (1,)),
    "Pairwise": sonic.Pairwise("pf.x", 2, "x_i - x_j"),
    "Tokens": sonic.Tokens({"pf": sonic.Padded("pf.x", 2)}),
    "strings": sonic.Row("pt", dtype="string"),
    "expression": sonic.Row(sonic.Feature("y", expression="pt + 1")),
}
EVENTS = ak.Array([{"pt": 1.0, "pf": [{"x": 1.0}]}, {"pt": 2.0, "pf": []}])


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_record_is_not_an_array_of_records(name: str) -> None:
    layout = LAYOUTS[name]
    for record in (EVENTS[0], EVENTS[1], ak.Record({"pt": 1.0, "pf": [{"x": 1.0}]})):
        with pytest.raises(InputError, match="one record"):
            layout.pack(record)
        with pytest.raises(InputError, match="one record"):
            sonic.Model("m", {"in": layout}, {"y": ["a"]}).pack(record)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("array", [None, 5, 1.5, "pt", b"pt", object(), {1, 2}, (n for n in "ab")])
def test_what_is_not_an_array_is_refused(name: str, array: Any) -> None:
    with pytest.raises(InputError):
        LAYOUTS[name].pack(array)
    with pytest.raises(InputError):
        sonic.Model("m", {"in": LAYOUTS[name]}, {"y": ["a"]}).pack(array)


@pytest.mark.parametrize("column", [None, 5, 1.5, object(), EVENTS[0], np.float32(1), {1, 2}])
def test_columns_of_a_dict_are_arrays(column: Any) -> None:
    for name in ("Row", "expression", "strings", "Dense"):
        with pytest.raises(InputError):
            LAYOUTS[name].pack({"pt": column})
    for name in ("Padded", "Flat", "Mask", "leading", "Tokens"):
        with pytest.raises(InputError):
            LAYOUTS[name].pack({"pf": column})
