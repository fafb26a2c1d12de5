"""A TCP proxy that delays, slices, cuts and loses bytes, after Toxiproxy.

What is set holds for the connections that there are, and for new ones, until it is changed::

    with ToxicProxy("127.0.0.1:8001") as proxy, sonic.connect(proxy.url) as pool:
        proxy.latency_s = 0.05          # each way
        proxy.bytes_per_s = 1_000_000   # each way
        proxy.slice_bytes = 100         # never more at once
        proxy.cut_after_bytes = 5000    # of each connection, in both ways together
        proxy.cut = "reset"             # what happens then: "close", "reset", "lose"
        proxy.lose()                    # half-open: accepts everything, forwards nothing
        proxy.reset()                   # RST to everybody, now
        proxy.refuse()                  # nobody listens; `accept` ends it
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Any

from tests.network.loops import LoopThread, close_listener
from tests.ports import held_port

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Self

_READ_BYTES = 65536


class ToxicProxy:
    """Forwards TCP connections to one address, with what is set.

    Parameters
    ----------
    target : str
        ``host:port``, or a URL that ends so.

    Attributes
    ----------
    latency_s : float
        How long bytes are held back, each way; they stay in order.
    bytes_per_s : float or None
        The bandwidth of each connection, each way.
    slice_bytes : int or None
        The most bytes that are forwarded at once.
    cut_after_bytes : int or None
        After how many forwarded bytes a connection is cut.
    cut : str
        How: "close" (FIN), "reset" (RST), or "lose": nothing is forwarded any more.
    connections, sent_bytes : int
        How many have been made, and how much clients have sent.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition("://")[2].partition("/")[0].rpartition(":")
        self._target = (host, int(port))
        self.latency_s = 0.0
        self.bytes_per_s: float | None = None
        self.slice_bytes: int | None = None
        self.cut_after_bytes: int | None = None
        self.cut = "close"
        self.connections = self.sent_bytes = 0
        self._held = contextlib.ExitStack()
        self._port = 0
        self._thread = LoopThread("toxic-proxy")
        self._links: set[_Link] = set()
        self._listener: Any = None
        self._losing = False

    def __enter__(self) -> Self:
        self._port = self._held.enter_context(held_port())
        self._thread.start()
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self.reset()
        self._thread.stop()
        self._held.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"grpc://127.0.0.1:{self._port}"

    def refuse(self) -> None:
        """Listen no more: who connects is refused. Connections that there are go on."""
        self._thread.call(self._close_listener())

    def accept(self) -> None:
        """Listen again."""
        self._thread.call(self._listen())

    def lose(self) -> None:
        """Forward nothing any more, on any connection; none is closed, new ones are accepted."""
        self._losing = True
        self._do(lambda: [link.lose() for link in self._links])

    def find(self) -> None:
        """Forward the bytes of new connections again; what was lost stays so."""
        self._losing = False

    def reset(self) -> None:
        """Reset all connections (RST), at once."""
        self._do(lambda: [link.end(reset=True) for link in list(self._links)])

    def close_connections(self) -> None:
        """Close all connections (FIN), at once."""
        self._do(lambda: [link.end(reset=False) for link in list(self._links)])

    def _do(self, action: Callable[[], Any]) -> None:
        async def run() -> None:
            action()

        self._thread.call(run())

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(
                self._serve, "127.0.0.1", self._port, reuse_address=True
            )

    async def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await close_listener(listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = _Link(self, writer)
        self._links.add(link)
        if self._losing:
            link.lose()
        try:
            there, to_server = await asyncio.open_connection(*self._target)
            link.writers.append(to_server)
            await link.run(link.forward(reader, to_server), link.forward(there, writer))
        except OSError:  # the server refuses, or one side has reset the connection
            link.end(reset=True)
        except asyncio.CancelledError:  # asyncio logs a cancelled handler as an error
            pass
        finally:
            link.end(reset=False)
            self._links.discard(link)


class _Link:
    """A client's connection, and the one to the server that it is led to."""

    def __init__(self, proxy: ToxicProxy, writer: asyncio.StreamWriter) -> None:
        self.writers = [writer]
        self._proxy = proxy
        self._forwarded = 0
        self._lost = False
        self._ways: list[asyncio.Task[None]] = []

    async def run(self, *ways: Coroutine[Any, Any, None]) -> None:
        self._ways = [asyncio.get_running_loop().create_task(way) for way in ways]
        try:
            await asyncio.gather(*self._ways)
        finally:
            self._cancel()

    def lose(self) -> None:
        self._lost = True

    def _cancel(self) -> None:
        for way in self._ways:
            way.cancel()

    def end(self, *, reset: bool) -> None:
        self._cancel()
        for writer in self.writers:
            if reset:
                linger = struct.pack("ii", 1, 0)
                with contextlib.suppress(OSError):  # it is closed already
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            else:
                writer.close()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes one way; those on their way do not hold up reading."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.ensure_future(self._deliver(on_the_way, writer))
        loop = asyncio.get_running_loop()
        try:
            while True:
                data = await reader.read(_READ_BYTES)
                if writer is not self.writers[0]:
                    self._proxy.sent_bytes += len(data)
                on_the_way.put_nowait((loop.time() + self._proxy.latency_s, data))
                if not data:
                    await delivery
                    return
                if delivery.done():
                    return
        finally:
            delivery.cancel()

    async def _deliver(
        self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        loop, proxy = asyncio.get_running_loop(), self._proxy
        while True:
            due_at, data = await on_the_way.get()
            await asyncio.sleep(max(0.0, due_at - loop.time()))
            if not data:
                if not self._lost:
                    writer.close()
                return
            while data:
                size = min(len(data), proxy.slice_bytes or len(data))
                if proxy.cut_after_bytes is not None:
                    size = min(size, proxy.cut_after_bytes - self._forwarded)
                    if size <= 0 and not self._cut():
                        return
                if self._lost:
                    break
                if proxy.bytes_per_s:
                    await asyncio.sleep(size / proxy.bytes_per_s)
                writer.write(data[:size])
                await writer.drain()
                self._forwarded += size
                data = data[size:]

    def _cut(self) -> bool:
        """Do what is set to a connection that has had its bytes; False if it has ended."""
        if self._proxy.cut == "lose":
            self._lost = True
            return True
        self.end(reset=self._proxy.cut == "reset")
        return False
