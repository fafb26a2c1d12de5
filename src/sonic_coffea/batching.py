"""How many rows go into a request: pure planning, no IO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where a server sets no limit, requests of this size keep its queue short and a core busy.
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
        Limit on one request's tensors.

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
    if row_bytes > max_bytes:
        raise ConfigError(
            f"one row takes {row_bytes} bytes, more than a request may hold ({max_bytes}); "
            "raise max_request_bytes"
        )
    limit = UNLIMITED_ROWS if max_rows is None else max_rows
    limit = max(1, min(limit, max_bytes // max(row_bytes, 1)))
    fitting = [size for size in preferred_rows if 0 < size <= limit]
    return max(fitting) if fitting else limit


def slices(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut `rows` rows into requests of at most `size`; the last holds what is left.

    Examples
    --------
    >>> list(slices(10, 4))
    [(0, 4), (4, 8), (8, 10)]
    """
    for start in range(0, rows, size):
        yield start, min(start + size, rows)
