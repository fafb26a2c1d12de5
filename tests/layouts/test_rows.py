"""Any awkward structure, built node by node, taken apart and put back as plain loops do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import NumpyArray
from hypothesis import given
from hypothesis import strategies as st
from tests.layouts import nodes
from tests.layouts.reference import replaced, rows_of

import sonic_coffea as sonic
from sonic_coffea.layouts import bind_inputs

if TYPE_CHECKING:
    from tests.layouts.nodes import Kinds


@st.composite
def arrays(draw: Any, *, jagged: bool) -> tuple[Kinds, ak.Array]:
    """Draw events with some list levels, each of which, or its contents, may be missing."""
    levels = draw(st.lists(st.sampled_from(["list", "list", 1, 2]), max_size=3))
    levels += [draw(st.sampled_from(["list", 3]))] * jagged
    kinds: list[Any] = []
    for level in levels:
        kinds += ["option"] * draw(st.booleans())
        kinds.append(level)
    # Among the constituents of a row there is no None.
    kinds += ["option"] * (not jagged and draw(st.booleans()))
    type_ = (*kinds, draw(st.sampled_from(nodes.DTYPES)))
    return type_, draw(nodes.arrays(type_))


def axes(kinds: Kinds) -> int:
    """How many axes there are, with that of the events."""
    return sum(kind != "option" for kind in kinds)


@given(arrays(jagged=False))
def test_rows_of_any_structure(data: tuple[Kinds, ak.Array]) -> None:
    (kinds, array), plain = data, ak.to_list(data[1])
    depth = axes(kinds)
    rows = rows_of(plain, depth)
    expected = np.asarray(rows, np.float32).reshape(-1, 1)
    np.testing.assert_array_equal(sonic.Row("pt").pack({"pt": array}), expected)
    inputs = bind_inputs({"x": sonic.Row("pt")}, {"pt": array})
    scores = inputs.rows.unflatten(NumpyArray(np.arange(len(rows), dtype=np.float32)))
    assert scores.tolist() == replaced(plain, depth, iter(range(len(rows))))
    if "union" not in str(array.type):  # whose options awkward moves about
        assert str(scores.type) == str(array.type).replace(kinds[-1], "float32")
    events = [number for number, one in enumerate(plain) for _ in rows_of([one], depth)]
    ranges = [inputs.rows.events_of(row, row + 1) for row in range(len(rows))]
    assert ranges == [(event, event + 1) for event in events]
    assert inputs.rows.event_numbers().tolist() == events


def test_the_first_event_that_differs_is_found() -> None:
    for event in range(7):
        counts = np.ones(7, int)
        other = counts.copy()
        other[event:] += 1
        x = ak.unflatten(np.zeros(counts.sum()), counts)
        y = ak.unflatten(np.zeros(other.sum()), other)
        with pytest.raises(sonic.errors.InputError, match=f"difference is in event {event}"):
            sonic.Row(["x", "y"]).pack({"x": x, "y": y})


def test_missing_objects_in_one_field_only_are_a_difference() -> None:
    first = ak.Array([[1.0, 2.0], [None, 3.0]])
    second = ak.Array([[1.0, 2.0], [4.0, 3.0]])
    with pytest.raises(sonic.errors.InputError, match="do not have the same objects"):
        sonic.Row(["x", "y"]).pack({"x": first, "y": second})


def test_events_of_rows_are_counted_in_the_array_that_was_passed() -> None:
    array = ak.Array([None, [[1.0], [2.0, 3.0]], [], [[], None, [4.0]]])
    rows = bind_inputs({"x": sonic.Row("pt")}, {"pt": array}).rows
    assert [rows.events_of(i, i + 1) for i in range(4)] == [(1, 2), (1, 2), (1, 2), (3, 4)]
    assert rows.events_of(0, 4) == (1, 4)
    assert rows.events_of(2, 2) == (0, 0)
