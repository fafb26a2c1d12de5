"""The worker plugin: every present and future worker of a cluster gets its pool."""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import time
import uuid
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.core import clean_exception
from tornado.ioloop import PeriodicCallback

from sonic_coffea.dask._messages import FINAL, JOIN, QUOTAS, REPORT, read_quotas, write_report
from sonic_coffea.dask._metrics import offer_metrics
from sonic_coffea.dask._secede import Suspender
from sonic_coffea.errors import ServerStartError, SonicError
from sonic_coffea.pool import TRANSIENT, Pool, Settings, forget, install, take_part

logger = logging.getLogger(__name__)

# Of this process; a forked child has its parent's.
_IMPORT = uuid.uuid4().hex
# Of this process's reports: those of its workers may reach the scheduler in another order.
_numbers = itertools.count()
# Before Python 3.11.9, `sys._current_frames`, which dask's profiler calls 100 times a second, can
# freeze a process in which a thread is started at the same moment (CPython issue 106883). A thread
# is started whenever a chunk secedes.
_PROFILER_FREEZES = sys.version_info < (3, 11, 9)


class SonicPlugin(WorkerPlugin):  # type: ignore[misc]
    """Opens the pool of a worker process when it starts, and closes it when it ends.

    Meanwhile it reports the pool's telemetry to the scheduler, and tells the pool its quotas.

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
        self._busy = False
        self._asks = False
        self._timings: dict[Any, Any] = {}

    async def setup(self, worker: Worker) -> None:
        """Open the pool, and hear from the scheduler how to use it; no server is contacted yet."""
        self._worker = worker
        if _PROFILER_FREEZES and (profiler := worker.periodic_callbacks.pop("profile", None)):
            profiler.stop()
        memory_bytes = worker.memory_manager.memory_limit
        suspended = self.settings.limits.suspended_chunks(memory_bytes, worker.state.nthreads)
        take_part(Suspender(suspended).wait, memory_bytes)
        # Not on the event loop: it closes the pool of other settings.
        self._pool = await worker.loop.run_in_executor(None, install, self.settings)
        offer_metrics(worker, self._pool)
        worker.stream_handlers[QUOTAS] = self._set_quotas
        # Waited for, as the first task may fail for good, or contact the servers.
        await self._join()

    def teardown(self, worker: Worker) -> None:
        """Close the pool, unless the worker shares a process with others or with the client."""
        callback = worker.periodic_callbacks.pop(self.name, None)
        if callback is not None:
            callback.stop()
        if worker.nanny is not None:
            # dask adds the plugin that replaces this one right after. With the same settings, it
            # keeps the pool, and what is in flight.
            worker.loop.add_callback(self._close_unless_replaced)

    def _close_unless_replaced(self) -> None:
        if self.name not in self._worker.plugins:
            self._worker.loop.run_in_executor(None, forget, self._pool)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_worker": None}

    async def _join(self) -> None:
        """Ask the scheduler whether it allocates quotas; without, the pool adapts by itself."""
        worker = self._worker
        try:
            join = getattr(worker.scheduler, JOIN)
            reply = await join(
                worker=worker.address, process=_process(), weight=self.settings.weight
            )
        except Exception as error:  # noqa: BLE001  the pool works without
            logger.warning("the scheduler allocates no quotas: %r", error)
            return
        # One that does not know the question answers nothing. Meanwhile, another plugin may have
        # taken the place of this one.
        if reply is None or self._pool is None or worker.plugins.get(self.name) is not self:
            return
        delay_s = random.uniform(0.0, reply["spread_s"])
        self._pool.join_cluster(delay_s, int(reply["max_in_flight"]), reply["quotas_within_s"])
        callback = PeriodicCallback(self._report, reply["round_s"] * 1000)
        worker.periodic_callbacks[self.name] = callback
        callback.start()

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Tell the scheduler not to retry a task whose rows no server will ever score.

        dask reports the failure after this message, in the same stream, so the scheduler reads this
        message first.
        """
        del start, kwargs
        task = self._worker.state.tasks.get(key) if finish == "error" else None
        joined = self.name in self._worker.periodic_callbacks
        # dask keeps no exception of a task that it forgets meanwhile.
        error = None if task is None else task.exception
        if error is not None and joined and _is_final(error.data):
            self._worker.batched_send({"op": FINAL, "key": key})

    def _report(self) -> None:
        """Report the pool's telemetry, unless it was idle in this round and the one before."""
        stream = self._worker.batched_stream
        if stream is None or stream.comm is None or stream.comm.closed():
            return  # dask would drop the message, and with it what is counted since the last one
        if self._pool is None or self._pool.closed:
            return
        if self._asks:
            self._worker.loop.run_in_executor(None, self._ask_timings, self._pool)
        number, report = next(_numbers), write_report(self._pool, self._timings)
        telemetry = report["telemetry"]
        busy = any(in_flight or waiting or rtt[0] for _, _, in_flight, waiting, rtt, _ in telemetry)
        if busy or self._busy:
            message = {"op": REPORT, "process": _process(), "number": number, **report}
            self._worker.batched_send(message)
            self._timings = {}
        self._busy = busy

    def _ask_timings(self, pool: Pool) -> None:
        """Ask the servers for their own statistics, for the next report."""
        self._timings = pool.timings()

    def _set_quotas(
        self, grants: list[Any], ejected: list[str], lease_s: float, round_s: float, *, asks: bool
    ) -> None:
        self._asks = asks
        if self._pool is None or self._pool.closed:
            return
        quotas = read_quotas(grants, lease_s, time.monotonic())
        self._pool.set_quotas(quotas, ejected, lease_s)
        callback = self._worker.periodic_callbacks.get(self.name)
        if callback is not None:
            callback.callback_time = round_s * 1000


def _process() -> str:
    """Return the name of this process: its workers share one pool, and so one quota."""
    return f"{_IMPORT}-{os.getpid()}"


def _is_final(exception: bytes) -> bool:
    """Whether a task failed by an error of this package that another try would repeat."""
    _, error, _ = clean_exception(exception)
    while error is not None and not isinstance(error, SonicError):
        error = error.__cause__
    return error is not None and not isinstance(error, (*TRANSIENT, ServerStartError))
