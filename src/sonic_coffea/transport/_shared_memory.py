"""Tensors that a server on this machine reads where they are, instead of from the message.

A file in ``/dev/shm`` that only this user can read is mapped here and, by its name, by the server.
It is used for one request at a time, and for the next when the server has answered. If it has not,
it might still read, and the file is never used again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.grpc import service_pb2

from sonic_coffea.errors import ConfigError, DeadlineError, ServerLostError, SonicError
from sonic_coffea.local_state import process_start_ticks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sonic_coffea.transport._address import Address

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is
PREFIX = "sonic-coffea-client"
EXTENSION = "system_shared_memory"
# Requests of 0.3 MB to Triton 2.51 on loopback take 0.9 times as long with it, of 1 MB 0.7, of
# 10 MB 0.5, of 100 MB 0.1 (`benchmarks/shared_memory.py`).
WORTH_BYTES = 250_000
_SMALLEST = 1 << 20
_KEPT_BYTES = 256_000_000
_ALIGNED = 64
_LOST_WORDS = "unable to find shared memory region"

Ask = Callable[[str, Any], Any]
Tell = Callable[[str, Any], None]


@dataclass(slots=True, eq=False)
class Region:
    """A file that is mapped here and, once it is registered, by the server."""

    path: Path
    memory: mmap.mmap
    nbytes: int

    @property
    def name(self) -> str:
        """By which the server knows it."""
        return self.path.name

    def fill(self, inputs: Any, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Copy tensors into it, and say in a request's inputs where they are."""
        start = 0
        for one, tensor in zip(inputs, tensors.values(), strict=True):
            np.copyto(np.ndarray(tensor.shape, tensor.dtype, self.memory, start), tensor)
            one.parameters["shared_memory_region"].string_param = self.name
            one.parameters["shared_memory_byte_size"].int64_param = tensor.nbytes
            one.parameters["shared_memory_offset"].int64_param = start
            start += _padded(tensor.nbytes)

    def remove(self) -> None:
        """Let go of the file and the mapping, here."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):  # someone looks at it still; it goes with them
            self.memory.close()


class SharedMemory:
    """The regions of a connection.

    Parameters
    ----------
    ask : callable
        Makes a call of the protocol, by method and request, and waits for the answer.
    tell : callable
        Makes one without waiting; what becomes of it does not matter.
    address : Address
        The server.
    demanded : bool
        Whether it is an error if the server cannot use them.
    """

    def __init__(self, ask: Ask, tell: Tell, address: Address, *, demanded: bool) -> None:
        self._ask = ask
        self._tell = tell
        self._address = address
        self._demanded = demanded
        self._closed = False
        self._lock = threading.Lock()
        self._free: list[Region] = []
        self._usable: bool | None = None
        self._paths: set[Path] = set()
        # However this process ends, short of being killed, no file is left.
        self._finalizer = weakref.finalize(self, _unlink, self._paths, os.getpid())

    def place(self, tensors: Mapping[str, NDArray[Any]], inputs: Any) -> Region | None:
        """Put a request's tensors where the server reads them; None if the message is to have them.

        Raises
        ------
        ConfigError
            If the server cannot use shared memory and it was demanded.
        """
        nbytes = sum(_padded(t.nbytes) for t in tensors.values())
        if nbytes < WORTH_BYTES or self._usable is False:
            return None
        try:
            region = self._take(nbytes) or self._new(nbytes)
        except (ServerLostError, DeadlineError):
            return None  # what becomes of the request says more
        except (SonicError, OSError) as error:
            self._give_up(error)
            return None
        region.fill(inputs, tensors)
        return region

    def release(self, region: Region) -> None:
        """Have a region be used again: the server has answered."""
        with self._lock:
            kept = sum(r.nbytes for r in self._free) + region.nbytes <= _KEPT_BYTES
            if kept and not self._closed:
                self._free.append(region)
                return
        self.discard(region)

    def discard(self, region: Region) -> None:
        """Never use a region again: the server might still read it."""
        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=region.name)
        self._tell("SystemSharedMemoryUnregister", request)
        region.remove()
        self._paths.discard(region.path)

    def forget(self) -> None:
        """Begin anew, with what may be another server at the same address."""
        with self._lock:
            free, self._free = self._free, []
        for region in free:
            self.discard(region)

    def close(self) -> None:
        """Let go of all; what is out is removed when it ends."""
        self._closed = True
        self.forget()

    def _take(self, nbytes: int) -> Region | None:
        with self._lock:
            fitting = [r for r in self._free if r.nbytes >= nbytes]
            best = min(fitting, key=lambda r: r.nbytes, default=None)
            if best is not None:
                self._free.remove(best)
            return best

    def _new(self, nbytes: int) -> Region:
        if self._usable is None:
            _remove_stale()
            extensions = self._ask("ServerMetadata", service_pb2.ServerMetadataRequest()).extensions
            if EXTENSION not in extensions:
                raise ConfigError(f"it does not have the extension {EXTENSION}")
        region = _create(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        self._paths.add(region.path)
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=region.name, key=region.name, offset=0, byte_size=region.nbytes
        )
        try:
            self._ask("SystemSharedMemoryRegister", request)
        except BaseException:
            region.remove()
            self._paths.discard(region.path)
            raise
        self._usable = True
        return region

    def _give_up(self, error: Exception) -> None:
        """Use messages from now on: a container or a tunnel does not see this machine's memory."""
        reason = f"{self._address} cannot use shared memory: {error}"
        if self._demanded:
            raise ConfigError(f"shared_memory=True, but {reason}") from None
        self._usable = False
        logger.info("%s; tensors travel in messages", reason)


def shares(address: Address, *, wanted: bool | str) -> bool:
    """Whether shared memory is to be tried with a server.

    Raises
    ------
    ConfigError
        If it is demanded where it cannot be.
    """
    possible = address.loopback and sys.platform == "linux" and FOLDER.is_dir()
    if wanted is True and not possible:
        raise ConfigError(
            f"shared_memory=True, but {address} is not on this machine; use 'auto' or False"
        )
    return bool(wanted) and possible


def lost_words(details: str | None) -> bool:
    """Whether a server says that it does not know a region: it is not the one that did."""
    return _LOST_WORDS in (details or "").lower()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


_numbers = itertools.count()


def _create(nbytes: int) -> Region:
    """Make a file of a size that there is room for."""
    number = next(_numbers)
    path = FOLDER / f"{_mine(os.getpid())}-{number}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Writing to memory that turns out not to be there would kill the process.
        os.posix_fallocate(fd, 0, nbytes)
        memory = mmap.mmap(fd, nbytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return Region(path, memory, nbytes)


def _mine(pid: int) -> str:
    """Return how the names of a process's files begin; numbers mean something in a namespace."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{PREFIX}-{os.getuid()}-{namespace}-{pid}-{process_start_ticks(pid)}"


def _remove_stale() -> None:
    """Remove what processes of this user left that were killed."""
    for path in FOLDER.glob(f"{PREFIX}-{os.getuid()}-*"):
        parts = path.name.removeprefix(f"{PREFIX}-").split("-")
        with contextlib.suppress(ValueError, IndexError, OSError):
            alive = path.name.startswith(f"{_mine(int(parts[2]))}-")
            here = int(parts[1]) == Path("/proc/self/ns/pid").stat().st_ino
            if here and not alive and path.stat().st_uid == os.getuid():
                path.unlink()


def _unlink(paths: set[Path], owner: int) -> None:
    if os.getpid() != owner:  # a forked child: they are its parent's
        return
    for path in list(paths):
        with contextlib.suppress(OSError):
            path.unlink()
