"""A dask cluster before one URL, behind which Tritons die, hang and leave."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from distributed import Client
from tests.dask.conftest import local_cluster
from tests.scored import same_scores
from tests.waiting import until

import sonic_coffea as sonic

if TYPE_CHECKING:
    from tests.network.tritons import Triton

TASKS = 4


def test_workers_lose_no_row_when_one_of_two_servers_dies(
    two_tritons: list[Triton],
    proxy: Any,
    tagger: sonic.Model,
    jets: Any,
    direct: list[Any],
) -> None:
    def timed(number: int) -> tuple[float, Any]:
        begun = time.monotonic()
        scores = tagger(jets).top
        return time.monotonic() - begun, scores

    with (
        proxy(two_tritons) as running,
        local_cluster(2) as cluster,
        Client(cluster) as client,
        sonic.connect(running.url, client=client, max_suspended_chunks=0),
    ):

        def longest_s(first: int) -> float:
            tasks = client.gather(client.map(timed, range(first, first + TASKS)))
            for _, scores in tasks:
                same_scores(scores, direct)
            return max(took_s for took_s, _ in tasks)

        longest_s(0)  # compiles
        healthy_s = longest_s(TASKS)
        futures = client.map(timed, range(2 * TASKS, 3 * TASKS))
        until(lambda: any(future.done() for future in futures))
        two_tritons[0].kill()
        dying_s = longest_s(2 * TASKS)
        dead_s = longest_s(3 * TASKS)
        # What is lost is sent again at once, by each worker; no server is lost to the cluster.
        assert max(dying_s, dead_s) < 8 * healthy_s + 2
        events = [event for _, event in client.get_events("sonic-coffea")]
        assert [event for event in events if event["action"] == "lost"] == []
