"""XGBoost's trees, as JSON or as UBJSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing import BinaryIO

    from sonic_coffea.server.repository._served import Served
    from sonic_coffea.server.repository.formats._format import Contents, Runner

_NUMBERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}
_CONSTANTS = {"Z": None, "T": True, "F": False}


def read(served: Served) -> Contents:
    """Read what the trees take and give, unless it is declared."""
    path = Path(str(served.source))
    files = {f"model{path.suffix.lower()}": path}
    if served.inputs is not None or served.outputs is not None:
        return {"files": files}
    try:
        learner = _parse(path)["learner"]
        sizes = learner["learner_model_param"]
        # The class alone, rather than one number for each.
        chosen = learner["objective"]["name"] == "multi:softmax"
        features, classes = int(sizes["num_feature"]), int(sizes.get("num_class", 0))
        width = max(1 if chosen else classes, int(sizes.get("num_target", 1)), 1)
        names = list(learner.get("feature_names", ()))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"expected XGBoost trees in {path}, which cannot be read: {error!r}"
        ) from None
    return {
        "files": files,
        "inputs": {"features": ("float32", [-1, features])},
        "outputs": {"scores": ("float32", [-1, width])},
        "manifest": {"features": names},
    }


def load(path: Path, manifest: dict[str, Any], threads: int) -> Runner:
    """Return what runs the trees."""
    import xgboost  # type: ignore[import-not-found,unused-ignore]

    booster = xgboost.Booster({"nthread": threads}, model_file=str(path))
    (output,) = manifest["outputs"]

    def run(feed: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
        del wanted
        (rows,) = feed.values()
        scores = np.asarray(booster.inplace_predict(rows), output["dtype"])
        # One number a row comes without an axis for it.
        return {output["name"]: scores.reshape(len(rows), *output["shape"][1:])}

    return run


def _parse(path: Path) -> Any:
    with path.open("rb") as file:
        if path.suffix.lower() == ".json":
            return json.load(file)
        return _ubjson(file, _mark(file))


def _ubjson(file: BinaryIO, mark: str) -> Any:
    """Return the value after a mark, in the part of UBJSON that XGBoost writes.

    That is here because packages for UBJSON are not kept up, and want a compiler.
    """
    if mark in _CONSTANTS:
        return _CONSTANTS[mark]
    if mark in _NUMBERS:
        return _numbers(file, mark, 1)[0].item()
    if mark == "S":
        return _text(file, _mark(file))
    if mark == "[":
        following = _mark(file)
        kind = _mark(file) if following == "$" else ""
        if (_mark(file) if kind else following) != "#":
            raise ValueError("an array without its length")
        count = int(_ubjson(file, _mark(file)))
        if kind in _NUMBERS:
            return _numbers(file, kind, count)
        return [_ubjson(file, kind or _mark(file)) for _ in range(count)]
    if mark == "{":
        items = {}
        while (following := _mark(file)) != "}":
            key = _text(file, following)
            items[key] = _ubjson(file, _mark(file))
        return items
    raise ValueError(f"no value of UBJSON before byte {file.tell()}")


def _mark(file: BinaryIO) -> str:
    return file.read(1).decode("latin-1")


def _numbers(file: BinaryIO, kind: str, count: int) -> Any:
    dtype = np.dtype(_NUMBERS[kind])
    return np.frombuffer(file.read(count * dtype.itemsize), dtype, count)


def _text(file: BinaryIO, kind: str) -> str:
    return file.read(int(_ubjson(file, kind))).decode()
