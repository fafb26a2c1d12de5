"""Messages between workers and scheduler, as dask can carry them."""

from __future__ import annotations

from dataclasses import astuple
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sonic_coffea.dask._allocator import ServedModel, Telemetry
from sonic_coffea.pool import ModelKey, Quota, RttStatistics, Share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sonic_coffea.pool import Pool
    from sonic_coffea.transport import ModelStatistics

JOIN = "sonic_join"
REPORT = "sonic-report"
QUOTAS = "sonic-quotas"
FINAL = "sonic-final"

TOTALS = ("rows", "requests", "retries", "failures", "trip_s")
"""The fields of a worker's tallies that the dashboard shows."""
TIMINGS = ("requests", "queue_s", "input_s", "compute_s", "output_s")
"""The fields of a server's own statistics that it shows."""


def write_report(pool: Pool, timings: Mapping[ServedModel, ModelStatistics]) -> dict[str, Any]:
    """Return what a pool reports, as a message."""
    endpoints, waiting, shares = pool.telemetry()
    total, timing = attrgetter(*TOTALS), attrgetter(*TIMINGS)
    return {
        "telemetry": [
            (
                e.url,
                model,
                in_flight,
                waiting.get(model, 0),
                astuple(rtt),
                list(shares.get(model, {}).items()),
            )
            for e in endpoints
            for model, (in_flight, rtt) in e.models.items()
        ],
        "circuits": {e.url: e.circuit_open for e in endpoints},
        "totals": [(served, total(tally)) for served, tally in pool.statistics],
        "timings": [(served, timing(counts)) for served, counts in timings.items()],
    }


def read_telemetry(telemetry: Iterable[Sequence[Any]]) -> dict[ServedModel, Telemetry]:
    """Return the telemetry of a report."""
    return {
        (url, model): Telemetry(
            in_flight,
            waiting,
            RttStatistics(*rtt),
            {Share(*share): number for share, number in shares},
        )
        for url, model, in_flight, waiting, rtt, shares in telemetry
    }


def read_quotas(
    grants: Iterable[Sequence[Any]], lease_s: float, now: float
) -> dict[tuple[str, ModelKey], Quota]:
    """Return the quotas of a message that comes now."""
    return {
        served: Quota(max_in_flight, interval_s, now + delay_s, now + lease_s)
        for served, (max_in_flight, interval_s, delay_s) in grants
    }
