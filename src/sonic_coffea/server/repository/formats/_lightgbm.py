"""LightGBM's trees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sonic_coffea.server.repository._served import Served
    from sonic_coffea.server.repository.formats._format import Contents, Runner


def read(served: Served) -> Contents:
    """Read what the trees take and give from the head of the file, unless it is declared."""
    path = Path(str(served.source))
    if served.inputs is not None or served.outputs is not None:
        return {"files": {"model.txt": path}}
    head = dict(
        line.split("=", 1)
        for line in path.read_text(encoding="utf-8", errors="replace")
        .split("\nTree=")[0]
        .splitlines()
        if "=" in line
    )
    try:
        features, classes = int(head["max_feature_idx"]) + 1, int(head["num_class"])
    except (KeyError, ValueError):
        raise ValueError(
            f"expected LightGBM trees in {path}, which has no max_feature_idx or num_class"
        ) from None
    return {
        "files": {"model.txt": path},
        "inputs": {"features": ("float32", [-1, features])},
        "outputs": {"scores": ("float64", [-1, classes])},
        "manifest": {"features": head.get("feature_names", "").split()},
    }


def load(path: Path, manifest: dict[str, Any], threads: int) -> Runner:
    """Return what runs the trees."""
    import lightgbm  # type: ignore[import-not-found,unused-ignore]

    booster = lightgbm.Booster(model_file=str(path))
    (output,) = manifest["outputs"]

    def run(feed: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
        del wanted
        (rows,) = feed.values()
        scores = np.asarray(booster.predict(rows, num_threads=threads), output["dtype"])
        # One number a row comes without an axis for it.
        return {output["name"]: scores.reshape(len(rows), *output["shape"][1:])}

    return run
