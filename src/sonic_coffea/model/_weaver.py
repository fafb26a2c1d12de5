"""The preprocessing files of weaver and of the CMS software, read as layouts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts import Bucketed, Feature, Layout, Mask, Padded, Row

# Limits beyond which weaver means: none.
_NO_LIMIT = 1e32

# Stands for classes that weaver derives from a variable; the file does not name them.
_CLASSES = "truth_label"


def read(
    preprocess: str | Path | Mapping[str, Any],
    *,
    prefix: str | Mapping[str, str] = "",
    labels: str | Path | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    inputs: Mapping[str, Layout] | None = None,
) -> tuple[dict[str, Layout], list[str]]:
    """Return the layouts of the inputs, and the labels of the output.

    The rule is that of the files' readers. A value that is not finite is replaced by
    ``replace_inf_value``; then comes ``clip((value - median) * norm_factor, lower_bound,
    upper_bound)``. Rows are padded with ``pad`` up to ``var_length``. With ``min_length`` and
    ``max_length``, rows are padded to one of several lengths between these. The lengths double in
    the group that needs most steps, and the other groups have as many steps. A group of length 1
    holds numbers of the row itself: ``[N, F, 1]``.

    An input is a mask if the name of its only variable ends with ``mask``. It counts the elements
    of the first input with the same text before the last ``_``: ``sv_mask`` those of
    ``sv_features``. Names may end with the position of the input, as in weaver's TorchScript
    exports: ``sv_mask__5`` counts ``sv_features__4``.
    """
    content = _load(preprocess)
    file = "the preprocessing"
    if not isinstance(preprocess, Mapping):
        file = f"the preprocessing file {str(preprocess)!r}"
    groups = {name: _get(content, name, file) for name in _get(content, "input_names", file)}
    names = rename or {}
    declared = {v for group in groups.values() for v in group.get("var_names", ())}
    known = [*groups, *sorted(declared)]
    _require(names, known, "rename: the preprocessing file has no variable or input")
    prefixes = _prefixes(prefix, groups)
    lengths = _lengths({name: _range(group, name) for name, group in groups.items()})
    layouts: dict[str, Layout] = {}
    masks: list[str] = []
    for name, group in groups.items():
        variables = list(_get(group, "var_names", f"input {name!r} of {file}"))
        if len(variables) == 1 and variables[0].endswith("mask"):
            masks.append(name)
            layouts[name] = Mask()  # in the order of the file
            continue
        infos = _get(group, "var_infos", f"input {name!r} of {file}")
        features = [
            _feature(prefixes[name] + names.get(v, v), _get(infos, v, f"input {name!r} of {file}"))
            for v in variables
        ]
        fills = [float(infos[v].get("pad", 0.0)) for v in variables]
        if len(lengths[name]) > 1:
            layouts[name] = Bucketed(features, lengths[name], fill=fills)
        elif lengths[name] == [1]:
            layouts[name] = Row(features, axis_order="FL")
        else:
            layouts[name] = Padded(features, lengths[name][0], fill=fills)
    others = [name for name, layout in layouts.items() if layout.jagged]
    for name in masks:
        fixed = lengths[name][0] if len(lengths[name]) == 1 else None
        beside = _counted(name, others)
        layouts[name] = Mask(fixed, beside=names.get(beside, beside))
    renamed = {names.get(name, name): layout for name, layout in layouts.items()}
    if len(renamed) < len(layouts):
        raise ConfigError(f"rename: two inputs would have one name, of {', '.join(renamed)}")
    _require(inputs or (), renamed, "the preprocessing file has no input")
    return {**renamed, **(inputs or {})}, _labels(content, labels)


def usual_output(inputs: Iterable[str]) -> str:
    """Return weaver's name of the output; its TorchScript exports number inputs and outputs."""
    return "softmax__0" if all(re.search(r"__\d+$", name) for name in inputs) else "softmax"


def _prefixes(prefix: str | Mapping[str, str], groups: Mapping[str, Any]) -> dict[str, str]:
    if isinstance(prefix, str):
        return dict.fromkeys(groups, prefix)
    known = sorted({*groups, *map(_group, groups)})
    _require(prefix, known, "prefix: the preprocessing file has no input or group")
    return {name: prefix.get(name, prefix.get(_group(name), "")) for name in groups}


def _labels(content: Mapping[str, Any], labels: str | Path | Sequence[str] | None) -> list[str]:
    if isinstance(labels, (str, Path)):
        return _lines(Path(labels))
    if labels is not None:
        return [str(label) for label in labels]
    names = content.get("output_names", content.get("flav_names"))
    if not names:
        raise ConfigError(
            "the preprocessing file does not name the values of the model's output; the "
            "option labels names them: a file with one in each line, or in Python a list"
        )
    if _CLASSES in names:
        others = ", ".join(repr(str(n)) for n in names if n != _CLASSES)
        raise ConfigError(
            f"{_CLASSES!r} in the output_names of the preprocessing file stands for classes that "
            "the file does not name; the option labels names all values of the output"
            + (f", which ends with {others}" if others else "")
            + ": a file with one in each line, or in Python a list"
        )
    return [str(name).removeprefix("label_") for name in names]


def _lines(path: Path) -> list[str]:
    try:
        return [
            line.strip() for line in path.read_text(encoding="utf-8").split("\n") if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the labels in {str(path)!r}: {error}"
    raise ConfigError(message)


def _group(name: str) -> str:
    """Return the group of an input: its name to the last ``_``, without its position."""
    return re.sub(r"__\d+$", "", name).rpartition("_")[0]


def _counted(mask: str, others: list[str]) -> str:
    """Return the input whose elements a mask counts."""
    first = {_group(name): name for name in reversed(others)}
    group = _group(mask)
    if len(first) == 1:
        (group,) = first
    if group not in first:
        raise ConfigError(
            f"mask {mask!r} of the preprocessing file: expected an input of its group, with the "
            f"same text before the last '_', got {', '.join(map(repr, others)) or 'none'}"
        )
    return first[group]


def _feature(name: str, info: Mapping[str, Any]) -> Feature:
    lower = float(info.get("lower_bound", -_NO_LIMIT))
    upper = float(info.get("upper_bound", _NO_LIMIT))
    return Feature(
        name,
        shift=float(info.get("median", 0.0)),
        scale=float(info.get("norm_factor", 1.0)),
        lower=None if lower <= -_NO_LIMIT else lower,
        upper=None if upper >= _NO_LIMIT else upper,
        nonfinite=float(info.get("replace_inf_value", 0.0)),
    )


def _range(group: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the least and the greatest length of a group."""
    if "var_length" in group:
        return (int(group["var_length"]),) * 2
    if "max_length" not in group:
        raise ConfigError(
            f"input {name!r} of the preprocessing file has no var_length or max_length"
        )
    most = int(group["max_length"])
    least = max(1, int(group.get("min_length", most)))
    return least, max(least, most)


def _lengths(ranges: Mapping[str, tuple[int, int]]) -> dict[str, list[int]]:
    """Return the lengths to which the rows of each group may be padded.

    Rows of all groups have the same level, so that as many steps in each group waste least.
    """
    steps = max((_doublings(*limits) for limits in ranges.values()), default=0)
    return {
        name: sorted({_length(least, most, step, steps) for step in range(steps + 1)})
        for name, (least, most) in ranges.items()
    }


def _doublings(least: int, most: int) -> int:
    return math.ceil(math.log2(most / least)) if most > least else 0


def _length(least: int, most: int, step: int, steps: int) -> int:
    if _doublings(least, most) == steps:
        return min(least << step, most)
    # Rounded, as 2 ** 0.5 ** 2 is a little more than 2.
    return math.ceil(round(float(least * (most / least) ** (step / steps)), 6))


def _load(preprocess: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(preprocess, Mapping):
        return preprocess
    path = Path(preprocess)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read the preprocessing file {str(path)!r}: {error.strerror}"
    except UnicodeDecodeError:
        message = f"the preprocessing file {str(path)!r} is not JSON: it is not a text"
    except ValueError as error:
        message = f"the preprocessing file {str(path)!r} is not JSON: {error}"
    else:
        if isinstance(content, dict):
            return content
        message = f"the preprocessing file {str(path)!r} holds no JSON object"
    raise ConfigError(message)


def _get(content: Mapping[str, Any], key: str, where: str) -> Any:
    _require([key], content, f"{where} has no")
    return content[key]


def _require(names: Iterable[str], known: Collection[str], problem: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{problem} {name!r}; {nearest(name, known)}")
