"""Secedes a task while it waits for scores, so that its thread runs others; then rejoins."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from distributed import Worker, get_worker, secede, threadpoolexecutor, utils

from sonic_coffea.pool import Deadline

# Above this part of a worker's memory limit, waiting chunks keep their threads, so that no more
# start. dask begins to spill at the same part.
_MAX_MEMORY_PART = 0.6
# The longest time for which a chunk that has its scores makes way for others.
_MAX_REJOIN_S = 5.0
# dask does not say when a task starts, so it has to be polled.
_POLL_S = 0.01


class Suspender:
    """Suspends chunks that wait for scores: their threads start others meanwhile.

    A chunk whose scores are there rejoins when a thread is free. While few chunks wait for the
    servers, the thread starts another one first: or the servers would idle while it works on what
    they have answered. A worker suspends at most ``max_suspended_chunks`` for each of its threads.
    """

    def __init__(self, max_suspended_chunks: int) -> None:
        self._max_for_thread = max_suspended_chunks
        self._counts: defaultdict[str, _Suspended] = defaultdict(_Suspended)
        self._changed = threading.Condition()
        # distributed lets those that came last rejoin first; one at a time keeps it fair.
        self._gate = threading.Lock()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Wait for an event without the thread, if that is possible."""
        executor = _executor()
        if executor is None:
            return event.wait(timeout_s)
        worker = get_worker()
        deadline = Deadline.after(timeout_s)
        suspended = self._counts[worker.address]
        max_chunks = self._max_for_thread * worker.state.nthreads
        while not self._suspend(suspended, max_chunks, worker, executor):
            if event.wait(deadline.within(_POLL_S)):
                return True
            if deadline.over:
                return False
        try:
            secede()
            try:
                return event.wait(deadline.left_s)
            finally:
                self._count(suspended, waiting=-1)
                self._rejoin(suspended, max_chunks, executor, deadline)
        finally:
            self._count(suspended, chunks=-1)

    def _suspend(
        self, suspended: _Suspended, max_chunks: int, worker: Worker, executor: Any
    ) -> bool:
        """Count one more suspended chunk, if that is allowed or another wants to rejoin."""
        with self._changed:
            full = suspended.chunks >= max_chunks or _memory_is_full(worker)
            if full and not executor._rejoin_list:  # noqa: SLF001
                return False
            self._count(suspended, chunks=1, waiting=1)
            return True

    def _count(self, suspended: _Suspended, *, chunks: int = 0, waiting: int = 0) -> None:
        with self._changed:
            suspended.chunks += chunks
            suspended.waiting += waiting
            self._changed.notify_all()

    def _rejoin(
        self, suspended: _Suspended, max_chunks: int, executor: Any, deadline: Deadline
    ) -> None:
        """Rejoin once the thread is not better used to start another chunk.

        If all threads are busy until the deadline, the task goes on beside them, as dask has it for
        a task that never rejoins.
        """
        until = time.monotonic() + deadline.within(_MAX_REJOIN_S)

        def better_used() -> bool:
            few = suspended.waiting < max_chunks / 2 and suspended.chunks < max_chunks
            queued = not executor._work_queue.empty()  # noqa: SLF001
            return few and queued and time.monotonic() < until

        if not self._gate.acquire(timeout=deadline.within(threading.TIMEOUT_MAX)):
            return
        try:
            with self._changed:
                while better_used():
                    self._changed.wait(_POLL_S)
            _rejoin_within(executor, deadline.left_s)
        finally:
            self._gate.release()


@dataclass(slots=True)
class _Suspended:
    """Suspended chunks of a worker, and those of them that wait for scores."""

    chunks: int = 0
    waiting: int = 0


def _executor() -> Any:
    """Return the worker's executor if this thread runs one of its tasks, and has not seceded."""
    executor = getattr(threadpoolexecutor.thread_state, "executor", None)
    if executor is None or getattr(utils.thread_state, "key", None) is None:
        return None
    return executor if threading.current_thread() in executor._threads else None  # noqa: SLF001


def _rejoin_within(executor: Any, timeout_s: float | None) -> None:
    """Rejoin as `distributed.rejoin` does, but wait no longer than some time."""
    thread, rejoined = threading.current_thread(), threading.Event()
    with executor._rejoin_lock:  # noqa: SLF001
        executor._rejoin_list.append((thread, rejoined))  # noqa: SLF001
    executor.submit(lambda: None)
    if not rejoined.wait(timeout_s):
        with executor._rejoin_lock:  # noqa: SLF001
            if not rejoined.is_set():
                executor._rejoin_list.remove((thread, rejoined))  # noqa: SLF001
                return
    threadpoolexecutor.thread_state.proceed = True


def _memory_is_full(worker: Worker) -> bool:
    limit = worker.memory_manager.memory_limit
    return bool(limit) and worker.monitor.get_process_memory() > _MAX_MEMORY_PART * limit
