"""The scheduler plugin: sees the servers through all workers, and deals them out."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from distributed import Scheduler, SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from sonic_coffea.dask._allocation import Shares
from sonic_coffea.dask._dashboard import add_page
from sonic_coffea.dask._history import History
from sonic_coffea.dask._messages import FINAL, JOIN, REPORT, SHARES, read_seen, written_shares

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

TOPIC = "sonic-coffea"
"""Of the events that are logged."""

# So many workers may connect to the servers in a second.
_CONNECT_RATE = 200


class SonicSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Deals out what the servers bear among the workers, and keeps what the dashboard shows.

    Workers join when their plugin starts and report in rounds, by the messages that they send to
    the scheduler anyway. A worker that hears nothing goes by what it sees itself.
    """

    name = "sonic-coffea-scheduler"
    idempotent = True

    def __init__(self) -> None:
        self.shares = Shares()
        self.history = History()
        self._some_lost = False
        self._scheduler: Any = None

    async def start(self, scheduler: Scheduler) -> None:
        """Listen to the workers."""
        self._scheduler = scheduler
        scheduler.handlers[JOIN] = self.join
        scheduler.stream_handlers[REPORT] = self.report
        scheduler.stream_handlers[FINAL] = self.final
        callback = PeriodicCallback(self.round, self.shares.every_s * 1000)
        scheduler.periodic_callbacks[self.name] = callback
        callback.start()
        add_page(scheduler, self)

    async def close(self) -> None:
        """End with the scheduler."""
        callback = self._scheduler.periodic_callbacks.pop(self.name, None)
        if callback is not None:
            callback.stop()

    def join(self, worker: str) -> dict[str, float]:
        """Take in a worker; it is told how to behave until the first round."""
        self.shares.join(worker)
        return {
            "every_s": self.shares.every_s,
            "spread_s": (self.shares.workers - 1) / _CONNECT_RATE,
        }

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a worker."""
        del scheduler, kwargs
        self.shares.leave(worker)
        self.history.leave(worker)

    def report(
        self,
        worker: str,
        seen: Sequence[Any],
        lost: Mapping[str, bool],
        totals: Sequence[Any],
        timings: Sequence[Any],
    ) -> None:
        """Take what a worker saw."""
        if worker not in self._scheduler.workers:  # it is gone, and its last words come late
            return
        now = time.monotonic()
        self._tell_of_losses(worker, lost)
        self.shares.report(worker, read_seen(seen), lost, now)
        self.history.add(worker, totals, timings, lost, now)

    def _tell_of_losses(self, worker: str, lost: Mapping[str, bool]) -> None:
        """Log what changed as an event, for `Client.get_events` and whoever listens."""
        for server, is_lost in lost.items():
            if is_lost != self.history.is_lost(worker, server):
                event = {"action": "lost" if is_lost else "back", "server": server}
                self._scheduler.log_event(TOPIC, {**event, "worker": worker})

    def final(self, worker: str, key: Any) -> None:
        """Have a task that failed for good not be tried again: the pool has done what can be."""
        task = self._scheduler.tasks.get(key)
        # It may be elsewhere by now, if the worker had been thought lost.
        if task is not None and task.processing_on and task.processing_on.address == worker:
            task.retries = 0

    def round(self) -> None:
        """End a round: tell the workers what they may have."""
        now = time.monotonic()
        shares = self.shares.hand_out(now)
        lost = self.shares.lost_servers()
        self.history.round(now)
        # When the last one is back, all hear of it once, also who has nothing out.
        tells = bool(lost) or self._some_lost
        self._some_lost = bool(lost)
        asks = next((name for name, allowed in shares.items() if allowed), None)
        for worker, allowed in shares.items():
            spared = [server for server, scouts in lost.items() if worker not in scouts]
            if worker in self._scheduler.workers and (allowed or tells):
                message = {
                    "op": SHARES,
                    "shares": written_shares(allowed),
                    "lost": spared,
                    "lasts_s": self.shares.lasts_s,
                    "every_s": self.shares.every_s,
                    "asks": worker == asks,
                }
                self._scheduler.worker_send(worker, message)
        self._scheduler.periodic_callbacks[self.name].callback_time = self.shares.every_s * 1000
