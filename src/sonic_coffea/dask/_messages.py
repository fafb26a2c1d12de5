"""What workers and scheduler tell each other, as dask's messages can carry it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sonic_coffea.dask._allocation import Allowed, Seen, Served, Trips
from sonic_coffea.pool import Quota

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sonic_coffea.pool import EndpointReport, ModelKey
    from sonic_coffea.reporting import Statistics
    from sonic_coffea.transport import ModelStatistics

JOIN = "sonic_join"
REPORT = "sonic-report"
SHARES = "sonic-shares"
FINAL = "sonic-final"

TOTALS = ("rows", "requests", "retries", "failures", "wait_s", "trip_s")
"""What of a worker's tallies the dashboard shows."""
TIMINGS = ("requests", "queue_s", "input_s", "compute_s", "output_s")
"""What of a server's own statistics it shows."""


def model_of(wanted: ModelKey) -> str:
    """Return a model and its version, if one is asked for, in one word."""
    name, version = wanted
    return name if version is None else f"{name}/{version}"


def wanted_of(model: str) -> ModelKey:
    """Return the inverse of `model_of`."""
    name, _, version = model.partition("/")
    return name, version or None


def written_report(
    sights: Sequence[EndpointReport],
    waiting: Mapping[ModelKey, int],
    statistics: Statistics,
    timings: Mapping[tuple[str, ModelKey], ModelStatistics],
) -> dict[str, Any]:
    """Return what a worker saw, as a message."""
    seen = [
        {
            "server": sight.url,
            "model": model_of(wanted),
            "out": out,
            "waiting": waiting.get(wanted, 0),
            "rows": observed.rows,
            "refused": observed.refused,
            "full": observed.full,
            "trips": [[size, *trips] for size, trips in observed.trips.items()],
        }
        for sight in sights
        for wanted, (out, observed) in sight.models.items()
    ]
    return {
        "seen": seen,
        "lost": {sight.url: sight.lost for sight in sights},
        "totals": [
            [*served, *(getattr(tally, name) for name in TOTALS)] for served, tally in statistics
        ],
        "timings": [
            [server, model_of(wanted), *(getattr(t, name) for name in TIMINGS)]
            for (server, wanted), t in timings.items()
        ],
    }


def read_seen(seen: Sequence[Mapping[str, Any]]) -> dict[Served, Seen]:
    """Return what a worker saw, from a message."""
    return {
        (one["server"], one["model"]): Seen(
            out=one["out"],
            waiting=one["waiting"],
            rows=one["rows"],
            refused=one["refused"],
            full=one["full"],
            trips={
                size: Trips(number=number, sum_s=sum_s, least_s=least_s)
                for size, number, sum_s, least_s in one["trips"]
            },
        )
        for one in seen
    }


def written_shares(shares: Mapping[Served, Allowed]) -> list[list[Any]]:
    """Return what a worker may have, as a message."""
    return [[*served, a.most, a.every_s, a.first_s] for served, a in shares.items()]


def read_shares(
    shares: Sequence[Sequence[Any]], lasts_s: float, now: float
) -> dict[tuple[str, ModelKey], Quota]:
    """Return what a worker may have, from a message that comes now."""
    return {
        (server, wanted_of(model)): Quota(most, every_s, now + first_s, now + lasts_s)
        for server, model, most, every_s, first_s in shares
    }
