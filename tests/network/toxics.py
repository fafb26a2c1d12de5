"""A TCP proxy that delays, slices, cuts and loses bytes, after Toxiproxy.

What is set holds for the connections that there are, and for new ones, until it is changed::

    with ToxicProxy("127.0.0.1:8001") as proxy, sonic.connect(proxy.url) as pool:
        proxy.latency_s = 0.05          # each way
        proxy.bytes_per_s = 1_000_000   # each way
        proxy.slice_bytes = 100         # never more at once
        proxy.cut_after_bytes = 5000    # of each connection, in both ways together
        proxy.cut = "reset"             # what happens then: "close", "reset"
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
        How long bytes are held back, each way.
    bytes_per_s : float or None
        The bandwidth of each connection, each way.
    slice_bytes : int or None
        The most bytes that are forwarded at once.
    cut_after_bytes : int or None
        After how many forwarded bytes a connection is cut.
    cut : str
        How: "close" (FIN), or "reset" (RST).
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
        self.losing = False

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
        self.losing = True
        for link in self._links:
            link.lost = True

    def find(self) -> None:
        """Forward the bytes of new connections again; what was lost stays so."""
        self.losing = False

    def reset(self) -> None:
        """Reset all connections (RST), at once."""
        self._end_links(reset=True)

    def close_connections(self) -> None:
        """Close all connections (FIN), at once."""
        self._end_links(reset=False)

    def _end_links(self, *, reset: bool) -> None:
        async def end() -> None:
            for link in list(self._links):
                link.end(reset=reset)

        self._thread.call(end())

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
        try:
            there, to_server = await asyncio.open_connection(*self._target)
            link.writers.append(to_server)
            await asyncio.gather(link.forward(reader, to_server), link.forward(there, writer))
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
        self.lost = proxy.losing
        self._proxy = proxy
        self._forwarded = 0

    def end(self, *, reset: bool) -> None:
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
        """Forward bytes one way until they end, or are cut."""
        proxy = self._proxy
        while True:
            size = proxy.slice_bytes or _READ_BYTES
            if proxy.cut_after_bytes is not None:
                size = min(size, proxy.cut_after_bytes - self._forwarded)
                if size <= 0:
                    return self.end(reset=proxy.cut == "reset")
            data = await reader.read(size)
            if writer is not self.writers[0]:
                proxy.sent_bytes += len(data)
            seconds = len(data) / proxy.bytes_per_s if proxy.bytes_per_s else 0.0
            await asyncio.sleep(proxy.latency_s + seconds)
            if not data:
                return None if self.lost else writer.close()
            if not self.lost:
                self._forwarded += len(data)
                writer.write(data)
                await writer.drain()
