"""Plots of a report: where the time of requests went, how long they took, and when they left."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import printable
from sonic_coffea.reporting._tables import duration
from sonic_coffea.reporting._tally import LATENCY_EDGES_S, STAGES, Statistics, Tally

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#999999", "#4477aa", "#ee6677", "#228833")
# Bins of the statistics in a bin of a plot: ten a decade.
_MERGED = 4


def draw(statistics: Statistics) -> Figure:
    """Draw three plots of statistics, one below another."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None
    height = 3 * (3.6 + 0.35 * max(len(statistics.tallies) - 2, 0))
    # Not of pyplot, whose backend in a notebook would show it a second time.
    figure = Figure(figsize=(7.5, height), layout="constrained")
    parts: Any = figure.subfigures(len(_PANELS))
    # Names may look like formulae.
    with mpl.rc_context({"text.parse_math": False}):
        for part, (title, fill) in zip(parts, _PANELS.items(), strict=True):
            part.suptitle(title, weight="bold")
            fill(part.subplots(), statistics)
    return figure


def _label(name: str) -> str:
    """Return a name in lines that leave room for a plot; legends leave out what begins with _."""
    shown = textwrap.wrap(printable(name), 75, drop_whitespace=False)
    return "\n".join(shown) if not name.startswith("_") else " " + "\n".join(shown)


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
        name = _label(f"{model} v{version} on {server}")
        axes.annotate(name, (0, place - 0.27), (3, 0), textcoords="offset points", size="small")
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set(xlabel="mean time of a request", ylim=(max(len(served), 1) - 0.6, -0.6))
    axes.set_yticks([])
    if served:
        _legend(axes, columns=2)


def _latency(axes: Any, statistics: Statistics) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    served = sorted(statistics)
    filled = np.flatnonzero(_drawn_counts(statistics.total()))
    edges = LATENCY_EDGES_S[::_MERGED]
    several = len({server for (server, _, _), _ in served}) > 1
    for number, ((server, model, version), tally) in enumerate(served):
        name, color = f"{model} v{version}", f"C{number}"
        label = _label(f"{name} on {server}" if several else name)
        if tally.has_quantiles:
            p50, p99 = (tally.latency_s(quantile) for quantile in (0.5, 0.99))
            label += f"\np50 {duration(p50)} (dashed), p99 {duration(p99)} (dotted)"
            axes.axvline(p50, color=color, linestyle="--", linewidth=1)
            axes.axvline(p99, color=color, linestyle=":", linewidth=1)
        axes.stairs(_drawn_counts(tally), edges, label=label, color=color, linewidth=1.5)
    axes.set_xscale("log")
    if len(filled):
        axes.set_xlim(edges[max(filled[0] - 2, 0)], edges[min(filled[-1] + 3, len(edges) - 1)])
        # 30 ms and 100 ms, not powers of ten.
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(EngFormatter("s"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        _legend(axes, columns=1)
    axes.set(xlabel="round trip of a request", ylabel="requests")
    axes.yaxis.get_major_locator().set_params(integer=True)


def _drawn_counts(tally: Tally) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = tally.latencies[1:-1].reshape(-1, _MERGED).sum(axis=1)
    return counts


def _timeline(axes: Any, statistics: Statistics) -> None:
    spans = statistics.spans
    workers = sorted({span.worker for span in spans})[:40]  # for which there is room
    begun = min((span.begun for span in spans), default=0.0)
    models = sorted({span.model for span in spans})
    for place, worker in enumerate(workers):
        for number, model in enumerate(models):
            here = [s for s in spans if s.worker == worker and s.model == model]
            axes.broken_barh(
                [(s.begun - begun, s.seconds) for s in here],
                (place - 0.4, 0.8),
                color=f"C{number}",
                alpha=0.4,
                label=_label(model) if place == 0 else None,
            )
    axes.set_yticks(range(len(workers)), map(printable, workers), fontsize="small")
    shown, requests = len(spans), statistics.total().requests
    part = f", {shown:,} of {requests:,} requests" if shown < requests else ""
    axes.set(xlabel=f"time since the first request (s){part}", ylabel="process")
    if models:
        _legend(axes, columns=3)


def _legend(axes: Any, *, columns: int) -> None:
    """Put the legend above the axes, where it hides nothing."""
    place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    axes.legend(fontsize="small", ncols=columns, frameon=False, **place)


_PANELS = {
    "Where the mean time of a request goes": _time,
    "How long requests take: network, queue and inference": _latency,
    "When requests were in flight, each a bar": _timeline,
}
