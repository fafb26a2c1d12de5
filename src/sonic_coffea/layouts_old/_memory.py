"""Reuse of the memory of large tensors: a new page costs more than writing to it."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lend = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any] | None]

# The C library uses smaller blocks again. It gives larger ones back to the system: from 32 MB on,
# and in dask's workers from much less (they set MALLOC_TRIM_THRESHOLD_).
LARGE = 1_000_000

# Bytes that are kept of released tensors; a single block may be larger. Finalizers run in any
# thread, at any time: what they do to the list is one operation each.
KEPT = 64_000_000
_spare: deque[NDArray[np.uint8]] = deque()


_lending: ContextVar[Lend | None] = ContextVar("lending", default=None)
"""What lends memory for tensors, if something does, to the thread that packs."""


@contextmanager
def lent(lend: Lend | None) -> Iterator[None]:
    """Have tensors of this thread be packed where `lend` has room for them."""
    before = _lending.set(lend)
    try:
        yield
    finally:
        _lending.reset(before)


def empty_tensor(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array with undefined contents for what is sent, in lent memory if there is some."""
    lend = _lending.get()
    tensor = None if lend is None else lend(shape, dtype)
    return empty(shape, dtype) if tensor is None else tensor


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
    """Return a spare block that fits, or a new one, for which others may have to go."""
    for _ in range(len(_spare)):
        try:
            block = _spare.popleft()
        except IndexError:
            break
        if nbytes <= len(block) <= 1.1 * nbytes:
            return block
        if nbytes + len(block) <= KEPT:
            _spare.append(block)
        del block
    return np.empty(nbytes, np.uint8)


def _give_back(block: NDArray[np.uint8]) -> None:
    _spare.append(block)
    if len(_spare) > 1 and sum(map(len, list(_spare))) > KEPT:
        _spare.popleft()
