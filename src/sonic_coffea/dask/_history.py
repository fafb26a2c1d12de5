"""What the dashboard shows: sums over all workers that there were, and their course."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sonic_coffea.dask._messages import TIMINGS, TOTALS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Served = tuple[str, str, str]

_POINTS = 600
_SMOOTHING = 0.3


@dataclass(slots=True)
class Course:
    """One model on one server.

    Attributes
    ----------
    sums : dict
        Of the tallies of all workers.
    rows_per_s : deque
        Time and rate, round by round.
    timings : dict
        The server's own account of the time since it was last asked: mean seconds of a request in
        the queue and in the model.
    """

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    rows_per_s: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_POINTS))
    trip_s: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    _then: dict[str, float] = field(default_factory=dict)
    _at: float | None = None

    def round(self, now: float) -> None:
        """End a round: what has come since the last one is a point of the course."""
        if self._at is not None:
            came = {name: self.sums[name] - self._then[name] for name in TOTALS}
            rate = came["rows"] / max(now - self._at, 1e-3)
            last = self.rows_per_s[-1][1] if self.rows_per_s else rate
            self.rows_per_s.append((now, last + _SMOOTHING * (rate - last)))
            if came["requests"]:
                self.trip_s = came["trip_s"] / came["requests"]
        self._at, self._then = now, dict(self.sums)


class History:
    """What all workers reported, also those that are gone."""

    def __init__(self) -> None:
        self.courses: defaultdict[Served, Course] = defaultdict(Course)
        self.lost: dict[str, set[str]] = defaultdict(set)
        self._last: dict[str, dict[Served, Sequence[float]]] = {}
        self._asked: dict[tuple[str, str], Sequence[float]] = {}

    def add(
        self,
        worker: str,
        totals: Sequence[Sequence[Any]],
        timings: Sequence[Sequence[Any]],
        lost: Mapping[str, bool],
        now: float,
    ) -> None:
        """Take a worker's report."""
        del now
        last = self._last.setdefault(worker, {})
        for server, model, version, *numbers in totals:
            served = server, model, version
            before = last.get(served, [0.0] * len(TOTALS))
            for name, new, old in zip(TOTALS, numbers, before, strict=True):
                self.courses[served].sums[name] += new - old
            last[served] = numbers
        for server, is_lost in lost.items():
            (self.lost[server].add if is_lost else self.lost[server].discard)(worker)
        for server, model, *numbers in timings:
            self._time(server, model, numbers)

    def is_lost(self, worker: str, server: str) -> bool:
        """Whether a worker had lost a server when it last reported."""
        return worker in self.lost.get(server, ())

    def leave(self, worker: str) -> None:
        """Take note that a worker is gone; what it did stays."""
        self._last.pop(worker, None)
        for workers in self.lost.values():
            workers.discard(worker)

    def round(self, now: float) -> None:
        """End a round."""
        for course in self.courses.values():
            course.round(now)

    def _time(self, server: str, model: str, numbers: Sequence[float]) -> None:
        """Take a server's own statistics, which count from its start, over all of its clients."""
        before = self._asked.get((server, model), [0.0] * len(TIMINGS))
        self._asked[server, model] = numbers
        came = {n: new - old for n, new, old in zip(TIMINGS, numbers, before, strict=True)}
        # Behind a balancer they are another server's, or it has been started anew.
        if came["requests"] <= 0 or min(came.values()) < 0:
            return
        name, _, wanted = model.partition("/")
        model_s = came["input_s"] + came["compute_s"] + came["output_s"]
        for (url, served, version), course in self.courses.items():
            if url == server and served == name and wanted in ("", version):
                course.timings = {
                    "queue_s": came["queue_s"] / came["requests"],
                    "model_s": model_s / came["requests"],
                }
