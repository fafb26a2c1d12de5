from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonic_coffea import errors
from sonic_coffea.layouts import Segment
from sonic_coffea.pool._batching import UNLIMITED_ROWS, plan, rows_per_request


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
    weights = Segment(0, 2, np.asarray([5, 101], np.int64))
    with pytest.raises(errors.ConfigError, match=r"101 bytes, more than .* \(100\)"):
        list(plan([weights], max_rows=None, max_bytes=100))


@given(st.integers(1, 100), st.integers(1, 40), st.lists(st.integers(-2, 60), max_size=4))
def test_the_largest_preferred_batch_that_fits_is_taken(
    row_bytes: int, max_rows: int, preferred: list[int]
) -> None:
    limits = {"max_rows": max_rows, "max_bytes": 500}
    most = rows_per_request(row_bytes, **limits)
    assert 1 <= most <= max_rows
    assert most * row_bytes <= 500
    assert most == max_rows or (most + 1) * row_bytes > 500
    taken = rows_per_request(row_bytes, preferred_rows=tuple(preferred), **limits)
    assert taken == max([p for p in preferred if 0 < p <= most], default=most)


def test_without_limits_requests_are_still_bounded() -> None:
    assert rows_per_request(1, max_rows=None, max_bytes=10**9) == UNLIMITED_ROWS
    assert rows_per_request(0, max_rows=None, max_bytes=10**9) == UNLIMITED_ROWS


def test_segments_do_not_share_requests() -> None:
    segments = [Segment(0, 3, 10, 16), Segment(3, 8, 20, 32)]
    assert list(plan(segments, max_rows=2, max_bytes=1000)) == [
        (0, 2, 20),
        (2, 3, 10),
        (3, 5, 40),
        (5, 7, 40),
        (7, 8, 20),
    ]
