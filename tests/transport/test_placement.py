"""Where tensors lie in shared memory, and several servers behind an address, without a Triton."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.waiting import until
from tritonclient.grpc import service_pb2

from sonic_coffea import errors
from sonic_coffea.transport import Address
from sonic_coffea.transport import _shared_memory as shm

if TYPE_CHECKING:
    from collections.abc import Iterator


class Balanced:
    """Two servers behind one address: calls go to the first, or to each in turn, or one is lost."""

    def __init__(self) -> None:
        self.registered: tuple[set[str], set[str]] = (set(), set())
        self.turns: Iterator[set[str] | None] = itertools.repeat(self.registered[0])
        self.lock = threading.Lock()

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        with self.lock:
            server = next(self.turns)
            if server is None:
                raise errors.ServerLostError("upstream connect error")
            if method == "SystemSharedMemoryRegister":
                server.add(request.name)
            elif method == "SystemSharedMemoryUnregister":
                server.discard(request.name)
            regions = dict.fromkeys(server, True)
            return SimpleNamespace(extensions=[shm.EXTENSION], regions=regions)


def memory_of(balanced: Balanced, **options: Any) -> shm.SharedMemory:
    address = Address.parse("grpc://127.0.0.1:1")
    return shm.SharedMemory(balanced.call, address, shm.Usability(), demanded=False, **options)


@pytest.mark.parametrize("lost", [False, True])
def test_each_server_behind_an_address_unregisters_its_regions(lost: bool) -> None:
    """While one was alone, all regions were registered there; later calls go to both in turn."""
    balanced = Balanced()
    memory = memory_of(balanced)
    inputs = service_pb2.ModelInferRequest(inputs=[{}]).inputs
    tensors = {"x": np.zeros(shm.WORTH_BYTES, np.uint8)}
    regions = [memory.place(tensors, inputs, None) for _ in range(8)]
    assert len(balanced.registered[0]) == 8
    balanced.turns = itertools.cycle(balanced.registered)
    if lost:
        # It is known that there are two, and that one of them does not answer for a while.
        memory.unknown("")
        for_a_while = [None, balanced.registered[1]] * 20
        balanced.turns = itertools.chain(for_a_while, itertools.cycle(balanced.registered))
    for region in regions:
        assert region is not None
        memory.release(region, reusable=not lost)
    if lost:
        until(lambda: not balanced.registered[0])
    closed = threading.Event()
    memory.close(closed.set)
    assert closed.wait(30)
    assert balanced.registered == (set(), set())


def test_a_server_that_is_started_anew_twice_keeps_shared_memory() -> None:
    """A region that is unknown a second time means several servers, unless that was long ago."""
    tensors = {"x": np.zeros(shm.WORTH_BYTES, np.uint8)}
    inputs = service_pb2.ModelInferRequest(inputs=[{}]).inputs
    for settled_s, usable in ((0.0, True), (60.0, False)):
        memory = memory_of(Balanced(), settled_s=settled_s)
        for _ in range(2):
            region = memory.place(tensors, inputs, None)
            assert region is not None
            memory.unknown(f"Unable to find shared memory region: '{region.name}'")
            memory.release(region, reusable=False)
        assert memory.known.usable is usable
        region = memory.place(tensors, inputs, None)
        assert (region is not None) is usable
        if region is not None:
            memory.release(region)
        closed = threading.Event()
        memory.close(closed.set)
        assert closed.wait(30)


def test_tensors_are_packed_where_the_server_reads_them() -> None:
    balanced = Balanced()
    memory = memory_of(balanced)
    inputs = service_pb2.ModelInferRequest(inputs=[{}, {}, {}]).inputs
    kind = np.dtype(np.float32)
    room = memory.room(shm.WORTH_BYTES, 3)
    assert room is not None
    there, wide = room.lend((100_000,), kind), room.lend((3, 4), kind)
    assert there is not None
    assert wide is not None
    there[:], wide[:] = 1, np.arange(12).reshape(3, 4)
    tensors = {"x": there, "t": wide.T, "y": np.full(5, 2, np.uint8)}
    assert memory.place(tensors, inputs, room) is room
    for entry, (name, tensor) in zip(inputs, tensors.items(), strict=True):
        offset = entry.parameters["shared_memory_offset"].int64_param
        read = np.ndarray(tensor.shape, tensor.dtype, room.memory, offset)
        np.testing.assert_array_equal(read, tensor)
        assert (read.__array_interface__["data"][0] == room.address) == (name == "x")
    # More than was expected: all of it moves to another region, and that one is free again.
    tensors["y"] = np.full(room.nbytes, 3, np.uint8)
    larger = memory.place(tensors, inputs, room)
    assert larger is not None
    assert memory.room(shm.WORTH_BYTES, 3) is room
    offsets = [entry.parameters["shared_memory_offset"].int64_param for entry in inputs]
    for offset, tensor in zip(offsets, tensors.values(), strict=True):
        read = np.ndarray(tensor.shape, tensor.dtype, larger.memory, offset)
        np.testing.assert_array_equal(read, tensor)
    memory.release(larger)
    memory.release(room, reusable=False)
    del there, wide, read, tensor, tensors
    closed = threading.Event()
    memory.close(closed.set)
    assert closed.wait(30)
