"""Tensors in shared memory, for a server on this machine that is asked to read them there.

A region is memory that this process and the server map. Only this user may open its file, which is
removed as soon as the server has opened it. A region holds one request at a time. It is used again
once the server has answered; without an answer, the server might still read it, so it is not.
Triton keeps a region until a client unregisters it, which it refuses while a request uses the
region. Regions that are left are unregistered before the next one is made, when the connection is
closed, or by the next client.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from sonic_coffea import errors
from sonic_coffea.errors import ConfigError, SonicError
from sonic_coffea.transport._address import Address
from sonic_coffea.transport._heap import LARGE_BYTES
from sonic_coffea.transport._transport import PROMPT_S

_FOLDER = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is
_NAME = re.compile(r"sonic-coffea-client-(?P<pid>\d+)-(?P<round>\d+)-[0-9a-f]+")
# If what listens at a port forgets regions twice within this time, it is a balancer of several
# servers.
_SETTLED_S = 60.0

Call = Callable[[str, Any, float], Any]
Release = Callable[..., None]
"""Takes a region back; it is not ``reusable=`` if the server might still read it."""


class Region(NamedTuple):
    """Memory that is mapped here and by the server."""

    name: str
    memory: NDArray[np.uint8]


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
        if not (address.loopback and sys.platform == "linux" and _FOLDER.is_dir()):
            raise ConfigError(f"shared_memory=True, but {address} is not on this machine")
        self._call, self._address = call, address
        self._lock = threading.Lock()
        self._free: list[Region] = []
        # Regions that the server still has, and should unregister.
        self._unwanted: set[str] = set()
        self._used = 0
        self._closed = self._cleaned = False
        # How often all regions were discarded, and when last.
        self._round, self._discarded_at = 0, -math.inf

    def place(self, request: Any, tensors: Iterable[NDArray[Any]], nbytes: int) -> Release | None:
        """Put a request's tensors into a region, and return what takes the region back.

        None if the message is to have the tensors. May block while the server registers a new
        region.

        Raises
        ------
        ConfigError
            If the server cannot use shared memory.
        """
        if nbytes < LARGE_BYTES:  # a message takes less time
            return None
        region = self._region(nbytes + (len(request.inputs) + 1) * mmap.PAGESIZE)
        if region is None:
            return None
        offset = mmap.PAGESIZE  # Triton refuses an empty tensor at 0
        for entry, tensor in zip(request.inputs, tensors, strict=True):
            np.copyto(np.ndarray(tensor.shape, tensor.dtype, region.memory, offset), tensor)
            entry.parameters["shared_memory_region"].string_param = region.name
            entry.parameters["shared_memory_byte_size"].int64_param = tensor.nbytes
            entry.parameters["shared_memory_offset"].int64_param = offset
            offset += -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return partial(self._release, region)

    def _region(self, nbytes: int) -> Region | None:
        """Return a region of at least a size; None if the server is lost."""
        with self._lock:
            if self._closed:
                raise errors.CancelledError("the connection is closed", server=str(self._address))
            self._used += 1
            fitting = [r for r in self._free if r.memory.nbytes >= nbytes]
            region = min(fitting, key=lambda r: r.memory.nbytes, default=None)
            if region is not None:
                self._free.remove(region)
                return region
        try:
            return self._new(nbytes)
        except BaseException as error:
            with self._lock:
                self._used -= 1
            if isinstance(error, errors.ServerLostError | errors.DeadlineError | FileNotFoundError):
                # The request fails with the cause: a server that ends takes its folder along.
                return None
            if isinstance(error, SonicError | OSError):
                raise self._unusable(str(error)) from None
            raise

    def _release(self, region: Region, *, reusable: bool) -> None:
        with self._lock:
            self._used -= 1
            if reusable and not self._closed:
                self._free.append(region)
            else:
                self._unwanted.add(region.name)

    def close(self) -> None:
        """Discard all regions, after the requests in flight have been cancelled."""
        with self._lock:
            self._closed = True
        self._discard()
        until = time.monotonic() + PROMPT_S
        while True:
            self._unregister(self._unwanted.copy())
            if not (self._unwanted or self._used) or time.monotonic() > until:
                return
            time.sleep(0.01)

    def unknown(self, details: str) -> SonicError | None:
        """Discard all regions, as the server does not know one; return an error if it never will.

        A server that was started anew knows those that are made from now on.
        """
        match, now = _NAME.search(details), time.monotonic()
        if match is not None and int(match["round"]) < self._round:  # it was in flight then
            return None
        # At a Unix socket is one server, which may crash twice.
        if self._address.path is None and now - self._discarded_at <= _SETTLED_S:
            return self._unusable("there are several servers behind the URL")
        self._round, self._discarded_at = self._round + 1, now
        self._discard()
        return None

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
            known = self._call("SystemSharedMemoryStatus", request, PROMPT_S).regions
            matches = [match for match in map(_NAME.fullmatch, known) if match is not None]
            left.update(m[0] for m in matches if not Path("/proc", m["pid"]).exists())
            self._cleaned = True
        self._unregister(left)
        nbytes = 1 << (nbytes - 1).bit_length()
        name = f"sonic-coffea-client-{os.getpid()}-{self._round}-{uuid.uuid4().hex}"
        # A local server has a folder of its own.
        own = Path(self._address.path or "/").parent / "shm"
        path = (own if own.is_dir() else _FOLDER) / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Writing to memory that is not reserved may kill the process, by SIGBUS.
            os.posix_fallocate(fd, 0, nbytes)
            # The server may have registered it also if the call fails.
            self._unwanted.add(name)
            request = service_pb2.SystemSharedMemoryRegisterRequest(
                name=name, key=name, offset=0, byte_size=nbytes
            )
            self._call("SystemSharedMemoryRegister", request, PROMPT_S)
            self._unwanted.discard(name)
            return Region(name, np.frombuffer(mmap.mmap(fd, nbytes), np.uint8))
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)

    def _unregister(self, names: Iterable[str]) -> None:
        for name in names:
            request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
            try:
                self._call("SystemSharedMemoryUnregister", request, PROMPT_S)
            except errors.DeadlineError:  # the others would take as long
                return
            except errors.ServerLostError:  # mappings end with the process
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
