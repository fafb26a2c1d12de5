"""Packs and sends the requests of an endpoint, on its own thread, as sending may block.

A token may have to be read, a file of shared memory to be registered, a connection to be made. So
an endpoint that is slow to take requests holds up no other, and not the engine either.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import (
    CancelledError,
    ModelNotFoundError,
    RequestError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.pool._events import Answered, Failed, Unsendable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from sonic_coffea.pool._call import Call
    from sonic_coffea.pool._events import Event
    from sonic_coffea.pool._request import Attempt
    from sonic_coffea.transport import Connection, Lend, Response, RpcHandle

logger = logging.getLogger(__name__)


class Transmission:
    """An attempt as it is packed, sent and cancelled.

    The sender sets the handle and then looks whether it was cancelled; who cancels says so first
    and then looks for the handle. So one of them cancels it, without a lock.
    """

    __slots__ = ("_handle", "attempt", "cancelled", "packing_at", "request_id")

    def __init__(self, attempt: Attempt, request_id: str) -> None:
        self.attempt = attempt
        self.request_id = request_id
        self.packing_at = 0.0
        self._handle: RpcHandle | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel it, now or as soon as it is sent."""
        self.cancelled = True
        if self._handle is not None:
            self._handle.cancel()

    def sent(self, handle: RpcHandle) -> None:
        """Record that it has left."""
        self._handle = handle
        if self.cancelled:
            handle.cancel()


class Sender:
    """The connections to an endpoint, and the thread that sends requests over them.

    There are several connections for a balancer that leads each of them to another server, and for
    a server that is far away. Each is made for the first request that takes it.
    """

    def __init__(self, connection: Connection, post: Callable[[Event], None]) -> None:
        self.connections = [connection]
        self._post = post
        self._inbox: SimpleQueue[tuple[Call, Transmission] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, call: Call, transmission: Transmission) -> None:
        """Have an attempt be packed and sent; a RuntimeError if the system has no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="sonic-send", daemon=True)
            thread.start()
            self._thread = thread
        transmission.attempt.sent_at = math.inf
        self._inbox.put((call, transmission))

    def renew(self, channel: int) -> Connection | None:
        """Make a connection anew, and return the old one, which is to be closed."""
        if channel >= len(self.connections):  # that one was never used
            return None
        old = self.connections[channel]
        self.connections[channel] = old.another()
        return old

    def close(self) -> None:
        """Send nothing more, and close the connections; this may block."""
        self._inbox.put(None)
        for connection in self.connections:
            connection.close()

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            self._transmit(*work)
            # It would keep the tensors until the next request.
            del work

    def _transmit(self, call: Call, transmission: Transmission) -> None:
        attempt = transmission.attempt
        if transmission.cancelled or call.over:
            self._post(Failed(attempt, CancelledError("cancelled before it was sent")))
            return
        try:
            handle = self._send(call, transmission)
        except ServerLostError as error:
            self._post(Failed(attempt, error))
        except SonicError as error:
            self._post(Unsendable(attempt, error))
        except Exception as error:
            logger.debug("a request could not be made", exc_info=True)
            failure = RequestError(f"the request could not be made: {error!r}")
            self._post(Unsendable(attempt, failure))
        else:
            transmission.sent(handle)

    def _send(self, call: Call, transmission: Transmission) -> RpcHandle:
        attempt = transmission.attempt
        request = attempt.slice
        version = call.pin.wanted

        def pack(lend: Lend | None) -> Mapping[str, NDArray[Any]]:
            transmission.packing_at = time.monotonic()
            inputs = call.inputs.pack(request.start, request.stop, lend)
            attempt.sent_at = time.monotonic()
            return inputs

        def done(outcome: Response | SonicError) -> None:
            if not isinstance(outcome, SonicError):
                outcome = call.pin.answered(outcome.version) or outcome
            if isinstance(outcome, ModelNotFoundError):
                call.pin.missed(version)
            if isinstance(outcome, SonicError):
                self._post(Failed(attempt, outcome))
            else:
                times = transmission.packing_at, attempt.sent_at
                self._post(Answered(attempt, outcome, *times, time.monotonic()))

        while attempt.channel >= len(self.connections):
            self.connections.append(self.connections[0].another())
        return self.connections[attempt.channel].infer(
            call.contract,
            pack,
            call.asked,
            nbytes=request.nbytes,
            version=version,
            request_id=transmission.request_id,
            done=done,
        )
