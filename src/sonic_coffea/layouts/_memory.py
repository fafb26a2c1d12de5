"""Memory of large tensors, used again: a fresh page costs more than what is written to it."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Smaller blocks are used again by the C library, which gives larger ones back to the system.
LARGE = 32_000_000

# At most one block, of a tensor that nobody holds any more. Finalizers run in any thread, at any
# time: what they do to the list is one operation each.
_spare: list[NDArray[np.uint8]] = []


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array with undefined contents."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes <= LARGE:
        return np.empty(shape, dtype)
    block = _take(nbytes)
    lease = _Lease(block)
    weakref.finalize(lease, _give_back, block).atexit = False
    return np.asarray(lease)[:nbytes].view(dtype).reshape(shape)


class _Lease:
    """What the array holds, and all of its views: when it goes, the block is free again."""

    def __init__(self, block: NDArray[np.uint8]) -> None:
        self.__array_interface__ = block.__array_interface__


def _take(nbytes: int) -> NDArray[np.uint8]:
    """Return the spare block if it fits, and let go of it if it does not."""
    try:
        block = _spare.pop()
    except IndexError:
        block = None
    if block is None or not nbytes <= len(block) <= 1.1 * nbytes:
        del block
        return np.empty(nbytes, np.uint8)
    return block


def _give_back(block: NDArray[np.uint8]) -> None:
    _spare[:] = [block]
