"""Equal rows of a call, found by hashes of their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from sonic_coffea.errors import InputError
from sonic_coffea.transport import STRINGS, to_wire

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from sonic_coffea.layouts import Inputs, Int64

_BLOCK = 4096


def keys_of(inputs: Inputs, scope: str) -> dict[int, bytes]:
    """Return a key for each row: a hash of 128 bits of what would be sent for it.

    Two rows that differ have the same key with a probability of 10^-38; among 10^9 rows, there is
    such a pair with one of 10^-21. ``scope`` is what else sets a row apart, such as the model.
    """
    keys: dict[int, bytes] = {}
    inputs = replace(inputs, without_axis=frozenset())  # of many rows at a time
    for segment in inputs.segments:
        for start in range(segment.start, segment.stop, _BLOCK):
            rows = inputs.numbers(start, min(start + _BLOCK, segment.stop)).tolist()
            tensors = inputs.pack(start, start + len(rows))
            keys.update(zip(rows, _keys_of_tensors(tensors, scope), strict=True))
    return keys


def check_unchanged(
    keys: Mapping[int, bytes],
    scope: str,
    without_axis: Collection[str],
    rows: Int64,
    tensors: Mapping[str, NDArray[Any]],
) -> None:
    """Raise if the tensors that are about to be sent are not those that the keys are of.

    The arrays of a call are packed again for each request, long after the keys were made.
    """
    by_row = {n: t[np.newaxis] if n in without_axis else t for n, t in tensors.items()}
    if _keys_of_tensors(by_row, scope) != [keys[row] for row in rows.tolist()]:
        raise InputError(
            "the arrays of the call have been changed since it was submitted, so that its scores "
            "would be kept for other rows; change no array before the result is there, or submit a "
            "copy of it"
        )


def _keys_of_tensors(tensors: Mapping[str, NDArray[Any]], scope: str) -> list[bytes]:
    form = [(name, t.dtype.str, t.shape[1:]) for name, t in tensors.items()]
    head = xxhash.xxh3_128_digest(f"{scope} {form}".encode())
    rows = len(next(iter(tensors.values())))
    parts = [
        np.ascontiguousarray(_hashed(t)).reshape(rows, -1).view(np.uint8) for t in tensors.values()
    ]
    packed = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    width, view = packed.shape[1], packed.data.cast("B")
    keys = []
    for row in range(rows):
        key = xxhash.xxh3_128(head)
        key.update(view[row * width : (row + 1) * width])
        keys.append(key.digest())
    return keys


def _hashed(tensor: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor with equally many bytes in each row: hashes in place of strings."""
    if tensor.dtype != STRINGS:
        return tensor
    each = (xxhash.xxh3_128_digest(to_wire(row).tobytes()) for row in tensor)
    return np.frombuffer(b"".join(each), np.uint8).reshape(len(tensor), -1)


class Duplicates:
    """For each row, the equal row that is sent in its place.

    Rows with the same key are equal; ``sent`` has the first of them.
    """

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        first: dict[bytes, int] = {}
        sent_for = np.asarray([first.setdefault(key, row) for row, key in keys.items()], np.int64)
        self.sent = np.fromiter(first.values(), np.int64, len(first))
        order = np.argsort(sent_for, kind="stable")
        self._members = np.fromiter(keys, np.int64, len(keys))[order]
        self._sent_for = sent_for[order]

    def expand(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return all rows that are equal to `rows`, and the place in `rows` of each one's equal."""
        start = np.searchsorted(self._sent_for, rows, "left")
        counts = np.searchsorted(self._sent_for, rows, "right") - start
        places = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._members[start[places] + within], places
