"""The worker plugin: every present and future worker of a cluster gets the pool of a client."""

from __future__ import annotations

import logging
import pickle
import random
import sys
import threading
from collections import Counter
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from dask.base import tokenize
from distributed import Worker, WorkerPlugin, get_worker
from distributed.core import clean_exception
from tornado.ioloop import PeriodicCallback

from sonic_coffea._version import __version__
from sonic_coffea.dask._dashboard import TOTALS
from sonic_coffea.dask._metrics import offer_metrics
from sonic_coffea.dask._quotas import ServedModel
from sonic_coffea.dask._secede import suspend
from sonic_coffea.errors import ConfigError, ServerStartError, SonicError
from sonic_coffea.pool import TRANSIENT, Pool, Settings, hooks, install, is_in_process, uninstall

logger = logging.getLogger(__name__)

TOPIC = "sonic-coffea"
"""The topic of events, for `Client.get_events`; and the annotation of a task with the name of the
worker plugin that has the settings of its client, "" if that is ambiguous."""
FINAL = "sonic-coffea-final"
"""The topic of tasks that are not to be tried again."""
JOIN = f"sonic_join_{__version__}"
"""Asked by a worker, once. A scheduler with another version, and so perhaps other messages, does
not know it."""
REPORT, QUOTAS = "sonic-report", "sonic-quotas-"
"""In the streams between workers and scheduler, once a worker has joined: distributed ends a stream
that brings an unknown operation. Quotas name the plugin."""

# Before Python 3.11.9, `sys._current_frames`, which dask's profiler calls 100 times a second, can
# freeze a process in which a thread is started at the same moment (CPython issue 106883). A thread
# is started whenever a chunk secedes.
_PROFILER_FREEZES = sys.version_info < (3, 11, 9)

# Of each pool, what was reported of its tallies; workers of one process share a pool.
_reported: WeakKeyDictionary[Pool, Counter[Any]] = WeakKeyDictionary()


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
    is_known : bool
        Whether the scheduler knows which client has registered it.
    """

    idempotent = True
    is_known = False
    pool: Pool | None = None
    _worker: Any = None
    _last: Any = False, {}
    _polling: threading.Thread | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = f"sonic-coffea-{tokenize(settings.identity())}"
        self._timings: dict[Any, Any] = {}

    async def setup(self, worker: Worker) -> None:
        """Open the pool, and ask the scheduler for its first limits; this contacts no server."""
        self._worker = worker
        if _PROFILER_FREEZES and (profiler := worker.periodic_callbacks.pop("profile", None)):
            profiler.stop()
        hooks.wait, hooks.pool_of_task = suspend, _pool_of_task
        hooks.memory_bytes = worker.memory_manager.memory_limit
        self.pool = install(self.settings, claim=False)
        self.pool.workers[worker] = None
        offer_metrics()
        # Waited for, as the first task may fail for good, or contact the servers.
        await self._join(self.pool)

    async def _join(self, pool: Pool) -> None:
        """Ask the scheduler whether it allocates quotas; without, the pool adapts by itself."""
        worker = self._worker
        try:
            reply = await getattr(worker.scheduler, JOIN)(worker=worker.address, plugin=self.name)
            first = reply["max_in_flight"], reply["quotas_within_s"]
        except Exception as error:  # noqa: BLE001  the pool works without
            logger.warning(
                "the scheduler allocates no quotas: %r; has it another version of sonic-coffea?",
                error,
            )
            return
        if self.pool is not None:  # else, the plugin has been taken away meanwhile
            pool.join_cluster(random.uniform(0.0, reply["spread_s"]), *first)
            worker.stream_handlers[QUOTAS + self.name] = self.set_quotas
            callback = PeriodicCallback(self._report, reply["round_s"] * 1000)
            worker.periodic_callbacks[self.name] = callback
            callback.start()

    def teardown(self, worker: Worker) -> None:
        """Let go of the pool, which stays open for calls that are under way."""
        callback = worker.periodic_callbacks.pop(self.name, None)
        if callback is not None:
            callback.stop()
            self._report()  # what was counted since the last round
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.workers.pop(worker, None)
            uninstall(pool)

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Tell the scheduler not to retry a task whose rows no server will ever score.

        dask reports the failure after this message, in the same stream, so the scheduler reads this
        message first.
        """
        del start, kwargs
        task = self._worker.state.tasks.get(key) if finish == "error" else None
        # dask keeps no exception of a task that it forgets meanwhile.
        error = None if task is None else task.exception
        if error is not None and _is_final(error.data):
            self._worker.log_event(FINAL, {"key": key})

    def _report(self) -> None:
        """Report the pool's telemetry, unless it is idle, and nothing has changed since last time.

        Of the workers of this process that have the pool, the first one does so.
        """
        stream, pool = self._worker.batched_stream, self.pool
        if stream is None or stream.comm is None or stream.comm.closed():
            return  # dask would drop the message, and with it what is counted since the last one
        if pool is None or next(iter(pool.workers), self._worker) is not self._worker:
            return
        telemetry = {} if pool.closed else pool.telemetry()
        busy = any(t.in_flight or t.waiting or t.rtts for t in telemetry.values())
        totals = _news(pool)
        servers = [] if pool.closed else pool.servers
        states = [state for state in servers if not is_in_process(state.url)]
        circuits = {state.url: state.circuit != "closed" for state in states}
        # Calls that wait for a lost server to confirm its model have no requests yet.
        if busy or totals or (busy, circuits) != self._last:
            report = pickle.dumps((telemetry, circuits, totals, self._timings))
            self._worker.batched_send({"op": REPORT, "plugin": self.name, "report": report})
            self._timings = {}
        self._last = busy, circuits

    def set_quotas(self, message: bytes, lease_s: float, round_s: float) -> None:
        """Take the message of a round."""
        pool = self.pool
        if pool is None or pool.closed:
            return
        quotas, asks = pickle.loads(message)  # noqa: S301  as dask does with its own
        pool.set_quotas(quotas, lease_s)
        self._worker.periodic_callbacks[self.name].callback_time = round_s * 1000
        # Servers that have not answered yet are not asked again.
        if asks and not (self._polling and self._polling.is_alive()):
            # On a thread of its own, as servers may hang: dask needs those of its executors.
            self._polling = threading.Thread(target=self._poll, args=[pool, asks], daemon=True)
            self._polling.start()

    def _poll(self, pool: Pool, asks: Collection[ServedModel]) -> None:
        """Ask servers for their own statistics of models, for the next report."""
        versions = pool.versions(asks)
        timings = pool.timings(versions.values())
        self._timings = {s: (v, timings[v]) for s, v in versions.items() if v in timings}


def _news(pool: Pool) -> Counter[Any]:
    """Return by how much a pool's tallies have grown since this was asked last."""
    tallies = pool.statistics
    counted = Counter({(key, n): getattr(t, n) for key, t in tallies for n in TOTALS})
    news = counted - _reported.get(pool, Counter())
    _reported[pool] = counted
    return news


def _plugins(worker: Worker) -> list[Any]:
    """Return the plugins of a worker that have a pool."""
    plugins = worker.plugins.copy().values()  # the event loop may add one meanwhile
    return [plugin for plugin in plugins if isinstance(plugin, SonicPlugin) and plugin.pool]


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
    plugins = {plugin.name: plugin for plugin in _plugins(worker)}
    name = annotations.get(TOPIC)
    if name is None and not plugins:
        return None
    if name is None and len(plugins) == 1:  # its client is not connected, and may mean no other
        (name,) = plugins
    if (plugin := plugins.get(name)) is not None:
        if plugin.pool.closed:  # by a task, or by the client, if that is in this process
            plugin.pool.workers.pop(worker, None)
            plugin.pool = install(plugin.settings, claim=False)
            plugin.pool.workers[worker] = None
        pool: Pool = plugin.pool
        return pool
    if name == "":
        raise ConfigError(
            "threads of the client that sent this task were in `with sonic.connect(...)` of "
            "several pools; give each thread a client of its own, or pass the model to the task"
        )
    raise ConfigError(
        "the client that sent this task is not connected to its servers, and others may be; call "
        "sonic.connect(..., client=client) again, or pass the model to the task"
    )


def _is_final(exception: bytes) -> bool:
    """Whether a task failed by an error of this package that another try would repeat."""
    _, error, _ = clean_exception(exception)
    while error is not None and not isinstance(error, SonicError):
        error = error.__cause__
    return error is not None and not isinstance(error, (*TRANSIENT, ServerStartError))
