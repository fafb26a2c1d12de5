"""The worker plugin: every present and future worker of a cluster gets its pool."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.core import clean_exception
from tornado.ioloop import PeriodicCallback

from sonic_coffea.dask._messages import FINAL, JOIN, REPORT, SHARES, read_shares, written_report
from sonic_coffea.dask._metrics import offer_metrics
from sonic_coffea.dask._secede import ThreadLoan, current_task
from sonic_coffea.errors import SonicError
from sonic_coffea.pool import Pool, Settings, forget, install, take_part

logger = logging.getLogger(__name__)

# Tasks in which a model has failed, by the worker's address and the key, while they run. Not in the
# plugin, as another may take its place meanwhile.
_failed: set[tuple[str, Any]] = set()
# dask's states of a task whose function has not returned.
_RUNNING = ("executing", "long-running", "cancelled", "resumed")


class SonicPlugin(WorkerPlugin):  # type: ignore[misc]
    """Opens the pool of a worker process when it starts, and closes it when it ends.

    Meanwhile it tells the scheduler what the pool sees of the servers, and the pool what the
    scheduler lets it have of them.

    Parameters
    ----------
    settings : Settings
        The servers and limits; they travel by dask's own channel to the workers.
    """

    name = "sonic-coffea"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pool: Pool | None = None
        self._worker: Any = None
        self._idle = True
        self._joined = False
        self._asks = False
        self._timings: dict[Any, Any] = {}

    async def setup(self, worker: Worker) -> None:
        """Open the pool, and hear from the scheduler how to use it; no server is contacted yet."""
        self._worker = worker
        self._pool = install(self.settings)
        take_part(ThreadLoan(self.settings.limits.max_suspended_chunks).wait, _note_failure)
        offer_metrics(worker, self._pool)
        worker.stream_handlers[SHARES] = self._allow
        # Waited for, as the first task may fail for good, or contact the servers.
        await self._join()

    def teardown(self, worker: Worker) -> None:
        """Close the pool, unless the worker shares a process with others or with the client."""
        callback = worker.periodic_callbacks.pop(self.name, None)
        if callback is not None:
            callback.stop()
        if worker.nanny is not None:
            # dask adds the plugin that replaces this one right after. With the same settings, it
            # keeps the pool, and what is out.
            worker.loop.add_callback(self._close_unless_replaced)

    def _close_unless_replaced(self) -> None:
        if self.name not in self._worker.plugins:
            forget(self._pool)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_worker": None}

    async def _join(self) -> None:
        """Ask the scheduler whether it deals out shares; without, the pool goes by what it sees."""
        worker = self._worker
        try:
            reply = await getattr(worker.scheduler, JOIN)(worker=worker.address)
        except Exception as error:  # noqa: BLE001  the pool works without
            logger.warning("the scheduler deals out no shares: %r", error)
            return
        # One that does not know the question answers nothing. Meanwhile, another plugin may have
        # taken the place of this one.
        if reply is None or self._pool is None or worker.plugins.get(self.name) is not self:
            return
        self._joined = True
        self._pool.wait_for_turn(random.uniform(0.0, reply["spread_s"]))
        callback = PeriodicCallback(self._report, reply["every_s"] * 1000)
        worker.periodic_callbacks[self.name] = callback
        callback.start()

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Have the scheduler not try a task again that its pool has given up.

        A task may catch that, and fail later for what another try mends. dask tells of the failure
        after this, in the same stream, so that the scheduler reads this first.
        """
        del start, finish, kwargs
        failed = self._worker.address, key
        if failed not in _failed:
            return
        task = self._worker.state.tasks.get(key)
        if task is not None and task.state in _RUNNING:
            return
        _failed.discard(failed)
        erred = task is not None and task.state == "error"
        if erred and self._joined and _given_up(task.exception.data):
            self._worker.batched_send({"op": FINAL, "key": key})

    def _report(self) -> None:
        """Say what was seen since the last time; nothing, if it is nothing again."""
        if self._pool is None or self._pool.closed:
            return
        pool = self._pool
        report = written_report(*pool.observe(), pool.statistics, self._timings)
        self._timings = {}
        if self._asks:
            self._worker.loop.run_in_executor(None, self._ask_timings, pool)
        idle = not any(one["out"] or one["waiting"] or one["rows"] for one in report["seen"])
        if not (idle and self._idle):
            self._worker.batched_send({"op": REPORT, **report})
        self._idle = idle

    def _ask_timings(self, pool: Pool) -> None:
        """Ask the servers for their own statistics, to be told with the next report."""
        self._timings = pool.timings()

    def _allow(  # what the scheduler's message holds
        self,
        shares: list[list[Any]],
        lost: list[str],
        lasts_s: float,
        every_s: float,
        *,
        asks: bool,
    ) -> None:
        self._asks = asks
        if self._pool is None or self._pool.closed:
            return
        self._pool.allow(read_shares(shares, lasts_s, time.monotonic()), lost, lasts_s)
        callback = self._worker.periodic_callbacks.get(self.name)
        if callback is not None:
            callback.callback_time = every_s * 1000


def _note_failure() -> None:
    """Note that a model has failed in the task that this thread runs."""
    worker, key = current_task()
    if worker is not None:
        _failed.add((worker.address, key))


def _given_up(exception: bytes) -> bool:
    """Whether what a task raised is a model's failure, or was raised from one."""
    _, error, _ = clean_exception(exception)
    while error is not None and not isinstance(error, SonicError):
        error = error.__cause__
    return error is not None
