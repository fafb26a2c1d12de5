"""Gives a worker's thread back while a task waits for scores, and takes it again afterwards."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from distributed import Worker, get_worker, rejoin, secede, threadpoolexecutor, utils

# Above this part of a worker's memory limit, waiting chunks keep their threads, so that no more of
# them start; dask begins to spill at the same part.
_FULL = 0.6
# A chunk whose scores are there makes way for others for at most so long.
_PATIENCE_S = 5.0
# dask does not say when a task starts, so it has to be looked at.
_LOOK_S = 0.01


class ThreadLoan:
    """Lends the threads of waiting tasks to others, while there is room for more chunks.

    A chunk whose scores are there goes on when a thread is free. Before that, the thread starts
    another chunk as long as few wait for the servers: or these would have nothing to do while the
    thread works off what they have answered.

    Parameters
    ----------
    most : int
        Chunks of a worker that may be without a thread at a time, for each of its threads.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._loans: defaultdict[str, _Loans] = defaultdict(_Loans)
        self._changed = threading.Condition()
        # distributed lets those that came last continue first; one at a time keeps it fair.
        self._gate = threading.Lock()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Wait for an event without the thread, if that is possible."""
        worker, _ = current_task()
        executor = _executor()
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if worker is None or executor is None:
            return event.wait(timeout_s)
        while not self._lend(worker, executor):
            if event.wait(min(_LOOK_S, max(0.0, until - time.monotonic()))):
                return True
            if time.monotonic() > until:
                return False
        loans = self._loans[worker.address]
        try:
            secede()
            try:
                left_s = max(0.0, until - time.monotonic())
                return event.wait(None if timeout_s is None else left_s)
            finally:
                self._note(loans, waiting=-1)
                self._come_back(executor, loans, self.most * worker.state.nthreads)
        finally:
            self._note(loans, out=-1)

    def _lend(self, worker: Worker, executor: Any) -> bool:
        """Take a place among those without a thread, if there is one, or one wants to have it."""
        with self._changed:
            loans = self._loans[worker.address]
            full = loans.out >= self.most * worker.state.nthreads or _full(worker)
            if full and not executor._rejoin_list:  # noqa: SLF001
                return False
            self._note(loans, out=1, waiting=1)
            return True

    def _note(self, loans: _Loans, *, out: int = 0, waiting: int = 0) -> None:
        with self._changed:
            loans.out += out
            loans.waiting += waiting
            self._changed.notify_all()

    def _come_back(self, executor: Any, loans: _Loans, most: int) -> None:
        """Take a thread again, once it is not better used to start another chunk."""
        until = time.monotonic() + _PATIENCE_S

        def better_used() -> bool:
            few = loans.waiting < most / 2 and loans.out < most
            started = executor._work_queue.empty()  # noqa: SLF001
            return few and not started and time.monotonic() < until

        with self._gate:
            with self._changed:
                while better_used():
                    self._changed.wait(_LOOK_S)
            rejoin()


@dataclass(slots=True)
class _Loans:
    """Chunks of a worker without a thread, and those of them that wait for scores."""

    out: int = 0
    waiting: int = 0


def current_task() -> tuple[Any, Any]:
    """Return the worker and the key of the task that this thread runs; None and None without."""
    key = getattr(utils.thread_state, "key", None)
    try:
        return (None, None) if key is None else (get_worker(), key)
    except ValueError:
        return None, None


def _executor() -> Any:
    """Return the worker's executor if this is one of its threads, and not lent already."""
    executor = getattr(threadpoolexecutor.thread_state, "executor", None)
    lent = executor is None or threading.current_thread() not in executor._threads  # noqa: SLF001
    return None if lent else executor


def _full(worker: Worker) -> bool:
    limit = worker.memory_manager.memory_limit
    return bool(limit) and worker.monitor.get_process_memory() > _FULL * limit
