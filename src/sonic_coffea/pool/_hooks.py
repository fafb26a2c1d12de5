"""Where something that runs this process's tasks, such as a dask worker, takes part."""

from __future__ import annotations

import threading
from collections.abc import Callable

Wait = Callable[[threading.Event, float | None], bool]

_wait: Wait = threading.Event.wait


def take_part(wait: Wait) -> None:
    """Take part in what threads of this process do.

    Parameters
    ----------
    wait : callable
        Waits for an event, at most so many seconds, and returns whether it happened.
    """
    global _wait  # noqa: PLW0603
    _wait = wait


def wait_for(event: threading.Event, timeout_s: float | None) -> bool:
    """Wait for an event; False if the time was not enough."""
    return event.is_set() or _wait(event, timeout_s)
