from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.layouts import _memory, bind_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOAT = np.dtype(np.float32)
ROWS = _memory.LARGE // 40 + 1


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Let collections look at the objects of these tests alone, not at all imported modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_spare() -> Iterator[None]:
    gc.collect()
    _memory._spare.clear()
    yield
    _memory._spare.clear()


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_the_memory_of_a_tensor_that_is_gone_is_used_again() -> None:
    first = _memory.empty((ROWS, 10), FLOAT)
    assert first.shape == (ROWS, 10)
    assert first.dtype == FLOAT
    assert first.flags.c_contiguous
    assert first.flags.writeable
    block = address(first)
    del first
    assert address(_memory.empty((10, ROWS), FLOAT)) == block


@pytest.mark.parametrize(
    "keep",
    [
        lambda a: a[5:],
        lambda a: a.T,
        lambda a: a.view(np.int32),
        lambda a: a.reshape(-1)[:1],
        memoryview,
        lambda a: np.frombuffer(a, np.uint8),
        lambda a: np.asarray(a[0]),
    ],
)
def test_memory_that_anyone_can_see_is_not(keep: object) -> None:
    first = _memory.empty((ROWS, 10), FLOAT)
    first[:] = 1
    kept = keep(first)  # type: ignore[operator]
    del first
    gc.collect()
    assert not _memory._spare
    before = np.array(kept)
    other = _memory.empty((ROWS, 10), FLOAT)
    other[:] = 2
    np.testing.assert_array_equal(np.asarray(kept), before)
    del kept
    gc.collect()
    assert len(_memory._spare) == 1


def test_two_at_a_time_are_two() -> None:
    first, second = (_memory.empty((ROWS, 10), FLOAT) for _ in range(2))
    assert not np.shares_memory(first, second)
    addresses = {address(first), address(second)}
    del first, second
    again = [_memory.empty((ROWS, 10), FLOAT) for _ in range(2)]
    assert {address(array) for array in again} == addresses


def test_blocks_of_several_sizes_are_kept() -> None:
    """As a model with several inputs needs them."""
    sizes = ROWS, 2 * ROWS, 3 * ROWS
    addresses = [address(array) for array in [_memory.empty((n, 10), FLOAT) for n in sizes]]
    assert [address(_memory.empty((n, 10), FLOAT)) for n in sizes] == addresses


def test_not_much_is_kept() -> None:
    rows = _memory.KEPT // 40 // 2
    arrays = [_memory.empty((rows, 10), FLOAT) for _ in range(4)]
    del arrays
    assert sum(map(len, _memory._spare)) <= _memory.KEPT
    _memory._spare.clear()
    big = _memory.empty((4 * rows, 10), FLOAT)
    del big
    block = weakref.ref(_memory._spare[0])
    _memory.empty((ROWS, 10), FLOAT)
    assert block() is None


def test_small_arrays_are_numpy_s_own() -> None:
    small = _memory.empty((10, 10), FLOAT)
    assert small.base is None
    del small
    assert not _memory._spare


def test_threads_never_get_the_same_memory() -> None:
    wrong = []

    def use(number: int) -> None:
        for _ in range(30):
            array = _memory.empty((ROWS, 10), FLOAT)
            array[::1000] = number
            if np.any(array[::1000] != number):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_tensors_are_packed_where_memory_is_lent() -> None:
    objects = ak.Array({"x": np.arange(6.0)})
    lent = np.zeros(4, np.float32)

    def lend(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        return lent.reshape(shape) if dtype == lent.dtype and shape == (4, 1) else None

    inputs = bind_inputs({"x": sonic.Row(["x"]), "n": sonic.Row(["x"], dtype="float16")}, objects)
    packed = inputs.pack(1, 5, lend)
    assert packed["x"].base is lent
    assert lent.tolist() == [1, 2, 3, 4]
    assert packed["n"].ravel().tolist() == [1, 2, 3, 4]
    assert inputs.pack(0, 4)["x"].base is not lent
