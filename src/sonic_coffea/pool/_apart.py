"""Threads for work that may block, apart from the engine's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def apart(name: str, work: Callable[[], Any], failed: Callable[[Exception], Any]) -> None:
    """Run work that may block on a new thread; `failed` takes the error that it raises."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  rows would wait for ever
            failed(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:  # no more threads
        failed(error)


def all_at_once(closings: Iterable[Callable[[], None]]) -> None:
    """Close several connections or senders at the same time, as each may block."""
    threads = [threading.Thread(target=close, name="sonic-close") for close in closings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
