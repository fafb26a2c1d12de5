"""Rows of any structure are put back as plain loops do; None is not sent, or is replaced."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea.layouts import bind_inputs


def test_events_of_rows_are_counted_in_the_array_that_was_passed() -> None:
    array = ak.Array([None, [[1.0], [2.0, 3.0]], [], [[], None, [4.0]]])
    rows = bind_inputs({"x": sonic.Row("pt")}, {"pt": array})
    assert [rows.events_of(i, i + 1) for i in range(4)] == [(1, 2), (1, 2), (1, 2), (3, 4)]
    assert rows.events_of(0, 4) == (1, 4)
    assert rows.events_of(2, 2) == (0, 0)


maybe = st.one_of(st.none(), st.integers(-9, 9))


@given(st.lists(st.tuples(maybe, maybe), max_size=5))
def test_columns_of_a_dict_are_sent_as_those_of_records(pairs: list[tuple[Any, Any]]) -> None:
    first, second = (ak.Array([*(p[i] for p in pairs), None, 5])[: len(pairs)] for i in (0, 1))
    layout = sonic.Row(["a", "b"], missing=[-10.0, -11.0])
    wanted = [[-10.0 if a is None else a, -11.0 if b is None else b] for a, b in pairs]
    for arrays in ({"a": first, "b": second}, ak.Array({"a": first, "b": second})):
        packed = layout.pack(arrays)
        np.testing.assert_array_equal(packed, np.asarray(wanted, np.float32).reshape(-1, 2))
        back = layout.unpack(packed, arrays)
        assert [list(row.values()) for row in back.tolist()] == wanted


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        (sonic.Feature("y", expression="2 * pt"), [2.0, -9.0, 6.0]),
        (sonic.Feature("y", expression="pt + x"), [5.0, -9.0, -9.0]),
        (sonic.Feature("pt", scale=3.0, shift=1.0), [0.0, -9.0, 6.0]),
        (sonic.Feature("pt", function="sqrt"), [1.0, -9.0, 3.0**0.5]),
        (sonic.Feature("pt", categories={1: 10, 3: 30}), [10.0, -9.0, 30.0]),
        (sonic.Feature("many", index="at"), [8.0, -9.0, -9.0]),
        ("many[0]", [7.0, -9.0, 6.0]),
        ("many[-1]", [8.0, -9.0, 6.0]),
    ],
)
def test_fields_made_of_none_are_missing(field: Any, sent: list[float]) -> None:
    arrays = {
        "pt": ak.Array([1.0, None, 3.0]),
        "x": ak.Array([4.0, 5.0, None]),
        "at": ak.Array([1, -1, None]),
        "many": ak.Array([[7.0, 8.0], [], [6.0]]),
    }
    behind = [4.0, 5.0, -9.0]
    for given_as in (arrays, ak.Array(arrays)):
        alone = sonic.Row([field], missing=-9, dtype="float64").pack(given_as)
        np.testing.assert_allclose(alone[:, 0], sent, rtol=1e-14)
        beside = sonic.Row([field, "x"], missing=-9, dtype="float64").pack(given_as)
        np.testing.assert_allclose(beside, np.stack([sent, behind], 1), rtol=1e-14)


def test_unpacked_rows_are_none_where_the_objects_are() -> None:
    union = ak.concatenate([ak.Array([{"m": 1.0}, None]), ak.Array([{"m": None, "x": 1}, None])])
    layout = sonic.Row("m", missing=-9)
    assert layout.unpack(layout.pack(union), union).m.tolist() == [1.0, None, -9.0, None]
    names = ak.Array([{"s": "a"}, {"s": None}, None])
    strings = sonic.Row("s", dtype="string", missing="?")
    assert strings.unpack(strings.pack(names), names).s.tolist() == ["a", "?", None]
