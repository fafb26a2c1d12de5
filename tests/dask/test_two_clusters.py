"""Two clusters on one server, whose schedulers know nothing of each other, share it equally."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client
from tests.dask.conftest import MODEL, jets, local_cluster
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.dask import SonicSchedulerPlugin

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import LocalCluster

pytestmark = [pytest.mark.server, pytest.mark.slow]  # and clusters of processes

ROWS = 8 * 64


def keep_scoring(over: Path) -> None:
    """Have rows waiting until a file is there."""
    pending = deque[Any]()
    while not over.exists():
        while len(pending) < 4:
            pending.append(MODEL.submit(jets(0, ROWS)))
        pending.popleft().result()
    for one in pending:
        one.cancel()


class Scheduler:
    """What the scheduler of a cluster in this process knows of its one server."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._plugin = cluster.scheduler.plugins[SonicSchedulerPlugin.name]

    @property
    def rows(self) -> float:
        return sum(course.totals["rows"] for course in self._plugin.history.courses.values())

    @property
    def others(self) -> float:
        """Which part the other cluster sends, by the server's own account."""
        return max((c.others or 0.0 for c in self._plugin.history.courses.values()), default=0.0)


def test_two_clusters_share_a_server_equally(
    slow_server: sonic.LocalServer, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    with (
        local_cluster(1) as first,
        local_cluster(1) as second,
        Client(first) as of_first,
        Client(second) as of_second,
        sonic.connect(slow_server, client=of_first),
        sonic.connect(slow_server, client=of_second),
    ):
        futures = [client.submit(keep_scoring, over) for client in (of_first, of_second)]
        schedulers = Scheduler(first), Scheduler(second)
        until(lambda: all(scheduler.rows > 10 * ROWS for scheduler in schedulers))
        before = [scheduler.rows for scheduler in schedulers]
        until(lambda: sum(scheduler.rows for scheduler in schedulers) > sum(before) + 60 * ROWS)
        rows = [s.rows - at for s, at in zip(schedulers, before, strict=True)]
        until(lambda: all(0.2 < scheduler.others < 0.8 for scheduler in schedulers))
        over.touch()
        for future in futures:
            future.result()
    # 0.5, had they enough time.
    assert 0.3 < rows[0] / sum(rows) < 0.7
