"""The history of a cluster's requests for the dashboard, over all workers, past ones too."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sonic_coffea.dask._messages import TOTALS, increase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sonic_coffea.dask._quotas import Allocator, ServedModel

ServedVersion = tuple[str, str, str]
"""A server's URL, a model, and its version."""

_POINTS = 600
_SMOOTHING = 0.3
# Workers report at other moments than the server is asked.
_COUNTED = 1.1


@dataclass(slots=True)
class Course:
    """One version of a model on one server.

    Attributes
    ----------
    totals : dict
        Sums over the tallies of all workers.
    rows_per_s : deque
        Time and rate, round by round.
    rtt_s : float
        The mean of the last round with answers.
    queue_s, model_s : float or None
        The server's own account since it was last asked: mean seconds of a request.
    others : float or None
        The part of the server's requests that other clusters and clients made, by its own account.
    limit : float or None
        The in-flight limit of all workers together.
    open_circuits : int
        Workers whose circuit to the server is open.
    """

    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    rows_per_s: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_POINTS))
    rtt_s: float = 0.0
    queue_s: float | None = None
    model_s: float | None = None
    others: float | None = None
    in_flight: int = 0
    waiting: int = 0
    limit: float | None = None
    open_circuits: int = 0
    _last: tuple[float, dict[str, float]] | None = None

    def end_round(self, now: float) -> None:
        """Add a point to the course: what has come since the last round."""
        if self._last is not None:
            at, last = self._last
            new = {name: self.totals[name] - last[name] for name in TOTALS}
            rate = new["rows"] / max(now - at, 1e-3)
            before = self.rows_per_s[-1][1] if self.rows_per_s else rate
            self.rows_per_s.append((now, before + _SMOOTHING * (rate - before)))
            if new["requests"]:
                self.rtt_s = new["trip_s"] / new["requests"]
        self._last = now, dict(self.totals)


class History:
    """Courses by server, model and version."""

    def __init__(self) -> None:
        self.courses: defaultdict[ServedVersion, Course] = defaultdict(Course)
        # By model, the server's statistics when it was last asked, and the requests of all workers.
        self._asked: dict[ServedModel, tuple[Sequence[float] | None, float]] = {}

    def report(self, totals: Iterable[Any], timings: Iterable[Any]) -> dict[ServedModel, float]:
        """Take what a client has counted since its last report, and the servers' own statistics.

        Returns
        -------
        dict
            Mean compute times, in s. Where a server counts fewer requests than it has answered, it
            is one of several behind a balancer, and its counts are compared with another's.
        """
        compute_s: dict[ServedModel, float] = {}
        for served, numbers in totals:
            for name, more in zip(TOTALS, numbers, strict=True):
                self.courses[served].totals[name] += more
        for served, numbers in timings:
            # Behind a balancer, these may be of another server than before.
            last_numbers, last_total = self._asked.get(served, (None, 0.0))
            requests, queue_s, *model_s = increase(last_numbers, numbers)
            courses = self._courses(served)
            total = sum(course.totals["requests"] for course in courses)
            self._asked[served], own = (numbers, total), total - last_total
            for course in courses if requests > 0 else ():
                course.queue_s = queue_s / requests
                course.model_s = sum(model_s) / requests
                if last_numbers is not None:  # else, the server tells of its whole life
                    if own <= _COUNTED * requests:
                        compute_s[served] = course.model_s
                    # Reports of workers come at other moments than the server's.
                    others = min(max(1 - own / requests, 0.0), 1.0)
                    before = others if course.others is None else course.others
                    course.others = before + _SMOOTHING * (others - before)
        return compute_s

    def end_round(self, allocator: Allocator, now: float) -> None:
        """End a round."""
        for served, capacity in allocator.capacities.items():
            for course in self._courses(served):
                course.in_flight, course.waiting = allocator.demand(served)
                course.limit = capacity.limit
        for (server, *_), course in self.courses.items():
            course.open_circuits = allocator.open_circuits(server)
            course.end_round(now)

    def _courses(self, served: ServedModel) -> list[Course]:
        """Return the courses of a model, of all versions unless one is asked for."""
        server, (model, version) = served
        return [
            course
            for key, course in self.courses.items()
            if key[:2] == (server, model) and version in (None, key[2])
        ]
