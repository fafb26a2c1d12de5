"""The compiled kernels as functions; `_loops` has their source."""

from __future__ import annotations

import numpy as np

from sonic_coffea.layouts_old._machine_code import Call, Kernel

padded = Kernel("_packing", "padded")
rows = Kernel("_packing", "rows")
mask = Kernel("_placing", "mask")
positions = Kernel("_placing", "positions")
sort = Kernel("_placing", "sort")
unpad = Kernel("_placing", "unpad")
pairs = Kernel("_pairs", "pairs")

_in_turn = Kernel("_packing", "in_turn")


def in_turn(calls: list[Call], count: int, row_bytes: int) -> list[int]:
    """Make calls that begin with a row, and the one behind the last, for a number of rows.

    All calls fill some rows before the next rows, so memory is written from one end to the other.
    To fill the first half of every row, and then the second half, takes twice as long. Returns what
    each call found first, or -1.
    """
    if len(calls) == 1:
        return [calls[0]()]
    each = [(call.where, *call.addresses, -1) for call in calls]
    table = np.asarray(each, np.int64)
    failed = _in_turn(table, count, max(1, _TOGETHER // max(1, row_bytes)))
    if failed >= 0:
        raise RuntimeError(f"the kernel {calls[failed].name!r} failed")
    results: list[int] = table[:, 3].tolist()
    return results


_TOGETHER = 2048
"""Bytes of rows that are filled at a time: a call for less would take longer than what it does."""
