"""The scheduler plugin: collects telemetry of all workers, and allocates quotas."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distributed import Scheduler, SchedulerPlugin, Status
from tornado.ioloop import PeriodicCallback

from sonic_coffea.dask._dashboard import add_page
from sonic_coffea.dask._history import History
from sonic_coffea.dask._messages import (
    ANNOTATION,
    CONNECTED,
    FINAL,
    JOIN,
    LEAVE,
    OPERATION,
    QUOTAS,
    REPORT,
    VERSION,
    handler,
    message,
    read_telemetry,
)
from sonic_coffea.dask._quotas import Allocator

logger = logging.getLogger(__name__)

TOPIC = "sonic-coffea"
"""The topic of events, for `Client.get_events` and other listeners."""

# Processes that may connect to the servers in a second.
_CONNECT_RATE = 200


class SonicSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Allocates the servers to the processes of workers, and keeps what the dashboard shows.

    Workers join when their plugin starts and report in rounds, by the messages that they send to
    the scheduler anyway. Those of one process share its pool of each settings, and so one quota. A
    process whose lease has expired goes by its own limits.

    The plugin also notes on each task which settings its client has, for models that the task does
    not carry, and takes worker plugins away that no client has asked for.
    """

    name = "sonic-coffea-scheduler"
    idempotent = True

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.history = History()
        self._processes: dict[str, list[str]] = {}
        # By client, the worker plugins with its settings; the last is that of its next tasks.
        self._plugins: defaultdict[str, list[str]] = defaultdict(list)
        self._scheduler: Any = None

    async def start(self, scheduler: Scheduler) -> None:
        """Listen to the workers."""
        self._scheduler = scheduler
        scheduler.handlers[CONNECTED] = self.connected
        scheduler.handlers[JOIN] = self.join
        scheduler.stream_handlers[OPERATION] = handler(
            {REPORT: self.report, FINAL: self.final, LEAVE: self.leave}
        )
        callback = PeriodicCallback(self.end_round, self.allocator.round_s * 1000)
        scheduler.periodic_callbacks[self.name] = callback
        callback.start()
        add_page(scheduler, self.history)

    def connected(self, client: str, plugin: str, **unknown: Any) -> None:
        """Note which worker plugin has the settings of a client."""
        del unknown
        self._plugins[client] = [*(p for p in self._plugins[client] if p != plugin), plugin]

    def update_graph(
        self, scheduler: Scheduler, *, client: str, tasks: Collection[Any], **kwargs: Any
    ) -> None:
        """Note on new tasks which settings their client has."""
        del kwargs
        for key in tasks if client in self._plugins else ():
            task = scheduler.tasks[key]
            task.annotations = {ANNOTATION: self._plugins[client][-1], **(task.annotations or {})}

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Take the worker plugins away that the client has asked for, and no other."""
        for plugin in self._plugins.pop(client, ()):
            scheduler.loop.add_callback(self._take_away, scheduler, plugin)

    async def _take_away(self, scheduler: Scheduler, plugin: str) -> None:
        wanted = any(plugin in plugins for plugins in self._plugins.values())
        if wanted or plugin not in scheduler.worker_plugins or scheduler.status != Status.running:
            return
        try:
            await scheduler.unregister_worker_plugin(None, plugin)
        except Exception:  # such as a worker that leaves at this moment
            logger.debug("%s is still on some workers", plugin, exc_info=True)

    def join(
        self,
        worker: str,
        process: str,
        version: Any = None,
        **unknown: Any,
    ) -> dict[str, float]:
        """Add a worker, and return what it does until the first round."""
        del unknown
        if version != VERSION:
            return {"version": VERSION}
        workers = self._processes.setdefault(process, [])
        if worker not in workers:
            workers.append(worker)
        self.allocator.join(process)
        return {
            "version": VERSION,
            "round_s": self.allocator.round_s,
            "spread_s": (self.allocator.clients - 1) / _CONNECT_RATE,
            "max_in_flight": self.allocator.first_in_flight,
            "quotas_within_s": self.allocator.quotas_within_s,
        }

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a worker."""
        del scheduler, kwargs
        for process in [p for p, workers in self._processes.items() if worker in workers]:
            self.leave(worker, process)

    def leave(self, worker: str, process: str, **unknown: Any) -> None:
        """Forget a worker of a process."""
        del unknown
        workers = self._processes.get(process, [])
        if worker in workers:
            workers.remove(worker)
            if not workers:
                del self._processes[process]
                self.allocator.leave(process)
                self.history.leave(process)

    def report(
        self,
        worker: str,
        process: str,
        number: int,
        telemetry: Sequence[Any],
        circuits: Mapping[str, bool],
        totals: Sequence[Any],
        timings: Sequence[Any],
        **unknown: Any,
    ) -> None:
        """Take a worker's report of a pool of its process."""
        del unknown
        if worker not in self._scheduler.workers:  # it is gone, and its last report comes late
            return
        self.join(worker, process, version=VERSION)
        read = read_telemetry(telemetry)
        for server in self.allocator.report(process, read, circuits, time.monotonic()):
            action = "lost" if circuits[server] else "back"
            event = {"action": action, "server": server, "worker": worker}
            self._scheduler.log_event(TOPIC, event)
        for served, compute_s in self.history.report(process, number, totals, timings).items():
            self.allocator.capacities[served].compute_s = compute_s

    def final(self, worker: str, key: Any, **unknown: Any) -> None:
        """Keep dask from retrying a task that failed for good."""
        del unknown
        task = self._scheduler.tasks.get(key)
        # It may be elsewhere by now, if the worker had been thought lost.
        if task is not None and task.processing_on and task.processing_on.address == worker:
            task.retries = 0

    def end_round(self) -> None:
        """Tell the processes what they may have in flight."""
        now = time.monotonic()
        allocated = self.allocator.allocate(now)
        self.history.end_round(self.allocator, now)
        asking = next((process for process, grants in allocated.items() if grants), None)
        for process, grants in allocated.items():
            worker = self._processes[process][0]
            concerned = grants or process in self.allocator.held
            if worker in self._scheduler.workers and concerned:
                quotas = message(
                    QUOTAS,
                    process=process,
                    grants=list(grants.items()),
                    lease_s=self.allocator.lease_s,
                    round_s=self.allocator.round_s,
                    asks=process == asking,
                )
                self._scheduler.worker_send(worker, quotas)
        self._scheduler.periodic_callbacks[self.name].callback_time = self.allocator.round_s * 1000
