"""Servers of tests at a port of loopback, whose asyncio loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

from tests.ports import held_port

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine
    from typing import Self

TIMEOUT_S = 20.0


class Link:
    """A client's connection to a `Listener`; subclasses say what it does.

    Parameters
    ----------
    server : Listener
        What was connected to.
    writer : asyncio.StreamWriter
        Where it writes.
    """

    def __init__(self, server: Any, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.writers = [writer]

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until the client has closed the connection."""
        raise NotImplementedError

    def end(self, *, reset: bool = False) -> None:
        """Close the connection: by FIN after what was sent, or by RST."""
        for writer in self.writers:
            if reset:
                linger = struct.pack("ii", 1, 0)
                # It may be closed already; TLS knows no socket then.
                with contextlib.suppress(OSError, AttributeError):
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            else:
                writer.close()


class Listener:
    """Accepts connections within a ``with`` block, at one port, and breaks them on demand.

    Attributes
    ----------
    connections : int
        How many have been made.
    alive : set of Link
        Those that there are.
    host : str
        Where it listens, as in a URL.
    tls : ssl.SSLContext, optional
        What it speaks TLS with.
    """

    link: Callable[[Any, asyncio.StreamWriter], Link]
    host = "127.0.0.1"
    tls: ssl.SSLContext | None = None

    def __init__(self) -> None:
        self.connections = 0
        self.alive: set[Any] = set()
        self._held = contextlib.ExitStack()
        self._listener: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._port = self._held.enter_context(held_port())
        self._thread.start()
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self.break_connections(reset=True)
        self._call(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()
        self._held.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"grpc{'s' if self.tls else ''}://{self.host}:{self._port}"

    def refuse(self) -> None:
        """Listen no more: who connects is refused. Connections that there are go on."""
        self._call(self._close_listener())

    def accept(self) -> None:
        """Listen again."""
        self._call(self._listen())

    def break_connections(self, *, reset: bool = False) -> None:
        """Close the connections that there are: by FIN, or by RST."""
        self.on_each(lambda link: link.end(reset=reset))

    def on_each(self, act: Callable[[Any], None]) -> None:
        """Do something with each connection that there is."""

        async def on_all() -> None:
            for link in list(self.alive):
                act(link)

        self._call(on_all())

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(
                self._serve, self.host.strip("[]"), self._port, reuse_address=True, ssl=self.tls
            )

    async def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            # Closed while a task of its own makes a connection of a socket, asyncio would lose it.
            while any(t.get_coro().__name__ == "_accept_connection2" for t in asyncio.all_tasks()):  # type: ignore[union-attr]
                await asyncio.sleep(0)
            listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = self.link(self, writer)
        self.alive.add(link)
        try:
            await link.serve(reader)
        except OSError:  # one side has reset the connection
            link.end(reset=True)
        except asyncio.CancelledError:  # asyncio logs a cancelled handler as an error
            pass
        finally:
            link.end()
            self.alive.discard(link)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)  # transports that were closed say so to their protocols
