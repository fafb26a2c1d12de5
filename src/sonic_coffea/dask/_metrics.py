"""Figures of a worker's pool where dask's users look: the worker table and Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Worker

    from sonic_coffea.pool import Pool


def offer_metrics(worker: Worker, pool: Pool) -> None:
    """Add the pool's figures to those that the worker sends to the scheduler with its heartbeat."""
    rate = _Rate(pool)
    worker.metrics |= {
        "sonic in flight": lambda _: sum(server.in_flight for server in pool.servers),
        "sonic rows/s": lambda _: rate(),
        "sonic wait": lambda _: _mean_wait_s(pool),
        "sonic retries": lambda _: pool.statistics.total().retries,
    }
    _collect(pool)


class _Rate:
    """Rows in a second, since the last call."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last = time.monotonic(), pool.statistics.total().rows

    def __call__(self) -> float:
        now, rows = time.monotonic(), self._pool.statistics.total().rows
        (then, before), self._last = self._last, (now, rows)
        return round((rows - before) / max(now - then, 1e-3), 1)


def _mean_wait_s(pool: Pool) -> float:
    total = pool.statistics.total()
    return round((total.wait_s + total.trip_s) / total.requests, 4) if total.requests else 0.0


class PoolCollector:
    """A pool's figures for Prometheus, on the endpoint that dask has anyway."""

    _COUNTED = ("rows", "requests", "retries", "failures", "sent_bytes", "received_bytes")
    _SUMMED = ("wait_s", "trip_s", "pack_s", "unpack_s")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def collect(self) -> Iterator[Any]:
        """Return the families of metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        served = list(self.pool.statistics)
        labels = ["server", "model", "version"]
        for name in (*self._COUNTED, *self._SUMMED):
            unit = name.replace("_s", "_seconds") if name in self._SUMMED else name
            family = CounterMetricFamily(f"sonic_{unit}", f"Sum of {name}", labels=labels)
            for where, tally in served:
                family.add_metric(list(where), getattr(tally, name))
            yield family
        in_flight = GaugeMetricFamily("sonic_in_flight", "Requests in flight", labels=["server"])
        usable = GaugeMetricFamily("sonic_usable", "1 if it gets requests", labels=["server"])
        for state in self.pool.servers:
            in_flight.add_metric([state.url], state.in_flight)
            usable.add_metric([state.url], float(state.usable))
        yield from (in_flight, usable)


# As many as Prometheus's registries: one in a process.
_collectors: list[PoolCollector] = []


def _collect(pool: Pool) -> None:
    """Register the pool of this process, in the place of the one before."""
    for collector in _collectors:
        collector.pool = pool
    if not _collectors:
        try:
            from prometheus_client import REGISTRY
        except ImportError:  # dask offers no metrics then, either
            return
        _collectors.append(PoolCollector(pool))
        REGISTRY.register(_collectors[0])
