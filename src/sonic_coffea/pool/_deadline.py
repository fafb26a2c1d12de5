"""The deadline of a call, from its first question to its last response."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the time that was given is over.

    Parameters
    ----------
    timeout_s : float or None
        The time that was given, which errors name; None if there is no deadline.
    at : float
        When it is over, by the monotonic clock.
    """

    timeout_s: float | None = None
    at: float = math.inf

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """Return the deadline of what begins now."""
        return cls() if timeout_s is None else cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float | None:
        """How long one may wait; None if as long as it takes."""
        return None if self.timeout_s is None else max(0.0, self.at - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.at

    def within(self, seconds: float) -> float:
        """Return how long one may wait of some time."""
        return (
            seconds
            if self.timeout_s is None
            else max(0.0, min(seconds, self.at - time.monotonic()))
        )

    def run(self, work: Callable[[], T], *, name: str) -> Future[T]:
        """Run what may block, such as a file system, and wait for it as long as there is time.

        Parameters
        ----------
        work : callable
            Without a deadline, it runs here; else on a thread of its own, where it goes on when
            the time is over.
        name : str
            Of that thread.

        Returns
        -------
        Future
            What came of it; not done if the time was not enough.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  it is raised where it is asked for
                future.set_exception(error)

        if self.timeout_s is None:
            run()
        else:
            threading.Thread(target=run, name=name, daemon=True).start()
            concurrent.futures.wait([future], self.left_s)
        return future


NEVER = Deadline()
"""That of what may take as long as it does."""
