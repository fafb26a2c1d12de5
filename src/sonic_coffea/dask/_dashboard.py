"""A page of dask's dashboard: servers and models, updating while it is looked at."""

from __future__ import annotations

import logging
import posixpath
import re
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
_NAME = "Inference Servers"
_PANE = "/individual-sonic"
_UPDATE_MS = 1000
_SHOWN_S = 300.0
_RATES = "Rows scored per second"
# Heights in the table.
_HEAD_PX, _ROW_PX, _MOST_PX = 30, 25, 330
_STAGES = {"network and client": "#c6dbef", "queue": "#fdae6b", "model": "#31a354"}
_LINES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def add_page(scheduler: Scheduler, history: History) -> None:
    """Add ``/sonic`` to the scheduler's dashboard, if it has one, and a pane for JupyterLab."""
    try:
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables
    except ImportError:
        logger.debug("no dashboard", exc_info=True)
        return
    variables = template_variables(scheduler)
    entry = {"url": _URL, "name": _NAME}
    if _URL not in variables["pages"]:
        # dask shows the titles of pages in its bar, and the plots below "More...".
        variables["pages"].append(_URL)
        variables["plots"].append(entry)
        variables["plots"].sort(key=lambda plot: plot["name"])
    prefix = str(dask.config.get("distributed.scheduler.http.prefix", "") or "")
    pages = {
        f"/{_URL}": partial(_fill, history, with_bar=True),
        _PANE: partial(_fill, history, with_bar=False),
    }
    application = BokehApplication(pages, scheduler, prefix=prefix, template_variables=variables)
    scheduler.http_application.add_application(application)
    application.initialize(scheduler.loop)
    application.start()
    _list_pane(scheduler, prefix)


def _list_pane(scheduler: Scheduler, prefix: str) -> None:
    """List the pane for dask's JupyterLab extension; dask lists only its own."""
    from distributed.http.scheduler.info import IndividualPlots
    from tornado.routing import PathMatches, Rule

    class Plots(IndividualPlots):  # type: ignore[misc]
        def write(self, chunk: Any) -> None:
            is_list = isinstance(chunk, dict)  # and no error page
            super().write({**chunk, f"Individual {_NAME}": _PANE} if is_list else chunk)

    path = posixpath.join("/", prefix.strip("/"), "individual-plots.json")
    rule = Rule(PathMatches(path), Plots, {"dask_server": scheduler})
    # The first that matches counts.
    scheduler.http_application.default_router.rules.insert(0, rule)


def _fill(
    history: History, _: Scheduler, extra: dict[str, Any], document: Any, *, with_bar: bool
) -> None:
    """Fill a page with figures and a table, and keep them up to date."""
    from bokeh.layouts import column, row
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env

    view = ServersView(history)
    view.update()
    document.title = f"Dask: {_NAME}"
    # A narrow pane of JupyterLab has the figures below each other, and slides the table.
    wraps = {"flex-wrap": "wrap"}
    figures = row(view.rates, view.stages, sizing_mode="stretch_both", styles=wraps)
    table = column(view.table, sizing_mode="stretch_width", styles={"overflow-x": "auto"})
    document.add_root(column(figures, table, sizing_mode="stretch_both"))
    document.theme = BOKEH_THEME
    document.add_periodic_callback(view.update, _UPDATE_MS)
    if with_bar:  # dask's, of links to its other pages
        document.template = env.get_template("simple.html")
        document.template_variables.update(extra)


class ServersView:
    """Rows per second over time, where the time of a request goes, and a table of all figures.

    The colours of the table's first column are those of the lines.
    """

    def __init__(self, history: History) -> None:
        from bokeh import models
        from bokeh.plotting import figure

        self._history = history
        # A row for each line, bar, and row of the table.
        self._source = models.ColumnDataSource()
        shape = {
            "min_height": 240,
            "min_width": 420,
            "sizing_mode": "stretch_both",
            "toolbar_location": None,
        }
        self.rates = figure(
            title=_RATES,
            x_axis_label="time from now (s)",
            y_axis_label="rows/s",
            x_range=models.Range1d(-_SHOWN_S, 0),
            tools=[models.HoverTool(tooltips=[("", "@name")], line_policy="interp")],
            **shape,
        )
        self.rates.y_range.start = 0
        self.rates.yaxis.formatter = models.NumeralTickFormatter(format="0,0")
        self.rates.multi_line("times", "rates", color="color", line_width=2, source=self._source)
        self.stages = figure(
            title="Where the time of a request goes",
            x_axis_label="mean of the last requests (ms)",
            y_range=[],
            tools="",
            **shape,
        )
        self.stages.hbar_stack(
            list(_STAGES),
            y="name",
            height=0.6,
            color=list(_STAGES.values()),
            source=self._source,
            legend_label=list(_STAGES),
        )
        self.stages.x_range.start = 0
        legend = self.stages.legend[0]
        legend.update(orientation="horizontal", location="left", margin=0, padding=0)
        legend.update(border_line_color=None, background_fill_color=None)
        self.stages.add_layout(legend, "above")
        swatch = models.HTMLTemplateFormatter(template='<b style="color:<%= value %>">■</b>')
        columns = [
            models.TableColumn(field=field, title=title, width=width)
            for field, (title, width, _) in _COLUMNS.items()
        ]
        self.table = models.DataTable(
            source=self._source,
            columns=[
                models.TableColumn(field="color", title="", width=20, formatter=swatch),
                *columns,
            ],
            index_position=None,
            reorderable=False,
            min_width=1390,
            sizing_mode="stretch_width",
        )

    def update(self) -> None:
        """Show what is known now."""
        from bokeh.models import AllIndices

        now = time.monotonic()
        items = sorted(self._history.courses.items())
        courses = [course for _, course in items]
        names = [
            f"{_literal(f'{model} v{version}')}\n{_literal(server)}"
            for (server, model, version), _ in items
        ]
        stages_ms = [_stages_ms(course) for course in courses]
        self.stages.y_range.factors = names[::-1]
        self._source.data = {
            "name": names,
            "color": [_LINES[i % len(_LINES)] for i in range(len(courses))],
            "times": [[at - now for at, _ in c.rows_per_s] for c in courses],
            "rates": [[rate for _, rate in c.rows_per_s] for c in courses],
            **{stage: [ms[stage] for ms in stages_ms] for stage in _STAGES},
            **{field: [text(*item) for item in items] for field, (*_, text) in _COLUMNS.items()},
        }
        self.table.height = min(_HEAD_PX + _ROW_PX * len(items), _MOST_PX)
        # Bokeh 3.9 draws a table anew only when the view of its data changes.
        self.table.view.filter = AllIndices()
        oldest = min((c.rows_per_s[0][0] for c in courses if c.rows_per_s), default=now)
        self.rates.x_range.start = max(-_SHOWN_S, min(oldest - now, -10.0))
        self.rates.title.text = _RATES if courses else f"{_RATES}: no requests yet"


def _literal(text: str) -> str:
    """Return what Bokeh draws as it is: where a formula would begin is a space without width."""
    return re.sub(r"(\$|\\)(?=[$(\[])", "\\1\u200b", printable(text))


def _stages_ms(course: Course) -> dict[str, float]:
    queue_s, model_s = course.queue_s or 0.0, course.model_s or 0.0
    rest_s = max(0.0, course.rtt_s - queue_s - model_s)
    parts_s = (rest_s, min(queue_s, course.rtt_s), min(model_s, course.rtt_s))
    return {name: part_s * 1e3 for name, part_s in zip(_STAGES, parts_s, strict=True)}


def _state(course: Course) -> str:
    number = course.open_circuits
    return f"circuit open on {number} worker{'s'[: number > 1]}" if number else "up"


def _number(value: float | None, unit: float = 1.0, digits: int = 0) -> str:
    """Return a number in a unit; nothing if it is not known."""
    return "" if value is None else f"{value / unit:,.{digits}f}"


def _total(name: str) -> Callable[[ServedVersion, Course], str]:
    return lambda _, course: _number(course.totals[name])


# The title, the width, and what a row shows.
_COLUMNS: dict[str, tuple[str, int, Callable[[ServedVersion, Course], str]]] = {
    "server": ("Server", 180, lambda served, _: printable(served[0])),
    "model": ("Model", 130, lambda served, _: printable(f"{served[1]} v{served[2]}")),
    "state": ("State", 155, lambda _, c: _state(c)),
    "rows_s": ("Rows/s", 80, lambda _, c: _number(c.rows_per_s[-1][1] if c.rows_per_s else None)),
    "in_flight": ("In flight (requests)", 140, lambda _, c: _number(c.in_flight)),
    "waiting": ("Waiting (requests)", 135, lambda _, c: _number(c.waiting)),
    "limit": ("Limit (requests)", 120, lambda _, c: _number(c.limit)),
    "rtt_ms": ("RTT (ms)", 80, lambda _, c: _number(c.rtt_s or None, 1e-3, 2)),
    "queue_ms": ("Queue (ms)", 80, lambda _, c: _number(c.queue_s, 1e-3, 2)),
    "model_ms": ("Model (ms)", 80, lambda _, c: _number(c.model_s, 1e-3, 2)),
    "others": ("Other clients (%)", 125, lambda _, c: _number(c.others, 0.01)),
    "rows": ("Rows", 80, _total("rows")),
    "requests": ("Requests", 75, _total("requests")),
    "retries": ("Retries", 65, _total("retries")),
    "failures": ("Failures", 70, _total("failures")),
}
