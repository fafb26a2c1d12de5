"""Features by the numbers of a fitted scaler: scikit-learn's, or a file of statistics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sonic_coffea.errors import ConfigError
from sonic_coffea.layouts._expressions import path_of
from sonic_coffea.layouts._features import Feature, as_features, number_of

# The attributes of scikit-learn's scalers that hold what is subtracted, and what is divided by.
_ATTRIBUTES = {
    "StandardScaler": ("mean_", "scale_"),
    "RobustScaler": ("center_", "scale_"),
    "MaxAbsScaler": (None, "scale_"),
}
_PAIRS = (("mean", "std"), ("min", "max"))


def Scaled(scaler: Any, fields: Any = None) -> tuple[Feature, ...]:  # noqa: N802
    """Return channels that are scaled as a fitted scaler does it.

    Parameters
    ----------
    scaler : scaler, mapping or path
        scikit-learn's StandardScaler, MinMaxScaler, MaxAbsScaler or RobustScaler, fitted. Or a
        mapping, or a JSON file with it, that has the statistics of each feature:
        ``{"pt": {"mean": 50.0, "std": 20.0}}``, which means ``(pt - mean) / std``, or ``min`` and
        ``max``, which mean ``(pt - min) / (max - min)``.
    fields : sequence or mapping, optional
        The fields, in the scaler's order. The last part of each field's name is compared with the
        scaler's name, if the scaler has names. A mapping has the fields of other names:
        ``{"pt": "Photon.pt"}``. By default, the scaler's names.

    Raises
    ------
    ConfigError
        If the scaler is not fitted, is of a kind that features cannot express, or has other names
        than the fields.

    Examples
    --------
    >>> import sonic_coffea as sonic
    >>> sonic.Scaled({"pt": {"mean": 50.0, "std": 20.0}}, ["Jet.pt"])
    (Feature('Jet.pt', shift=50.0, scale=0.05),)
    """
    if isinstance(scaler, (str, os.PathLike)):
        scaler = read_json(scaler, "the file of statistics")
    names, options = _of_statistics(scaler) if isinstance(scaler, Mapping) else _of_sklearn(scaler)
    features = named(fields, names, len(options), "the scaler")
    for feature in features:
        if not replace(feature, function=None, power=None, within=None).plain:
            raise ConfigError(f"Scaled: expected a field without a scale of its own: {feature!r}")
    return tuple(replace(f, **each) for f, each in zip(features, options, strict=True))


def named(fields: Any, names: Sequence[str], count: int, who: str) -> tuple[Feature, ...]:
    """Return the features that somebody who was trained, or fitted, knows by names.

    Parameters
    ----------
    fields : sequence, mapping or None
        The fields in order, compared with the names; or the fields of some names; or None.
    names : sequence of str
        The names, which may be none.
    count : int
        How many there are.
    who : str
        Who has them, in messages.

    Raises
    ------
    ConfigError
        If there are no names and no fields, or if they do not fit.
    """
    if isinstance(fields, Mapping) or fields is None:
        given = fields or {}
        unknown = [name for name in given if name not in names]
        if unknown or not names:
            raise ConfigError(
                f"{who} has {', '.join(map(repr, names)) or 'no names'}"
                + (f", and no {unknown[0]!r}" if unknown else f"; name its {count} fields in order")
            )
        return as_features([given.get(name, name) for name in names], who)
    features = as_features(fields, who)
    if len(features) != count:
        raise ConfigError(f"{who} has {count} features, got {len(features)} fields")
    for place, (name, feature) in enumerate(zip(names, features, strict=bool(names))):
        if name not in (feature.text, path_of(feature.name)[-1]):
            raise ConfigError(
                f"feature {place} of {who} is {name!r}, got {feature.text!r}; expected the order "
                f"{', '.join(names)}, or a dict with the field of each name"
            )
    return features


def _of_sklearn(scaler: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of a scaler's features, if it has them, and the options of each."""
    kind = type(scaler).__name__
    if kind not in (*_ATTRIBUTES, "MinMaxScaler"):
        raise ConfigError(
            f"features cannot express a {kind}; expected {', '.join(_ATTRIBUTES)} or MinMaxScaler, "
            "or put it into the model's ONNX file, before the network (skl2onnx converts it)"
        )
    count = getattr(scaler, "n_features_in_", None)
    if count is None:
        raise ConfigError(f"the {kind} is not fitted")
    limits: dict[str, Any] = {}
    if kind == "MinMaxScaler":
        scales = scaler.scale_
        shifts = -scaler.min_ / scales
    else:
        shifts, widths = (
            None if name is None else getattr(scaler, name) for name in _ATTRIBUTES[kind]
        )
        # Without with_mean, scikit-learn computes a mean all the same.
        if shifts is None or not getattr(scaler, "with_mean", True):
            shifts = np.zeros(count)
        scales = np.ones(count) if widths is None else 1 / widths
    if getattr(scaler, "clip", False):
        lower, upper = getattr(scaler, "feature_range", (-1.0, 1.0))
        limits = {"lower": lower, "upper": upper}
    each = zip(np.asarray(shifts).tolist(), np.asarray(scales).tolist(), strict=True)
    names = getattr(scaler, "feature_names_in_", ())
    return [*map(str, names)], [{"shift": s, "scale": by, **limits} for s, by in each]


def _of_statistics(content: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of features, and the options of each, by their statistics."""
    options = []
    for name, statistics in content.items():
        where = f"the statistics of {name!r}"
        has = set(statistics) if isinstance(statistics, Mapping) else set()
        pairs = [pair for pair in _PAIRS if has & {*pair}]
        if len(pairs) != 1 or not has >= {*pairs[0]}:
            raise ConfigError(
                f"{where}: expected either mean and std, or min and max, got {statistics!r}; "
                "another rule is that of Feature(name, shift=, scale=)"
            )
        first, second = (number_of(statistics[key], f"{where}: {key}") for key in pairs[0])
        width = second if pairs[0] == _PAIRS[0] else second - first
        if not (math.isfinite(first) and math.isfinite(width) and width > 0):
            raise ConfigError(f"{where}: expected finite numbers and a width, got {statistics!r}")
        options.append({"shift": first, "scale": 1 / width})
    return list(content), options


def read_json(path: str | os.PathLike[str], what: str) -> Mapping[str, Any]:
    """Return the object that a JSON file holds; errors call the file `what`."""
    file = f"{what} {str(path)!r}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot read {file}: {error.strerror}"
    except UnicodeDecodeError:
        problem = f"{file} is not JSON: it is not a text"
    except ValueError as error:
        problem = f"{file} is not JSON: {error}"
    else:
        if isinstance(content, dict):
            return content
        problem = f"{file} holds no JSON object"
    raise ConfigError(problem)
