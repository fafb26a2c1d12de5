"""The plots of a report: where time went, how long requests took, and when they were out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.statistics import latency_edges_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sonic_coffea.statistics import Statistics

__all__ = ["draw"]

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
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the plots of a report need matplotlib: pip install matplotlib") from None
    statistics: Statistics = report.statistics
    # A figure by itself: whatever backend a notebook has, it is shown once, by who asked for it.
    figure = Figure(figsize=(9.0, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 1.2))
    _time(figure.add_subplot(grid[0, 0]), statistics)
    _latency(figure.add_subplot(grid[0, 1]), statistics)
    _timeline(figure.add_subplot(grid[1, :]), statistics)
    return figure


def _time(axes: Any, statistics: Statistics) -> None:
    served = sorted(statistics.tallies.items())
    names = [f"{model} v{version}\n{server}" for (server, model, version), _ in served]
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
    edges = 1e3 * latency_edges_s()
    for (_, model, version), tally in sorted(statistics.tallies.items()):
        axes.stairs(tally.latencies[1:-1], edges, label=f"{model} v{version}")
    axes.set_xscale("log")
    there = np.flatnonzero(statistics.total().latencies[1:-1])
    if len(there):
        axes.set_xlim(edges[max(there[0] - 2, 0)], edges[min(there[-1] + 3, len(edges) - 1)])
        axes.legend(fontsize="x-small")
    axes.set_xlabel("round trip [ms]")
    axes.set_ylabel("requests")


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
                label=model if place == 0 else None,
            )
    axes.set_yticks(range(len(workers)), workers, fontsize="x-small")
    axes.set_xlabel("requests out, a part of them, by worker [s]")
    if len(models) > 1:
        axes.legend(fontsize="x-small")
