"""Secedes a task while it waits for scores, so that its thread runs others; then rejoins."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

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
        try:
            worker = get_worker()
            worker.get_current_task()
        except (ValueError, KeyError):  # no task
            return event.wait(timeout_s)
        deadline = Deadline.after(timeout_s)
        suspended = self._counts[worker.address]
        max_chunks = self._max_for_thread * worker.state.nthreads
        threads = _Threads.of_this_thread()
        if threads is None:
            return event.wait(timeout_s)
        while not self._suspend(suspended, max_chunks, worker, threads):
            if event.wait(deadline.within(_POLL_S)):
                return True
            if deadline.over:
                return False
        seceded = False
        try:
            seceded = threads.secede()
            try:
                return event.wait(deadline.left_s)
            finally:
                self._count(suspended, waiting=-1)
                if seceded:
                    self._rejoin(suspended, max_chunks, threads, deadline)
        finally:
            self._count(suspended, chunks=-1)

    def _suspend(
        self, suspended: _Suspended, max_chunks: int, worker: Worker, threads: _Threads
    ) -> bool:
        """Count one more suspended chunk, if that is allowed or another wants to rejoin."""
        with self._changed:
            full = suspended.chunks >= max_chunks or _memory_is_full(worker)
            if full and not threads.rejoining:
                return False
            self._count(suspended, chunks=1, waiting=1)
            return True

    def _count(self, suspended: _Suspended, *, chunks: int = 0, waiting: int = 0) -> None:
        with self._changed:
            suspended.chunks += chunks
            suspended.waiting += waiting
            self._changed.notify_all()

    def _rejoin(
        self, suspended: _Suspended, max_chunks: int, threads: _Threads, deadline: Deadline
    ) -> None:
        """Rejoin once the thread is not better used to start another chunk.

        If all threads are busy until the deadline, the task goes on beside them, as dask has it for
        a task that never rejoins.
        """
        until = time.monotonic() + deadline.within(_MAX_REJOIN_S)

        def better_used() -> bool:
            few = suspended.waiting < max_chunks / 2 and suspended.chunks < max_chunks
            return few and threads.has_queued and time.monotonic() < until

        if not self._gate.acquire(timeout=deadline.within(threading.TIMEOUT_MAX)):
            return
        try:
            with self._changed:
                while better_used():
                    self._changed.wait(_POLL_S)
            threads.rejoin(deadline.left_s)
        finally:
            self._gate.release()


@dataclass(slots=True)
class _Suspended:
    """Suspended chunks of a worker, and those of them that wait for scores."""

    chunks: int = 0
    waiting: int = 0


class _Threads:
    """The threads of a worker, as far as distributed promises nothing about them.

    `distributed.rejoin` knows no timeout, and nothing tells whether tasks wait for a thread. So
    this reads three attributes of distributed's executor, and nothing else here does.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._lock = executor._rejoin_lock  # noqa: SLF001
        self._rejoin_list = executor._rejoin_list  # noqa: SLF001
        self._queue = executor._work_queue  # noqa: SLF001

    @classmethod
    def of_this_thread(cls) -> _Threads | None:
        """Return the threads to which this one belongs; None if it cannot secede from them."""
        executor = getattr(threadpoolexecutor.thread_state, "executor", None)
        try:
            return None if executor is None else cls(executor)
        except AttributeError as error:  # another version of distributed
            _warn(str(error))
            return None

    @property
    def rejoining(self) -> bool:
        """Whether tasks want to rejoin."""
        return bool(self._rejoin_list)

    @property
    def has_queued(self) -> bool:
        """Whether tasks wait for a thread."""
        return not self._queue.empty()

    def secede(self) -> bool:
        """Secede; False if the task has done so before."""
        try:
            secede()
        except KeyError:
            return False
        return True

    def rejoin(self, timeout_s: float | None) -> None:
        """Rejoin as `distributed.rejoin` does, but wait no longer than some time."""
        thread, rejoined = threading.current_thread(), threading.Event()
        with self._lock:
            self._rejoin_list.append((thread, rejoined))
        self._executor.submit(lambda: None)
        if not rejoined.wait(timeout_s):
            with self._lock:
                if not rejoined.is_set():
                    self._rejoin_list.remove((thread, rejoined))
                    return
        threadpoolexecutor.thread_state.proceed = True


@cache
def _warn(problem: str) -> None:
    """Warn, once in a process."""
    logger.warning(
        "chunks keep their threads while they wait for scores, as this version of distributed is "
        "not known: %s",
        problem,
    )


def _memory_is_full(worker: Worker) -> bool:
    limit = worker.memory_manager.memory_limit
    return bool(limit) and worker.monitor.get_process_memory() > _MAX_MEMORY_PART * limit
