"""A page of dask's dashboard: servers and models, updating while it is looked at."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import dask.config

from sonic_coffea.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

    from sonic_coffea.dask._history import Course, History, ServedVersion

logger = logging.getLogger(__name__)

_URL = "sonic"
_UPDATE_MS = 1000
_RATES = "Rows scored per second"
_LINES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def add_page(scheduler: Scheduler, history: History) -> None:
    """Add ``/sonic`` to the scheduler's dashboard, if it has one."""
    try:
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables
    except ImportError:
        logger.debug("no dashboard", exc_info=True)
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
            *(models.TableColumn(field=t, title=t, width=w) for t, (w, _) in _COLUMNS.items()),
        ],
        index_position=None,
        reorderable=False,
        min_width=1390,
        min_height=360,
        sizing_mode="stretch_width",
    )

    def update() -> None:
        now = time.monotonic()
        items = sorted(history.courses.items())
        courses = [course for _, course in items]
        source.data = {
            "color": [_LINES[i % len(_LINES)] for i in range(len(courses))],
            "times": [[at - now for at, _ in c.rows_per_s] for c in courses],
            "rates": [[rate for _, rate in c.rows_per_s] for c in courses],
            **{t: [text(*item) for item in items] for t, (_, text) in _COLUMNS.items()},
        }
        # Bokeh 3.9 draws a table anew only when the view of its data changes.
        table.view.filter = models.AllIndices()
        rates.title.text = _RATES if courses else f"{_RATES}: no requests yet"

    update()
    document.title = "Dask: Inference Servers"
    document.add_root(column(rates, table, sizing_mode="stretch_both"))
    document.theme = BOKEH_THEME
    document.add_periodic_callback(update, _UPDATE_MS)
    document.template = env.get_template("simple.html")  # dask's, of links to its other pages
    document.template_variables.update(extra)


def _number(value: float | None, unit: float = 1.0, digits: int = 0) -> str:
    """Return a number in a unit; nothing if it is not known."""
    return "" if value is None else f"{value / unit:,.{digits}f}"


def _state(number: int) -> str:
    return f"circuit open on {number} worker{'s'[: number > 1]}" if number else "up"


# By title, the width and what a row shows.
_COLUMNS: dict[str, tuple[int, Callable[[ServedVersion, Course], str]]] = {
    "Server": (180, lambda served, _: printable(served[0])),
    "Model": (130, lambda served, _: printable(f"{served[1]} v{served[2]}")),
    "State": (155, lambda _, c: _state(c.open_circuits)),
    "Rows/s": (80, lambda _, c: _number(c.rows_per_s[-1][1] if c.rows_per_s else None)),
    "In flight (requests)": (140, lambda _, c: _number(c.in_flight)),
    "Waiting (requests)": (135, lambda _, c: _number(c.waiting)),
    "Limit (requests)": (120, lambda _, c: _number(c.limit)),
    "RTT (ms)": (80, lambda _, c: _number(c.rtt_s or None, 1e-3, 2)),
    "Queue (ms)": (80, lambda _, c: _number(c.queue_s, 1e-3, 2)),
    "Model (ms)": (80, lambda _, c: _number(c.model_s, 1e-3, 2)),
    "Other clients (%)": (125, lambda _, c: _number(c.others, 0.01)),
    "Rows": (80, lambda _, c: _number(c.totals["rows"])),
    "Requests": (75, lambda _, c: _number(c.totals["requests"])),
    "Retries": (65, lambda _, c: _number(c.totals["retries"])),
    "Failures": (70, lambda _, c: _number(c.totals["failures"])),
}
