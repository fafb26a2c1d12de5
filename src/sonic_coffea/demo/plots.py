"""The demo's plots: scores by process, ROC curve, and jet mass before and after a cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(
    output: Any, jets: Any, directory: Path, *, cut: float, network: str
) -> tuple[list[Path], float | None]:
    """Write the plots as PNG.

    Returns
    -------
    list of Path
        The files; none if no jet was scored.
    float or None
        The area under the ROC curve; None for data, or if all jets are of one kind.
    """
    datasets = list(output["score"].axes["dataset"])
    if not datasets:
        return [], None
    import awkward as ak
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import mplhep
    from sklearn.metrics import auc, roc_curve

    paths: list[Path] = []

    def save(name: str) -> None:
        paths.append(directory / f"{name}.png")
        plt.savefig(paths[-1], dpi=130, bbox_inches="tight")
        plt.close()

    with plt.style.context(mplhep.style.ROOT):
        mpl.rcParams.update({"font.size": 18, "figure.figsize": (9, 7), "axes.titlesize": 20})
        scores = [output["score"][dataset, :] for dataset in datasets]
        mplhep.histplot(scores, label=datasets, density=True)
        plt.gca().set(
            title="Scores by process",
            xlabel=f"top-quark score of {network}",
            ylabel="jets, normalised to area 1",
            xlim=(0, 1),
            yscale="log",
        )
        plt.legend()
        save("score")

        for number, dataset in enumerate(datasets):
            mass, color = output["mass"][dataset, :, :], f"C{number}"
            before, after = f"{dataset}, all", f"{dataset}, score > {cut:g}"
            mplhep.histplot(mass[sum, :], label=before, color=color, linestyle=":")
            mplhep.histplot(mass[True, :], label=after, color=color)
        plt.gca().set(
            title="Jet mass before and after a cut on the score",
            xlabel="soft-drop mass [GeV]",
            ylabel="jets (weighted)",
            xlim=(0, 300),
            yscale="log",
        )
        plt.legend(fontsize=15)
        save("mass")

        scored = jets[~ak.is_none(jets.top)]
        is_top = scored.is_top if "is_top" in jets.fields else []
        if not ak.any(is_top) or ak.all(is_top):
            return paths, None
        others_pass, tops_pass, _ = roc_curve(ak.to_numpy(is_top), ak.to_numpy(scored.top))
        area = float(auc(others_pass, tops_pass))
        shown = others_pass > 0
        plt.plot(tops_pass[shown], others_pass[shown], label=f"{network}: AUC = {area:.3f}")
        tops = int(ak.sum(is_top))
        plt.gca().set(
            title=f"{tops:,} merged tops and {len(is_top) - tops:,} other jets",
            xlabel="efficiency for merged tops",
            ylabel="efficiency for other jets",
            xlim=(0, 1),
            yscale="log",
        )
        plt.grid(visible=True, which="both", alpha=0.25)
        plt.legend(loc="upper left")
        save("roc")
    return paths, area
