"""Messages between workers and scheduler, as dask can carry them."""

from __future__ import annotations

import logging
from dataclasses import astuple
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sonic_coffea.dask._quotas import ServedModel, Telemetry
from sonic_coffea.pool import ModelKey, Quota, RttStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sonic_coffea.pool import Pool
    from sonic_coffea.transport import ModelStatistics

logger = logging.getLogger(__name__)

VERSION = 1
"""Of all messages; what comes with another version is ignored. A new field needs no new version."""

CONNECTED = "sonic_connected"
"""Asked by a client that has been connected."""
JOIN = "sonic_join"
"""Asked by a worker whose pool wants quotas."""
OPERATION = "sonic-coffea"
"""Of messages in the streams between workers and scheduler, for all versions to come: distributed
ends a stream that brings an unknown operation."""
REPORT, FINAL, LEAVE, QUOTAS = "report", "final", "leave", "quotas"
ANNOTATION = "sonic-coffea"
"""Of a task: the worker plugin with the settings of the client that sent it."""

TOTALS = ("rows", "requests", "retries", "failures", "trip_s")
"""The fields of a worker's tallies that the dashboard shows."""
TIMINGS = ("requests", "queue_s", "input_s", "compute_s", "output_s")
"""The fields of a server's own statistics that it shows."""


def message(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a message for a stream."""
    return {"op": OPERATION, "version": VERSION, "kind": kind, **fields}


def handler(functions: Mapping[str, Callable[..., None]]) -> Callable[..., None]:
    """Return the handler of messages, which go to functions by kind.

    The handler never raises: distributed would close the stream, and so throw the worker out. The
    functions take fields that they do not know.
    """

    def handle(version: Any = None, kind: Any = None, **fields: Any) -> None:
        if version != VERSION or kind not in functions:
            _warn(f"of kind {kind!r} and version {version!r} is not known here")
            return
        try:
            functions[kind](**fields)
        except Exception as error:
            logger.debug("a message could not be taken", exc_info=True)
            _warn(f"of kind {kind!r} cannot be taken: {type(error).__name__}")

    return handle


@cache
def _warn(problem: str) -> None:
    """Warn, once in a process rather than in each round."""
    logger.warning(
        "a message %s; does the cluster have one version of sonic-coffea everywhere?", problem
    )


def write_report(pool: Pool, timings: Mapping[ServedModel, ModelStatistics]) -> dict[str, Any]:
    """Return what a pool reports, as a message."""
    endpoints, waiting = pool.telemetry()
    total, timing = attrgetter(*TOTALS), attrgetter(*TIMINGS)
    return {
        "telemetry": [
            (
                e.url,
                model,
                in_flight,
                waiting.get(model, 0),
                astuple(rtt),
                e.network_s,
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
        (url, model): Telemetry(in_flight, waiting, RttStatistics(*rtt), network_s)
        for url, model, in_flight, waiting, rtt, network_s in telemetry
    }


def read_quotas(
    grants: Iterable[Sequence[Any]], lease_s: float, now: float
) -> dict[tuple[str, ModelKey], Quota]:
    """Return the quotas of a message that comes now."""
    return {
        served: Quota(max_in_flight, interval_s, now + delay_s, now + lease_s)
        for served, (max_in_flight, interval_s, delay_s) in grants
    }
