"""The scheduler plugin: collects telemetry of all workers, and allocates quotas."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from distributed import Scheduler, SchedulerPlugin, Status
from tornado.ioloop import PeriodicCallback

from sonic_coffea._version import __version__
from sonic_coffea.dask._dashboard import History, add_page
from sonic_coffea.dask._quotas import Allocator, ServedModel
from sonic_coffea.dask._worker import FINAL, JOIN, QUOTAS, REPORT, TOPIC

logger = logging.getLogger(__name__)

CONNECTED = f"sonic_connected_{__version__}"
"""Asked by a client that has been connected."""
TURN = "sonic-turn"
"""In the stream of such a client, where it is read after the tasks that were sent before."""

# Processes that may connect to the servers in a second.
_CONNECT_RATE = 200


class SonicSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Allocates the servers to the plugins of workers, and keeps what the dashboard shows.

    Workers join when their plugin starts, and report in rounds. A worker whose lease has expired
    adapts its own limits. The plugin also annotates each task with the settings of its client, for
    models that the task does not carry, and removes worker plugins that no client has asked for.
    """

    name = "sonic-coffea-scheduler"
    idempotent = True

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.history = History(self.allocator)
        # By client, the worker plugins with its settings, and that of its next tasks.
        self._plugins: defaultdict[str, set[str]] = defaultdict(set)
        self._next: dict[str, str] = {}
        self._scheduler: Any = None

    async def start(self, scheduler: Scheduler) -> None:
        """Listen to the workers."""
        self._scheduler = scheduler
        # A client that comes back must not register a worker plugin that is just being taken away.
        self._removal = asyncio.Lock()
        scheduler.handlers.update({CONNECTED: self.connected, JOIN: self.join})
        scheduler.stream_handlers.update({REPORT: self.report, TURN: self.set_next})
        callback = PeriodicCallback(self.end_round, self.allocator.round_s * 1000)
        scheduler.periodic_callbacks[self.name] = callback
        callback.start()
        add_page(scheduler, self.history)

    async def connected(self, client: str, plugin: str) -> None:
        """Note a worker plugin that has settings of a client."""
        async with self._removal:
            self._plugins[client].add(plugin)

    def set_next(self, client: str, plugin: str) -> None:
        """Note which worker plugin is that of a client's next tasks."""
        self._next[client] = plugin

    def update_graph(
        self, scheduler: Scheduler, *, client: str, tasks: Collection[Any], **kwargs: Any
    ) -> None:
        """Annotate new tasks with the settings of their client."""
        del kwargs
        for key in tasks if client in self._next else ():
            task = scheduler.tasks[key]
            task.annotations = {TOPIC: self._next[client], **(task.annotations or {})}

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Take the worker plugins away that the client has asked for, and no other."""
        self._next.pop(client, None)
        for plugin in self._plugins.pop(client, ()):
            scheduler.loop.add_callback(self._remove, scheduler, plugin)

    async def _remove(self, scheduler: Scheduler, plugin: str) -> None:
        async with self._removal:
            is_needed = any(plugin in plugins for plugins in self._plugins.values())
            known = plugin in scheduler.worker_plugins
            if is_needed or not known or scheduler.status != Status.running:
                return
            try:
                await scheduler.unregister_worker_plugin(None, plugin)
            except Exception:  # such as a worker that leaves at this moment
                logger.debug("%s is still on some workers", plugin, exc_info=True)
            self._forget(plugin)

    def join(self, worker: str, plugin: str) -> dict[str, float]:
        """Add a worker, and return what it does until the first round."""
        self.allocator.join((worker, plugin))
        return {
            "round_s": self.allocator.round_s,
            "spread_s": (len(self.allocator.clients) - 1) / _CONNECT_RATE,
            "max_in_flight": self.allocator.first_in_flight,
            "quotas_within_s": self.allocator.quotas_within_s,
        }

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a worker."""
        del scheduler, kwargs
        self._forget(worker)

    def _forget(self, worker_or_plugin: str) -> None:
        for client in list(self.allocator.clients):
            if worker_or_plugin in client:
                self.allocator.leave(client)

    def report(self, worker: str, plugin: str, report: bytes) -> None:
        """Take a worker's report of a pool."""
        telemetry, circuits, totals, timings = pickle.loads(report)  # noqa: S301  as dask does
        self.history.report(totals, timings)
        client, now = (worker, plugin), time.monotonic()
        if client not in self.allocator.clients:  # it is gone, and its last report comes late
            return
        for server in self.allocator.report(client, telemetry, circuits, now):
            action = "lost" if circuits[server] else "back"
            event = {"action": action, "server": server, "worker": worker}
            self._scheduler.log_event(TOPIC, event)

    def log_event(self, topic: str, msg: Any) -> None:
        """Keep dask from retrying a task that failed for good, as its worker says."""
        if topic == FINAL:
            task = self._scheduler.tasks.get(msg["key"])
            # It may be elsewhere by now, if the worker had been thought lost.
            if task and task.processing_on and task.processing_on.address == msg["worker"]:
                task.retries = 0

    def end_round(self) -> None:
        """Tell the workers what they may have in flight."""
        now = time.monotonic()
        allocated = self.allocator.end_round(now)
        self.history.end_round(now)
        # For each model of a server, one of them asks for the server's own statistics.
        asked: set[ServedModel] = set()
        for (worker, plugin), quotas in allocated.items():
            message = {
                "op": QUOTAS + plugin,
                "message": pickle.dumps((quotas, quotas.keys() - asked)),
                "lease_s": self.allocator.lease_s,
                "round_s": self.allocator.round_s,
            }
            asked |= quotas.keys()
            if worker in self._scheduler.workers:
                self._scheduler.worker_send(worker, message)
        self._scheduler.periodic_callbacks[self.name].callback_time = self.allocator.round_s * 1000
