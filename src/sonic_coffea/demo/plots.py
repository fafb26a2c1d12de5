"""The demo's plots: score by process, ROC, and jet mass before and after a cut on the score."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6")


@dataclass(frozen=True, slots=True)
class Roc:
    """Efficiencies at every cut on a score, and the area under their curve.

    Attributes
    ----------
    background, signal : array
        Efficiencies.
    area, area_error : float
        Area under the curve and its standard error, by Hanley and McNeil, Radiology 143 (1982) 29.
    """

    background: NDArray[np.float64]
    signal: NDArray[np.float64]
    area: float
    area_error: float


def roc(score: NDArray[Any], is_signal: NDArray[np.bool_]) -> Roc:
    """Return the efficiencies at every cut on the score.

    Jets of equal score are cut together, so ties count half, as in the Mann-Whitney statistic.
    """
    order = np.argsort(-score, kind="stable")
    score, is_signal = score[order], is_signal[order]
    last_of_ties = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    signal = np.append(0.0, np.cumsum(is_signal)[last_of_ties] / is_signal.sum())
    background = np.append(0.0, np.cumsum(~is_signal)[last_of_ties] / (~is_signal).sum())
    area = float(np.trapezoid(signal, background))
    n_signal, n_background = int(is_signal.sum()), int((~is_signal).sum())
    return Roc(background, signal, area, _area_error(area, n_signal, n_background))


def _area_error(area: float, n_signal: int, n_background: int) -> float:
    pairs = n_signal * n_background
    # Of perfect separation, what half a pair in the wrong order would be.
    a = min(max(area, 0.5 / pairs), 1 - 0.5 / pairs)
    of_signal, of_background = a / (2 - a) - a**2, 2 * a**2 / (1 + a) - a**2
    variance = a * (1 - a) + (n_signal - 1) * of_signal + (n_background - 1) * of_background
    return float(np.sqrt(variance / pairs))


def draw(
    output: Any, jets: Any, directory: Path, *, cut: float, network: str
) -> tuple[list[Path], Roc | None]:
    """Write the plots as PNG.

    Returns
    -------
    list of Path
        What was written: nothing if no jet was scored.
    Roc or None
        None for data, or if all jets are of one kind.
    """
    if not list(output["score"].axes["dataset"]):
        return [], None
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import mplhep

    paths: list[Path] = []

    def save(name: str) -> None:
        path = directory / f"{name}.png"
        plt.savefig(path, dpi=130, bbox_inches="tight")
        plt.close()
        paths.append(path)

    with plt.style.context(mplhep.style.ROOT):
        mpl.rcParams.update({"font.size": 18, "figure.figsize": (9, 7)})
        _scores(output["score"], network)
        save("score")
        _masses(output["mass"], cut)
        save("mass")
        truth = _truth(jets)
        if truth is None:
            return paths, None
        curve = roc(*truth)
        _roc(curve, truth[1], network)
        save("roc")
    return paths, curve


def _truth(jets: Any) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    import awkward as ak

    if "is_top" not in jets.fields:
        return None
    jets = jets[~ak.is_none(jets.top)]
    is_top = np.asarray(jets.is_top, bool)
    if is_top.all() or not is_top.any():
        return None
    return np.asarray(jets.top), is_top


def _scores(histogram: Any, network: str) -> None:
    import matplotlib.pyplot as plt
    import mplhep

    for colour, dataset in zip(cycle(_COLOURS), histogram.axes["dataset"], strict=False):
        mplhep.histplot(
            histogram[dataset, :],
            label=dataset,
            density=True,
            yerr=False,
            color=colour,
            linewidth=2,
        )
    plt.yscale("log")
    plt.xlabel(f"{network} top score")
    plt.ylabel("jets, normalised")
    plt.xlim(0, 1)
    plt.legend()


def _masses(histogram: Any, cut: float) -> None:
    import matplotlib.pyplot as plt

    for colour, dataset in zip(cycle(_COLOURS), histogram.axes["dataset"], strict=False):
        both = histogram[dataset, :, :]
        before, after = both[sum, :], both[True, :]
        _steps(plt.gca(), before, label=f"{dataset}, all", color=colour, linestyle=":")
        _steps(plt.gca(), after, label=f"{dataset}, score > {cut}", color=colour)
    plt.xlabel("soft-drop mass [GeV]")
    plt.ylabel("jets (weighted)")
    plt.xlim(0, 300)
    plt.yscale("log")
    plt.legend(fontsize=15)


def _steps(axes: Any, histogram: Any, *, color: str, **style: Any) -> None:
    """Draw a histogram with the errors of its bins, but for empty ones: those have none."""
    import mplhep

    mplhep.histplot(histogram, ax=axes, yerr=False, color=color, linewidth=2, **style)
    filled = histogram.values() > 0
    axes.errorbar(
        histogram.axes[0].centers[filled],
        histogram.values()[filled],
        np.sqrt(histogram.variances()[filled]),
        fmt="none",
        ecolor=color,
    )


def _roc(curve: Roc, is_top: NDArray[np.bool_], network: str) -> None:
    import matplotlib.pyplot as plt

    seen = curve.background > 0
    plt.plot(curve.signal[seen], curve.background[seen], color=_COLOURS[0], linewidth=2.5)
    plt.yscale("log")
    plt.xlim(0, 1)
    plt.ylim(1e-4, 1)
    plt.xlabel("efficiency for merged tops")
    plt.ylabel("efficiency for other jets")
    plt.grid(visible=True, which="both", alpha=0.25)
    plt.text(
        0.05,
        0.95,
        f"{network}\nAUC = {curve.area:.3f} ± {curve.area_error:.3f}\n"
        f"{is_top.sum():,} tops, {(~is_top).sum():,} others",
        transform=plt.gca().transAxes,
        verticalalignment="top",
    )
