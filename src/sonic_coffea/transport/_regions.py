"""Regions of shared memory: files that this process and a server map."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.transport._local_state import SHARED_MEMORY, process_start_ticks

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFIX = "sonic-coffea-client"
ALIGNED_BYTES = 64

Lend = Callable[[tuple[int, ...], np.dtype[Any]], "NDArray[Any] | None"]
"""Returns memory for a tensor, by shape and type; None if there is no room."""


@dataclass(slots=True, eq=False)
class Region:
    """A file that is mapped here and, once it is registered, by the server.

    Attributes
    ----------
    address : int
        Where the memory begins in this process.
    lent : int
        Number of its bytes that are lent to tensors, or taken by them.
    """

    path: Path
    memory: mmap.mmap
    nbytes: int
    address: int
    lent: int = 0

    @property
    def name(self) -> str:
        """The name by which the server knows it."""
        return self.path.name

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """Return a part of it, to write a tensor to; None if there is no room."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self.lent + nbytes > self.nbytes:
            return None
        tensor: NDArray[Any] = np.ndarray(shape, dtype, self.memory, self.lent)
        self.lent += -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return tensor

    def offset_of(self, tensor: NDArray[Any]) -> int | None:
        """Return where a tensor lies in it; None if it lies elsewhere, or not in one piece."""
        offset: int = tensor.__array_interface__["data"][0] - self.address
        inside = offset >= 0 and offset + tensor.nbytes <= self.nbytes
        return offset if inside and tensor.flags.c_contiguous else None

    def fill(self, inputs: Any, tensors: Mapping[str, NDArray[Any]]) -> bool:
        """Copy tensors into it that are not there, and write into a request where they are.

        False if there is no room for all.
        """
        for entry, tensor in zip(inputs, tensors.values(), strict=True):
            offset = self.offset_of(tensor)
            if offset is None:
                offset, copy = self.lent, self.lend(tensor.shape, tensor.dtype)
                if copy is None:
                    return False
                np.copyto(copy, tensor)
            entry.parameters["shared_memory_region"].string_param = self.name
            entry.parameters["shared_memory_byte_size"].int64_param = tensor.nbytes
            entry.parameters["shared_memory_offset"].int64_param = offset
        return True

    def remove(self) -> None:
        """Remove the file and the mapping of this process."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):  # an array still refers to it
            self.memory.close()


numbers = itertools.count()
"""The numbers of regions, in the order in which they are created."""


def create(nbytes: int) -> Region:
    """Create a region, whose memory is reserved."""
    path = SHARED_MEMORY / f"{process_prefix(os.getpid())}-{next(numbers)}"
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
    return Region(path, memory, nbytes, address)


def user_prefix() -> str:
    """Return how the names of this user's files begin; process numbers hold in a namespace."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{PREFIX}-{os.getuid()}-{namespace}-"


def process_prefix(pid: int) -> str:
    """Return how the names of a process's files begin."""
    return f"{user_prefix()}{pid}-{process_start_ticks(pid)}"


def remove_stale() -> None:
    """Remove the files of this user's processes that were killed."""
    for path in SHARED_MEMORY.glob(f"{user_prefix()}*"):
        with contextlib.suppress(ValueError, OSError):
            pid = int(path.name.removeprefix(user_prefix()).split("-")[0])
            alive = path.name.startswith(f"{process_prefix(pid)}-")
            if not alive and path.stat().st_uid == os.getuid():
                path.unlink()


def unlink(paths: set[Path], owner: int) -> None:
    """Remove files when the process that created them, `owner`, ends."""
    if os.getpid() != owner:  # a forked child: they are its parent's
        return
    for path in list(paths):
        with contextlib.suppress(OSError):
            path.unlink()
