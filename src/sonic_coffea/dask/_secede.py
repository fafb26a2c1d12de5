"""Secedes a task while it waits for scores, so that its thread runs others; then rejoins."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from distributed import Worker, get_worker, rejoin, secede, threadpoolexecutor

from sonic_coffea.pool import Settings

# Above this part of a worker's memory limit, waiting chunks keep their threads, so that no more
# start. dask begins to spill at the same part.
_MAX_MEMORY_PART = 0.6

# Workers may share this process.
_suspended: WeakKeyDictionary[Worker, _Suspended] = WeakKeyDictionary()


class _Suspended:
    """The chunks of a worker that are suspended, and those of them that want to rejoin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks = self._rejoining = 0
        # distributed lets those that came last rejoin first; one at a time keeps it fair.
        self._gate = threading.Lock()

    def add(self, max_chunks: int) -> bool:
        """Count one more suspended chunk, if that is allowed or another wants to rejoin."""
        with self._lock:
            allowed = self._chunks < max_chunks or self._rejoining > 0
            self._chunks += allowed
            return allowed

    def rejoin(self) -> None:
        with self._lock:
            self._rejoining += 1
        with self._gate:
            rejoin()
        with self._lock:
            self._rejoining -= 1

    def remove(self) -> None:
        with self._lock:
            self._chunks -= 1


def suspend(event: threading.Event, timeout_s: float | None, settings: Settings) -> bool:
    """Wait for an event without the task's thread, if that is possible: it starts others meanwhile.

    A chunk whose scores are there rejoins when a thread is free. It is suspended while fewer are
    than ``max_suspended_chunks`` of its pool, for each of the worker's threads. With a timeout, a
    chunk keeps its thread, as it could not be sure to have one when the time is over.
    """
    try:
        worker = get_worker()
        worker.get_current_task()
    except (ValueError, KeyError):  # no task
        return event.wait(timeout_s)
    if timeout_s is not None or not hasattr(threadpoolexecutor.thread_state, "executor"):
        return event.wait(timeout_s)
    suspended = _suspended.setdefault(worker, _Suspended())
    threads = worker.state.nthreads
    limit = settings.suspended_chunks(worker.memory_manager.memory_limit, threads)
    while not suspended.add(0 if _memory_is_full(worker) else limit * threads):
        if event.wait(0.01):  # dask does not say when a task starts
            return True
    try:
        secede()
    except KeyError:  # the task has done so before
        event.wait()
    else:
        event.wait()
        suspended.rejoin()
    finally:
        suspended.remove()
    return True


def _memory_is_full(worker: Worker) -> bool:
    limit = worker.memory_manager.memory_limit
    return bool(limit) and worker.monitor.get_process_memory() > _MAX_MEMORY_PART * limit
