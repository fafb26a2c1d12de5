"""The deadline of a call, from the request for its contract to its last response."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import TypeVar

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._settings import MAX_TIME_S

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a timeout is over.

    Parameters
    ----------
    timeout_s : float or None
        The timeout, which errors name; None if there is no deadline.
    at : float
        When it is over, by the monotonic clock.
    """

    timeout_s: float | None = None
    at: float = math.inf

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """Return the deadline of a call that begins now; a timeout of 0 or less is over at once.

        Raises
        ------
        ConfigError
            If the timeout is not a number of seconds, or is longer than a week.
        """
        if timeout_s is None:
            return cls()
        if not isinstance(timeout_s, Real) or not float(timeout_s) <= MAX_TIME_S:
            raise ConfigError(
                f"timeout_s: expected a number of seconds, up to {MAX_TIME_S} (a week), or None to "
                f"wait without end; got {timeout_s!r}"
            )
        return cls(float(timeout_s), time.monotonic() + float(timeout_s))

    @property
    def left_s(self) -> float | None:
        """The seconds that are left; None without a deadline."""
        return None if self.timeout_s is None else max(0.0, self.at - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.at

    def run(self, work: Callable[[], T], *, name: str) -> Future[T]:
        """Run work that may block, and return its future, which is not done if the deadline passes.

        Without a deadline, the work runs on this thread; else on another, where it may go on.
        """
        future: Future[T] = Future()
        if self.timeout_s is None:
            fulfil(future, work)
            return future
        future = run_in_thread(name, work)
        concurrent.futures.wait([future], self.left_s)
        return future


NEVER = Deadline()
"""The deadline of a call without a timeout."""


def run_in_thread(name: str, work: Callable[[], T], *, or_here: bool = False) -> Future[T]:
    """Run work that may block on a new thread, `or_here` if the system has no more threads."""
    future: Future[T] = Future()
    thread = threading.Thread(target=fulfil, args=(future, work), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads
        if or_here:
            fulfil(future, work)
        else:
            future.set_exception(error)
    return future


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Run work here, and set the future's result or error."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  the future raises it
        future.set_exception(error)
