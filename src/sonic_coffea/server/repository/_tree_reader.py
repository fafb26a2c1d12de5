"""What a file of boosted trees takes and gives; run as a script where its package is.

It prints JSON: features, outputs a row, the type of these, and the features' names. A process of
its own, because these packages end it on some broken files.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np


def _xgboost(path: str) -> tuple[Any, int, Any]:
    import xgboost  # type: ignore[import-not-found,unused-ignore]

    booster = xgboost.Booster(model_file=path)
    features = booster.num_features()
    return booster.feature_names, features, booster.inplace_predict(np.zeros((1, features), "f4"))


def _lightgbm(path: str) -> tuple[Any, int, Any]:
    import lightgbm  # type: ignore[import-not-found,unused-ignore]

    booster = lightgbm.Booster(model_file=path)
    features = booster.num_feature()
    return booster.feature_name(), features, booster.predict(np.zeros((1, features), "f4"))


def _said(error: Exception) -> str:
    """Return in one line what a package said, without where in its own sources it was."""
    text = str(error).partition("Stack trace:")[0]
    return " ".join(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", text.strip()).split()) or repr(error)


def main(kind: str, path: str) -> None:
    """Print what `path` says."""
    reader = {"xgboost": _xgboost, "lightgbm": _lightgbm}[kind]
    try:
        names, features, scores = reader(path)
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001  each package has its own class
        print(json.dumps({"error": _said(error)}))  # noqa: T201
        return
    scores = np.asarray(scores)
    about = {
        "names": names,
        "features": features,
        "outputs": scores.size,
        "dtype": scores.dtype.name,
    }
    print(json.dumps(about))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
