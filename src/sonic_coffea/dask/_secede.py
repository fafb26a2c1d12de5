"""Secedes a task while it waits for scores, so that its thread runs others; then rejoins."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Worker, get_worker, secede, threadpoolexecutor

from sonic_coffea.pool import Deadline

logger = logging.getLogger(__name__)

# Above this part of a worker's memory limit, waiting chunks keep their threads, so that no more
# start. dask begins to spill at the same part.
_MAX_MEMORY_PART = 0.6
# The longest time for which a chunk that has its scores makes way for others.
_MAX_REJOIN_S = 5.0
# dask does not say when a task starts, so it has to be polled.
_POLL_S = 0.01


# By executor, as workers may share this process.
_threads: WeakKeyDictionary[Any, _Threads] = WeakKeyDictionary()


def suspend(max_suspended_chunks: int, event: threading.Event, timeout_s: float | None) -> bool:
    """Wait for an event without the task's thread, if that is possible: it starts others meanwhile.

    A chunk whose scores are there rejoins when a thread is free. While few chunks wait for the
    servers, the thread starts another one first: or the servers would idle while it works on what
    they have answered. A worker suspends at most ``max_suspended_chunks`` for each of its threads.
    """
    threads = None
    with contextlib.suppress(ValueError, KeyError):  # no task
        worker = get_worker()
        worker.get_current_task()
        threads = _threads_of(worker, max_suspended_chunks)
    if threads is None:
        return event.wait(timeout_s)
    deadline = Deadline.after(timeout_s)
    while not threads.suspend(may_start_another=not _memory_is_full(worker)):
        if event.wait(deadline.within(_POLL_S)):
            return True
        if deadline.over:
            return False
    seceded = False
    try:
        with contextlib.suppress(KeyError):  # the task has done so before
            secede()
            seceded = True
        try:
            return event.wait(deadline.left_s)
        finally:
            threads.count(waiting=-1)
            if seceded:
                threads.rejoin(deadline)
    finally:
        threads.count(chunks=-1)


def _threads_of(worker: Worker, max_suspended_chunks: int) -> _Threads | None:
    """Return the threads that run the worker's tasks; None if a task cannot leave them."""
    executor = getattr(threadpoolexecutor.thread_state, "executor", None)
    if executor is None:
        return None
    try:
        threads = _threads.setdefault(executor, _Threads(executor))
    except AttributeError as error:  # another version of distributed
        _warn(str(error))
        return None
    threads.max_chunks = max_suspended_chunks * worker.state.nthreads
    return threads


class _Threads:
    """The threads of a worker, and its suspended chunks.

    `distributed.rejoin` knows no timeout, and nothing public tells whether tasks wait for a thread.
    So this reads three attributes that distributed promises to nobody. No other code does.
    """

    def __init__(self, executor: Any) -> None:
        self._rejoin_lock = executor._rejoin_lock  # noqa: SLF001
        self._rejoin_list = executor._rejoin_list  # noqa: SLF001
        self._queue = executor._work_queue  # noqa: SLF001
        self.max_chunks = 0
        # Suspended chunks, and those of them that wait for scores.
        self._chunks = self._waiting = 0
        self._changed = threading.Condition()
        # distributed lets those that came last rejoin first; one at a time keeps it fair.
        self._gate = threading.Lock()

    def suspend(self, *, may_start_another: bool) -> bool:
        """Count one more suspended chunk, if that is allowed or another wants to rejoin."""
        with self._changed:
            full = self._chunks >= self.max_chunks or not may_start_another
            if full and not self._rejoin_list:
                return False
            self.count(chunks=1, waiting=1)
            return True

    def count(self, *, chunks: int = 0, waiting: int = 0) -> None:
        """Count more suspended chunks, or fewer."""
        with self._changed:
            self._chunks += chunks
            self._waiting += waiting
            self._changed.notify_all()

    def rejoin(self, deadline: Deadline) -> None:
        """Rejoin once the thread is not better used to start another chunk.

        If all threads are busy until the deadline, the task goes on beside them, as dask has it for
        a task that never rejoins.
        """
        until = time.monotonic() + deadline.within(_MAX_REJOIN_S)

        def better_used() -> bool:
            few = self._waiting < self.max_chunks / 2 and self._chunks < self.max_chunks
            return few and not self._queue.empty() and time.monotonic() < until

        if not self._gate.acquire(timeout=deadline.within(threading.TIMEOUT_MAX)):
            return
        try:
            with self._changed:
                while better_used():
                    self._changed.wait(_POLL_S)
            self._rejoin_within(deadline.left_s)
        finally:
            self._gate.release()

    def _rejoin_within(self, timeout_s: float | None) -> None:
        """Rejoin as `distributed.rejoin` does, but wait no longer than some time."""
        thread, rejoined = threading.current_thread(), threading.Event()
        with self._rejoin_lock:
            self._rejoin_list.append((thread, rejoined))
        threadpoolexecutor.thread_state.executor.submit(lambda: None)
        if not rejoined.wait(timeout_s):
            with self._rejoin_lock:
                if not rejoined.is_set():
                    self._rejoin_list.remove((thread, rejoined))
                    return
        threadpoolexecutor.thread_state.proceed = True


def _memory_is_full(worker: Worker) -> bool:
    limit = worker.memory_manager.memory_limit
    return bool(limit) and worker.monitor.get_process_memory() > _MAX_MEMORY_PART * limit


@cache
def _warn(problem: str) -> None:
    """Warn, once in a process."""
    logger.warning(
        "chunks keep their threads while they wait for scores, as this version of distributed is "
        "not known: %s",
        problem,
    )
