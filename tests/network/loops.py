"""An asyncio loop in a thread of its own, for servers of tests."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

STOP_TIMEOUT_S = 20.0


class LoopThread:
    """Runs coroutines in a thread from `start` until `stop`, which leaves nothing behind."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine there, and wait for what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Cancel what still runs there, and end the thread."""
        self.call(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # transports that were closed say so to their protocols


async def close_listener(listener: asyncio.Server) -> None:
    """Listen no more.

    Closed while a task of its own makes a connection of a socket, asyncio would lose the socket.
    """
    while any(t.get_coro().__name__ == "_accept_connection2" for t in asyncio.all_tasks()):
        await asyncio.sleep(0)
    listener.close()
