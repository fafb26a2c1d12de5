"""A page of dask's dashboard: servers and models, updating while it is looked at."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Scheduler

    from sonic_coffea.dask._scheduler import SonicSchedulerPlugin

logger = logging.getLogger(__name__)

_UPDATE_MS = 1000
_SHOWN_S = 300.0
_PARTS = {"network and client": "#c6dbef", "queue": "#fdae6b", "model": "#31a354"}
_LINES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
_WIDTHS = {"server": 240, "model": 160, "state": 110}
_COLUMNS = {
    "server": "Server",
    "model": "Model",
    "state": "State",
    "rows_s": "Rows/s",
    "in_flight": "In flight",
    "waiting": "Waiting",
    "limit": "AdaptiveLimit",
    "trip_ms": "Answer (ms)",
    "queue_ms": "Queue (ms)",
    "model_ms": "Model (ms)",
    "rows": "Rows",
    "requests": "Requests",
    "retries": "Retries",
    "failures": "Failures",
}


def add_page(scheduler: Scheduler, plugin: SonicSchedulerPlugin) -> None:
    """Add ``/sonic`` to the scheduler's dashboard, if it has one."""
    try:
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables
    except ImportError:
        logger.debug("no dashboard", exc_info=True)
        return
    known = template_variables(scheduler)
    entry = {"url": "sonic", "name": "Inference Servers"}
    if entry not in known["plots"]:
        known["plots"].append(entry)

    def page(_: Any, extra: dict[str, Any], document: Any) -> None:
        fill(document, extra, plugin)

    prefix = getattr(scheduler, "http_application", None) and _prefix()
    application = BokehApplication(
        {"/sonic": page}, scheduler, prefix=prefix, template_variables=known
    )
    scheduler.http_application.add_application(application)
    application.initialize(scheduler.loop)
    application.start()


def _prefix() -> str:
    import dask.config

    return str(dask.config.get("distributed.scheduler.http.prefix", "") or "")


def fill(document: Any, extra: dict[str, Any], plugin: SonicSchedulerPlugin) -> None:
    """Fill a page with figures and a table, and keep them up to date."""
    from bokeh.layouts import column, row
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env

    view = ServersView(plugin)
    view.update()
    document.title = "Dask: Inference Servers"
    figures = row(view.rates, view.split, sizing_mode="stretch_width")
    document.add_root(column(figures, view.table, sizing_mode="stretch_both"))
    document.template = env.get_template("simple.html")
    document.template_variables.update(extra)
    document.theme = BOKEH_THEME
    document.add_periodic_callback(view.update, _UPDATE_MS)


class ServersView:
    """Rows a second over time, where the time of a request goes, and a table of all figures."""

    def __init__(self, plugin: SonicSchedulerPlugin) -> None:
        from bokeh.models import ColumnDataSource, DataTable, Range1d, TableColumn
        from bokeh.plotting import figure

        self._plugin = plugin
        self._lines = ColumnDataSource({"t": [], "rows_s": [], "color": [], "name": []})
        self._bars = ColumnDataSource({name: [] for name in ("name", *_PARTS)})
        self._cells = ColumnDataSource({name: [] for name in _COLUMNS})
        self.rates = figure(
            title="Rows a second",
            x_axis_label="seconds ago",
            height=280,
            x_range=Range1d(-_SHOWN_S, 0),
            sizing_mode="stretch_width",
            tools="",
        )
        self.rates.y_range.start = 0
        self.rates.multi_line(
            xs="t",
            ys="rows_s",
            color="color",
            legend_field="name",
            line_width=2,
            source=self._lines,
        )
        self.rates.legend.location = "top_left"
        self.rates.legend.background_fill_alpha = 0.6
        self.split = figure(
            title="Where a request's time goes (ms)",
            y_range=[],
            height=280,
            sizing_mode="stretch_width",
            tools="",
        )
        self.split.hbar_stack(
            list(_PARTS),
            y="name",
            height=0.6,
            color=list(_PARTS.values()),
            legend_label=list(_PARTS),
            source=self._bars,
        )
        self.split.x_range.start = 0
        self.split.legend.location = "bottom_right"
        self.split.legend.background_fill_alpha = 0.6
        self.table = DataTable(
            source=self._cells,
            columns=[
                TableColumn(field=f, title=t, width=_WIDTHS.get(f, 80)) for f, t in _COLUMNS.items()
            ],
            index_position=None,
            reorderable=False,
            sizing_mode="stretch_both",
        )

    def update(self) -> None:
        """Show what is known now."""
        from bokeh.models import AllIndices

        rows = [self._row(*item) for item in sorted(self._plugin.history.courses.items())]
        cells = {name: [row[name] for row in rows] for name in _COLUMNS}
        now = time.monotonic()
        courses = sorted(self._plugin.history.courses.items())
        oldest = min((c.rows_per_s[0][0] for _, c in courses if c.rows_per_s), default=now)
        self.rates.x_range.start = max(-_SHOWN_S, min(oldest - now, -10.0))
        names = [f"{model} v{version} at {server}" for (server, model, version), _ in courses]
        self._cells.data = cells
        # Bokeh 3.9 draws a table anew only when the view of its data changes.
        self.table.view.filter = AllIndices()
        self.rates.legend.visible = self.split.legend.visible = bool(courses)
        self._lines.data = {
            "t": [[at - now for at, _ in c.rows_per_s] for _, c in courses],
            "rows_s": [[rate for _, rate in c.rows_per_s] for _, c in courses],
            "color": [_LINES[i % len(_LINES)] for i in range(len(courses))],
            "name": names,
        }
        split = [_split_ms(c.trip_s, c.timings) for _, c in courses]
        self.split.y_range.factors = names[::-1]
        self._bars.data = {"name": names, **{part: [s[part] for s in split] for part in _PARTS}}

    def _row(self, served: tuple[str, str, str], course: Any) -> dict[str, Any]:
        server, model, version = served
        shares = self._plugin.shares
        key = next((k for k in shares.capacities if k[0] == server and _is(k[1], model)), None)
        out, waiting = shares.demand(key) if key is not None else (0, 0)
        lost_by = len(self._plugin.history.lost.get(server, ()))
        return {
            "server": server,
            "model": f"{model} v{version}",
            "state": f"lost by {lost_by} worker{'s'[: lost_by > 1]}" if lost_by else "up",
            "rows_s": f"{course.rows_per_s[-1][1]:,.0f}" if course.rows_per_s else "",
            "in_flight": out,
            "waiting": waiting,
            "limit": f"{shares.capacities[key].value:.0f}" if key is not None else "",
            "trip_ms": _ms(course.trip_s or None),
            "queue_ms": _ms(course.timings.get("queue_s")),
            "model_ms": _ms(course.timings.get("model_s")),
            "rows": f"{course.sums['rows']:,.0f}",
            "requests": f"{course.sums['requests']:,.0f}",
            "retries": f"{course.sums['retries']:,.0f}",
            "failures": f"{course.sums['failures']:,.0f}",
        }


def _is(shared: str, model: str) -> bool:
    return shared.partition("/")[0] == model


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def _split_ms(trip_s: float, timings: dict[str, float]) -> dict[str, float]:
    queue_s, model_s = timings.get("queue_s", 0.0), timings.get("model_s", 0.0)
    rest_s = max(0.0, trip_s - queue_s - model_s)
    parts = (rest_s, min(queue_s, trip_s), min(model_s, trip_s))
    return {name: part * 1e3 for name, part in zip(_PARTS, parts, strict=True)}
