"""Plots of scores: by class, and ROC curves, with uncertainties; from arrays or histograms."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import awkward as ak
import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError

__all__ = ["Roc", "draw_histogram", "draw_roc", "draw_scores", "roc", "score_histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roc:
    """A ROC curve: efficiencies at each cut on a score, and the area under the curve.

    Attributes
    ----------
    cut : array
        Lowest score that passes, descending. The first cut is infinity, which nothing passes.
    background, signal : array
        Efficiencies at each cut.
    background_error, signal_error : array
        Standard errors of the efficiencies, which take weights into account.
    area, area_error : float
        Area under the curve, and its standard error by Hanley and McNeil, Radiology 143 (1982) 29.
        With weights, the error uses the effective numbers of objects.
    n_background, n_signal : int
        Numbers of objects, without weights.
    """

    cut: NDArray[np.float64]
    background: NDArray[np.float64]
    signal: NDArray[np.float64]
    background_error: NDArray[np.float64]
    signal_error: NDArray[np.float64]
    area: float
    area_error: float
    n_background: int
    n_signal: int

    def at_background(self, efficiency: float) -> dict[str, float]:
        """Return the loosest cut with at most this background efficiency.

        Returns
        -------
        dict of str to float
            ``cut``, ``background``, ``signal``, ``background_error`` and ``signal_error``.

        Raises
        ------
        ConfigError
            If the efficiency is not between 0 and 1.
        """
        if not 0.0 <= efficiency <= 1.0:
            raise ConfigError(f"expected an efficiency from 0 to 1, got {efficiency}")
        place = int(np.flatnonzero(self.background <= efficiency)[-1])
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: float(a[place]) for name, a in arrays.items() if isinstance(a, np.ndarray)}


def roc(scores: Any, is_signal: Any, *, weight: Any = None) -> Roc:
    """Return the ROC curve of a score.

    Objects with equal scores pass or fail together, so ties count half in the area.

    Parameters
    ----------
    scores : array
        A score for each object, of any nesting; objects whose score is None are left out.
    is_signal : array of bool
        Whether each object, or each event, is signal.
    weight : array, optional
        A weight for each object, or for each event; by default 1. Weights may be negative.

    Raises
    ------
    ConfigError
        If there is no signal or no background, if a score is NaN, or if the weights of signal or
        background do not have a positive sum.
    """
    score, truth, weights = _flat(scores, is_signal, 1.0 if weight is None else weight)
    truth = truth.astype(bool)
    for kind, number in (("signal", truth.sum()), ("background", (~truth).sum())):
        if not number:
            raise ConfigError(
                f"expected signal and background, got {len(truth)} objects, no {kind}"
            )
    order = np.argsort(-score, kind="stable")
    score, truth, weights = score[order], truth[order], weights[order]
    last_of_ties = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    signal, signal_error, n_signal = _efficiency(np.where(truth, weights, 0.0), last_of_ties)
    background, background_error, n_background = _efficiency(
        np.where(truth, 0.0, weights), last_of_ties
    )
    area = float(np.sum(np.diff(background) * (signal[1:] + signal[:-1]) / 2))
    return Roc(
        cut=np.append(np.inf, score[last_of_ties]),
        background=background,
        signal=signal,
        background_error=background_error,
        signal_error=signal_error,
        area=area,
        area_error=_area_error(area, n_signal, n_background),
        n_background=int((~truth).sum()),
        n_signal=int(truth.sum()),
    )


def _efficiency(
    weights: NDArray[np.float64], places: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return efficiencies after these objects, standard errors, and the effective number."""
    total, squares = weights.sum(), weights**2
    if total <= 0:
        raise ConfigError(f"expected weights whose sum is positive, got {total:.3g}")
    efficiency = np.append(0.0, np.cumsum(weights)[places] / total)
    passing = np.append(0.0, np.cumsum(squares)[places])
    variance = passing * (1 - efficiency) ** 2 + (squares.sum() - passing) * efficiency**2
    error = np.sqrt(np.maximum(variance, 0.0)) / total
    return efficiency, error, float(total**2 / squares.sum())


def _area_error(area: float, n_signal: float, n_background: float) -> float:
    pairs = n_signal * n_background
    # Perfect separation would have no error; take the area with half a pair in the wrong order.
    a = min(max(area, 0.5 / pairs), 1 - 0.5 / pairs)
    of_signal, of_background = a / (2 - a) - a**2, 2 * a**2 / (1 + a) - a**2
    variance = a * (1 - a) + (n_signal - 1) * of_signal + (n_background - 1) * of_background
    return float(np.sqrt(variance / pairs))


def score_histogram(
    scores: Any,
    classes: Mapping[str, Any],
    *,
    weight: Any = None,
    bins: int = 40,
    limits: tuple[float, float] = (0.0, 1.0),
    label: str = "score",
) -> Any:
    """Return a histogram of a score for each class of objects.

    Parameters
    ----------
    scores : array
        A score for each object, of any nesting; objects whose score is None are left out.
    classes : mapping of str to array of bool
        For each class, whether an object, or an event, belongs to the class.
    weight : array, optional
        A weight for each object, or for each event; by default 1.
    bins : int
        Number of bins of the score.
    limits : tuple of float
        Lowest and highest score; the last bin includes the highest.
    label : str
        Label of the score's axis.

    Returns
    -------
    hist.Hist
        Axes ``"class"`` and ``"score"``, with weighted storage. Histograms of chunks can be added.
    """
    hist = _needed("hist")
    axes = hist.Hist.new.StrCat([], growth=True, name="class", label="class")
    histogram = axes.Reg(bins, *limits, name="score", label=label).Weight()
    for name, of_class in classes.items():
        score, chosen, weights = _flat(scores, of_class, 1.0 if weight is None else weight)
        chosen = chosen.astype(bool)
        # A score on the upper edge would go into the overflow.
        score = np.where(score == limits[1], np.nextafter(limits[1], limits[0]), score)
        histogram.fill(name, score[chosen], weight=weights[chosen])
    return histogram


def draw_scores(histogram: Any, ax: Any = None, *, density: bool = True, **style: Any) -> Any:
    """Draw a score for each class, with the standard errors of the bins.

    Parameters
    ----------
    histogram : hist.Hist
        From `score_histogram`, or any other with two axes: categories, and a score.
    ax : matplotlib Axes, optional
        By default, pyplot's current axes.
    density : bool
        Whether each class is normalised to an area of 1.
    **style
        Passed to `mplhep.histplot`.

    Returns
    -------
    matplotlib Axes
    """
    ax = _current_axes() if ax is None else ax
    classes, score = histogram.axes
    style = {"linewidth": 2, **style}
    for number, name in enumerate(classes):
        of_class = histogram[{classes.name: name}]
        draw_histogram(of_class, ax, density=density, label=name, color=f"C{number}", **style)
    ax.set(
        xlabel=score.label,
        ylabel="objects, normalised to area 1" if density else "objects",
        xlim=(score.edges[0], score.edges[-1]),
        yscale="log",
    )
    if len(classes):
        ax.legend()
    return ax


def draw_histogram(histogram: Any, ax: Any, *, density: bool = False, **style: Any) -> None:
    """Draw a histogram with one axis; bins with content have standard errors.

    Parameters
    ----------
    histogram : hist.Hist
        The histogram, with weighted storage or counts.
    ax : matplotlib Axes
        Axes to draw on.
    density : bool
        Whether the histogram is normalised to an area of 1.
    **style
        Passed to `mplhep.histplot`.
    """
    mplhep = _needed("mplhep")
    values, variances = histogram.values(), histogram.variances()
    edges, centers = histogram.axes[0].edges, histogram.axes[0].centers
    scale = 1 / (values.sum() or 1) / np.diff(edges) if density else 1
    heights, errors = values * scale, np.sqrt(variances) * scale
    color = style.pop("color", "C0")
    mplhep.histplot(heights, edges, ax=ax, yerr=False, color=color, **style)
    filled = values != 0
    ax.errorbar(centers[filled], heights[filled], errors[filled], fmt="none", ecolor=color)


def draw_roc(curves: Roc | Mapping[str, Roc], ax: Any = None, **style: Any) -> Any:
    """Draw ROC curves with bands of standard errors; the legend has the areas.

    Parameters
    ----------
    curves : Roc, or mapping of str to Roc
        One curve, or several by the names of the legend.
    ax : matplotlib Axes, optional
        By default, pyplot's current axes.
    **style
        Passed to matplotlib's ``plot``.

    Returns
    -------
    matplotlib Axes
        The background's efficiency on a logarithmic axis, against the signal's.
    """
    ax = _current_axes() if ax is None else ax
    named = {"": curves} if isinstance(curves, Roc) else dict(curves)
    lowest = 1.0
    for number, (name, curve) in enumerate(named.items()):
        area = f"AUC = {curve.area:.3f} ± {curve.area_error:.3f}"
        label = f"{name}: {area}" if name else area
        drawn = curve.background > 0
        signal, background = curve.signal[drawn], curve.background[drawn]
        style = {"linewidth": 2, **style}
        ax.plot(signal, background, label=label, color=f"C{number}", **style)
        band = {"color": f"C{number}", "alpha": 0.2, "linewidth": 0}
        error = curve.signal_error[drawn]
        ax.fill_betweenx(background, signal - error, signal + error, **band)
        error = curve.background_error[drawn]
        ax.fill_between(signal, background - error, background + error, **band)
        lowest = min(lowest, float(background[0]))
    ax.set(
        xlabel="signal efficiency",
        ylabel="background efficiency",
        xlim=(0, 1),
        ylim=(lowest / 2, 1),
        yscale="log",
    )
    ax.grid(visible=True, which="both", alpha=0.25)
    ax.legend(loc="upper left")
    return ax


def _flat(scores: Any, *others: Any) -> list[NDArray[Any]]:
    """Return flat arrays of the scores that are not None, and of the other arrays beside them."""
    try:
        arrays = ak.broadcast_arrays(scores, *others)
    except ValueError as error:
        raise ConfigError(f"the arrays do not fit together: {error}".splitlines()[0]) from None
    # An object that is None in one array is None in all of them, and left out.
    flat = [np.asarray(ak.to_numpy(ak.flatten(array, axis=None))) for array in arrays]
    score, *rest = flat
    score = score.astype(np.float64)
    if bad := int(np.isnan(score).sum()):
        raise ConfigError(f"{bad:,} of {len(score):,} scores are NaN")
    return [score, *rest]


def _current_axes() -> Any:
    import matplotlib.pyplot as plt

    return plt.gca()


def _needed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(
            f"plots of scores need {package}: pip install 'sonic-coffea[demo]'"
        ) from None
