"""The leading objects of lists, side by side: as plain loops put them, whichever way is taken."""

from __future__ import annotations

import math
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import InputError

RNG = np.random.default_rng(3)
COUNTS = [3, 0, 1, 5, 2, 0, 4]
JETS = ak.unflatten(
    ak.zip({"pt": RNG.exponential(30, sum(COUNTS)), "n": np.arange(sum(COUNTS), dtype=np.int32)}),
    COUNTS,
)
EVENTS = ak.zip({"Jet": JETS}, depth_limit=1)
PER_FIELD = ["Jet[:3].pt", "Jet[:3].n"]
PER_OBJECT = [f"Jet[{k}].{name}" for k in range(3) for name in ("pt", "n")]


def expected(events: Any, layout: sonic.Row) -> np.ndarray:
    out = []
    for event in events.to_list():
        row = []
        for slot, feature in enumerate(layout.features):
            place, name = int(feature.name[4]), feature.name.rpartition(".")[2]
            if place < len(event["Jet"]):
                row.append(event["Jet"][place][name] * feature.scale)
            else:
                row.append((layout.missing or ())[slot])
        out.append(row)
    return np.asarray(out, layout.dtype).reshape(len(out), len(layout.features))


@pytest.mark.parametrize("fields", [PER_FIELD[:1], PER_OBJECT[::2], ["Jet[0].pt"]])
@pytest.mark.parametrize("missing", [0.0, -5.0, math.nan])
@pytest.mark.parametrize("cut", [slice(None), slice(2, 6), slice(0, 0), slice(None, None, -1)])
def test_objects_are_side_by_side(fields: Any, missing: float, cut: slice) -> None:
    layout, events = sonic.Row(fields, missing=missing), EVENTS[cut]
    tensor = layout.pack(events)
    np.testing.assert_array_equal(tensor, expected(events, layout))
    np.testing.assert_array_equal(
        ak.to_numpy(layout.unpack(tensor, events)["Jet[0].pt"]), tensor[:, 0]
    )


@pytest.mark.parametrize("fields", [PER_FIELD, PER_OBJECT, [*PER_FIELD, "Jet[3].n"]])
@pytest.mark.parametrize("order", ["F", "LF"])
def test_fields_come_in_the_order_of_the_declaration(fields: Any, order: str) -> None:
    layout = sonic.Row(fields, missing=7.0, axis_order=order)
    tensor = layout.pack(ak.values_astype(EVENTS, np.float32))
    wanted = expected(EVENTS, layout)
    np.testing.assert_array_equal(tensor, wanted if order == "F" else wanted[:, np.newaxis])
    mixed = layout.pack(EVENTS)  # pt and n are of different types
    np.testing.assert_array_equal(mixed, tensor)


def test_objects_are_transformed_and_what_is_missing_is_not() -> None:
    features = [sonic.Feature(f"Jet[{k}].pt", scale=2.0) for k in range(3)]
    layout = sonic.Row(features, missing=1.0, dtype="float64")
    np.testing.assert_array_equal(layout.pack(EVENTS), expected(EVENTS, layout))
    other = sonic.Row([features[0], "Jet[1].pt"], missing=[1.0, 2.0], dtype="float64")
    np.testing.assert_array_equal(other.pack(EVENTS), expected(EVENTS, other))


def test_wrong_numbers_are_named_if_they_are_sent() -> None:
    pt = [[1.0, 2.0, math.nan], [3.0, math.inf], [1e9]]
    events = ak.Array([{"Jet": [{"pt": p} for p in event]} for event in pt])
    with pytest.raises(InputError, match=r"field 'Jet\[1\].pt' is NaN or infinite in event 1"):
        sonic.Row("Jet[:2].pt", missing=0.0).pack(events)
    assert sonic.Row("Jet[:1].pt", missing=0.0, dtype="int64").pack(events)[2] == [10**9]
    with pytest.raises(InputError, match=r"'Jet\[0\].pt' is 1000000000.0 in event 2.*int16 cannot"):
        sonic.Row("Jet[:1].pt", missing=0.0, dtype="int16").pack(events)
    with pytest.raises(InputError, match=r"event 2 has no Jet\[1\]; say what stands for it"):
        sonic.Row("Jet[:2].pt").pack(events)


def test_tokens_have_leading_objects_too() -> None:
    tokens = sonic.Tokens({"first": sonic.Row("Jet[0].pt", missing=0.0)})
    row = sonic.Row("Jet[0].pt", missing=0.0)
    np.testing.assert_array_equal(tokens.pack(EVENTS)[:, 0], row.pack(EVENTS))
