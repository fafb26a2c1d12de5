"""What the dashboard shows of a cluster's requests: sums over all workers, past ones too."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from operator import lt
from typing import TYPE_CHECKING, Any

import dask.config

from sonic_coffea.dask._quotas import LEASE_ROUNDS, Allocator, ServedModel
from sonic_coffea.errors import printable
from sonic_coffea.transport import ModelStatistics

if TYPE_CHECKING:
    from distributed import Scheduler

_URL = "sonic"
_RATES = "Rows scored per second"
_LINES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")

TOTALS = ("rows", "requests", "retries", "failures", "trip_s")
"""The fields of a worker's tallies that the dashboard shows."""

ServedVersion = tuple[str, str, str]
"""A server's URL, a model, and its version."""


def _last_rounds() -> deque[Any]:
    """Return what keeps the rounds of a lease, over which figures are averaged.

    Requests are answered in batches, and workers report at other moments than servers are asked.
    """
    return deque(maxlen=LEASE_ROUNDS + 1)


@dataclass(slots=True)
class VersionHistory:
    """One version of a model on one server.

    Attributes
    ----------
    totals : Counter
        Sums over the tallies of all workers.
    rows_per_s : deque
        Time and rate, round by round.
    rtt_s : float or None
        The mean of the last rounds with answers.
    queue_s, model_s : float or None
        The server's own account since it was last asked: mean seconds of a request.
    others : float or None
        The part of the server's requests that other clusters and clients made, by its own account.
    """

    totals: Counter[str] = field(default_factory=Counter)
    rows_per_s: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=600))
    rtt_s: float | None = None
    queue_s: float | None = None
    model_s: float | None = None
    others: float | None = None
    _rounds: deque[tuple[float, Counter[str]]] = field(default_factory=_last_rounds)

    def end_round(self, now: float) -> None:
        """Add a point."""
        if self._rounds:
            then, before = self._rounds[0]
            new = self.totals - before
            self.rows_per_s.append((now, new["rows"] / max(now - then, 1e-3)))
            if new["requests"]:
                self.rtt_s = new["trip_s"] / new["requests"]
        self._rounds.append((now, self.totals.copy()))


class History:
    """What is shown of each server, model and version, beside what an allocator knows."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.versions: defaultdict[ServedVersion, VersionHistory] = defaultdict(VersionHistory)
        # The server's statistics when it was asked, and the requests of all workers then.
        self._asked: defaultdict[ServedVersion, deque[tuple[ModelStatistics, float]]]
        self._asked = defaultdict(_last_rounds)

    def report(
        self,
        totals: Mapping[tuple[ServedVersion, str], Any],
        timings: Mapping[ServedModel, tuple[ServedVersion, ModelStatistics]],
    ) -> None:
        """Take what a client has counted since its last report, and the servers' own statistics.

        The allocator gets a model's mean compute time, unless the server counts fewer requests than
        it has answered: then it is one of several behind a balancer, and its counts are compared
        with another's.
        """
        for (served_version, name), more in totals.items():
            self.versions[served_version].totals[name] += more
        for served, (key, counts) in timings.items():
            if (history := self.versions.get(key)) is None:
                continue
            asked, total = self._asked[key], history.totals["requests"]
            # A server that counts less than before was started again, or is another one.
            if asked and any(map(lt, astuple(counts), astuple(asked[-1][0]))):
                asked.clear()
            # The first counts are of the server's whole life.
            last, last_total = asked[0] if asked else (ModelStatistics(), math.inf)
            asked.append((counts, total))
            requests, own = counts.requests - last.requests, total - last_total
            if requests <= 0:
                continue
            history.queue_s = (counts.queue_s - last.queue_s) / requests
            history.model_s = (counts.work_s - last.work_s) / requests
            if own >= 0:
                history.others = max(1 - own / requests, 0.0)
            # If far more are answered than this server counts, others are behind its URL, too.
            if 0 <= own <= 1.1 * requests:
                self.allocator.capacities[served].compute_s = history.model_s

    def end_round(self, now: float) -> None:
        """End a round of the allocator's."""
        for history in self.versions.values():
            history.end_round(now)


def add_page(scheduler: Scheduler, history: History) -> None:
    """Add ``/sonic`` to the scheduler's dashboard, if it has one."""
    try:
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables
    except ImportError:
        return
    variables = template_variables(scheduler)
    if _URL not in variables["pages"]:
        # dask shows the titles of pages in its bar, and the plots below "More...".
        variables["pages"].append(_URL)
        variables["plots"].append({"url": _URL, "name": "Inference Servers"})
        variables["plots"].sort(key=lambda plot: plot["name"])
    prefix = str(dask.config.get("distributed.scheduler.http.prefix", "") or "")
    pages = {f"/{_URL}": partial(fill_page, history)}
    application = BokehApplication(pages, scheduler, prefix=prefix, template_variables=variables)
    scheduler.http_application.add_application(application)
    application.initialize(scheduler.loop)
    application.start()


def fill_page(history: History, _: Scheduler, extra: dict[str, Any], document: Any) -> None:
    """Fill a document of Bokeh with rows/s over time and a table, and keep them up to date.

    The colours of the table's first column are those of the lines.
    """
    from bokeh import models
    from bokeh.layouts import column
    from bokeh.plotting import figure
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env

    # A row for each line, and row of the table.
    source = models.ColumnDataSource()
    rates = figure(
        title=_RATES,
        x_axis_label="time from now (s)",
        y_axis_label="rows/s",
        tools=[models.HoverTool(tooltips=[("", "@Model @Server")], line_policy="interp")],
        toolbar_location=None,
        min_height=240,
        sizing_mode="stretch_both",
    )
    rates.y_range.start = 0
    rates.yaxis.formatter = models.NumeralTickFormatter(format="0,0")
    rates.multi_line("times", "rates", color="color", line_width=2, source=source)
    swatch = models.HTMLTemplateFormatter(template='<b style="color:<%= value %>">■</b>')
    table = models.DataTable(
        source=source,
        columns=[
            models.TableColumn(field="color", title="", width=20, formatter=swatch),
            *(models.TableColumn(field=t, title=t, width=w) for t, (w, _) in COLUMNS.items()),
        ],
        index_position=None,
        reorderable=False,
        min_width=1390,
        min_height=360,
        sizing_mode="stretch_width",
    )

    def update() -> None:
        now = time.monotonic()
        items = [(*item, history.allocator) for item in sorted(history.versions.items())]
        histories = [each for _, each, _ in items]
        source.data = {
            "color": [_LINES[i % len(_LINES)] for i in range(len(histories))],
            "times": [[at - now for at, _ in c.rows_per_s] for c in histories],
            "rates": [[rate for _, rate in c.rows_per_s] for c in histories],
            **{t: [text(*item) for item in items] for t, (_, text) in COLUMNS.items()},
        }
        # Bokeh 3.9 draws a table anew only when the view of its data changes.
        table.view.filter = models.AllIndices()
        rates.title.text = _RATES if histories else f"{_RATES}: no requests yet"

    update()
    document.title = "Dask: Inference Servers"
    document.add_root(column(rates, table, sizing_mode="stretch_both"))
    document.theme = BOKEH_THEME
    document.add_periodic_callback(update, 1000)
    document.template = env.get_template("simple.html")  # dask's, of links to its other pages
    document.template_variables.update(extra)


def _number(value: float | None, unit: float = 1.0, digits: int = 0) -> str:
    """Return a number in a unit; nothing if it is not known."""
    return "" if value is None else f"{value / unit:,.{digits}f}"


def _state(circuits: list[bool]) -> str:
    """Return a server's state by the circuits of those who have it; nothing if nobody has it."""
    number = sum(circuits)
    up = "up" if circuits else ""
    return f"circuit open on {number} worker{'s'[: number > 1]}" if number else up


# By title, the width and what a row shows.
COLUMNS: dict[str, tuple[int, Callable[[ServedVersion, VersionHistory, Allocator], str]]] = {
    "Server": (180, lambda served, *_: printable(served[0])),
    "Model": (130, lambda served, *_: printable(f"{served[1]} v{served[2]}")),
    "State": (155, lambda served, _, a: _state(a.circuits(served[0]))),
    "Rows/s": (80, lambda _, c, __: _number(c.rows_per_s[-1][1] if c.rows_per_s else None)),
    "In flight (requests)": (140, lambda served, _, a: _number(a.demand(*served)[0])),
    "Waiting (requests)": (135, lambda served, _, a: _number(a.demand(*served)[1])),
    "Limit (requests)": (120, lambda served, _, a: _number(a.demand(*served)[2])),
    "RTT (ms)": (80, lambda _, c, __: _number(c.rtt_s, 1e-3, 2)),
    "Queue (ms)": (80, lambda _, c, __: _number(c.queue_s, 1e-3, 2)),
    "Model (ms)": (80, lambda _, c, __: _number(c.model_s, 1e-3, 2)),
    "Other clients (%)": (125, lambda _, c, __: _number(c.others, 0.01)),
    "Rows": (80, lambda _, c, __: _number(c.totals["rows"])),
    "Requests": (75, lambda _, c, __: _number(c.totals["requests"])),
    "Retries": (65, lambda _, c, __: _number(c.totals["retries"])),
    "Failures": (70, lambda _, c, __: _number(c.totals["failures"])),
}
