"""A TCP proxy that delays, slices, cuts and loses bytes, after Toxiproxy.

What is set holds for the connections that there are, and for new ones, until it is changed::

    with ToxicProxy("127.0.0.1:8001") as proxy, sonic.connect(proxy.url) as pool:
        proxy.latency_s = 0.05          # each way
        proxy.bytes_per_s = 1_000_000   # each way
        proxy.slice_bytes = 100         # never more at once
        proxy.cut_after_bytes = 5000    # RST to each connection, in both ways together
        proxy.lose()                    # half-open: accepts everything, forwards nothing
        proxy.break_connections(reset=True)  # RST to everybody, now
        proxy.refuse()                  # nobody listens; `accept` ends it
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.network.loops import Link, Listener


class Forwarded(Link):
    """A client's connection, and the one to the server that it is led to."""

    def __init__(self, proxy: ToxicProxy, writer: asyncio.StreamWriter) -> None:
        super().__init__(proxy, writer)
        self.lost = proxy.losing
        self._forwarded = 0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        there, to_server = await asyncio.open_connection(*self.server.target)
        self.writers.append(to_server)
        await asyncio.gather(
            self._forward(reader, to_server), self._forward(there, self.writers[0])
        )

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes one way until they end, or are cut."""
        proxy = self.server
        while True:
            size = proxy.slice_bytes or 2**16
            if proxy.cut_after_bytes is not None:
                size = min(size, proxy.cut_after_bytes - self._forwarded)
                if size <= 0:
                    return self.end(reset=True)
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


class ToxicProxy(Listener):
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
        After how many forwarded bytes a connection is cut, by RST.
    sent_bytes : int
        How much clients have sent.
    """

    link = Forwarded
    latency_s = 0.0
    bytes_per_s: float | None = None
    slice_bytes: int | None = None
    cut_after_bytes: int | None = None
    sent_bytes = 0
    losing = False

    def __init__(self, target: str) -> None:
        super().__init__()
        host, _, port = target.rpartition("://")[2].partition("/")[0].rpartition(":")
        self.target: Any = (host, int(port))

    def lose(self) -> None:
        """Forward nothing any more, on any connection; none is closed, new ones are accepted."""
        self.losing = True
        self.on_each(lambda link: setattr(link, "lost", True))

    def find(self) -> None:
        """Forward the bytes of new connections again; what was lost stays so."""
        self.losing = False
