"""Metrics of a worker's process, for Prometheus, on the endpoint that dask has anyway."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from sonic_coffea.pool import hooks, of_workers
from sonic_coffea.reporting import SUMS


class _PoolCollector:
    """The sums over all pools of this process, and what those of its workers have in flight."""

    def collect(self) -> Iterator[Any]:
        """Return the families of metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["server", "model", "version"]
        for name in SUMS:
            in_full = re.sub("_s$", "_seconds", name)
            family = CounterMetricFamily(f"sonic_{in_full}", f"Sum of {name}", labels=labels)
            for where, tally in hooks.statistics:
                family.add_metric(list(where), getattr(tally, name))
            yield family
        in_flight: Counter[str] = Counter()
        for state in (state for pool in of_workers() for state in pool.servers):
            in_flight[state.url] += state.in_flight
        gauge = GaugeMetricFamily("sonic_in_flight", "Requests in flight", labels=["server"])
        for url, number in in_flight.items():
            gauge.add_metric([url], number)
        yield gauge


@cache
def offer_metrics() -> None:
    """Offer the figures, once in a process: it has one registry."""
    with contextlib.suppress(ImportError):  # dask offers no metrics then, either
        from prometheus_client import REGISTRY

        REGISTRY.register(_PoolCollector())
