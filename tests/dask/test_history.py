"""What the dashboard shows: sums and rates over all workers that there were."""

from __future__ import annotations

import itertools
from typing import Any

from sonic_coffea.dask._history import History
from sonic_coffea.dask._quotas import Allocator, Telemetry
from sonic_coffea.pool import RttStatistics

URL = "grpc://s:1"
NUMBERS = itertools.count()
KEY = URL, "m", "1"


def totals(rows: int) -> list[Any]:
    """Return those of a worker that has sent requests of ten rows and 0.5 s."""
    return [(KEY, [rows, rows / 10, 0, 0, 0.05 * rows])]


def test_workers_that_leave_or_begin_anew_count_once() -> None:
    history = History()
    history.report("a", next(NUMBERS), totals(100), [])
    history.report("b", next(NUMBERS), totals(50), [])
    history.report("a", next(NUMBERS), totals(130), [])
    assert history.courses[KEY].totals["rows"] == 180
    # Connected with other options, a worker has another pool, whose counters begin at 0.
    history.report("a", next(NUMBERS), totals(20), [])
    history.leave("b")
    history.report("b", next(NUMBERS), totals(10), [])
    assert history.courses[KEY].totals["rows"] == 210


def test_a_report_that_comes_late_is_no_new_beginning() -> None:
    """Workers of one process report in turn, each in a stream of its own."""
    history = History()
    history.report("a", 1, totals(100), [])
    history.report("a", 3, totals(130), [])
    history.report("a", 2, totals(120), [])
    history.report("a", 4, totals(140), [])
    assert history.courses[KEY].totals["rows"] == 140


def test_what_other_clusters_send_is_seen() -> None:
    """By the server's own account, which is of all requests."""
    history = History()
    served = URL, ("m", None)
    for step in range(40):
        # Ten of its own a step, and thirty of others.
        history.report("a", next(NUMBERS), totals(100 * step), [])
        history.report("a", next(NUMBERS), [], [(served, [1000 + 40 * step, 1, 0, 1, 0])])
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
        history.report("a", next(NUMBERS), totals(int(100 * now)), [])
        allocator.report("a", telemetry, {URL: now == 2.0}, now)
        allocator.allocate(now)
        history.end_round(allocator, now)
    (course,) = history.courses.values()
    assert [rate for _, rate in course.rows_per_s] == [100.0, 100.0]
    assert course.rtt_s == 0.5
    assert (course.in_flight, course.waiting, course.open_circuits) == (3, 4, 1)
    assert course.limit == allocator.capacities[URL, ("m", None)].limit


def test_a_server_s_own_account_is_of_the_time_since_it_was_asked() -> None:
    history = History()
    history.report("a", next(NUMBERS), totals(10), [((URL, ("m", None)), [10, 1.0, 0.5, 2.0, 0.5])])
    history.report("a", next(NUMBERS), [], [((URL, ("m", None)), [20, 1.1, 1.0, 4.0, 1.0])])
    history.report(
        "a", next(NUMBERS), [], [((URL, ("m", "2")), [20, 9.0, 9.0, 9.0, 9.0])]
    )  # another version
    (course,) = history.courses.values()
    assert course.queue_s is not None
    assert round(course.queue_s, 6) == 0.01
    assert course.model_s == 0.3
