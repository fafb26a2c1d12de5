"""A KServe-v2 server on raw HTTP/2, which breaks the protocol's rules on demand.

It answers as a `FakeServer` does, but every frame is its own: so it does what gRPC's servers never
do, and what proxies, balancers and dying servers do. The faults follow gRPC's negative interop
tests (goaway, rst_after_header, rst_during_data, rst_after_data), and what stands before gRPC
servers: Envoy, nginx, an ingress. ``grpc/doc/statuscodes.md`` and
``grpc/doc/http-grpc-status-mapping.md`` say what a client makes of some of them.

::

    with FaultServer({"tagger": FakeModel.of(model)}) as server:
        server.misbehave(reset(ErrorCodes.REFUSED_STREAM), times=2)
        server.misbehave(http_status(503, "upstream connect error"), method="ModelMetadata")
        server.misbehave(garbage(b"SSH-2.0-OpenSSH_9.2\\r\\n"), method="")

A fault of a call is a coroutine function of an `Exchange`, a fault of a connection a function of a
`Connection`; both stand below the server. What gRPC makes of each is in `tests.network.faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError
from hyperframe.frame import GoAwayFrame
from tests.network.loops import Link, Listener

from sonic_coffea.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

ALL_STREAMS = 2**31 - 1


class Connection(Link):
    """One connection: its frames in, and frames out."""

    def __init__(self, server: FaultServer, writer: asyncio.StreamWriter) -> None:
        super().__init__(server, writer)
        self.exchanges: dict[int, Exchange] = {}
        self.frames: H2Connection | None = None
        self.last_stream = ALL_STREAMS  # calls above it are ignored
        self._frozen = False

    async def serve(self, reader: asyncio.StreamReader) -> None:
        (self.server.next_fault("") or Connection.shake_hands)(self)
        try:
            # A client that does not keep to the protocol is left.
            with contextlib.suppress(ProtocolError):
                while data := await reader.read(2**16):
                    if self.frames is not None and not self._frozen:
                        for event in self.frames.receive_data(data):
                            self._take(event)
                        self.flush()
        finally:
            for exchange in self.exchanges.values():
                exchange.task.cancel()

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
        frames.initiate_connection()
        self.frames = frames
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
            case StreamEnded() if exchange is not None:
                exchange.complete.set()
            case StreamReset() if exchange is not None:
                exchange.task.cancel()

    def _begin(self, event: RequestReceived) -> None:
        path = dict(event.headers)[":path"]
        self.exchanges[event.stream_id] = exchange = Exchange(self, event.stream_id, path)
        self.server.calls.append(exchange.method)

    def ended(self, exchange: Exchange) -> None:
        """Take note that a call is over."""
        self.exchanges.pop(exchange.stream_id, None)

    def goaway(
        self, code: int = ErrorCodes.NO_ERROR, *, last_stream: int, words: bytes = b""
    ) -> None:
        """Say that calls above a stream are not taken; the others go on."""
        self.flush()
        self.last_stream = last_stream
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=code, additional_data=words)
        self.write(frame.serialize())

    def flush(self) -> None:
        """Send the frames that are due."""
        if self.frames is not None and not self._frozen:
            self.write(self.frames.data_to_send())

    def write(self, data: bytes) -> None:
        """Send bytes, whatever they are."""
        self.writers[0].write(data)

    def freeze(self) -> None:
        """Take and send no byte any more; to the client, the connection lives."""
        self._frozen = True


class Exchange:
    """One call: what was asked, and the frames of the answer."""

    def __init__(self, connection: Connection, stream_id: int, path: str) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.path = path
        self.method = path.rpartition("/")[2]
        self.request = b""
        self.complete = asyncio.Event()
        fault = connection.server.next_fault(self.method) or answered
        self.task = asyncio.get_running_loop().create_task(self._run(fault))

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

    async def answer(self) -> tuple[bytes, list[tuple[str, str]]]:
        """Return what a faultless server answers: a message, if there is one, and trailers."""
        await self.complete.wait()
        ask = self.connection.server.channel.unary_unary(self.path)
        try:
            message = await asyncio.to_thread(ask, self.request[5:])
        except grpc.RpcError as error:
            return b"", trailers(error.code(), error.details())  # type: ignore[attr-defined]
        return b"\0" + struct.pack(">I", len(message)) + message, trailers(grpc.StatusCode.OK)

    def send_headers(
        self,
        *more: tuple[str, str],
        status: int = 200,
        content_type: str = "application/grpc",
        end: bool = False,
    ) -> None:
        """Send headers: by default those of a good answer."""
        first = [(":status", str(status)), ("content-type", content_type)]
        self.frames.send_headers(self.stream_id, [*first, *more], end_stream=end)
        self.connection.flush()

    def send_data(self, data: bytes, *, end: bool = False) -> None:
        """Send bytes of the message, fewer than the client's windows allow."""
        self.frames.send_data(self.stream_id, data, end_stream=end)
        self.connection.flush()

    def send_trailers(self, sent: list[tuple[str, str]]) -> None:
        """End the call with trailers."""
        self.frames.send_headers(self.stream_id, sent, end_stream=True)
        self.connection.flush()


CallFault = Callable[[Exchange], Awaitable[None]]
ConnectionFault = Callable[[Connection], None]


class FaultServer(Listener):
    """A `FakeServer` behind HTTP/2 frames of our own; `misbehave` breaks them.

    Attributes
    ----------
    models : dict
        What is served; ``hold`` and ``release`` are those of the `FakeServer`, too.
    calls : list of str
        The methods of all calls that arrived.
    """

    link = Connection

    def __init__(self, models: Mapping[str, Any]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._plans: dict[str, list[Iterator[Any]]] = {}
        self._answering = FakeServer(models)
        self.models = self._answering.models
        self.hold, self.release = self._answering.hold, self._answering.release

    def __enter__(self) -> Self:
        target = self._held.enter_context(self._answering).url.removeprefix("grpc://")
        self.channel = self._held.enter_context(grpc.insecure_channel(target))
        return super().__enter__()

    def misbehave(
        self, fault: CallFault | ConnectionFault, *, times: int = 1, method: str = "ModelInfer"
    ) -> None:
        """Have a fault happen to the next calls of a method, or to the next connections ("")."""
        self._plans.setdefault(method, []).append(repeat(fault, times))

    def freeze(self) -> None:
        """Answer nothing any more on the connections that there are, as a host that vanished."""
        self.on_each(Connection.freeze)

    def next_fault(self, method: str) -> Any:
        """Return what goes wrong with the call, or for "" the connection, that has just come."""
        planned = (next(turns, None) for turns in self._plans.get(method, ()))
        return next(filter(None, planned), None)


def trailers(code: grpc.StatusCode, words: str | None = "") -> list[tuple[str, str]]:
    """Return what ends a call with a status."""
    return [("grpc-status", str(code.value[0])), ("grpc-message", words or "")]


def answering(
    change: Callable[[bytes], bytes] = bytes,
    *,
    headers: tuple[str, str] | None = None,
    ending: list[tuple[str, str]] | None = None,
) -> CallFault:
    """Answer, but for what is said: with more headers, another message, or other trailers."""

    async def fault(call: Exchange) -> None:
        message, good = await call.answer()
        if not message:
            return call.send_headers(*good, end=True)
        call.send_headers(*[headers] if headers else ())
        call.send_data(change(message))
        return call.send_trailers(ending or good)

    return fault


answered = answering()


# What goes wrong with a call.


async def silent(call: Exchange) -> None:
    """Take the request, and never answer it."""
    await asyncio.Event().wait()


def status(code: Any, words: str = "", *more: tuple[str, str]) -> CallFault:
    """End the call with a status and more trailers."""

    async def fault(call: Exchange) -> None:
        await call.complete.wait()
        call.send_headers(*trailers(code, words), *more, end=True)

    return fault


def http_status(code: int, body: str = "", *, early: bool = False) -> CallFault:
    """Answer as a web server that knows no gRPC; early: before the request has arrived."""

    async def fault(call: Exchange) -> None:
        if not early:
            await call.complete.wait()
        call.send_headers(status=code, content_type="text/html")
        call.send_data(body.encode(), end=True)

    return fault


def reset(code: int = ErrorCodes.CANCEL) -> CallFault:
    """Reset the stream in the middle of the answer's message."""

    def end(call: Exchange) -> None:
        call.frames.reset_stream(call.stream_id, code)
        call.connection.flush()

    return _cut(end)


def disconnect(*, by_reset: bool = False) -> CallFault:
    """End the connection in the middle of the answer's message; by FIN, or by RST."""
    return _cut(lambda call: call.connection.end(reset=by_reset))


def _cut(end: Callable[[Exchange], None]) -> CallFault:
    async def fault(call: Exchange) -> None:
        message, _ = await call.answer()
        call.send_headers()
        call.send_data(message[: len(message) // 2])
        end(call)

    return fault


def goaway(
    code: int = ErrorCodes.NO_ERROR, words: bytes = b"", *, takes: bool = False
) -> CallFault:
    """Send GOAWAY that does not take this call, or this one last, and end the connection.

    Of one that takes no call, the client ends it: otherwise what it still sends could be refused
    before it reads why.
    """

    async def fault(call: Exchange) -> None:
        await call.complete.wait()
        last_stream = call.stream_id if takes else max(call.stream_id - 2, 0)
        call.connection.goaway(code, last_stream=last_stream, words=words)
        if takes:
            call.connection.end()

    return fault


no_status = answering(ending=[("x-served-by", "proxy")])
no_message = answering(lambda _: b"")
truncated = answering(lambda message: message[: len(message) // 2])
garbled = answering(lambda _: b"\0" + struct.pack(">I", 8) + b"\xff" * 8)


# What goes wrong with a connection.


def garbage(data: bytes) -> ConnectionFault:
    """Send bytes that are not HTTP/2, and close the connection."""

    def fault(connection: Connection) -> None:
        connection.write(data)
        connection.end()

    return fault


def deaf(connection: Connection) -> None:
    """Accept the connection, and say nothing, not even the first SETTINGS."""


def mute(connection: Connection) -> None:
    """Send SETTINGS, and nothing else: no answer to SETTINGS, PING or calls."""
    connection.shake_hands()
    connection.freeze()


def hang_up(connection: Connection, *, reset: bool = False) -> None:
    """Accept the connection, and close or reset it."""
    connection.end(reset=reset)
