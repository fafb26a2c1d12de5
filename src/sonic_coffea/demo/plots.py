"""The demo's plots: scores by process, jet mass before and after a cut, and the ROC curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(file: Path, *, network: str) -> tuple[list[str], float | None]:
    """Write the plots of a file of scored jets as PNG, beside it.

    Returns
    -------
    list of str
        The files; none if no jet was scored.
    float or None
        The area under the ROC curve; None for data, or if all jets are of one kind.
    """
    import awkward as ak
    import matplotlib as mpl
    import mplhep
    import numpy as np
    import pyarrow.parquet as pq
    from matplotlib.figure import Figure
    from sklearn.metrics import auc, roc_curve

    # Not by `ak.from_parquet`: its threads abort some processes that end soon after it.
    jets = ak.from_arrow(pq.read_table(file))
    scored = jets[~ak.is_none(jets.top)]
    top, mass = np.asarray(scored.top), np.asarray(scored.msoftdrop)
    weight = np.asarray(scored.weight, np.float64)
    dataset = np.array(scored.dataset.tolist())
    if not len(scored):
        return [], None
    pictures: dict[str, Any] = {}

    def picture(name: str, title: str, xlabel: str, ylabel: str, right: float) -> Any:
        axes = pictures[str(file.with_name(f"{name}.png"))] = Figure(figsize=(9, 7)).subplots()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xlim=(0, right), yscale="log")
        return axes

    with mpl.rc_context({**mplhep.style.ROOT, "font.size": 18, "axes.titlesize": 20}):
        xlabel, ylabel = f"top-quark score of {network}", "jets, normalised to area 1"
        scores = picture("score", "Scores by process", xlabel, ylabel, 1)
        title = "Jet mass before and after a cut on the score"
        masses = picture("mass", title, "soft-drop mass [GeV]", "jets (weighted)", 300)
        for number, name in enumerate(np.unique(dataset)):
            of, passes = dataset == name, (dataset == name) & (top > 0.5)
            options: dict[str, Any] = {"histtype": "step", "color": f"C{number}", "label": name}
            options |= {"bins": 40, "range": (0, 1)}
            scores.hist(top[of], weights=weight[of], density=True, **options)
            options |= {"bins": 50, "range": (0, 300), "label": f"{name}, all"}
            masses.hist(mass[of], weights=weight[of], ls=":", **options)
            options["label"] = f"{name}, score > 0.5"
            masses.hist(mass[passes], weights=weight[passes], **options)

        area = None
        is_top = np.asarray(scored.is_top) if "is_top" in jets.fields else np.zeros(len(top), bool)
        if is_top.any() and not is_top.all():
            others_pass, tops_pass, _ = roc_curve(is_top, top)
            area = float(auc(others_pass, tops_pass))
            title = f"{is_top.sum():,} merged tops and {(~is_top).sum():,} other jets"
            xlabel, ylabel = "efficiency for merged tops", "efficiency for other jets"
            axes = picture("roc", title, xlabel, ylabel, 1)
            shown = others_pass > 0
            axes.plot(tops_pass[shown], others_pass[shown], label=f"{network}: AUC = {area:.3f}")
            axes.grid(visible=True, which="both", alpha=0.25)
        for path, axes in pictures.items():
            axes.legend(fontsize=15)
            axes.figure.savefig(path, dpi=130, bbox_inches="tight")
    return list(pictures), area
