"""The preprocessing files of weaver and of the CMS software, read as layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts import Bucketed, Feature, Layout, Mask, Padded

# Limits beyond which weaver means: none.
_NO_LIMIT = 1e32


def read(
    preprocess: str | Path | Mapping[str, Any], *, prefix: str = ""
) -> tuple[dict[str, Layout], list[str]]:
    """Return the layouts of the inputs, and the labels of the output.

    The rule is that of the files' readers: a value that is not finite is replaced by
    ``replace_inf_value``, then ``clip((value - median) * norm_factor, lower_bound, upper_bound)``;
    what is missing up to ``var_length`` is ``pad``. Between ``min_length`` and ``max_length`` the
    length follows the row: rows are padded to the next of lengths that double from the least to
    the most. An input whose only variable is a mask, by its name, counts the elements of its
    group: of ``sv_features`` for ``sv_mask``, that is, of the first input with the same text
    before the last ``_``.
    """
    content = _load(preprocess)
    inputs: dict[str, Layout] = {}
    masks: dict[str, int | None] = {}
    for name in _get(content, "input_names", "the file"):
        group = _get(content, name, "the file")
        variables = list(_get(group, "var_names", f"input {name!r}"))
        lengths = _lengths(group, name)
        if len(variables) == 1 and variables[0].endswith("mask"):
            masks[name] = lengths[0] if len(lengths) == 1 else None
            inputs[name] = Mask(masks[name])  # in the order of the file
            continue
        infos = _get(group, "var_infos", f"input {name!r}")
        features = [_feature(v, _get(infos, v, f"input {name!r}"), prefix) for v in variables]
        fills = [float(infos[v].get("pad", 0.0)) for v in variables]
        if len(lengths) == 1:
            inputs[name] = Padded(features, lengths[0], fill=fills)
        else:
            inputs[name] = Bucketed(features, lengths, fill=fills)
    others = [name for name in inputs if name not in masks]
    inputs |= {name: Mask(n, beside=_counted(name, others)) for name, n in masks.items()}
    labels = [str(n).removeprefix("label_") for n in _get(content, "output_names", "the file")]
    return inputs, labels


def _counted(mask: str, others: list[str]) -> str:
    """Return the input whose elements a mask counts."""
    first = {name.rpartition("_")[0]: name for name in reversed(others)}
    group = mask.rpartition("_")[0]
    if len(first) == 1:
        (group,) = first
    if group not in first:
        raise ConfigError(
            f"mask {mask!r} of the preprocessing file: expected an input of its group, with the "
            f"same text before the last '_', got {', '.join(map(repr, others)) or 'none'}"
        )
    return first[group]


def _feature(variable: str, info: Mapping[str, Any], prefix: str) -> Feature:
    lower = float(info.get("lower_bound", -_NO_LIMIT))
    upper = float(info.get("upper_bound", _NO_LIMIT))
    return Feature(
        prefix + variable,
        shift=float(info.get("median", 0.0)),
        scale=float(info.get("norm_factor", 1.0)),
        lower=None if lower <= -_NO_LIMIT else lower,
        upper=None if upper >= _NO_LIMIT else upper,
        nonfinite=float(info.get("replace_inf_value", 0.0)),
    )


def _lengths(group: Mapping[str, Any], name: str) -> list[int]:
    """Return what rows are padded to: one length, or several to choose from."""
    if "var_length" in group:
        return [int(group["var_length"])]
    if "max_length" not in group:
        raise ConfigError(
            f"input {name!r} of the preprocessing file has no var_length or max_length"
        )
    most = int(group["max_length"])
    lengths = [max(1, int(group.get("min_length", most)))]
    while lengths[-1] < most:
        lengths.append(min(2 * lengths[-1], most))
    return lengths


def _load(preprocess: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(preprocess, Mapping):
        return preprocess
    path = Path(preprocess)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read the preprocessing file {str(path)!r}: {error.strerror}"
    except ValueError as error:
        message = f"the preprocessing file {str(path)!r} is not JSON: {error}"
    else:
        if isinstance(content, dict):
            return content
        message = f"the preprocessing file {str(path)!r} holds no JSON object"
    raise ConfigError(message)


def _get(content: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in content:
        raise ConfigError(f"{where} of the preprocessing has no {key!r}; {nearest(key, content)}")
    return content[key]
