"""The owner of a loopback port: this user's server, or another user, who is sent nothing.

On a machine of many users a port is nobody's: where a local server has ended, any user may listen.
Two things keep its secret, and rows, from them.

The port is held. Linux lets several sockets have a port if all of them ask for that
(``SO_REUSEPORT``) and belong to one user. A local server asks for it; so do its owner and each
client, by a socket that is bound and does not listen. While one of them is there, no other user
can listen at the port; where another user is there first, holding it fails. Calls cost no more.

The server is watched. A connection to a local server is one to a process: once that has ended, no
call is made, until the server's owner has recorded the next. The record of a server that ended by
itself stays, so that clients who come later do not take what listens there for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sonic_coffea.errors import ServerLostError, ServerStartError
from sonic_coffea.transport import _local_state as local_state

if TYPE_CHECKING:
    from typing import Self

    from sonic_coffea.transport._address import Address

# Where local servers listen; localhost may also be ::1, which is another port.
_HOST = "127.0.0.1"
_SHARED = sys.platform == "linux"
_SHARE: int = getattr(socket, "SO_REUSEPORT", socket.SO_REUSEADDR)
# A server that was killed a moment ago may still have its port.
_CLAIMS_WITHIN_S = 2.0
# As the kernel writes them: the state of a listening socket; this address, and those that have it.
_LISTENS = "0A"
_ADDRESSES = ("0100007F", "00000000")


class HeldPort:
    """A loopback port that no other user can take until it is released.

    Where the system does not tell users apart, nothing is held.
    """

    def __init__(self, number: int, fd: int | None) -> None:
        self.number = number
        self.release: Callable[[], object] = (
            (lambda: None) if fd is None else weakref.finalize(self, os.close, fd)
        )

    @classmethod
    def hold(cls, number: int = 0) -> Self:
        """Hold a port; by default a free one.

        Raises
        ------
        OSError
            If another user has the port, or a program that does not share it.
        """
        with _bound(number, _SHARE if _SHARED else socket.SO_REUSEADDR) as bound:
            port: int = bound.getsockname()[1]
            return cls(port, bound.detach() if _SHARED else None)

    @classmethod
    def claim(cls, number: int | None) -> Self:
        """Hold a port for a server: a free one, or a given one if nobody listens there.

        Raises
        ------
        ServerStartError
            If the port is in use.
        """
        if not number:
            return cls.hold()
        until = time.monotonic() + _CLAIMS_WITHIN_S
        while time.monotonic() < until:
            if not _listeners(number):
                with contextlib.suppress(OSError):
                    return cls.hold(number)
                # What connections of an earlier server left keeps it from being held for a minute.
                with contextlib.suppress(OSError), _bound(number, socket.SO_REUSEADDR, _SHARE):
                    return cls(number, None)
            time.sleep(0.05)
        raise ServerStartError(
            f"port {number} is in use, by another program or a server of yours, which "
            "`sonic-coffea status` lists; leave port out for a free one"
        )


def _bound(number: int, *options: int) -> socket.socket:
    bound = socket.socket()
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((_HOST, number))
    except BaseException:
        bound.close()
        raise
    return bound


def _listeners(port: int) -> set[int]:
    """Return the numbers of the users who listen at a port of this address."""
    users = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, _, _, _, user, *_ = line.split()
                address, _, number = local.partition(":")
                if state == _LISTENS and int(number, 16) == port and address.endswith(_ADDRESSES):
                    users.add(int(user))
    return users


class LocalPeer:
    """The local server of this user at an address, where there is one."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._record: local_state.ServerRecord | None = None
        self._held: HeldPort | None = None
        self._reached: tuple[Address, Mapping[str, str]] = address, {}
        # The first call looks it up.
        self._running: Callable[[], bool] = lambda: not address.loopback

    def reach(self) -> tuple[Address, Mapping[str, str]]:
        """Return, for one call, where the server listens, and the headers that it demands.

        Reads the record of the server when it has ended, and the first time. Another server than
        one of this user demands nothing.

        Raises
        ------
        ServerLostError
            If it has ended, or another user has its port; once if it was started anew.
        """
        with self._lock:
            if not self._running():
                self._look_up()
            return self._reached

    def look_up(self) -> Mapping[str, str]:
        """Read the record again after a failure, and return the headers that it has now."""
        with self._lock, contextlib.suppress(ServerLostError):
            if self._address.loopback:
                self._look_up()
            return self._reached[1]
        return {}

    def close(self) -> None:
        """Release the port."""
        if self._held is not None:
            self._held.release()

    def _look_up(self) -> None:
        self._running = lambda: False
        record = local_state.find(self._address.url)
        before, known = self._record, record or self._record
        if known is None:
            self._running = lambda: True
            return
        if not self._is_own() or record is None or not record.alive:
            raise self._refusal(known)
        self._record, self._running = record, _watch(record)
        self._reached = replace(self._address, host=_HOST), record.headers
        if before not in (None, record):
            # It may have other models.
            raise ServerLostError("the local server was started anew", server=record.url)

    def _is_own(self) -> bool:
        """Hold the port, and return whether only this user listens there."""
        if self._held is None and _SHARED:
            try:
                self._held = HeldPort.hold(self._address.port)
            except OSError:
                return _listeners(self._address.port) == {os.getuid()}
        return True

    def _refusal(self, record: local_state.ServerRecord) -> ServerLostError:
        port = self._address.port
        state = f"lost port {port}" if record.alive else f"has ended (process {record.pid})"
        others = _listeners(port) - {os.getuid()}
        listener = f"another user, who has port {port} now," if others else "what listens there now"
        path = local_state.record_path(record.url)
        return ServerLostError(
            f"the local server {state}; {listener} is sent neither its secret nor rows. "
            f"If another server is meant to be there, remove {path}",
            server=str(self._address),
        )


def _watch(record: local_state.ServerRecord) -> Callable[[], bool]:
    """Return a function that says whether a server still runs; each request calls it."""
    try:
        fd = os.pidfd_open(record.pid)
    except (AttributeError, OSError):
        return lambda: record.alive
    ended = select.poll()
    ended.register(fd, select.POLLIN)

    def running() -> bool:
        return not ended.poll(0)

    weakref.finalize(running, os.close, fd)
    return running
