"""Tensors in shared memory, for a server on this machine that is asked to read them there.

A region is memory that this process and the server map. Its file is of this user alone, and gone as
soon as the server has opened it. It holds one request at a time, and the next once the server has
answered; if the server has not, it might still read, and the region is never used again. Triton
keeps a region until a client unregisters it, and refuses to while a request uses it: what is left
is unregistered before the next region is made, when the connection is closed, or by the next
client.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.grpc import service_pb2

from sonic_coffea.errors import ConfigError, DeadlineError, ServerLostError, SonicError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sonic_coffea.transport._address import Address

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is
PREFIX = "sonic-coffea-client"
_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-[0-9a-f]+-(?P<number>\d+)")
# Larger requests take less time with it than as messages (`benchmarks/shared_memory.py`).
WORTH_BYTES = 250_000
_ALIGNED_BYTES = 64
_KEPT_BYTES = 256_000_000
# Deadline of calls that delay requests, and of what is unregistered when a connection is closed.
_CALL_TIMEOUT_S = 2.0
# A server that does not know a new region within this time is another one behind a balancer.
_SETTLED_S = 60.0

Call = Callable[[str, Any, float], Any]
Lend = Callable[[tuple[int, ...], np.dtype[Any]], "NDArray[Any] | None"]
"""Returns memory for a tensor, by shape and type; None if there is no room."""
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Region:
    """Memory that is mapped here and by the server.

    Attributes
    ----------
    lent : int
        Number of its bytes that are lent to tensors, or taken by them.
    """

    name: str
    memory: NDArray[np.uint8]
    lent: int = 0

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Return a part of it, to write a tensor to; None if there is no room."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self.lent + nbytes > self.memory.nbytes:
            return None
        tensor: NDArray[Any] = np.ndarray(shape, dtype, self.memory, self.lent)
        self.lent += -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return tensor

    def _offset_of(self, tensor: NDArray[Any]) -> int | None:
        """Return where a tensor lies, which is copied unless it was packed here.

        None if there is no room.
        """
        start = self.memory.ctypes.data
        if tensor.flags.c_contiguous and np.may_share_memory(tensor, self.memory):
            return int(tensor.ctypes.data - start)
        copy = self.lend(tensor.shape, tensor.dtype)
        if copy is None:
            return None
        np.copyto(copy, tensor)
        return int(copy.ctypes.data - start)

    def place(self, tensors: Iterable[NDArray[Any]], inputs: Any) -> bool:
        """Put a request's tensors into it; False if the message is to have them.

        Tensors that were packed there stay.
        """
        places = [(tensor.nbytes, self._offset_of(tensor)) for tensor in tensors]
        if any(offset is None for _, offset in places):
            return False
        for entry, (nbytes, offset) in zip(inputs, places, strict=True):
            entry.parameters["shared_memory_region"].string_param = self.name
            entry.parameters["shared_memory_byte_size"].int64_param = nbytes
            entry.parameters["shared_memory_offset"].int64_param = offset
        return True


class SharedMemory:
    """The regions of a connection.

    Parameters
    ----------
    call : callable
        Makes an RPC, by method, request and timeout, and waits for the response.

    Raises
    ------
    ConfigError
        If the server is not on this machine.
    """

    def __init__(self, call: Call, address: Address) -> None:
        if not (address.loopback and sys.platform == "linux" and SHARED_MEMORY.is_dir()):
            raise ConfigError(f"shared_memory=True, but {address} is not on this machine")
        self._call, self._address = call, address
        self._lock = threading.Lock()
        self._free: list[Region] = []
        # What the server knows, and may forget.
        self._unwanted: set[str] = set()
        self._used = 0
        self._closed = self._cleaned = False
        self._renewed = (0, -math.inf)

    def room(self, nbytes: int, tensors: int) -> Region | None:
        """Return a region for tensors of about `nbytes`; None if the message is to have them.

        May block while the server registers a new region.

        Raises
        ------
        ConfigError
            If the server cannot use shared memory.
        """
        if nbytes < WORTH_BYTES:
            return None
        nbytes += tensors * _ALIGNED_BYTES
        with self._lock:
            self._used += 1
            fitting = [r for r in self._free if r.memory.nbytes >= nbytes]
            region = min(fitting, key=lambda r: r.memory.nbytes, default=None)
            if region is not None:
                self._free.remove(region)
                region.lent = 0
                return region
        try:
            return self._new(nbytes)
        except BaseException as error:
            with self._lock:
                self._used -= 1
            if isinstance(error, ServerLostError | DeadlineError | FileNotFoundError):
                # The request fails with the cause: a server that ends takes its folder along.
                return None
            if isinstance(error, SonicError | OSError):
                raise self._unusable(str(error)) from None
            raise

    def release(self, region: Region, *, reusable: bool) -> None:
        """Take a region back; it is not reusable if the server might still read it."""
        with self._lock:
            self._used -= 1
            kept = sum(r.memory.nbytes for r in self._free) + region.memory.nbytes <= _KEPT_BYTES
            if reusable and kept and not self._closed:
                self._free.append(region)
            else:
                self._unwanted.add(region.name)

    def unknown(self, details: str) -> SonicError:
        """Discard all regions, as the server does not know one; return what that means."""
        match = _NAME.search(details)
        begun, at = self._renewed
        now = time.monotonic()
        if match is None or int(match["number"]) >= begun:  # else, it was in flight then
            if now - at <= _SETTLED_S:
                return self._unusable("there are several servers behind the URL")
            self._renewed = next(_numbers), now
            self._discard()
        return ServerLostError(f"the server was started anew: {details}")

    def close(self) -> None:
        """Discard all regions, after the requests in flight have been cancelled."""
        self._closed = True
        self._discard()
        until = time.monotonic() + _CALL_TIMEOUT_S
        while True:
            self._unregister(self._unwanted.copy())
            if not (self._unwanted or self._used) or time.monotonic() > until:
                return
            time.sleep(0.01)

    def _discard(self) -> None:
        with self._lock:
            self._unwanted.update(region.name for region in self._free)
            self._free.clear()

    def _new(self, nbytes: int) -> Region:
        """Return a region that the server has mapped."""
        left = self._unwanted.copy()
        if not self._cleaned:
            # What clients that were killed, or ended too soon, left in the server.
            request = service_pb2.SystemSharedMemoryStatusRequest()
            known = self._call("SystemSharedMemoryStatus", request, _CALL_TIMEOUT_S).regions
            names = (match for name in known if (match := _NAME.fullmatch(name)) is not None)
            left.update(m[0] for m in names if not Path("/proc", m["pid"]).exists())
            self._cleaned = True
        self._unregister(left)
        nbytes = 1 << (nbytes - 1).bit_length()
        name = f"{PREFIX}-{os.getpid()}-{os.urandom(4).hex()}-{next(_numbers)}"
        # A local server has a folder of its own.
        own = Path(self._address.path or "/").parent / "shm"
        path = (own if own.is_dir() else SHARED_MEMORY) / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Writing to memory that is not reserved may kill the process, by SIGBUS.
            os.posix_fallocate(fd, 0, nbytes)
            request = service_pb2.SystemSharedMemoryRegisterRequest(
                name=name, key=name, offset=0, byte_size=nbytes
            )
            try:
                self._call("SystemSharedMemoryRegister", request, _CALL_TIMEOUT_S)
            except BaseException:  # the server may have registered it all the same
                self._unwanted.add(name)
                raise
            return Region(name, np.frombuffer(mmap.mmap(fd, nbytes), np.uint8))
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)

    def _unregister(self, names: Iterable[str]) -> None:
        for name in names:
            request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
            try:
                self._call("SystemSharedMemoryUnregister", request, _CALL_TIMEOUT_S)
            except DeadlineError:  # the others would take as long
                return
            except ServerLostError:  # mappings end with the process
                pass
            except SonicError:  # in use
                continue
            with self._lock:
                self._unwanted.discard(name)

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"shared_memory=True, but {self._address} cannot use it: {why}; leave it out, or have "
            "Triton allow it (--allow-client-shm=true from 2.69 on)"
        )
