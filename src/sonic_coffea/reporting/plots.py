"""Plots of a report and of a measured model."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import format_time
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, printable
from sonic_coffea.reporting._tally import LATENCY_EDGES_S, STAGES, Statistics, Tally

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_name", "draw", "draw_curve"]

_COLORS = ("#999999", "#4477aa", "#ee6677", "#228833")
_MOST_WORKERS = 40
_WIDEST = 75
# Bins of the statistics in a bin of a plot.
_MERGED = 4
# Parameters of matplotlib that get the ink of a page.
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def draw(report: Any, *, ink: str | None = None) -> Figure:
    """Draw a `sonic_coffea.Report`; texts and lines have the colour `ink`, if one is named."""
    statistics = report.statistics
    figure = _figure(7.5, 3 * (3.6 + 0.35 * max(len(statistics.tallies) - 2, 0)))
    import matplotlib as mpl

    colors: Any = {} if ink is None else dict.fromkeys(_INKED, ink)
    parts: Any = figure.subfigures(len(_PANELS))
    with mpl.rc_context(colors):
        for part, (title, fill) in zip(parts, _PANELS.items(), strict=True):
            part.suptitle(title, weight="bold")
            fill(part.subplots(), statistics)
    return figure


def draw_curve(curve: Any) -> Figure:
    """Draw a `sonic_coffea.tools._bench.Curve`: time and rate of requests by their rows."""
    rows, seconds = np.array(curve.rows), np.array(curve.seconds)
    figure = _figure(9.0, 3.5)
    times, rates = figure.subplots(1, 2)
    line = f"{curve.launch_s * 1e3:.3g} ms and {curve.row_s * 1e6:.3g} µs a row"
    times.loglog(rows, seconds * 1e3, "o", label="one at a time")
    times.loglog(rows, (curve.launch_s + curve.row_s * rows) * 1e3, "-", color="gray", label=line)
    figure.suptitle(_folded(_literal(f"{curve.model} v{curve.version} on {curve.server}")))
    times.set(xlabel="rows of a request", ylabel="time of a request (ms)")
    times.set_title("How long a request takes", fontsize="medium")
    rates.loglog(rows, rows / seconds, "o-", label="one at a time")
    saturated = f"{curve.in_flight} at a time: {curve.rows_per_s:,.0f} rows/s"
    rates.axhline(curve.rows_per_s, color="C1", label=saturated)
    rates.set(xlabel="rows of a request", ylabel="rows/s")
    rates.set_title("How many rows are scored", fontsize="medium")
    for axes in (times, rates):
        axes.legend()
        _plain_ticks(axes.xaxis)
        _plain_ticks(axes.yaxis)
    return figure


def check_name(path: Path) -> None:
    """Refuse the name of a file whose format figures do not have, before the figure is drawn.

    Raises
    ------
    ConfigError
        If the name ends otherwise.
    """
    known = _figure(1.0, 1.0).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"expected a name that ends in .png, .pdf or .svg, got {path.name}")


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None
    # Not of pyplot, whose backend in a notebook would show it a second time.
    return Figure(figsize=(width, height), layout="constrained")


def _literal(text: str) -> str:
    """Return a text that matplotlib draws unchanged: no formula, no label that it leaves out."""
    shown = printable(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _folded(name: str) -> str:
    """Return a name in lines that leave room for a plot beside them."""
    return "\n".join(textwrap.wrap(name, _WIDEST, drop_whitespace=False))


def _time(axes: Any, statistics: Statistics) -> None:
    from matplotlib.ticker import EngFormatter

    served = sorted(statistics)
    places, left = np.arange(len(served)), np.zeros(len(served))
    for (stage, label), color in zip(STAGES.items(), _COLORS, strict=True):
        means = [getattr(t, stage) / max(t.requests, 1) for _, t in served]
        axes.barh(places, means, left=left, label=label, color=color, height=0.45)
        left += means
    # Above its bar, a long name takes no width from the bars.
    for place, ((server, model, version), _) in zip(places, served, strict=True):
        name = _folded(_literal(f"{model} v{version} on {server}"))
        axes.annotate(name, (0, place - 0.27), (3, 0), textcoords="offset points", size="small")
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set(xlabel="mean time of a request", ylim=(max(len(served), 1) - 0.6, -0.6))
    axes.set_yticks([])
    if served:
        _legend(axes, columns=2)


def _latency(axes: Any, statistics: Statistics) -> None:
    served = sorted(statistics)
    filled = np.flatnonzero(_drawn_counts(statistics.total()))
    edges = LATENCY_EDGES_S[::_MERGED]
    several = len({server for (server, _, _), _ in served}) > 1
    for number, ((server, model, version), tally) in enumerate(served):
        name, color = _literal(f"{model} v{version}"), f"C{number}"
        if several:
            name = _folded(f"{name} on {_literal(server)}")
        if tally.has_quantiles:
            p50, p99 = (tally.latency_s(quantile) for quantile in (0.5, 0.99))
            name += f"\np50 {format_time(p50)} (dashed), p99 {format_time(p99)} (dotted)"
            axes.axvline(p50, color=color, linestyle="--", linewidth=1)
            axes.axvline(p99, color=color, linestyle=":", linewidth=1)
        axes.stairs(_drawn_counts(tally), edges, label=name, color=color, linewidth=1.5)
    axes.set_xscale("log")
    if len(filled):
        low, high = edges[max(filled[0] - 2, 0)], edges[min(filled[-1] + 3, len(edges) - 1)]
        axes.set_xlim(low, high)
        _plain_ticks(axes.xaxis, unit="s")
        _legend(axes, columns=1)
    axes.set(xlabel="round trip of a request", ylabel="requests")
    axes.yaxis.get_major_locator().set_params(integer=True)


def _drawn_counts(tally: Tally) -> NDArray[np.int64]:
    """Return round trips in wider bins, ten a decade."""
    counts: NDArray[np.int64] = tally.latencies[1:-1].reshape(-1, _MERGED).sum(axis=1)
    return counts


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
    axes.set_yticks(range(len(workers)), map(_literal, workers), fontsize="small")
    shown, requests = len(statistics.spans), statistics.total().requests
    part = f", {shown:,} of {requests:,} requests" if shown < requests else ""
    axes.set(xlabel=f"time since the first request (s){part}", ylabel="process")
    if models:
        _legend(axes, columns=3)


def _legend(axes: Any, *, columns: int) -> None:
    """Put the legend above the axes, where it hides nothing."""
    axes.legend(
        fontsize="small",
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        borderaxespad=0.2,
    )


def _plain_ticks(axis: Any, unit: str = "") -> None:
    """Write 30 and 100, or 30 ms and 100 ms, not powers of ten."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(EngFormatter(unit) if unit else StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


_PANELS = {
    "Where the mean time of a request goes": _time,
    "How long requests take: network, queue and inference": _latency,
    "When requests were in flight, each a bar": _timeline,
}
