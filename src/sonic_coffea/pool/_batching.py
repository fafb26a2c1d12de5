"""The number of rows of each request: pure planning, no IO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError

# Without a limit of the server, requests of this size keep its queue short and a core busy.
UNLIMITED_ROWS = 16_384


def rows_per_request(
    row_bytes: int, *, max_rows: int | None, preferred_rows: tuple[int, ...] = (), max_bytes: int
) -> int:
    """Return the number of rows of a full request.

    Parameters
    ----------
    row_bytes : int
        Bytes of one row, over all inputs.
    max_rows : int, optional
        The model's own limit.
    preferred_rows : tuple of int
        Batch sizes that the server prefers; the largest that fits is taken.
    max_bytes : int
        Bytes that the tensors of one request may have.

    Raises
    ------
    ConfigError
        If a single row is larger than a request may be.

    Examples
    --------
    >>> rows_per_request(2560, max_rows=1024, max_bytes=16_000_000)
    1024
    >>> rows_per_request(2560, max_rows=1024, preferred_rows=(64, 512), max_bytes=16_000_000)
    512
    """
    _refuse_large(row_bytes, max_bytes)
    limit = UNLIMITED_ROWS if max_rows is None else max_rows
    limit = max(1, min(limit, max_bytes // max(row_bytes, 1)))
    fitting = [size for size in preferred_rows if 0 < size <= limit]
    return max(fitting) if fitting else limit


def plan(
    segments: Sequence[Any],
    *,
    max_rows: int | None,
    preferred_rows: tuple[int, ...] = (),
    max_bytes: int,
) -> Iterator[tuple[int, int, int]]:
    """Cut segments into requests: first place, one past the last, and bytes of each.

    `rows_per_request` has the other parameters.

    Parameters
    ----------
    segments : sequence
        Places of a call whose rows may share requests, from ``start`` to ``stop``. ``row_bytes``
        has the bytes of each row in a request, or of all rows if they are equal. ``cuts`` has the
        place of each request's first row after ``start``, and the end; None if free.

    Examples
    --------
    >>> from sonic_coffea.layouts import Segment
    >>> list(plan([Segment(0, 10, 100)], max_rows=4, max_bytes=1000))
    [(0, 4, 400), (4, 8, 400), (8, 10, 200)]
    >>> list(plan([Segment(0, 4, 100, cuts=np.array([0, 3, 4]))], max_rows=2, max_bytes=1000))
    [(0, 3, 300), (3, 4, 100)]
    >>> weights = np.array([300, 300, 700, 100])
    >>> list(plan([Segment(0, 4, weights)], max_rows=None, max_bytes=1000))
    [(0, 2, 600), (2, 4, 800)]
    """
    for segment in segments:
        row_bytes, cuts = segment.row_bytes, segment.cuts
        varies = isinstance(row_bytes, np.ndarray)
        if cuts is not None:
            cuts = cuts.tolist()
        elif varies:
            cuts = _cuts_by_bytes(row_bytes, max_rows, max_bytes)
        else:
            size = rows_per_request(
                row_bytes, max_rows=max_rows, preferred_rows=preferred_rows, max_bytes=max_bytes
            )
            rows = segment.stop - segment.start
            if size not in preferred_rows and rows:  # as many requests, of equal size
                size = -(-rows // -(-rows // size))
            cuts = [*range(0, rows, size), rows]
        for start, stop in pairwise(cuts):
            nbytes = int(row_bytes[start:stop].sum() if varies else (stop - start) * row_bytes)
            _refuse_large(nbytes, max_bytes)
            yield segment.start + start, segment.start + stop, nbytes


def _cuts_by_bytes(row_bytes: NDArray[np.int64], max_rows: int | None, max_bytes: int) -> list[int]:
    """Return the first row of each request, and the end, for rows of different sizes."""
    _refuse_large(int(row_bytes.max(initial=0)), max_bytes)
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(row_bytes)))
    limit = UNLIMITED_ROWS if max_rows is None else max_rows
    cuts = [0]
    while cuts[-1] < len(row_bytes):
        fits = int(np.searchsorted(before, before[cuts[-1]] + max_bytes, side="right")) - 1
        cuts.append(min(fits, cuts[-1] + limit, len(row_bytes)))
    return cuts


def _refuse_large(row_bytes: int, max_bytes: int) -> None:
    if row_bytes > max_bytes:
        raise ConfigError(
            f"one row takes {row_bytes} bytes, more than a request may hold ({max_bytes}); "
            "raise max_request_bytes"
        )
