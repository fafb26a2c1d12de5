"""What may block runs apart from the engine: on threads of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def apart(name: str, work: Callable[[], Any], failed: Callable[[Exception], Any]) -> None:
    """Do what may block on a thread of its own; what it raises goes to `failed`."""

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
    """Close several things, of which each may take its time."""
    threads = [threading.Thread(target=close, name="sonic-close") for close in closings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
