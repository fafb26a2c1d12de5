from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonic_coffea import errors
from sonic_coffea.batching import Segment, plan, rows_per_request


@given(
    st.integers(0, 300),
    st.integers(1, 50),
    st.none() | st.integers(1, 40),
    st.lists(st.integers(1, 60), max_size=3),
    st.integers(50, 5000),
)
def test_plans_cover_every_row_once(
    rows: int, row_bytes: int, max_rows: int | None, preferred: list[int], max_bytes: int
) -> None:
    pieces = list(
        plan(
            [Segment(0, rows, row_bytes)],
            max_rows=max_rows,
            preferred_rows=tuple(preferred),
            max_bytes=max_bytes,
        )
    )
    assert [r for start, stop, _ in pieces for r in range(start, stop)] == list(range(rows))
    for start, stop, nbytes in pieces:
        assert nbytes == (stop - start) * row_bytes <= max_bytes
        assert max_rows is None or stop - start <= max_rows


@given(st.lists(st.integers(0, 90), max_size=60), st.none() | st.integers(1, 9))
def test_plans_by_weight(weights: list[int], max_rows: int | None) -> None:
    segment = Segment(10, 10 + len(weights), np.asarray(weights, np.int64))
    pieces = list(plan([segment], max_rows=max_rows, max_bytes=100))
    covered = [r for start, stop, _ in pieces for r in range(start, stop)]
    assert covered == list(range(10, 10 + len(weights)))
    for start, stop, nbytes in pieces:
        assert nbytes == sum(weights[start - 10 : stop - 10]) <= 100
        assert max_rows is None or stop - start <= max_rows


def test_a_row_that_is_too_large() -> None:
    with pytest.raises(errors.ConfigError, match="raise max_request_bytes"):
        rows_per_request(101, max_rows=None, max_bytes=100)
