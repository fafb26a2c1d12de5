"""The demo's plots: scores by process, jet mass before and after a cut, and the ROC curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCORE_CUT = 0.5


def draw(jets: Any, directory: Path, *, network: str) -> tuple[list[Path], float | None]:
    """Write the plots of scored jets as PNG.

    Returns
    -------
    list of Path
        The files; none if no jet was scored.
    float or None
        The area under the ROC curve; None for data, or if all jets are of one kind.
    """
    import awkward as ak
    import matplotlib as mpl
    import mplhep
    import numpy as np
    from matplotlib.figure import Figure
    from sklearn.metrics import auc, roc_curve

    scored = jets[~ak.is_none(jets.top)]
    top, mass = np.asarray(scored.top), np.asarray(scored.msoftdrop)
    weight = np.asarray(scored.weight, np.float64)
    dataset = np.array(scored.dataset.tolist())
    paths: list[Path] = []

    def picture(name: str, title: str, xlabel: str, ylabel: str, right: float) -> Any:
        paths.append(directory / f"{name}.png")
        axes = Figure(figsize=(9, 7)).subplots()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xlim=(0, right), yscale="log")
        return axes

    def save(axes: Any) -> None:
        axes.legend(fontsize=15)
        axes.figure.savefig(paths[-1], dpi=130, bbox_inches="tight")

    if not len(scored):
        return [], None
    with mpl.rc_context({**mplhep.style.ROOT, "font.size": 18, "axes.titlesize": 20}):
        xlabel, ylabel = f"top-quark score of {network}", "jets, normalised to area 1"
        axes = picture("score", "Scores by process", xlabel, ylabel, 1)
        options: dict[str, Any] = {"bins": 40, "range": (0, 1), "histtype": "step"}
        for name in np.unique(dataset):
            of = dataset == name
            axes.hist(top[of], weights=weight[of], density=True, label=name, **options)
        save(axes)

        title = "Jet mass before and after a cut on the score"
        axes = picture("mass", title, "soft-drop mass [GeV]", "jets (weighted)", 300)
        options = {"bins": 50, "range": (0, 300), "histtype": "step"}
        for number, name in enumerate(np.unique(dataset)):
            options["color"] = f"C{number}"
            of, passes = dataset == name, (dataset == name) & (top > SCORE_CUT)
            axes.hist(mass[of], weights=weight[of], label=f"{name}, all", ls=":", **options)
            label = f"{name}, score > {SCORE_CUT:g}"
            axes.hist(mass[passes], weights=weight[passes], label=label, **options)
        save(axes)

        is_top = np.asarray(scored.is_top) if "is_top" in jets.fields else np.zeros(len(top), bool)
        if not is_top.any() or is_top.all():
            return paths, None
        others_pass, tops_pass, _ = roc_curve(is_top, top)
        area = float(auc(others_pass, tops_pass))
        title = f"{is_top.sum():,} merged tops and {(~is_top).sum():,} other jets"
        xlabel, ylabel = "efficiency for merged tops", "efficiency for other jets"
        axes = picture("roc", title, xlabel, ylabel, 1)
        shown = others_pass > 0
        axes.plot(tops_pass[shown], others_pass[shown], label=f"{network}: AUC = {area:.3f}")
        axes.grid(visible=True, which="both", alpha=0.25)
        save(axes)
    return paths, area
