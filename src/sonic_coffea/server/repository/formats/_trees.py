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
    try:
        learner = json.loads(_json(path))["learner"]
        sizes = learner["learner_model_param"]
        # The class alone, rather than one number for each.
        chosen = learner["objective"]["name"] == "multi:softmax"
        features, classes = int(sizes["num_feature"]), int(sizes.get("num_class", 0))
        width = max(1 if chosen else classes, int(sizes.get("num_target", 1)), 1)
        manifest: dict[str, Any] = {"features": list(learner.get("feature_names", ()))}
        if "best_iteration" in (attributes := learner.get("attributes", {})):
            manifest["best_iteration"] = int(attributes["best_iteration"])
    except (KeyError, TypeError, ValueError, ImportError) as error:
        if _is_declared(served):
            return {"files": files}
        missing = isinstance(error, ImportError)
        problem = str(error) if missing else f"expected XGBoost trees in {path}: {error!r}"
        raise ValueError(problem) from None
    return _contents(served, files, features, ("float32", [-1, width]), manifest)


def read_lightgbm(served: Served) -> Contents:
    """Read the inputs and outputs of LightGBM's trees, unless they are declared."""
    path = Path(str(served.source))
    files = {"model.txt": path}
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
        if _is_declared(served):
            return {"files": files}
        raise ValueError(
            f"expected LightGBM trees in {path}, which has no max_feature_idx or num_class"
        ) from None
    manifest = {"features": head.get("feature_names", "").split()}
    return _contents(served, files, features, ("float64", [-1, classes]), manifest)


def _is_declared(served: Served) -> bool:
    return served.inputs is not None or served.outputs is not None


def _contents(
    served: Served,
    files: dict[str, Path],
    features: int,
    scores: tuple[str, list[int]],
    manifest: dict[str, Any],
) -> Contents:
    """Return what a file of trees describes; a declaration must have as many features."""
    if not _is_declared(served):
        inputs = {"features": ("float32", [-1, features])}
        outputs = {"scores": scores}
        return {"files": files, "inputs": inputs, "outputs": outputs, "manifest": manifest}
    declared: dict[str, Any] = dict(served.inputs or {})
    for name, tensor in declared.items():
        # What is no pair of a type and a shape is refused for every format.
        shape = tensor[1] if isinstance(tensor, (list, tuple)) and len(tensor) == 2 else ()
        last = shape[-1] if isinstance(shape, (list, tuple)) and shape else -1
        if isinstance(last, int) and last not in (-1, features):
            raise ValueError(
                f"{served.source} has {features} features: expected input {name!r} of shape "
                f"[-1, {features}], got {list(shape)}"
            )
    return {"files": files, "manifest": manifest}


def load(path: Path, manifest: dict[str, Any], threads: int) -> Runner:
    (output,) = manifest["outputs"]
    predict: Callable[[Any], Any]
    if path.suffix == ".txt":
        import lightgbm  # type: ignore[import-not-found,unused-ignore]

        trees = lightgbm.Booster(model_file=str(path))
        predict = functools.partial(trees.predict, num_threads=threads)
    else:
        import xgboost  # type: ignore[import-not-found,unused-ignore]

        forest = xgboost.Booster({"nthread": threads}, model_file=str(path))
        # Of trees that stopped early, XGBoost's own estimators use those up to the best; 0 is all.
        trees = int(forest.attr("best_iteration") or -1) + 1
        predict = functools.partial(forest.inplace_predict, iteration_range=(0, trees))

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
        raise ImportError(
            f"reading {path} needs the xgboost package here; save the trees as .json, or declare "
            "inputs= and outputs= with Served"
        ) from None
    content: bytearray = xgboost.Booster(model_file=str(path)).save_raw("json")
    return content
