"""Tensors that a server on this machine reads where they are, instead of from the message.

A file in ``/dev/shm`` that only this user can read is mapped here and, by its name, by the server.
It is used for one request at a time, and for the next when the server has answered. If it has not,
it might still read, and the file is never used again. Triton keeps what it has mapped until it is
told to let go, and refuses that while a request uses it; so it is asked again until it agrees.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import os
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

from sonic_coffea.errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.transport._local_state import process_start_ticks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sonic_coffea.transport._address import Address

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is
PREFIX = "sonic-coffea-client"
EXTENSION = "system_shared_memory"
# From about here on, requests take less time with it than as messages, and the larger they are, the
# less in proportion (`benchmarks/shared_memory.py`).
WORTH_BYTES = 250_000
_SMALLEST = 1 << 20
_KEPT_BYTES = 256_000_000
_ALIGNED = 64
_LOST_WORDS = "unable to find shared memory region"
# What delays requests must be answered in this time.
_SOON_S = 2.0
# The server is asked again to let go after the first of these, then twice as long, up to the last.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 1.0
# `close` waits for it so long, as the process may end; a thread goes on for at most the second.
_CLOSES_WITHIN_S, _LINGERS_S = 0.5, 60.0

Ask = Callable[[str, Any, float], Any]


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
        Makes a call of the protocol, by method, request and deadline, and waits for the answer.
    address : Address
        The server.
    demanded : bool
        Whether it is an error if the server cannot use them.
    """

    def __init__(self, ask: Ask, address: Address, *, demanded: bool) -> None:
        self._ask = ask
        self._address = address
        self._demanded = demanded
        self._closed = False
        self._changed = threading.Condition()
        self._free: list[Region] = []
        self._owed: set[str] = set()
        self._asking = False
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
        """Have a region be used again: nobody reads it any more."""
        with self._changed:
            kept = sum(r.nbytes for r in self._free) + region.nbytes <= _KEPT_BYTES
            if kept and not self._closed:
                self._free.append(region)
                return
        self.discard(region)

    def discard(self, region: Region) -> None:
        """Never use a region again: the server might still read it, and lets go of it then."""
        region.remove()
        self._owe([region.name])
        with self._changed:
            self._paths.discard(region.path)

    def forget(self) -> None:
        """Begin anew, with what may be another server at the same address."""
        with self._changed:
            free, self._free = self._free, []
        for region in free:
            self.discard(region)

    def close(self, done: Callable[[], None]) -> None:
        """Let go of all, once what is out has been cancelled.

        Parameters
        ----------
        done : callable
            Called when the server has let go, too, or has been asked for long enough.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.forget()

        def settled() -> bool:
            return not self._owed and not self._paths

        def linger() -> None:
            self._ask_until(settled, _LINGERS_S)
            done()

        self._ask_until(settled, _CLOSES_WITHIN_S)
        if settled() or not _started(linger):
            done()

    def _take(self, nbytes: int) -> Region | None:
        with self._changed:
            fitting = [r for r in self._free if r.nbytes >= nbytes]
            best = min(fitting, key=lambda r: r.nbytes, default=None)
            if best is not None:
                self._free.remove(best)
            return best

    def _new(self, nbytes: int) -> Region:
        if self._usable is None:
            _remove_stale()
            request = service_pb2.ServerMetadataRequest()
            extensions = self._ask("ServerMetadata", request, _SOON_S).extensions
            if EXTENSION not in extensions:
                raise ConfigError(f"it does not have the extension {EXTENSION}")
        region = _create(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        self._paths.add(region.path)
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=region.name, key=region.name, offset=0, byte_size=region.nbytes
        )
        try:
            self._ask("SystemSharedMemoryRegister", request, _SOON_S)
        except BaseException:  # the server may have it all the same
            self.discard(region)
            raise
        if self._usable is None:
            # Only now is it known that the server sees the same files.
            self._usable = True
            self._owe(self._left())
        return region

    def _left(self) -> list[str]:
        """Return regions of this user whose files are gone: nobody uses them any more.

        Clients that were killed left them, or did not wait until the server let go of them.
        """
        request = service_pb2.SystemSharedMemoryStatusRequest()
        try:
            registered = self._ask("SystemSharedMemoryStatus", request, _SOON_S).regions
        except SonicError as error:
            logger.debug("%s does not say what it has registered: %s", self._address, error)
            return []
        return [n for n in registered if n.startswith(_ours()) and not (FOLDER / n).exists()]

    def _owe(self, names: Iterable[str]) -> None:
        """Have the server let go of regions when it can, which is not waited for."""
        with self._changed:
            self._owed.update(names)
            if self._asking or self._closed or not self._owed:
                return
            self._asking = True
        if not _started(self._ask_while_open):
            self._asking = False

    def _ask_while_open(self) -> None:
        def over() -> bool:
            self._asking = not self._closed and bool(self._owed)
            return not self._asking

        self._ask_until(over, math.inf)

    def _ask_until(self, over: Callable[[], bool], most_s: float) -> None:
        """Ask the server again and again to let go, for at most so long."""
        until, pause_s = time.monotonic() + most_s, _FIRST_PAUSE_S
        while True:
            self._ask_each(until)
            with self._changed:
                left_s = until - time.monotonic()
                if over() or left_s <= 0:
                    return
                self._changed.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _ask_each(self, until: float) -> None:
        with self._changed:
            names = list(self._owed)
        for name in names:
            timeout_s = min(_SOON_S, until - time.monotonic())
            if timeout_s <= 0:
                return
            request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
            try:
                self._ask("SystemSharedMemoryUnregister", request, timeout_s)
            except DeadlineError:  # it would be the same for the others
                return
            except (ServerLostError, CancelledError):
                pass  # what a process has mapped goes with it
            except SonicError as error:  # in use
                logger.debug("%s", error)
                continue
            with self._changed:
                self._owed.discard(name)

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


def _started(target: Callable[[], None]) -> bool:
    """Start a thread; False if none can be, as when the interpreter ends."""
    try:
        threading.Thread(target=target, name="sonic-memory", daemon=True).start()
    except RuntimeError:
        return False
    return True


_numbers = itertools.count()


def _create(nbytes: int) -> Region:
    """Make a file of a size that there is room for."""
    number = next(_numbers)
    path = FOLDER / f"{_of(os.getpid())}-{number}"
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


def _ours() -> str:
    """Return how the names of this user's files begin; numbers mean something in a namespace."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{PREFIX}-{os.getuid()}-{namespace}-"


def _of(pid: int) -> str:
    """Return how the names of a process's files begin."""
    return f"{_ours()}{pid}-{process_start_ticks(pid)}"


def _remove_stale() -> None:
    """Remove what processes of this user left that were killed."""
    for path in FOLDER.glob(f"{_ours()}*"):
        with contextlib.suppress(ValueError, OSError):
            pid = int(path.name.removeprefix(_ours()).split("-")[0])
            if not path.name.startswith(f"{_of(pid)}-") and path.stat().st_uid == os.getuid():
                path.unlink()


def _unlink(paths: set[Path], owner: int) -> None:
    if os.getpid() != owner:  # a forked child: they are its parent's
        return
    for path in list(paths):
        with contextlib.suppress(OSError):
            path.unlink()
