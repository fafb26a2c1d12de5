"""Metrics of a worker's pool, for dask's worker table and Prometheus."""

from __future__ import annotations

import contextlib
import re
import time
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Worker

    from sonic_coffea.pool import Pool

_COUNTS = ("rows", "requests", "retries", "failures", "sent_bytes", "received_bytes")
_TIMES = ("wait_s", "trip_s", "pack_s", "unpack_s")


def offer_metrics(worker: Worker, pool: Pool) -> None:
    """Add the pool's figures to those that the worker sends to the scheduler with its heartbeat."""
    last = time.monotonic(), pool.statistics.total().rows

    def rows_per_s(_: Any) -> float:
        nonlocal last
        then, before = last
        last = now, rows = time.monotonic(), pool.statistics.total().rows
        return round((rows - before) / max(now - then, 1e-3), 1)

    worker.metrics |= {
        "sonic in flight": lambda _: sum(server.in_flight for server in pool.servers),
        "sonic rows/s": rows_per_s,
        "sonic wait": lambda _: _mean_wait_s(pool),
        "sonic retries": lambda _: pool.statistics.total().retries,
    }
    _PoolCollector.pool = pool
    _register()


def _mean_wait_s(pool: Pool) -> float:
    total = pool.statistics.total()
    return round((total.wait_s + total.trip_s) / total.requests, 4) if total.requests else 0.0


class _PoolCollector:
    """The figures of the process's pool for Prometheus, on the endpoint that dask has anyway."""

    pool: Pool

    def collect(self) -> Iterator[Any]:
        """Return the families of metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        served = list(self.pool.statistics)
        labels = ["server", "model", "version"]
        for name in _COUNTS + _TIMES:
            in_full = re.sub("_s$", "_seconds", name)
            family = CounterMetricFamily(f"sonic_{in_full}", f"Sum of {name}", labels=labels)
            for where, tally in served:
                family.add_metric(list(where), getattr(tally, name))
            yield family
        in_flight = GaugeMetricFamily("sonic_in_flight", "Requests in flight", labels=["server"])
        usable = GaugeMetricFamily("sonic_usable", "1 if it gets requests", labels=["server"])
        for state in self.pool.servers:
            in_flight.add_metric([state.url], state.in_flight)
            usable.add_metric([state.url], float(state.usable))
        yield from (in_flight, usable)


@cache
def _register() -> None:
    """Register the collector, once in a process: it has one registry."""
    with contextlib.suppress(ImportError):  # dask offers no metrics then, either
        from prometheus_client import REGISTRY

        REGISTRY.register(_PoolCollector())
