"""The demo's plots: score by process, ROC, and jet mass before and after a cut on the score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sonic_coffea.plots import Roc, draw_histogram, draw_roc, draw_scores, roc


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
    import awkward as ak
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
        mpl.rcParams.update({"font.size": 18, "figure.figsize": (9, 7), "axes.titlesize": 20})
        axes = draw_scores(output["score"])
        axes.set(xlabel=f"top-quark score of {network}", ylabel="jets, normalised to area 1")
        axes.set_title("Scores by process")
        save("score")
        axes = plt.gca()
        for number, dataset in enumerate(output["mass"].axes["dataset"]):
            both, color = output["mass"][dataset, :, :], f"C{number}"
            before, after = both[sum, :], both[True, :]
            draw_histogram(before, axes, label=f"{dataset}, all", color=color, linestyle=":")
            draw_histogram(after, axes, label=f"{dataset}, score > {cut:g}", color=color)
        axes.set(xlabel="soft-drop mass [GeV]", ylabel="jets (weighted)", xlim=(0, 300))
        axes.set(yscale="log", title="Jet mass before and after a cut on the score")
        axes.legend(fontsize=15)
        save("mass")
        scored = jets[~ak.is_none(jets.top)]
        is_top = scored.is_top if "is_top" in jets.fields else []
        curve = None
        if ak.any(is_top) and not ak.all(is_top):
            curve = roc(scored.top, is_top)
            axes = draw_roc({network: curve})
            axes.set(xlabel="efficiency for merged tops", ylabel="efficiency for other jets")
            tops = f"{curve.n_signal:,} merged tops and {curve.n_background:,} other jets"
            axes.set_title(tops)
            save("roc")
    return paths, curve
