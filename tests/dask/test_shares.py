"""Two clusters on one server, and two shares in one of them: each has the part of its weight."""

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

    from sonic_coffea.dask._capacity import Capacity

pytestmark = [pytest.mark.server, pytest.mark.slow]  # and clusters of processes

ROWS = 8 * 64


def keep_scoring(share: str, weight: float, over: Path) -> int:
    """Have rows waiting until a file is there; return how many have scores."""
    rows, pending = 0, deque[Any]()
    with sonic.share(share, weight):
        while not over.exists():
            while len(pending) < 4:
                pending.append(MODEL.submit(jets(0, ROWS)))
            pending.popleft().result()
            rows += ROWS
    for one in pending:
        one.cancel()
    return rows


class Scheduler:
    """What the scheduler of a cluster in this process knows of its one server."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._plugin = cluster.scheduler.plugins[SonicSchedulerPlugin.name]

    @property
    def capacities(self) -> list[Capacity]:
        return list(self._plugin.allocator.capacities.values())

    @property
    def probing(self) -> bool:
        """Whether its clients leave room, so that those of the other find an empty queue."""
        return any(capacity._probe for capacity in self.capacities)

    @property
    def rows(self) -> float:
        return sum(course.totals["rows"] for course in self._plugin.history.courses.values())

    @property
    def others(self) -> float:
        """Which part the other cluster sends, by the server's own account."""
        return max((c.others or 0.0 for c in self._plugin.history.courses.values()), default=0.0)


def test_clusters_and_shares_have_parts_by_weight(
    slow_server: sonic.LocalServer, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    with (
        local_cluster(1) as small,
        local_cluster(1) as large,
        Client(small) as of_small,
        Client(large) as of_large,
        sonic.connect(slow_server, client=of_small, weight=1.0),
        sonic.connect(slow_server, client=of_large, weight=3.0),
    ):
        futures = [
            of_small.submit(keep_scoring, "", 1.0, over),
            of_large.submit(keep_scoring, "signal", 3.0, over),
            of_large.submit(keep_scoring, "", 1.0, over),
        ]
        one, two = Scheduler(small), Scheduler(large)
        until(lambda: bool(one.capacities and two.capacities))
        # The schedulers, which are in this process, make room for each other at full minutes, else.
        for capacity in (*one.capacities, *two.capacities):
            capacity.baseline_s = 10.0
        until(lambda: one.probing and two.probing)
        for capacity in (*one.capacities, *two.capacities):
            capacity.baseline_s = 1000.0  # as in the minute after that
        until(lambda: not (one.probing or two.probing))
        settling = one.rows + two.rows
        until(lambda: one.rows + two.rows > settling + 10 * ROWS)
        before = one.rows, two.rows
        until(lambda: one.rows + two.rows > sum(before) + 30 * ROWS)
        rows = one.rows - before[0], two.rows - before[1]
        until(lambda: 0.4 < one.others < 0.95)
        until(lambda: 0.05 < two.others < 0.6)
        over.touch()
        of_shares = [future.result() for future in futures[1:]]
        futures[0].result()
    # 0.75 of both, had they enough time.
    assert 0.5 < rows[1] / sum(rows) < 0.95
    assert 0.5 < of_shares[0] / sum(of_shares) < 0.95
