"""Tensors in shared memory, for a server on this machine that is asked to read them there.

A region is a file of this user alone, which this process maps and, by its name, the server. It
holds one request at a time, and the next once the server has answered; if the server has not, it
might still read, and the region is never used again. Triton keeps a region until a client
unregisters it, and refuses to while a request uses it: what is left is unregistered before the next
region is made, when the connection is closed, or by the next client.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
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
# Larger requests take less time with it than as messages (`benchmarks/shared_memory.py`).
WORTH_BYTES = 250_000
_ALIGNED_BYTES = 64
_SMALLEST = 1 << 20
_KEPT_BYTES = 256_000_000
# Deadline of calls that delay requests.
_CALL_TIMEOUT_S = 2.0
# `close` waits for this time until the server has unregistered all regions.
_CLOSES_WITHIN_S = 0.5
# A server that does not know a new region within this time is another one behind a balancer.
_SETTLED_S = 60.0

Call = Callable[[str, Any, float], Any]
Lend = Callable[[tuple[int, ...], np.dtype[Any]], "NDArray[Any] | None"]
"""Returns memory for a tensor, by shape and type; None if there is no room."""
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Region:
    """A file that is mapped here and, once it is registered, by the server.

    Attributes
    ----------
    lent : int
        Number of its bytes that are lent to tensors, or taken by them.
    """

    path: Path
    memory: mmap.mmap
    nbytes: int
    address: int
    lent: int = 0

    @classmethod
    def create(cls, folder: Path, nbytes: int) -> Region:
        """Create a region, whose memory is reserved."""
        path = folder / f"{PREFIX}-{os.getpid()}-{os.urandom(4).hex()}-{next(_numbers)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Writing to memory that is not reserved may kill the process, by SIGBUS.
            os.posix_fallocate(fd, 0, nbytes)
            memory = mmap.mmap(fd, nbytes)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        return cls(path, memory, nbytes, address)

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Return a part of it, to write a tensor to; None if there is no room."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self.lent + nbytes > self.nbytes:
            return None
        tensor: NDArray[Any] = np.ndarray(shape, dtype, self.memory, self.lent)
        self.lent += -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return tensor

    def fill(self, inputs: Any, tensors: Mapping[str, NDArray[Any]]) -> bool:
        """Copy tensors into it that are not there, and write into a request where they are.

        False if there is no room for all.
        """
        for entry, tensor in zip(inputs, tensors.values(), strict=True):
            offset: int = tensor.__array_interface__["data"][0] - self.address
            inside = offset >= 0 and offset + tensor.nbytes <= self.nbytes
            if not (inside and tensor.flags.c_contiguous):
                offset, copy = self.lent, self.lend(tensor.shape, tensor.dtype)
                if copy is None:
                    return False
                np.copyto(copy, tensor)
            entry.parameters["shared_memory_region"].string_param = self.path.name
            entry.parameters["shared_memory_byte_size"].int64_param = tensor.nbytes
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
        self._regions: dict[str, Path] = {}
        self._unwanted: set[str] = set()
        self._closed = self._cleaned = False
        self._renewed = (0, -math.inf)
        # However this process ends, short of being killed, no file is left.
        weakref.finalize(self, _unlink, self._regions, os.getpid())

    @property
    def _folder(self) -> Path:
        """Where the server finds its shared memory, as a local server has a folder of its own."""
        own = Path(self._address.path or "/").parent / "shm"
        return own if own.is_dir() else SHARED_MEMORY

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
            fitting = [r for r in self._free if r.nbytes >= nbytes]
            region = min(fitting, key=lambda r: r.nbytes, default=None)
            if region is not None:
                self._free.remove(region)
        try:
            region = region or self._new(nbytes)
        except (ServerLostError, DeadlineError, FileNotFoundError):
            # The request itself fails with the cause: a server that ends takes its folder along.
            return None
        except (SonicError, OSError) as error:
            raise self._unusable(str(error)) from None
        region.lent = 0
        return region

    def place(
        self, tensors: Mapping[str, NDArray[Any]], inputs: Any, region: Region | None
    ) -> Region | None:
        """Put a request's tensors into its region; None if the message is to have them.

        Tensors that were packed there stay. If the others have no room, all take another region.
        """
        if region is not None and region.fill(inputs, tensors):
            return region
        larger = self.room(sum(t.nbytes for t in tensors.values()), len(tensors))
        if larger is not None:
            larger.fill(inputs, tensors)
        if region is not None:  # the server has never read it
            self.release(region)
        return larger

    def release(self, region: Region, *, reusable: bool = True) -> None:
        """Take a region back; it is not reusable if the server might still read it."""
        with self._lock:
            kept = sum(r.nbytes for r in self._free) + region.nbytes <= _KEPT_BYTES
            if reusable and kept and region.path.name in self._regions and not self._closed:
                self._free.append(region)
                return
            self._unwanted.add(region.path.name)
            self._regions.pop(region.path.name, None)
        region.path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):  # an array still refers to it
            region.memory.close()

    def unknown(self, details: str) -> SonicError:
        """Discard all regions, as the server does not know one; return what that means."""
        match = re.search(rf"{PREFIX}-\d+-[0-9a-f]+-(\d+)", details)
        begun, at = self._renewed
        now = time.monotonic()
        if match is None or int(match[1]) >= begun:  # else it was in flight at the last time
            if now - at <= _SETTLED_S:
                return self._unusable("there are several servers behind the URL")
            self._renewed = next(_numbers), now
            self._discard()
        return ServerLostError(f"the server was started anew: {details}")

    def close(self) -> None:
        """Discard all regions, after the requests in flight have been cancelled."""
        self._closed = True
        self._discard()
        until = time.monotonic() + _CLOSES_WITHIN_S
        while True:
            self._unregister(self._unwanted.copy())
            if not (self._unwanted or self._regions) or time.monotonic() > until:
                return
            time.sleep(0.01)

    def _discard(self) -> None:
        with self._lock:
            free, self._free = self._free, []
        for region in free:
            self.release(region, reusable=False)

    def _new(self, nbytes: int) -> Region:
        folder = self._folder
        if not self._cleaned:
            self._clean(folder)
            self._cleaned = True
        self._unregister(self._unwanted.copy())
        region = Region.create(folder, max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        name = region.path.name
        self._regions[name] = region.path
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=name, key=name, offset=0, byte_size=region.nbytes
        )
        try:
            self._call("SystemSharedMemoryRegister", request, _CALL_TIMEOUT_S)
        except BaseException:  # the server may have registered it all the same
            self.release(region, reusable=False)
            raise
        return region

    def _clean(self, folder: Path) -> None:
        """Remove what clients that were killed, or ended too soon, left here and in the server."""
        for path in folder.glob(f"{PREFIX}-*"):
            pid = path.name.removeprefix(f"{PREFIX}-").partition("-")[0]
            with contextlib.suppress(OSError):
                if path.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                    path.unlink()
        request = service_pb2.SystemSharedMemoryStatusRequest()
        known = self._call("SystemSharedMemoryStatus", request, _CALL_TIMEOUT_S).regions
        self._unregister(
            name for name in known if name.startswith(PREFIX) and not (folder / name).exists()
        )

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


def _unlink(paths: Mapping[str, Path], owner: int) -> None:
    """Remove files when the process that created them, `owner`, ends."""
    if os.getpid() != owner:  # a forked child: they are its parent's
        return
    for path in list(paths.values()):
        with contextlib.suppress(OSError):
            path.unlink()
