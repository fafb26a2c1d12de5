"""Trees: XGBoost's, as JSON or as UBJSON, and LightGBM's."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sonic_coffea.server.repository.formats import Contents, Runner, Served


def read_xgboost(served: Served) -> Contents:
    """Read the inputs and outputs of XGBoost's trees, unless they are declared."""
    path = Path(str(served.source))
    files = {f"model{path.suffix.lower()}": path}
    if served.inputs is not None or served.outputs is not None:
        return {"files": files}
    try:
        learner = json.loads(_json(path))["learner"]
        sizes = learner["learner_model_param"]
        # The class alone, rather than one number for each.
        chosen = learner["objective"]["name"] == "multi:softmax"
        features, classes = int(sizes["num_feature"]), int(sizes.get("num_class", 0))
        width = max(1 if chosen else classes, int(sizes.get("num_target", 1)), 1)
        names = list(learner.get("feature_names", ()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected XGBoost trees in {path}: {error!r}") from None
    return {
        "files": files,
        "inputs": {"features": ("float32", [-1, features])},
        "outputs": {"scores": ("float32", [-1, width])},
        "manifest": {"features": names},
    }


def read_lightgbm(served: Served) -> Contents:
    """Read the inputs and outputs of LightGBM's trees, unless they are declared."""
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
    (output,) = manifest["outputs"]
    predict: Callable[[Any], Any]
    if path.suffix == ".txt":
        import lightgbm  # type: ignore[import-not-found,unused-ignore]

        trees = lightgbm.Booster(model_file=str(path))
        predict = functools.partial(trees.predict, num_threads=threads)
    else:
        import xgboost  # type: ignore[import-not-found,unused-ignore]

        predict = xgboost.Booster({"nthread": threads}, model_file=str(path)).inplace_predict

    def run(feed: dict[str, Any], requested: tuple[str, ...]) -> dict[str, Any]:
        del requested
        (rows,) = feed.values()
        scores = np.asarray(predict(rows), output["dtype"])
        # One number a row comes without an axis for it.
        return {output["name"]: scores.reshape(len(rows), *output["shape"][1:])}

    return run


def _json(path: Path) -> bytes | bytearray:
    """Return a file of trees as JSON: only XGBoost itself reads its binary form."""
    if path.suffix.lower() == ".json":
        return path.read_bytes()
    try:
        import xgboost
    except ImportError:
        # A model's server runs this module, too, without this package.
        from sonic_coffea.errors import ConfigError

        raise ConfigError(
            f"reading {path} needs the xgboost package here; save the trees as .json, or declare "
            "inputs= and outputs= with Served"
        ) from None
    content: bytearray = xgboost.Booster(model_file=str(path)).save_raw("json")
    return content
