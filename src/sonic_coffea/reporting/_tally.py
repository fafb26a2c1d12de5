"""What happened to the requests: counts and times that add up over chunks, workers and servers."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

Served = tuple[str, str, str]
"""Server, model, version."""

# Round trips from 0.1 ms to 1000 s, ten bins a decade.
_EDGES_S: NDArray[np.float64] = np.logspace(-4, 3, 71)


_COUNTS = (
    "chunks",
    "events",
    "objects",
    "lost",
    "repeated",
    "cached",
    "filled",
    "truncated",
    "padded",
)


def latency_edges_s() -> NDArray[np.float64]:
    """Return the edges of the bins of round trips; below and above are one more each."""
    return _EDGES_S


def _no_latencies() -> NDArray[np.int64]:
    return np.zeros(len(_EDGES_S) + 1, np.int64)


_MOST_SPANS = 500


@dataclass(frozen=True, slots=True)
class Span:
    """A request that was out.

    Attributes
    ----------
    worker : str
        Host and number of the process.
    model, server : str
        Of what, and where.
    begun : float
        When it was sent, in seconds since the epoch.
    seconds : float
        How long it took.
    rows : int
        What it held.
    """

    worker: str
    model: str
    server: str
    begun: float
    seconds: float
    rows: int

    @property
    def lot(self) -> float:
        """A number from 0 to 1 that is its own, by which some are drawn."""
        return zlib.crc32(f"{self.worker} {self.begun}".encode()) / 2**32


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts and times of one model on one server.

    Attributes
    ----------
    rows, requests, retries, failures : int
        Retries are requests that were sent again; failures those that were given up.
    sent_bytes, received_bytes : int
        Of the messages.
    pack_s, wait_s, trip_s, unpack_s : float
        Summed over requests: making the tensors, waiting for a place in flight, from the send to
        the answer (network, queue and inference), and copying the scores into their place.
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
    latencies: NDArray[np.int64] = field(default_factory=_no_latencies, repr=False)

    def __iadd__(self, other: Tally) -> Tally:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        return self

    def record_trip(self, seconds: float) -> None:
        """Count one round trip."""
        self.trip_s += seconds
        self.latencies[np.searchsorted(_EDGES_S, seconds)] += 1

    def latency_s(self, quantile: float) -> float:
        """Return a quantile of the round trips, to the width of a bin (26 %)."""
        total = int(self.latencies.sum())
        if total == 0:
            return float("nan")
        place = int(np.searchsorted(np.cumsum(self.latencies), quantile * total))
        return float(_EDGES_S[min(place, len(_EDGES_S) - 1)])

    def to_dict(self) -> dict[str, float]:
        """Return plain numbers."""
        numbers: dict[str, float] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name != "latencies"
        }
        for quantile in (0.5, 0.9, 0.99):
            numbers[f"latency_p{quantile * 100:.0f}_s"] = self.latency_s(quantile)
        return numbers


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Tallies by server, model and version, and what the layouts cut and padded.

    Addable, so that coffea can accumulate it; it holds numbers and names only.

    Attributes
    ----------
    chunks, events : int
        What the processor was given.
    objects, lost : int
        Rows that were asked for, over all models; and those that became None as servers lost them.
    repeated, cached : int
        Rows among them that were not sent, as others of the call were the same, or as their scores
        were on disk.
    filled, truncated, padded : int
        Elements along the consumed axes that were sent, cut off, and made up.
    spans : list of Span
        When requests were out: of all, or of a part that is drawn by chance and never large.
    spans_share : float
        How large that part is.
    """

    chunks: int = 0
    events: int = 0
    objects: int = 0
    lost: int = 0
    repeated: int = 0
    cached: int = 0
    filled: int = 0
    truncated: int = 0
    padded: int = 0
    spans: list[Span] = field(default_factory=list, repr=False)
    spans_share: float = 1.0
    tallies: dict[Served, Tally] = field(default_factory=dict)

    @property
    def scored(self) -> int:
        """How many objects have their scores, by whatever way."""
        # What repeats a lost row has no scores, nor have rows of an answer that was of no use.
        return min(self.total().rows + self.repeated + self.cached, self.objects - self.lost)

    def tally(self, server: str, model: str, version: str) -> Tally:
        """Return the tally of a served model, a new one if need be."""
        return self.tallies.setdefault((server, model, version), Tally())

    def record_span(self, span: Span) -> None:
        """Keep when a request was out, if it is among those that are drawn."""
        if span.lot < self.spans_share:
            self.spans.append(span)
            self._thin()

    def _thin(self) -> None:
        """Draw fewer, but the same ones wherever they are added up."""
        while len(self.spans) > _MOST_SPANS:
            self.spans = self._drawn(self.spans_share / 2)
            self.spans_share /= 2

    def _drawn(self, share: float) -> list[Span]:
        """Return the spans that a share of all has."""
        if share == self.spans_share:
            return self.spans
        return [span for span in self.spans if span.lot < share]

    def __iter__(self) -> Iterator[tuple[Served, Tally]]:
        return iter(self.tallies.items())

    def total(self) -> Tally:
        """Return the sum over servers and models."""
        total = Tally()
        for tally in self.tallies.values():
            total += tally
        return total

    def __iadd__(self, other: Statistics) -> Statistics:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        share = min(self.spans_share, other.spans_share)
        self.spans = self._drawn(share) + other._drawn(share)
        self.spans_share = share
        self._thin()
        for served, tally in other.tallies.items():
            mine = self.tally(*served)
            mine += tally
        return self

    def __add__(self, other: Statistics) -> Statistics:
        total = Statistics()
        total += self
        total += other
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "scored": self.scored,
            "total": self.total().to_dict(),
            "spans": [asdict(span) for span in self.spans],
            "served": [_served(served, tally) for served, tally in sorted(self.tallies.items())],
        }


def _served(served: Served, tally: Tally) -> Mapping[str, Any]:
    server, model, version = served
    return {"server": server, "model": model, "version": version, **tally.to_dict()}
