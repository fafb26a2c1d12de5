"""The demo's plots: score by process, ROC, and jet mass before and after a cut on the score."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6")


def roc(
    score: NDArray[Any], is_signal: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return background and signal efficiency at every cut on the score, and the area under them.

    Jets of equal score are cut together, so ties count half, as in the Mann-Whitney statistic.
    """
    order = np.argsort(-score, kind="stable")
    score, is_signal = score[order], is_signal[order]
    last_of_ties = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    signal = np.append(0.0, np.cumsum(is_signal)[last_of_ties] / is_signal.sum())
    background = np.append(0.0, np.cumsum(~is_signal)[last_of_ties] / (~is_signal).sum())
    return background, signal, float(np.trapezoid(signal, background))


def draw(
    output: Any, jets: Any, directory: Path, *, cut: float, network: str
) -> tuple[list[Path], float | None]:
    """Write the plots as PNG.

    Returns
    -------
    list of Path
        What was written: nothing if no jet was scored.
    float or None
        The area under the ROC curve; None for data, or if all jets are of one kind.
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
        area = _roc(*truth, network)
        save("roc")
    return paths, area


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
            histogram[dataset, :], label=dataset, density=True, color=colour, linewidth=2
        )
    plt.yscale("log")
    plt.xlabel(f"{network} top score")
    plt.ylabel("jets, normalised")
    plt.xlim(0, 1)
    plt.legend()


def _masses(histogram: Any, cut: float) -> None:
    import matplotlib.pyplot as plt
    import mplhep

    for colour, dataset in zip(cycle(_COLOURS), histogram.axes["dataset"], strict=False):
        both = histogram[dataset, :, :]
        before, after = both[sum, :], both[True, :]
        mplhep.histplot(before, label=f"{dataset}, all", color=colour, linestyle=":", linewidth=2)
        mplhep.histplot(after, label=f"{dataset}, score > {cut}", color=colour, linewidth=2)
    plt.xlabel("soft-drop mass [GeV]")
    plt.ylabel("jets (weighted)")
    plt.xlim(0, 300)
    plt.yscale("log")
    plt.legend(fontsize=15)


def _roc(score: NDArray[Any], is_top: NDArray[np.bool_], network: str) -> float:
    import matplotlib.pyplot as plt

    background, signal, area = roc(score, is_top)
    seen = background > 0
    plt.plot(signal[seen], background[seen], color=_COLOURS[0], linewidth=2.5)
    plt.yscale("log")
    plt.xlim(0, 1)
    plt.ylim(1e-4, 1)
    plt.xlabel("efficiency for merged tops")
    plt.ylabel("efficiency for other jets")
    plt.grid(visible=True, which="both", alpha=0.25)
    plt.text(
        0.05,
        0.95,
        f"{network}\nAUC = {area:.3f}\n{is_top.sum():,} tops, {(~is_top).sum():,} others",
        transform=plt.gca().transAxes,
        verticalalignment="top",
    )
    return area
