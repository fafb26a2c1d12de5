"""Metrics of a worker's pools, for dask's worker table and Prometheus."""

from __future__ import annotations

import contextlib
import re
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from sonic_coffea.reporting import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Worker

    from sonic_coffea.pool import Pool
    from sonic_coffea.reporting import Tally

_COUNTS = ("rows", "requests", "retries", "failures", "sent_bytes", "received_bytes")
_TIMES = ("wait_s", "trip_s", "pack_s", "unpack_s")


def offer_metrics(worker: Worker, pools: Callable[[], Sequence[Pool]]) -> None:
    """Add the pools' figures to those that the worker sends to the scheduler with its heartbeat."""

    def total() -> Tally:
        return _statistics(pools()).total()

    last = time.monotonic(), total().rows

    def rows_per_s(_: Any) -> float:
        nonlocal last
        then, before = last
        last = now, rows = time.monotonic(), total().rows
        return round((rows - before) / max(now - then, 1e-3), 1)

    worker.metrics |= {
        "sonic in flight": lambda _: sum(s.in_flight for pool in pools() for s in pool.servers),
        "sonic rows/s": rows_per_s,
        "sonic wait": lambda _: _mean_wait_s(total()),
        "sonic retries": lambda _: total().retries,
    }
    _PoolCollector.pools = staticmethod(pools)
    _register()


def _statistics(pools: Sequence[Pool]) -> Statistics:
    return sum((pool.statistics for pool in pools), Statistics())


def _mean_wait_s(total: Tally) -> float:
    return round((total.wait_s + total.trip_s) / total.requests, 4) if total.requests else 0.0


class _PoolCollector:
    """The figures of the process's pools for Prometheus, on the endpoint that dask has anyway."""

    pools: Callable[[], Sequence[Pool]]

    def collect(self) -> Iterator[Any]:
        """Return the families of metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        pools = self.pools()
        served = list(_statistics(pools))
        labels = ["server", "model", "version"]
        for name in _COUNTS + _TIMES:
            in_full = re.sub("_s$", "_seconds", name)
            family = CounterMetricFamily(f"sonic_{in_full}", f"Sum of {name}", labels=labels)
            for where, tally in served:
                family.add_metric(list(where), getattr(tally, name))
            yield family
        in_flight = GaugeMetricFamily("sonic_in_flight", "Requests in flight", labels=["server"])
        usable = GaugeMetricFamily("sonic_usable", "1 if it gets requests", labels=["server"])
        states = [state for pool in pools for state in pool.servers]
        for url in dict.fromkeys(state.url for state in states):
            same = [state for state in states if state.url == url]
            in_flight.add_metric([url], sum(state.in_flight for state in same))
            usable.add_metric([url], float(any(state.usable for state in same)))
        yield from (in_flight, usable)


@cache
def _register() -> None:
    """Register the collector, once in a process: it has one registry."""
    with contextlib.suppress(ImportError):  # dask offers no metrics then, either
        from prometheus_client import REGISTRY

        REGISTRY.register(_PoolCollector())
