"""Where something that runs this process's tasks, such as a dask worker, takes part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sonic_coffea.errors import SonicError

Wait = Callable[[threading.Event, float | None], bool]

_wait: Wait = threading.Event.wait
_on_failure: Callable[[], None] | None = None


def take_part(wait: Wait, on_failure: Callable[[], None]) -> None:
    """Take part in what threads of this process do.

    Parameters
    ----------
    wait : callable
        Waits for an event, at most so many seconds, and returns whether it happened.
    on_failure : callable
        Called in the thread of a task that could not be scored, before the error is raised; the
        task may still catch it.
    """
    global _wait, _on_failure
    _wait, _on_failure = wait, on_failure


def wait_for(event: threading.Event, timeout_s: float | None) -> bool:
    """Wait for an event; False if the time was not enough."""
    return event.is_set() or _wait(event, timeout_s)


@contextmanager
def failures_told() -> Iterator[None]:
    """Tell whoever takes part of a failure that another try does not mend."""
    try:
        yield
    except SonicError:
        if _on_failure is not None:
            _on_failure()
        raise
