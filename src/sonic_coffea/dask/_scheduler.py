"""The scheduler plugin: collects telemetry of all workers, and allocates quotas."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from sonic_coffea.dask._allocator import Allocator
from sonic_coffea.dask._dashboard import add_page
from sonic_coffea.dask._history import History
from sonic_coffea.dask._messages import FINAL, JOIN, QUOTAS, REPORT, read_telemetry

TOPIC = "sonic-coffea"
"""The topic of events, for `Client.get_events` and other listeners."""

# Processes that may connect to the servers in a second.
_CONNECT_RATE = 200


class SonicSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Allocates the servers to the processes of workers, and keeps what the dashboard shows.

    Workers join when their plugin starts and report in rounds, by the messages that they send to
    the scheduler anyway. Those of one process share its pool, and so one quota. A process whose
    lease has expired goes by its own limits.
    """

    name = "sonic-coffea-scheduler"
    idempotent = True

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.history = History()
        self._processes: dict[str, list[str]] = {}
        self._some_ejected = False
        # Runs evenly, and shows what the clocks of other schedulers show.
        self._clock_s = time.time() - time.monotonic()
        self._scheduler: Any = None

    async def start(self, scheduler: Scheduler) -> None:
        """Listen to the workers."""
        self._scheduler = scheduler
        scheduler.handlers[JOIN] = self.join
        scheduler.stream_handlers[REPORT] = self.report
        scheduler.stream_handlers[FINAL] = self.final
        callback = PeriodicCallback(self.end_round, self.allocator.round_s * 1000)
        scheduler.periodic_callbacks[self.name] = callback
        callback.start()
        add_page(scheduler, self.history)

    def join(self, worker: str, process: str, weight: float | None = None) -> dict[str, float]:
        """Add a worker, and return what it does until the first round.

        The weight holds for the cluster; the client that connects last sets it.
        """
        if weight is not None:
            self.allocator.weight = weight
        workers = self._processes.setdefault(process, [])
        if worker not in workers:
            workers.append(worker)
        self.allocator.join(process, len(workers))
        return {
            "round_s": self.allocator.round_s,
            "spread_s": (self.allocator.clients - 1) / _CONNECT_RATE,
            "max_in_flight": self.allocator.first_in_flight,
            "quotas_within_s": self.allocator.quotas_within_s,
        }

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a worker."""
        del scheduler, kwargs
        for process in [p for p, workers in self._processes.items() if worker in workers]:
            workers = self._processes[process]
            workers.remove(worker)
            if workers:
                self.allocator.join(process, len(workers))
            else:
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
    ) -> None:
        """Take a worker's report of its process's pool."""
        if worker not in self._scheduler.workers:  # it is gone, and its last report comes late
            return
        self.join(worker, process)
        read = read_telemetry(telemetry)
        now = time.monotonic() + self._clock_s
        for server in self.allocator.report(process, read, circuits, now):
            action = "lost" if circuits[server] else "back"
            event = {"action": action, "server": server, "worker": worker}
            self._scheduler.log_event(TOPIC, event)
        self.history.report(process, number, totals, timings)

    def final(self, worker: str, key: Any) -> None:
        """Keep dask from retrying a task that failed for good."""
        task = self._scheduler.tasks.get(key)
        # It may be elsewhere by now, if the worker had been thought lost.
        if task is not None and task.processing_on and task.processing_on.address == worker:
            task.retries = 0

    def end_round(self) -> None:
        """Tell the processes what they may have in flight."""
        now = time.monotonic()
        allocated = self.allocator.allocate(now + self._clock_s)
        ejected = self.allocator.ejected()
        self.history.end_round(self.allocator, now)
        # When the last server is readmitted, all processes hear of it once, also idle ones.
        ejections_changed = bool(ejected) or self._some_ejected
        self._some_ejected = bool(ejected)
        asking = next((process for process, grants in allocated.items() if grants), None)
        for process, grants in allocated.items():
            worker = self._processes[process][0]
            concerned = grants or ejections_changed or process in self.allocator.held
            if worker in self._scheduler.workers and concerned:
                message = {
                    "op": QUOTAS,
                    "grants": list(grants.items()),
                    "ejected": [url for url, probing in ejected.items() if process not in probing],
                    "lease_s": self.allocator.lease_s,
                    "round_s": self.allocator.round_s,
                    "asks": process == asking,
                }
                self._scheduler.worker_send(worker, message)
        self._scheduler.periodic_callbacks[self.name].callback_time = self.allocator.round_s * 1000
