"""What the dashboard shows: sums and rates over all workers that there were."""

from __future__ import annotations

from typing import Any

from sonic_coffea.dask._dashboard import History
from sonic_coffea.dask._quotas import Allocator
from sonic_coffea.pool import RttStatistics, Telemetry
from sonic_coffea.transport import ModelStatistics

URL = "grpc://s:1"
KEY = URL, "m", "1"


def totals(rows: int) -> dict[Any, float]:
    """Return those of a worker that has sent requests of ten rows and 0.5 s."""
    return {(KEY, "rows"): rows, (KEY, "requests"): rows / 10, (KEY, "trip_s"): 0.05 * rows}


def asked(requests: int, queue_s: float, compute_s: float) -> ModelStatistics:
    return ModelStatistics(requests=requests, queue_s=queue_s, compute_s=compute_s)


def test_what_other_clusters_send_is_seen() -> None:
    """By the server's own account, which is of all requests."""
    history = History()
    served = URL, ("m", None)
    for step in range(40):
        # Ten of its own a step, and thirty of others.
        history.report(totals(100 if step else 0), {})
        history.report({}, {served: asked(1000 + 40 * step, 1, 1)})
        if step == 0:
            # What was before is nobody's.
            assert history.courses[KEY].others is None
    others = history.courses[KEY].others
    assert others is not None
    assert abs(others - 0.75) < 0.01


def test_rounds_make_rates() -> None:
    history, allocator = History(), Allocator()
    telemetry = {(URL, ("m", None)): Telemetry(3, 4, RttStatistics())}
    for now in (0.0, 1.0, 2.0):
        history.report(totals(100 if now else 0), {})
        allocator.report("a", telemetry, {URL: now == 2.0}, now)
        allocator.end_round(now)
        history.end_round(allocator, now)
    (course,) = history.courses.values()
    assert [rate for _, rate in course.rows_per_s] == [100.0, 100.0]
    assert course.rtt_s == 0.5
    assert course.demand == (3, 4, allocator.capacities[URL, ("m", None)].limit)
    assert course.open_circuits == 1


def test_a_server_s_own_account_is_of_the_time_since_it_was_asked() -> None:
    history = History()
    history.report(totals(10), {(URL, ("m", None)): asked(10, 1.0, 3.0)})
    history.report({}, {(URL, ("m", None)): asked(20, 1.1, 6.0)})
    history.report({}, {(URL, ("m", "2")): asked(20, 9.0, 9.0)})  # another version
    (course,) = history.courses.values()
    assert course.queue_s is not None
    assert round(course.queue_s, 6) == 0.01
    assert course.model_s == 0.3
