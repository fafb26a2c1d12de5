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


def read(served: Served) -> Contents:
    """Read the inputs and outputs of trees."""
    path = Path(str(served.source))
    if path.suffix.lower() == ".txt":
        return _read_lightgbm(served, path)
    files = {f"model{path.suffix.lower()}": path}
    try:
        content: bytes | bytearray = path.read_bytes()
        if path.suffix.lower() != ".json":
            import xgboost

            # Only XGBoost itself reads its binary form.
            content = xgboost.Booster(model_file=str(path)).save_raw("json")
        learner = json.loads(content)["learner"]
        booster, sizes = learner.get("gradient_booster", {}), learner["learner_model_param"]
        # The class alone, rather than one number for each.
        chosen = learner["objective"]["name"] == "multi:softmax"
        features, classes = int(sizes["num_feature"]), int(sizes.get("num_class", 0))
        width = max(1 if chosen else classes, int(sizes.get("num_target", 1)), 1)
        manifest: dict[str, Any] = {"features": list(learner.get("feature_names", ()))}
    except ImportError:
        if served.inputs is None:
            raise ValueError(
                f"reading {path} needs the xgboost package here; save the trees as .json, or "
                "declare inputs= and outputs= with Served"
            ) from None
        return {"files": files}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected XGBoost trees in {path}: {error!r}") from None
    if booster.get("name") == "gblinear":
        raise ValueError(f"expected XGBoost trees in {path}, got a linear model (gblinear)")
    trees = booster.get("gbtree", booster).get("model", {})  # those of dart are in another place
    categories = trees.get("cats", {"enc": []})["enc"]
    # The values of others are the letters of their names.
    _check_categories(served, [c["values"] for c in categories if "offsets" not in c])
    return {"files": files, **_tensors(features, ("float32", [-1, width])), "manifest": manifest}


def _read_lightgbm(served: Served, path: Path) -> Contents:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.partition("\nTree=")[0].splitlines()
    head = dict(line.split("=", 1) for line in lines if "=" in line)
    try:
        features, classes = int(head["max_feature_idx"]) + 1, int(head["num_class"])
    except (KeyError, ValueError):
        raise ValueError(
            f"expected LightGBM trees in {path}, which has no max_feature_idx or num_class"
        ) from None
    categories = text.partition("\npandas_categorical:")[2].partition("\n")[0]
    _check_categories(served, json.loads(categories or "null") or [])
    manifest = {"features": head.get("feature_names", "").split()}
    tensors = _tensors(features, ("float64", [-1, classes]))
    return {"files": {"model.txt": path}, **tensors, "manifest": manifest}


def _check_categories(served: Served, categories: list[list[Any]]) -> None:
    """Refuse trees that were trained on pandas categories which are other numbers than their codes.

    The trees take the codes, and would take the numbers for codes of others.
    """
    for numbers in categories:
        codes = {number: code for code, number in enumerate(numbers)}
        is_numeric = all(isinstance(number, int | float) for number in numbers)
        if served.inputs is None and is_numeric and any(n != code for n, code in codes.items()):
            raise ValueError(
                f"{served.source} was trained on a pandas category, whose codes its trees take in "
                f"place of the numbers; train on the codes, or declare inputs= and outputs= with "
                f"Served, and send the codes: Feature(name, categories={codes})"
            )


def _tensors(features: int, scores: tuple[str, list[int]]) -> Contents:
    return {"inputs": {"features": ("float32", [-1, features])}, "outputs": {"scores": scores}}


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
