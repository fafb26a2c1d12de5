"""The worker plugin: every present and future worker of a cluster gets the pool of a client."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
import threading
import time
import uuid
from functools import partial
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker
from distributed.core import clean_exception
from tornado.ioloop import PeriodicCallback

from sonic_coffea.dask._messages import (
    ANNOTATION,
    FINAL,
    JOIN,
    OPERATION,
    QUOTAS,
    REPORT,
    VERSION,
    handler,
    message,
    read_quotas,
    write_report,
)
from sonic_coffea.dask._metrics import offer_metrics
from sonic_coffea.dask._secede import suspend
from sonic_coffea.errors import ConfigError, ServerStartError, SonicError
from sonic_coffea.pool import TRANSIENT, Pool, Settings, install, take_part, uninstall

logger = logging.getLogger(__name__)

# Of this process; a forked child has its parent's.
_IMPORT = uuid.uuid4().hex
# Before Python 3.11.9, `sys._current_frames`, which dask's profiler calls 100 times a second, can
# freeze a process in which a thread is started at the same moment (CPython issue 106883). A thread
# is started whenever a chunk secedes.
_PROFILER_FREEZES = sys.version_info < (3, 11, 9)


class SonicPlugin(WorkerPlugin):  # type: ignore[misc]
    """Opens the pool of a client's settings on a worker.

    Meanwhile it reports the pool's telemetry to the scheduler, and tells the pool its quotas. A
    worker has a plugin for each settings that clients of the cluster have.

    Parameters
    ----------
    settings : Settings
        The servers and limits; they travel by dask's own channel to the workers.

    Attributes
    ----------
    name : str
        The same for the same settings.
    """

    idempotent = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        identity = settings.identity()
        # The repr of settings has neither.
        text = repr((identity, identity.token, identity.secrets_id))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.name = f"sonic-coffea-{digest}"
        self.pool: Pool | None = None
        self._worker: Any = None
        self._busy = False
        self._polling: threading.Thread | None = None
        self._timings: dict[Any, Any] = {}

    async def setup(self, worker: Worker) -> None:
        """Open the pool, and hear from the scheduler how to use it; no server is contacted yet."""
        self._worker = worker
        if _PROFILER_FREEZES and (profiler := worker.periodic_callbacks.pop("profile", None)):
            profiler.stop()
        memory_bytes = worker.memory_manager.memory_limit
        suspended = self.settings.suspended_chunks(memory_bytes, worker.state.nthreads)
        take_part(partial(suspend, suspended), memory_bytes, _pool_of_task)
        self.pool = install(self.settings, claim=False)
        offer_metrics(worker, partial(_pools, worker))
        worker.stream_handlers[OPERATION] = handler({QUOTAS: partial(_set_quotas, worker)})
        # Waited for, as the first task may fail for good, or contact the servers.
        await self._join()

    def teardown(self, worker: Worker) -> None:
        """Let the pool go, which stays open for the calls under way."""
        callback = worker.periodic_callbacks.pop(self.name, None)
        if callback is not None:
            callback.stop()
        pool, self.pool = self.pool, None
        if pool is not None:
            uninstall(pool)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pool": None, "_worker": None, "_polling": None}

    @property
    def process(self) -> str:
        """A name of this process and the settings, whose pool its workers share."""
        return f"{_IMPORT}-{os.getpid()}-{self.name}"

    async def _join(self) -> None:
        """Ask the scheduler whether it allocates quotas; without, the pool adapts by itself."""
        worker = self._worker
        question = {"worker": worker.address, "process": self.process, "version": VERSION}
        try:
            join = getattr(worker.scheduler, JOIN)
            reply = await join(**question)
        except Exception as error:  # noqa: BLE001  the pool works without
            logger.warning("the scheduler allocates no quotas: %r", error)
            return
        # One that does not know the question answers nothing.
        if reply is None or reply.get("version") != VERSION:
            if reply is not None:
                logger.warning("the scheduler, of another sonic-coffea, allocates no quotas")
            return
        # Meanwhile, the plugin may have been taken away.
        if self.pool is None:
            return
        delay_s = random.uniform(0.0, reply["spread_s"])
        self.pool.join_cluster(delay_s, int(reply["max_in_flight"]), reply["quotas_within_s"])
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
            self._worker.batched_send(message(FINAL, key=key))

    def _report(self) -> None:
        """Report the pool's telemetry, unless it was idle in this round and the one before."""
        stream = self._worker.batched_stream
        if stream is None or stream.comm is None or stream.comm.closed():
            return  # dask would drop the message, and with it what is counted since the last one
        if self.pool is None or self.pool.closed:
            return
        report = write_report(self.pool, self._timings)
        telemetry = report["telemetry"]
        busy = any(in_flight or waiting or rtt[0] for _, _, in_flight, waiting, rtt, _ in telemetry)
        if busy or self._busy or report["totals"]:
            self._worker.batched_send(message(REPORT, process=self.process, **report))
            self._timings = {}
        self._busy = busy

    def set_quotas(self, pool: Pool, quotas: dict[str, Any]) -> None:
        """Take the message of a round."""
        lease_s = quotas["lease_s"]
        read = read_quotas(quotas["grants"], lease_s, time.monotonic())
        pool.set_quotas(read, lease_s)
        callback = self._worker.periodic_callbacks.get(self.name)
        if callback is not None:
            callback.callback_time = quotas["round_s"] * 1000
        # Once for each message that asks, and not while servers still owe the last answer.
        polling = self._polling is not None and self._polling.is_alive()
        if quotas.get("asks") and not polling:
            # On a thread of its own, as servers may hang: dask needs those of its executors.
            self._polling = threading.Thread(
                target=self._poll, args=[pool], name="sonic-statistics", daemon=True
            )
            self._polling.start()

    def _poll(self, pool: Pool) -> None:
        """Ask the servers for their own statistics, for the next report."""
        self._timings = pool.timings()


def _plugins(worker: Worker) -> list[SonicPlugin]:
    return [plugin for plugin in worker.plugins.values() if isinstance(plugin, SonicPlugin)]


def _pools(worker: Worker) -> list[Pool]:
    return [plugin.pool for plugin in _plugins(worker) if plugin.pool is not None]


def _set_quotas(worker: Worker, process: str, **quotas: Any) -> None:
    for plugin in _plugins(worker):
        if plugin.process == process and plugin.pool is not None and not plugin.pool.closed:
            plugin.set_quotas(plugin.pool, quotas)


def _pool_of_task() -> Pool | None:
    """Return the pool of the client that sent the task of this thread; None outside of tasks.

    Raises
    ------
    ConfigError
        If the client is not connected, and several others are.
    """
    try:
        worker = get_worker()
        annotations = worker.state.tasks[worker.get_current_task()].annotations or {}
    except (ValueError, KeyError):
        return None
    if (name := annotations.get(ANNOTATION)) is not None:
        plugin = worker.plugins.get(name)
        pool: Pool | None = getattr(plugin, "pool", None)
        if pool is None:
            raise ConfigError(
                "this worker has no pool of the client that sent the task; call "
                "sonic.connect(..., client=client) again"
            )
        return pool
    pools = _pools(worker)
    if len(pools) > 1:
        several = " and ".join(", ".join(pool.settings.servers) for pool in pools)
        raise ConfigError(
            f"the client that sent this task is not connected, and others are, to {several}; call "
            "sonic.connect(..., client=client), or pass the model to the task"
        )
    return pools[0] if pools else None


def _is_final(exception: bytes) -> bool:
    """Whether a task failed by an error of this package that another try would repeat."""
    _, error, _ = clean_exception(exception)
    while error is not None and not isinstance(error, SonicError):
        error = error.__cause__
    return error is not None and not isinstance(error, (*TRANSIENT, ServerStartError))
