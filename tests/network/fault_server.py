"""A KServe-v2 server on raw HTTP/2, which breaks the protocol's rules on demand.

It answers as a `FakeServer` does, but every frame is its own: so it does what gRPC's servers never
do, and what proxies, balancers and dying servers do. The faults follow gRPC's negative interop
tests (goaway, rst_after_header, rst_during_data, rst_after_data, ping, max_streams), and what
stands before gRPC servers: Envoy, nginx, an ingress. ``grpc/doc/statuscodes.md`` and
``grpc/doc/http-grpc-status-mapping.md`` say what a client makes of some of them.

::

    with FaultServer({"tagger": FakeModel.of(model)}) as server:
        server.misbehave(reset(ErrorCodes.REFUSED_STREAM), times=2)
        server.misbehave(http_status(503, "upstream connect error"), method="ModelMetadata")
        server.connect_badly(garbage(b"SSH-2.0-OpenSSH_9.2\\r\\n"))

A fault of a call is a coroutine function of an `Exchange`, a fault of a connection a function of a
`Connection`; `tests.network.misbehaviour` has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame
from tests.network.loops import LoopThread, close_listener
from tests.ports import held_port
from tritonclient.grpc import service_pb2

from sonic_coffea.testing import FakeServer
from sonic_coffea.testing._servicer import Servicer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

ALL_STREAMS = 2**31 - 1


class FaultServer(FakeServer):
    """A `FakeServer` on HTTP/2 frames of its own; `misbehave` and `connect_badly` break them.

    Attributes
    ----------
    max_streams : int or None
        MAX_CONCURRENT_STREAMS of the connections that are made from now on.
    streams_per_connection : int or None
        How many calls a connection takes before it is ended gracefully, as by max_connection_age.
    connections, alive : int, set
        How many connections have been made, and those that there are.
    calls : list of str
        The methods of all calls that arrived.
    """

    def __init__(self, models: Mapping[str, Any], **options: Any) -> None:
        super().__init__(models, **options)
        self.max_streams: int | None = None
        self.streams_per_connection: int | None = None
        self.connections = 0
        self.calls: list[str] = []
        self.servicer = Servicer(self)
        self._plans: dict[str, list[Iterator[Any]]] = {}
        self._held = contextlib.ExitStack()
        self.alive: set[Connection] = set()
        self._thread: LoopThread | None = None

    def misbehave(self, fault: CallFault, *, times: int = 1, method: str = "ModelInfer") -> None:
        """Have a fault happen to the next calls of a method; see `FakeServer.inject`."""
        self._plans.setdefault(method, []).append(repeat(fault, times))

    def connect_badly(self, fault: ConnectionFault, *, times: int = 1) -> None:
        """Have a fault happen to the next connections."""
        self._plans.setdefault("", []).append(repeat(fault, times))

    def freeze(self) -> None:
        """Answer nothing any more on the connections that there are, as a host that vanished."""
        self._on_each(lambda connection: connection.freeze())

    def break_connections(self, *, reset: bool = False) -> None:
        """Close the connections that there are: by FIN, or by RST."""
        self._on_each(lambda connection: connection.end(reset=reset))

    def start(self) -> Self:
        """Listen; at the same port as before, if it was stopped."""
        if self._thread is None:
            self._port = self._port or self._held.enter_context(held_port())
            self._thread = LoopThread("fault-server")
            self._thread.start()
            self._thread.call(self._listen())
        return self

    def stop(self) -> None:
        """Break all connections and listen no more. May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.call(self._end())
            thread.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._held.close()

    def next_fault(self, method: str) -> Any:
        """Return what goes wrong with the call, or for "" the connection, that has just come."""
        planned = (next(turns, None) for turns in self._plans.get(method, ()))
        return next(filter(None, planned), None)

    def _on_each(self, what: Callable[[Connection], None]) -> None:
        async def act() -> None:
            for connection in list(self.alive):
                what(connection)

        assert self._thread is not None
        self._thread.call(act())

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", self._port, reuse_address=True
        )

    async def _end(self) -> None:
        await close_listener(self._server)
        while self.alive:
            for connection in list(self.alive):
                connection.end(reset=True)
            await asyncio.sleep(0)


class Connection(asyncio.Protocol):
    """One connection: its frames in, and frames out."""

    def __init__(self, server: FaultServer) -> None:
        self.server = server
        self.exchanges: dict[int, Exchange] = {}
        self.writable = asyncio.Event()
        self.frames: H2Connection | None = None
        self.last_stream = ALL_STREAMS  # calls above it are ignored
        self._frozen = False
        self._taken = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.alive.add(self)
        self.server.connections += 1
        fault = self.server.next_fault("")
        if fault is not None:
            fault(self)
        else:
            self.shake_hands()

    def connection_lost(self, _: Exception | None) -> None:
        self.server.alive.discard(self)
        for exchange in self.exchanges.values():
            exchange.cancel()

    def shake_hands(self) -> None:
        """Begin to speak HTTP/2."""
        frames = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        values = {SettingCodes.INITIAL_WINDOW_SIZE: 2**24, SettingCodes.MAX_FRAME_SIZE: 2**14}
        if self.server.max_streams is not None:
            values[SettingCodes.MAX_CONCURRENT_STREAMS] = self.server.max_streams
        frames.local_settings = Settings(client=False, initial_values=values)
        frames.initiate_connection()
        self.frames = frames
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._frozen or self.frames is None:
            return
        try:
            events = self.frames.receive_data(data)
        except ProtocolError:
            self.end()
            return
        for event in events:
            self._take(event)
        self.flush()

    def _take(self, event: Any) -> None:
        assert self.frames is not None
        exchange = self.exchanges.get(getattr(event, "stream_id", 0))
        match event:
            case RequestReceived():
                if event.stream_id <= self.last_stream:
                    self._begin(event)
            case DataReceived():
                self.frames.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if exchange is not None:
                    exchange.request += event.data
            case StreamEnded():
                if exchange is not None:
                    exchange.complete.set()
            case StreamReset():
                if exchange is not None:
                    exchange.cancel()
            case WindowUpdated() | RemoteSettingsChanged():
                self.writable.set()

    def _begin(self, event: RequestReceived) -> None:
        exchange = Exchange(self, event.stream_id, dict(event.headers))
        self.exchanges[event.stream_id] = exchange
        self.server.calls.append(exchange.method)
        fault = self.server.next_fault(exchange.method)
        self._taken += 1
        if self._taken == self.server.streams_per_connection:
            self.goaway(last_stream=event.stream_id)
        exchange.run(fault)

    def ended(self, exchange: Exchange) -> None:
        """Take note that a call is over; a connection on its way out ends with its last one."""
        self.exchanges.pop(exchange.stream_id, None)
        if self.last_stream != ALL_STREAMS and not self.exchanges:
            self.end()

    def goaway(
        self, code: int = ErrorCodes.NO_ERROR, *, last_stream: int, words: bytes = b""
    ) -> None:
        """Say that calls above a stream are not taken; the others go on."""
        self.flush()
        self.last_stream = last_stream
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=code, additional_data=words)
        self.transport.write(frame.serialize())

    def flush(self) -> None:
        """Send the frames that are due."""
        if self.frames is not None and not self._frozen:
            self.transport.write(self.frames.data_to_send())

    def freeze(self) -> None:
        """Take and send no byte any more; to the client, the connection lives."""
        self._frozen = True

    def end(self, *, reset: bool = False) -> None:
        """Close the connection: by FIN after what was sent, or by RST."""
        if reset:
            if not self.transport.is_closing():
                linger = struct.pack("ii", 1, 0)
                sock = self.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.transport.abort()
        else:
            self.transport.close()


class Exchange:
    """One call: what was asked, and the frames of the answer."""

    def __init__(self, connection: Connection, stream_id: int, headers: dict[str, str]) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.headers = headers
        self.method = headers[":path"].rpartition("/")[2]
        self.request = b""
        self.complete = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def run(self, fault: CallFault | None) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(fault or answered))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, fault: CallFault) -> None:
        try:
            # A call that another side has reset, or whose connection has ended, is no error.
            with contextlib.suppress(ProtocolError, KeyError):
                await fault(self)
        finally:
            self.connection.ended(self)

    @property
    def frames(self) -> H2Connection:
        assert self.connection.frames is not None
        return self.connection.frames

    async def answer(self) -> tuple[bytes, grpc.StatusCode, str]:
        """Return what a faultless server answers: a message, or a status and its words."""
        await self.complete.wait()
        request = getattr(service_pb2, f"{self.method}Request").FromString(self.request[5:])
        context = _Context(self.headers)
        try:
            message = getattr(self.connection.server.servicer, self.method)(request, context)
        except _AbortedError as end:
            return b"", *end.args  # type: ignore[return-value]
        payload = message.SerializeToString()
        return b"\0" + struct.pack(">I", len(payload)) + payload, grpc.StatusCode.OK, ""

    def send_headers(self, *more: tuple[str, str], end: bool = False, **pseudo: str) -> None:
        """Send headers: by default those of a good answer."""
        first = {":status": pseudo.get("status", "200")}
        first["content-type"] = pseudo.get("content_type", "application/grpc")
        self.frames.send_headers(self.stream_id, [*first.items(), *more], end_stream=end)
        self.connection.flush()

    async def send_data(self, data: bytes, *, end: bool = False) -> None:
        """Send bytes of the message, as the client's windows allow."""
        while True:
            room = self.frames.local_flow_control_window(self.stream_id)
            part = data[: min(room, self.frames.max_outbound_frame_size)]
            data = data[len(part) :]
            if part or not data:
                self.frames.send_data(self.stream_id, part, end_stream=end and not data)
                self.connection.flush()
            if not data:
                return
            if not part:
                self.connection.writable.clear()
                await self.connection.writable.wait()

    def send_trailers(self, code: grpc.StatusCode, words: str = "") -> None:
        """End the call with a status."""
        trailers = [("grpc-status", str(code.value[0])), ("grpc-message", words)]
        self.frames.send_headers(self.stream_id, trailers, end_stream=True)
        self.connection.flush()

    def reset(self, code: int) -> None:
        """Send RST_STREAM."""
        self.frames.reset_stream(self.stream_id, code)
        self.connection.flush()


class _AbortedError(Exception):
    """What ends a call in the servicer: a status and its words."""


class _Context:
    """What the servicer knows of a call."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [item for item in self._headers.items() if not item[0].startswith(":")]

    def abort(self, code: Any, details: str) -> None:
        raise _AbortedError(code, details)


CallFault = Callable[[Exchange], Awaitable[None]]
ConnectionFault = Callable[[Connection], None]


async def answered(call: Exchange) -> None:
    """Answer rightly: no fault."""
    message, code, words = await call.answer()
    if message:
        call.send_headers()
        await call.send_data(message)
        call.send_trailers(code, words)
    else:
        call.send_headers(("grpc-status", str(code.value[0])), ("grpc-message", words), end=True)
