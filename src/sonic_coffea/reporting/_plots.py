"""The picture of a report: where the time of requests went, and how long they took."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea._extras import needed
from sonic_coffea.errors import printable
from sonic_coffea.reporting._tables import duration
from sonic_coffea.reporting._tally import LATENCY_EDGES_S, STAGES, Statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#999999", "#4477aa", "#ee6677", "#228833")


def draw(statistics: Statistics) -> Figure:
    """Draw two plots of statistics, one below the other."""
    with needed("demo", "drawing a report"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
    served = [(_label(*key), tally) for key, tally in sorted(statistics)]
    # Not of pyplot, whose backend in a notebook would show it a second time.
    figure = Figure(figsize=(7.5, 7.2 + 0.7 * len(served)), layout="constrained")
    # Names may look like formulae.
    with mpl.rc_context({"text.parse_math": False}):
        time, latency = figure.subplots(2)
        _draw_time(time, served)
        _draw_latency(latency, served)
        # 30 ms and 100 ms, not powers of ten.
        latency.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        latency.xaxis.set_minor_formatter(NullFormatter())
        for axes in (time, latency):
            axes.xaxis.set_major_formatter(EngFormatter("s"))
            if served:
                # Above the axes, where it hides nothing.
                axes.legend(
                    fontsize="small", frameon=False, loc="lower left", bbox_to_anchor=(0, 1)
                )
    return figure


def _label(server: str, model: str, version: str) -> str:
    """Return a name in lines that leave room for a plot; legends leave out what begins with _."""
    name = printable(f"{model} v{version} on {server}")
    shown = "\n".join(textwrap.wrap(name, 75, drop_whitespace=False))
    return f" {shown}" if name.startswith("_") else shown


def _draw_time(axes: Any, served: list[Any]) -> None:
    places, left = np.arange(len(served)), np.zeros(len(served))
    for (stage, label), color in zip(STAGES.items(), _COLORS, strict=True):
        means = [getattr(tally, stage) / max(tally.requests, 1) for _, tally in served]
        axes.barh(places, means, left=left, label=label, color=color, height=0.45)
        left += means
    # Above its bar, a long name takes no width from the bars.
    for place, (name, _) in enumerate(served):
        axes.annotate(name, (0, place - 0.27), (3, 0), textcoords="offset points", size="small")
    axes.set(xlabel="mean time of a request", ylim=(max(len(served), 1) - 0.6, -0.6), yticks=[])


def _draw_latency(axes: Any, served: list[Any]) -> None:
    # Of four bins of the statistics, one of the plot: ten a decade.
    edges = LATENCY_EDGES_S[::4]
    used: list[int] = []
    for number, (name, tally) in enumerate(served):
        label, color = name, f"C{number}"
        if tally.has_quantiles:
            p50, p99 = (tally.latency_s(quantile) for quantile in (0.5, 0.99))
            label += f"\np50 {duration(p50)} (dashed), p99 {duration(p99)} (dotted)"
            axes.axvline(p50, color=color, linestyle="--", linewidth=1)
            axes.axvline(p99, color=color, linestyle=":", linewidth=1)
        counts = tally.latencies[1:-1].reshape(-1, 4).sum(axis=1)
        used += np.flatnonzero(counts).tolist()
        axes.stairs(counts, edges, label=label, color=color, linewidth=1.5)
    axes.set(xscale="log", xlabel="round trip of a request", ylabel="requests")
    if used:
        axes.set_xlim(edges[max(min(used) - 2, 0)], edges[min(max(used) + 3, len(edges) - 1)])
