"""The preprocessing files of weaver and of the CMS software, read as layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts import Bucketed, Feature, Layout, Mask, Padded, Row, read_json

ORDERS = "cmssw", "weaver"

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
    order: str = "cmssw",
    pad_mode: str = "constant",
) -> tuple[dict[str, Layout], list[str]]:
    """Return the layouts of the inputs, and the labels of the output.

    The rule is that of the files' readers. A value that is not finite is replaced by
    ``replace_inf_value``; then comes ``clip((value - median) * norm_factor, lower_bound,
    upper_bound)``. In the order of weaver, the replacement comes last.

    Rows are padded with ``pad`` up to ``var_length``. With ``min_length`` and ``max_length``, rows
    are padded to one of several lengths between these. The lengths double in the group that needs
    most steps, and the other groups have as many steps. A group of length 1 holds numbers of the
    row itself: ``[N, F, 1]``. So does a group whose length is null, which weaver does not pad:
    ``[N, F]``, or ``[N]`` of one variable. Any other null stands for what the file need not have.

    An input is a mask if the name of its only variable ends with ``mask``. It counts the elements
    of the first input with the same text before the last ``_``: ``sv_mask`` those of
    ``sv_features``. Names may end with the position of the input, as in weaver's TorchScript
    exports: ``sv_mask__5`` counts ``sv_features__4``.
    """
    if order not in ORDERS:
        raise ConfigError(f"from_weaver: no order {order!r}; {nearest(str(order), ORDERS)}")
    content, file = preprocess, "the preprocessing"
    if not isinstance(content, Mapping):
        file = f"the preprocessing file {str(content)!r}"
        content = read_json(content, "the preprocessing file")
    groups = {name: _get(content, name, file) for name in _names(content, "input_names", file)}
    names = rename or {}
    variables_of = {
        name: _names(group, "var_names", f"input {name!r} of {file}")
        for name, group in groups.items()
    }
    declared = {variable for variables in variables_of.values() for variable in variables}
    known = [*groups, *sorted(declared)]
    _require(names, known, "rename: the preprocessing file has no variable or input")
    prefixes = _prefixes(prefix, groups)
    ranges = {name: _range(group, name) for name, group in groups.items()}
    lengths = _lengths({name: limits for name, limits in ranges.items() if limits is not None})
    layouts: dict[str, Layout] = {}
    masks: list[str] = []
    for name, group in groups.items():
        variables, where = variables_of[name], f"input {name!r} of {file}"
        if len(variables) == 1 and variables[0].endswith("mask") and name in lengths:
            masks.append(name)
            layouts[name] = Mask()  # in the order of the file
            continue
        infos = {v: _get(_get(group, "var_infos", where), v, where) for v in variables}
        features = [
            _feature(prefixes[name] + names.get(v, v), info, f"variable {v!r} of {where}", order)
            for v, info in infos.items()
        ]
        fills = [
            _number(info, "pad", 0.0, f"variable {v!r} of {where}") for v, info in infos.items()
        ]
        if name not in lengths:
            layouts[name] = Row(features, axis_order="" if len(features) == 1 else "F")
        elif len(lengths[name]) > 1:
            layouts[name] = Bucketed(features, lengths[name], fill=fills, pad_mode=pad_mode)
        elif lengths[name] == [1]:
            layouts[name] = Row(features, axis_order="FL")
        else:
            layouts[name] = Padded(features, lengths[name][0], fill=fills, pad_mode=pad_mode)
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
    known = sorted({*groups, *map(group_of, groups)})
    _require(prefix, known, "prefix: the preprocessing file has no input or group")
    return {name: prefix.get(name, prefix.get(group_of(name), "")) for name in groups}


def _labels(content: Mapping[str, Any], labels: str | Path | Sequence[str] | None) -> list[str]:
    if isinstance(labels, (str, Path)):
        return _lines(Path(labels))
    if labels is not None:
        if not isinstance(labels, Sequence):
            raise ConfigError(f"expected labels as a file or a list of names, got {labels!r}")
        return [str(label) for label in labels]
    names = content.get("output_names")
    names = content.get("flav_names") if names is None else names
    if names is not None and not isinstance(names, (list, tuple, Mapping)):
        raise ConfigError(
            f"the preprocessing file: expected output_names to be a list of names, got {names!r}"
        )
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


def group_of(name: str) -> str:
    """Return the group of an input: its name to the last ``_``, without its position."""
    return re.sub(r"__\d+$", "", name).rpartition("_")[0]


def _counted(mask: str, others: list[str]) -> str:
    """Return the input whose elements a mask counts."""
    first = {group_of(name): name for name in reversed(others)}
    group = group_of(mask)
    if len(first) == 1:
        (group,) = first
    if group not in first:
        raise ConfigError(
            f"mask {mask!r} of the preprocessing file: expected an input of its group, with the "
            f"same text before the last '_', got {', '.join(map(repr, others)) or 'none'}"
        )
    return first[group]


def _feature(name: str, info: Any, where: str, order: str) -> Feature:
    if not isinstance(info, Mapping):
        raise ConfigError(f"{where}: expected an object with its numbers, got {info!r}")
    shift = _number(info, "median", 0.0, where)
    scale = _number(info, "norm_factor", 1.0, where)
    lower = _number(info, "lower_bound", -_NO_LIMIT, where)
    upper = _number(info, "upper_bound", _NO_LIMIT, where)
    is_transformed = scale != 1.0 or lower > -_NO_LIMIT or upper < _NO_LIMIT
    if info.get("median", 0.0) is None and is_transformed:
        raise ConfigError(
            f"{where} has null as median, which to weaver means no transformation, beside a "
            "norm_factor or limits; write 0 as median, or null for the others too"
        )
    return Feature(
        name,
        shift=shift,
        scale=scale,
        lower=None if lower <= -_NO_LIMIT else lower,
        upper=None if upper >= _NO_LIMIT else upper,
        nonfinite=_number(info, "replace_inf_value", 0.0, where),
        nonfinite_last=order == "weaver",
    )


def _number(info: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """Return a number of the file; null is as good as none."""
    value = info.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: expected {key} to be a number, got {value!r}")
    return float(value)


def _range(group: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Return the least and the greatest length of a group; None if it is not padded."""
    where = f"input {name!r} of the preprocessing file"
    key = "var_length" if "var_length" in group else "max_length"
    if key not in group:
        raise ConfigError(f"{where} has no var_length or max_length")
    if group[key] is None:
        return None
    most = _length_of(group, key, where)
    if key == "var_length":
        return most, most
    least = most if group.get("min_length") is None else _length_of(group, "min_length", where)
    return max(1, least), max(1, least, most)


def _length_of(group: Mapping[str, Any], key: str, where: str) -> int:
    length = group[key]
    if isinstance(length, bool) or not isinstance(length, int):
        raise ConfigError(f"{where}: expected {key} to be a whole number, got {length!r}")
    return length


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


def _get(content: Any, key: str, where: str) -> Any:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: expected an object that has {key!r}, got {content!r}")
    _require([key], content, f"{where} has no")
    return content[key]


def _names(content: Any, key: str, where: str) -> list[str]:
    """Return a list of names in the file."""
    names = _get(content, key, where)
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: expected {key} to be a list of names, got {names!r}")
    return list(names)


def _require(names: Iterable[str], known: Collection[str], problem: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{problem} {name!r}; {nearest(name, known)}")
