"""Tensors in shared memory, for a server on this machine.

A region is a file in ``/dev/shm`` that only this user can read; this process maps it and, by its
name, the server. A region holds one request at a time, and the next once the server has answered.
If the server has not, it might still read, and the region is never used again. Triton keeps a
region until a client unregisters it, and refuses to while a request uses it; so the client tries
again until Triton agrees.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2

from sonic_coffea.errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.transport import _regions as regions
from sonic_coffea.transport._local_state import SHARED_MEMORY

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._regions import Region

logger = logging.getLogger(__name__)

EXTENSION = "system_shared_memory"
# Larger requests take less time with it than as messages (`benchmarks/shared_memory.py`).
WORTH_BYTES = 250_000
_SMALLEST = 1 << 20
_KEPT_BYTES = 256_000_000
# Deadline of calls that delay requests.
_CALL_TIMEOUT_S = 2.0
# Back-off between calls that ask the server to unregister: it doubles from the first to the second.
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.01, 1.0
# `close` waits for the first, as the process may end; then a thread waits for the second.
_CLOSES_WITHIN_S, _LINGERS_S = 0.5, 60.0
# This number of calls reaches each of the few servers behind a balancer on this machine.
_ENOUGH_CALLS = 16
_NUMBERED = re.compile(rf"{regions.PREFIX}-[\d-]*-(\d+)")

Call = Callable[[str, Any, float], Any]


@dataclass(slots=True)
class Usability:
    """Whether a server can use shared memory, for all connections to it.

    Attributes
    ----------
    usable : bool or None
        None as long as it is not known.
    reason : str
        Why it cannot be used.
    servers : int
        How often a region has to be unregistered, as there may be several servers behind the URL.
    connections : list of SharedMemory
        Their regions are discarded if the server cannot use them.
    """

    usable: bool | None = None
    reason: str = ""
    servers: int = 1
    connections: list[SharedMemory] = field(default_factory=list)


class SharedMemory:
    """The regions of a connection.

    Parameters
    ----------
    call : callable
        Makes an RPC, by method, request and timeout, and waits for the response.
    known : Usability
        What the connections to the server share.
    demanded : bool
        Whether it is an error if the server cannot use them.
    settled_s : float
        A server that was started anew, or of which there are two, is noticed within this time.
    """

    def __init__(
        self,
        call: Call,
        address: Address,
        known: Usability,
        *,
        demanded: bool,
        settled_s: float = 60.0,
    ) -> None:
        self._call = call
        self._address = address
        self._demanded = demanded
        self._closed = False
        self._changed = threading.Condition()
        self._free: list[Region] = []
        self._unwanted: set[str] = set()
        self._unregistering = False
        self._settled_s = settled_s
        self.known = known
        self.known.connections.append(self)
        self._renewed = (-1, -math.inf)
        self._paths: set[Path] = set()
        self._registers = False
        # However this process ends, short of being killed, no file is left.
        weakref.finalize(self, regions.unlink, self._paths, os.getpid())

    def room(self, nbytes: int, tensors: int) -> Region | None:
        """Return a region for tensors of about `nbytes`; None if the message is to have them.

        May block while the server registers a new region.

        Raises
        ------
        ConfigError
            If the server cannot use shared memory and it was demanded.
        """
        if nbytes < WORTH_BYTES:
            return None
        nbytes += tensors * regions.ALIGNED_BYTES
        if self.known.usable is not False:
            try:
                region = self._take(nbytes) or self._new(nbytes)
            except (ServerLostError, DeadlineError):
                return None  # the request itself fails with the cause
            except (SonicError, OSError) as error:
                self._give_up(str(error))
            else:
                region.lent = 0
                return region
        if self._demanded:
            raise ConfigError(f"shared_memory=True, but {self.known.reason}")
        return None

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
        with self._changed:
            kept = sum(r.nbytes for r in self._free) + region.nbytes <= _KEPT_BYTES
            if reusable and kept and self.known.usable and not self._closed:
                self._free.append(region)
                return
        region.remove()
        self._unregister([region.name])
        with self._changed:
            self._paths.discard(region.path)

    def forget(self) -> None:
        """Discard all regions, as there may be another server at the same address."""
        with self._changed:
            free, self._free = self._free, []
        for region in free:
            self.release(region, reusable=False)

    def unknown(self, details: str) -> str:
        """Discard all regions, as the server does not know one; return what that means.

        The first time, the server was started anew. If it does not know a region that was
        registered since then, it is another server behind a balancer.
        """
        number = int(match[1]) if (match := _NUMBERED.search(details)) else -1
        begun, at = self._renewed
        now = time.monotonic()
        # Only one of the servers that a balancer leads to has to unregister a region.
        self.known.servers = _ENOUGH_CALLS
        if number >= begun:  # else it was in flight when the server was started anew
            if now - at <= self._settled_s:
                self._renewed = (sys.maxsize, now)
                self._give_up("a region is known to one server behind the URL, and not to another")
                return f"the server is not the one that has the tensors: {details}"
            self._renewed = next(regions.numbers), now
            self.forget()
        return f"the server was started anew: {details}"

    def close(self, done: Callable[[], None]) -> None:
        """Discard all regions, after the requests in flight have been cancelled.

        `done` is called when the server has unregistered them, or has been asked for long enough.
        """
        self.known.connections.remove(self)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.forget()

        def linger() -> None:
            self._unregister_for(_LINGERS_S)
            done()

        if self._unregister_for(_CLOSES_WITHIN_S) or not _started(linger):
            done()

    def _take(self, nbytes: int) -> Region | None:
        with self._changed:
            fitting = [r for r in self._free if r.nbytes >= nbytes]
            best = min(fitting, key=lambda r: r.nbytes, default=None)
            if best is not None:
                self._free.remove(best)
            return best

    def _new(self, nbytes: int) -> Region:
        if self.known.usable is None:
            regions.remove_stale()
            request = service_pb2.ServerMetadataRequest()
            extensions = self._call("ServerMetadata", request, _CALL_TIMEOUT_S).extensions
            if EXTENSION not in extensions:
                raise ConfigError(f"it does not have the extension {EXTENSION}")
        region = regions.create(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        self._paths.add(region.path)
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=region.name, key=region.name, offset=0, byte_size=region.nbytes
        )
        self._registers = True
        try:
            self._call("SystemSharedMemoryRegister", request, _CALL_TIMEOUT_S)
        except BaseException:  # the server may have registered it all the same
            self.release(region, reusable=False)
            raise
        # Only now is it known that the server sees the same files.
        if self.known.usable is None:
            self.known.usable = True
            # Clients that were killed left some, or did not wait until all were unregistered.
            _started(lambda: self._unregister(self._orphans(regions.user_prefix(), math.inf)))
        return region

    def _orphans(self, prefix: str, until: float) -> set[str]:
        """Return registered regions whose files are gone, of all servers behind the URL."""
        request = service_pb2.SystemSharedMemoryStatusRequest()
        registered: set[str] = set()
        for _ in range(_ENOUGH_CALLS):
            timeout_s = min(_CALL_TIMEOUT_S, until - time.monotonic())
            try:
                registered.update(
                    self._call("SystemSharedMemoryStatus", request, timeout_s).regions
                )
            except SonicError as error:
                logger.debug("%s does not tell its registered regions: %s", self._address, error)
                break
        return {n for n in registered if n.startswith(prefix) and not (SHARED_MEMORY / n).exists()}

    def _unregister(self, names: Iterable[str]) -> None:
        """Have the server unregister regions when it can, without waiting for it."""
        with self._changed:
            self._unwanted.update(names)
            if self._unregistering or self._closed or not self._unwanted:
                return
            self._unregistering = True
        if not _started(lambda: self._unregister_for(math.inf, closing=False)):
            self._unregistering = False

    def _unregister_for(self, most_s: float, *, closing: bool = True) -> bool:
        """Ask the server to unregister, with back-off; return whether it has nothing left."""
        until, backoff_s = time.monotonic() + most_s, _MIN_BACKOFF_S
        while True:
            self._unregister_each(until)
            with self._changed:
                left_s = until - time.monotonic()
                settled = not self._unwanted and not (closing and self._paths)
                if settled or left_s <= 0 or (self._closed and not closing):
                    self._unregistering = False
                    return settled
                self._changed.wait(min(backoff_s, left_s))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _unregister_each(self, until: float) -> None:
        with self._changed:
            names = list(self._unwanted)
        for name in names:
            timeout_s = min(_CALL_TIMEOUT_S, until - time.monotonic())
            request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
            try:
                for _ in range(self.known.servers):
                    self._call("SystemSharedMemoryUnregister", request, timeout_s)
            except DeadlineError:  # the others would take as long
                return
            except (ServerLostError, CancelledError):
                if self.known.servers > 1 and not self._closed:  # another one may be lost
                    continue
                # Mappings end with the process.
            except SonicError as error:  # in use
                logger.debug("%s", error)
                continue
            with self._changed:
                self._unwanted.discard(name)
        if self._closed and self._registers and not self._unwanted:
            # Before it was known that there are several servers, only one of them was asked.
            left = self._orphans(regions.process_prefix(os.getpid()), until)
            with self._changed:
                self.known.servers = _ENOUGH_CALLS if left else self.known.servers
                self._unwanted |= left

    def _give_up(self, why: str) -> None:
        """Use messages from now on: a container or a tunnel does not see this machine's memory."""
        reason = f"{self._address} cannot use shared memory: {why}"
        news = self.known.usable is not False
        self.known.usable, self.known.reason = False, reason
        if news and not self._demanded:
            logger.info("%s; tensors travel in messages", reason)
        for connection in list(self.known.connections):
            connection.forget()


def shares(address: Address, *, wanted: bool | str) -> bool:
    """Whether shared memory is to be tried with a server.

    Raises
    ------
    ConfigError
        If it is demanded where it cannot be.
    """
    possible = address.loopback and sys.platform == "linux" and SHARED_MEMORY.is_dir()
    if wanted is True and not possible:
        raise ConfigError(
            f"shared_memory=True, but {address} is not on this machine; use 'auto' or False"
        )
    return bool(wanted) and possible


def _started(target: Callable[[], object]) -> bool:
    """Start a thread; False if none can be, as when the interpreter ends."""
    try:
        threading.Thread(target=target, name="sonic-memory", daemon=True).start()
    except RuntimeError:
        return False
    return True
