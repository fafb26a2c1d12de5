"""Statistics of requests: counts and times that add up over chunks, workers and servers."""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

TallyKey = tuple[str, str, str]
"""Server, model, version."""

STATISTICS_KEY = "sonic_statistics"
"""Where a processor's output holds the plain form of its statistics."""

LATENCY_EDGES_S: NDArray[np.float64] = np.logspace(-4, 3, 281)
"""Edges of the bins of round trips, forty a decade; there is a bin below and a bin above."""

STAGES = {
    "wait_s": "waiting for a place in flight",
    "pack_s": "packing",
    "trip_s": "network, queue and inference",
    "unpack_s": "unpacking",
}
"""Where a request's time goes."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts and times of one model on one server.

    Attributes
    ----------
    rows, requests, retries, failures : int
        Retries are requests that were sent again; failures are requests that were given up.
    sent_bytes, received_bytes : int
        Of the messages.
    pack_s, wait_s, trip_s, unpack_s : float
        Sums over requests: the time to make the tensors, to wait for a place in flight, from the
        send to the response (network, queue and inference), and to put the scores back.
    latencies : array of int64
        Round trips in bins, for percentiles.
    """

    rows: int = 0
    requests: int = 0
    retries: int = 0
    failures: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    pack_s: float = 0.0
    wait_s: float = 0.0
    trip_s: float = 0.0
    unpack_s: float = 0.0
    # Tallies of equal sums are equal; the comparison of an array is no bool.
    latencies: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(LATENCY_EDGES_S) + 1, np.int64),
        repr=False,
        compare=False,
    )

    def __iadd__(self, other: Tally) -> Tally:
        for name in (*SUMS, "latencies"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def record_trip(self, seconds: float) -> None:
        """Count one round trip."""
        self.trip_s += seconds
        self.latencies[bisect.bisect_left(LATENCY_EDGES_S, seconds)] += 1

    def latency_s(self, quantile: float) -> float:
        """Return a quantile of the round trips, interpolated within its bin, which is 6 % wide."""
        counts = np.cumsum(self.latencies)
        if counts[-1] == 0:
            return float("nan")
        # Slightly lower, to return the lower end of a gap. The outer bins have one edge each.
        rank = quantile * counts[-1] - 1e-6
        return float(np.exp(np.interp(rank, counts[:-1], np.log(LATENCY_EDGES_S))))

    @property
    def has_quantiles(self) -> bool:
        """Whether there are 20 round trips or more, so that quantiles say more than the mean."""
        return int(self.latencies.sum()) >= 20

    def to_dict(self) -> dict[str, float | None]:
        """Return plain numbers; quantiles of fewer than 20 round trips are None."""
        quantiles = {
            f"latency_p{percent}_s": self.latency_s(percent / 100) if self.has_quantiles else None
            for percent in (50, 90, 99)
        }
        return {**{name: getattr(self, name) for name in SUMS}, **quantiles}


SUMS = [f.name for f in fields(Tally) if f.name != "latencies"]
"""The counts and times of a tally."""


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Tallies by server, model and version, and the rows and elements of the calls.

    Threads may change and read it at the same time: `record` and ``+=`` are whole or not at all,
    and `copy` returns one state of it.

    Attributes
    ----------
    chunks, events : int
        Input of the processor.
    objects, masked : int
        Rows of the calls, over all models, and rows that became None, as no server scored them.
    deduplicated, cache_hits : int
        Rows that were not sent: equal to other rows of the call, or with scores on disk.
    elements, truncated, padding : int
        Elements along the consumed axes: sent, cut off, and added to fill a tensor.
    datasets : dict of str to int
        Events of each dataset, where the processor's events name theirs.
    digests : set of (str, str, str)
        Model, version and digest of each file that has made scores of a call or a run, where
        servers tell it.
    """

    chunks: int = 0
    events: int = 0
    objects: int = 0
    masked: int = 0
    deduplicated: int = 0
    cache_hits: int = 0
    elements: int = 0
    truncated: int = 0
    padding: int = 0
    datasets: dict[str, int] = field(default_factory=dict)
    digests: set[tuple[str, str, str]] = field(default_factory=set)
    tallies: defaultdict[TallyKey, Tally] = field(default_factory=lambda: defaultdict(Tally))
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    @property
    def scored(self) -> int:
        """Number of rows that have scores, whether sent, deduplicated or from the cache."""
        # A duplicate of a masked row has no scores, nor have rows of an unusable answer.
        scored = self.total().rows + self.deduplicated + self.cache_hits
        return min(scored, self.objects - self.masked)

    def record(self, server: str, model: str, version: str, tally: Tally) -> None:
        """Add to the tally of a model on a server."""
        with self._lock:
            self.tallies[server, model, version] += tally

    def __iter__(self) -> Iterator[tuple[TallyKey, Tally]]:
        with self._lock:
            return iter(list(self.tallies.items()))

    def total(self) -> Tally:
        """Return the sum over servers and models."""
        total = Tally()
        for _, tally in self:
            total += tally
        return total

    def copy(self) -> Statistics:
        """Return a snapshot, which does not change while requests go on."""
        return Statistics.from_plain(self.to_plain())

    def __iadd__(self, other: Statistics | Mapping[str, Any]) -> Statistics:
        plain = other.to_plain() if isinstance(other, Statistics) else other
        with self._lock:
            for name in _COUNTS:
                setattr(self, name, getattr(self, name) + plain.get(name, 0))
            for name, events in plain.get("datasets", {}).items():
                self.datasets[name] = self.datasets.get(name, 0) + events
            self.digests |= plain.get("digests", set())
            for key, numbers in plain["served"].items():
                self.tallies[key] += Tally(**numbers)
        return self

    def __add__(self, other: Statistics) -> Statistics:
        total = self.copy()
        total += other
        return total

    def __reduce__(self) -> tuple[Any, ...]:
        return Statistics.from_plain, (self.to_plain(),)

    def to_plain(self) -> dict[str, Any]:
        """Return a dict of dicts, sets, numbers and NumPy arrays, which needs no class of ours.

        ``served`` holds tallies by (server, model, version). coffea's rules add two such dicts to
        the right sum.
        """
        with self._lock:
            counts = {name: getattr(self, name) for name in _COUNTS}
            served = {key: asdict(tally) for key, tally in self.tallies.items()}
            named = {"datasets": self.datasets.copy(), "digests": self.digests.copy()}
            return {**counts, **named, "served": served}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Statistics:
        """Return the inverse of `to_plain`, or of a sum of such dicts."""
        statistics = cls()
        statistics += plain
        return statistics

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON."""
        now = self.copy()
        return {
            **{name: getattr(now, name) for name in _COUNTS},
            "scored": now.scored,
            "datasets": now.datasets,
            "digests": sorted(now.digests),
            "total": now.total().to_dict(),
            "served": [
                {"server": server, "model": model, "version": version, **tally.to_dict()}
                for (server, model, version), tally in sorted(now, key=lambda item: item[0])
            ],
        }


_COUNTS = [f.name for f in fields(Statistics) if f.type == "int"]
