"""Plots: of a report, of a measured model, and of plans for a facility."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, printable
from sonic_coffea.reporting._tally import LATENCY_EDGES_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from sonic_coffea.reporting._tally import Statistics

__all__ = ["draw", "draw_curve", "draw_plans", "save"]

_STAGES = {
    "wait_s": "waiting for a place in flight",
    "pack_s": "packing",
    "trip_s": "network, queue, inference",
    "unpack_s": "unpacking",
}
_COLORS = ("#999999", "#4477aa", "#ee6677", "#228833")
_MOST_WORKERS = 40


def draw(report: Any) -> Figure:
    """Draw a `sonic_coffea.Report`."""
    figure = _figure(9.0, 7.5)
    statistics: Statistics = report.statistics
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 1.2))
    _time(figure.add_subplot(grid[0, 0]), statistics)
    _latency(figure.add_subplot(grid[0, 1]), statistics)
    _timeline(figure.add_subplot(grid[1, :]), statistics)
    return figure


def draw_curve(curve: Any) -> Figure:
    """Draw a `sonic_coffea.tools._bench.Curve`: time and rate of requests by their rows."""
    rows, seconds = np.array(curve.rows), np.array(curve.seconds)
    figure = _figure(9.0, 3.5)
    times, rates = figure.subplots(1, 2)
    line = f"{curve.launch_s * 1e3:.3g} ms and {curve.row_s * 1e6:.3g} µs a row"
    times.loglog(rows, seconds * 1e3, "o", label="one at a time")
    times.loglog(rows, (curve.launch_s + curve.row_s * rows) * 1e3, "-", color="gray", label=line)
    title = _literal(f"{curve.model} v{curve.version}")
    times.set(xlabel="rows of a request", ylabel="time (ms)", title=title)
    rates.loglog(rows, rows / seconds, "o-", label="one at a time")
    saturated = f"{curve.in_flight} at a time: {curve.rows_per_s:,.0f}"
    rates.axhline(curve.rows_per_s, color="C1", label=saturated)
    rates.set(xlabel="rows of a request", ylabel="rows/s")
    for axes in (times, rates):
        axes.legend()
    return figure


def draw_plans(plans: Sequence[Any]) -> Figure:
    """Draw what a run does by the number of servers, of some `sonic_coffea.tools._plan.Plan`."""
    servers = [plan.servers for plan in plans]
    figure = _figure(9.0, 3.5)
    rates, times = figure.subplots(1, 2)
    for name in plans[0].capacities:
        capacity = [plan.capacities[name] for plan in plans]
        rates.plot(servers, capacity, "--", label=f"capacity of the {name}")
    rates.plot(servers, [plan.events_per_s for plan in plans], color="gray", lw=4, alpha=0.4)
    waits = [(plan.servers, plan.request_s * 1e3) for plan in plans if plan.request_s is not None]
    times.plot(*zip(*waits, strict=True), "ko-")
    top = 1.5 * max(plan.events_per_s for plan in plans)
    rates.set(xlabel="servers", ylabel="events/s", ylim=(0, top))
    times.set(xlabel="servers", ylabel="mean time of a request (ms)", xlim=rates.get_xlim(), ylim=0)
    rates.legend()
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file.

    Raises
    ------
    ConfigError
        If the name ends in nothing that a figure can be.
    """
    check_name(path)
    figure.savefig(path)


def check_name(path: Path) -> None:
    """Raise what `save` would, before there is something to draw."""
    known = _figure(1.0, 1.0).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"expected a name that ends in .png, .pdf or .svg, got {path.name}")


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None
    # By itself: whatever backend a notebook has, it is shown once, by who asked for it.
    return Figure(figsize=(width, height), layout="constrained")


def _literal(text: str) -> str:
    """Return what matplotlib draws as it is: no formula, and no label that it leaves out."""
    shown = printable(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _time(axes: Any, statistics: Statistics) -> None:
    served = sorted(statistics)
    names = [
        f"{_literal(f'{model} v{version}')}\n{_literal(server)}"
        for (server, model, version), _ in served
    ]
    left = np.zeros(len(served))
    for (stage, label), color in zip(_STAGES.items(), _COLORS, strict=True):
        means = [1e3 * getattr(t, stage) / max(t.requests, 1) for _, t in served]
        axes.barh(names, means, left=left, label=label, color=color)
        left += means
    axes.set_xlabel("time of a request [ms], mean")
    axes.invert_yaxis()
    if served:
        axes.legend(fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _latency(axes: Any, statistics: Statistics) -> None:
    edges = 1e3 * LATENCY_EDGES_S
    for (_, model, version), tally in sorted(statistics):
        axes.stairs(tally.latencies[1:-1], edges, label=_literal(f"{model} v{version}"))
    axes.set_xscale("log")
    there = np.flatnonzero(statistics.total().latencies[1:-1])
    if len(there):
        axes.set_xlim(edges[max(there[0] - 2, 0)], edges[min(there[-1] + 3, len(edges) - 1)])
        axes.legend(fontsize="x-small")
    axes.set(xlabel="round trip [ms]", ylabel="requests")


def _timeline(axes: Any, statistics: Statistics) -> None:
    workers = sorted({span.worker for span in statistics.spans})[:_MOST_WORKERS]
    begun = min((span.begun for span in statistics.spans), default=0.0)
    models = sorted({span.model for span in statistics.spans})
    for place, worker in enumerate(workers):
        for number, model in enumerate(models):
            here = [s for s in statistics.spans if s.worker == worker and s.model == model]
            axes.broken_barh(
                [(s.begun - begun, s.seconds) for s in here],
                (place - 0.4, 0.8),
                color=f"C{number}",
                alpha=0.4,
                label=_literal(model) if place == 0 else None,
            )
    axes.set_yticks(range(len(workers)), map(_literal, workers), fontsize="x-small")
    axes.set_xlabel("requests in flight (a sample), by worker [s]")
    if len(models) > 1:
        axes.legend(fontsize="x-small")
