"""What a `FaultServer` does wrong: faults of a call, and faults of a connection.

The codes that an answer is reset with are HTTP/2's; what gRPC makes of each is in
`tests.network.faults`.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

import grpc
from h2.errors import ErrorCodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.network.fault_server import CallFault, Connection, ConnectionFault, Exchange


# Of a call.


async def silent(call: Exchange) -> None:
    """Take the request, and never answer it."""
    await asyncio.Event().wait()


def status(code: Any, words: str = "", *more: tuple[str, str]) -> CallFault:
    """End the call with a status and more trailers."""

    async def fault(call: Exchange) -> None:
        await call.complete.wait()
        trailers = (("grpc-status", str(code.value[0])), ("grpc-message", words), *more)
        call.send_headers(*trailers, end=True)

    return fault


def http_status(code: int, body: str = "", *, early: bool = False) -> CallFault:
    """Answer as a web server that knows no gRPC; early: before the request has arrived."""

    async def fault(call: Exchange) -> None:
        if not early:
            await call.complete.wait()
        call.send_headers(status=str(code), content_type="text/html")
        await call.send_data(body.encode(), end=True)

    return fault


def reset(code: int = ErrorCodes.CANCEL, after: str = "request") -> CallFault:
    """Reset the stream after the call's "headers", "request", or the answer's "start", "half",
    "message".
    """
    return _cut(lambda call: call.reset(code), after)


def disconnect(after: str = "request", *, by_reset: bool = False) -> CallFault:
    """End the connection after a part, as in `reset`; by FIN, or by RST."""
    return _cut(lambda call: call.connection.end(reset=by_reset), after)


def _cut(end: Callable[[Exchange], None], after: str) -> CallFault:
    async def fault(call: Exchange) -> None:
        if after != "headers":
            message, _, _ = await call.answer()
            if after != "request":
                call.send_headers()
            if after in ("half", "message"):
                await call.send_data(message[: len(message) // 2] if after == "half" else message)
        end(call)

    return fault


def goaway(code: int, words: bytes) -> CallFault:
    """Send GOAWAY that does not take this call, and end the connection."""

    async def fault(call: Exchange) -> None:
        await call.complete.wait()
        call.connection.goaway(code, last_stream=max(call.stream_id - 2, 0), words=words)
        call.connection.end()

    return fault


async def goaway_and_end(call: Exchange) -> None:
    """Take this call, take no other, and end the connection without an answer."""
    await call.complete.wait()
    call.connection.goaway(last_stream=call.stream_id)
    call.connection.end()


def pings(count: int) -> CallFault:
    """Send PINGs before, within and after the right answer."""

    async def fault(call: Exchange) -> None:
        def flood() -> None:
            for number in range(count):
                call.frames.ping(struct.pack(">Q", number))
            call.connection.flush()

        message, code, words = await call.answer()
        flood()
        call.send_headers()
        await call.send_data(message[:7])
        flood()
        await call.send_data(message[7:])
        call.send_trailers(code, words)
        flood()

    return fault


def dribble(part_bytes: int, pause_s: float) -> CallFault:
    """Answer rightly, a few bytes at a time."""

    async def fault(call: Exchange) -> None:
        message, code, words = await call.answer()
        call.send_headers()
        for start in range(0, len(message), part_bytes):
            await call.send_data(message[start : start + part_bytes])
            await asyncio.sleep(pause_s)
        call.send_trailers(code, words)

    return fault


async def no_trailers(call: Exchange) -> None:
    """End the stream with the message."""
    message, _, _ = await call.answer()
    call.send_headers()
    await call.send_data(message, end=True)


async def no_status(call: Exchange) -> None:
    """End the call with trailers that have no grpc-status."""
    message, _, _ = await call.answer()
    call.send_headers()
    await call.send_data(message)
    call.frames.send_headers(call.stream_id, [("x-served-by", "proxy")], end_stream=True)
    call.connection.flush()


async def no_message(call: Exchange) -> None:
    """Say OK without a message."""
    await call.complete.wait()
    call.send_headers()
    call.send_trailers(grpc.StatusCode.OK)


async def truncated(call: Exchange) -> None:
    """Say OK after half of the message."""
    message, code, words = await call.answer()
    call.send_headers()
    await call.send_data(message[: len(message) // 2])
    call.send_trailers(code, words)


async def garbled(call: Exchange) -> None:
    """Answer a message that is none."""
    await call.complete.wait()
    call.send_headers()
    await call.send_data(b"\0" + struct.pack(">I", 8) + b"\xff" * 8)
    call.send_trailers(grpc.StatusCode.OK)


def large_headers(nbytes: int) -> CallFault:
    """Answer rightly, with a header of so many bytes."""

    async def fault(call: Exchange) -> None:
        message, code, words = await call.answer()
        call.send_headers(("x-filler", "x" * nbytes))
        await call.send_data(message)
        call.send_trailers(code, words)

    return fault


# Of a connection.


def garbage(data: bytes) -> ConnectionFault:
    """Send bytes that are not HTTP/2, and close the connection."""

    def fault(connection: Connection) -> None:
        connection.transport.write(data)
        connection.end()

    return fault


def deaf(connection: Connection) -> None:
    """Accept the connection, and say nothing, not even the first SETTINGS."""


def mute(connection: Connection) -> None:
    """Send SETTINGS, and nothing else: no answer to SETTINGS, PING or calls."""
    connection.shake_hands()
    connection.freeze()


def hang_up(connection: Connection) -> None:
    """Accept the connection, and close it."""
    connection.end()


def hang_up_by_reset(connection: Connection) -> None:
    """Accept the connection, and reset it."""
    connection.end(reset=True)
