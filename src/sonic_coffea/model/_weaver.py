"""The preprocessing files of weaver and of the CMS software, read as layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sonic_coffea._files import read_json, read_text
from sonic_coffea.errors import ConfigError, expect, require
from sonic_coffea.layouts import Bucketed, Feature, Layout, Mask, Padded, Row

ORDERS = "cmssw", "weaver"

# Limits beyond which weaver means: none.
_NO_LIMIT = 1e32

# What weaver writes of a variable.
_OF_VARIABLE = "median", "norm_factor", "replace_inf_value", "lower_bound", "upper_bound", "pad"

# What values of the file may be.
_OBJECT, _NAMES = (Mapping, "an object"), ((list, tuple), "a list of names")
_NUMBER, _WHOLE = ((int, float), "a number"), (int, "a whole number")

# Stands for classes that weaver derives from a variable; the file does not name them.
_CLASSES = "truth_label"


def read(
    preprocess: str | Path | Mapping[str, Any],
    prefix: str | Mapping[str, str],
    labels: str | Path | Sequence[str] | None,
    rename: Mapping[str, str] | None,
    inputs: Mapping[str, Layout] | None,
    order: str,
    pad_mode: str,
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
    method = "from_weaver"
    require([order], ORDERS, f"{method}: no order")
    names, replaced = {} if rename is None else rename, {} if inputs is None else inputs
    expect(isinstance(preprocess, (str, Path, Mapping)), "a file or a dict", preprocess, method)
    expect(isinstance(prefix, (str, Mapping)), "prefix as a str or a dict", prefix, method)
    expect(isinstance(names, Mapping), "rename as a dict", names, method)
    expect(isinstance(replaced, Mapping), "inputs as a dict", replaced, method)
    prefixed = prefix if isinstance(prefix, Mapping) else {"": prefix}
    for option, by_name in {"rename": names, "prefix": prefixed}.items():
        are_names = all(isinstance(name, str) for name in by_name.values())
        expect(are_names, f"names in {option} as str", by_name, method)
    content, file = preprocess, "the preprocessing"
    if not isinstance(content, Mapping):
        file = f"the preprocessing file {str(content)!r}"
        content = read_json(content, "the preprocessing file")
    listed = _get(content, "input_names", file, _NAMES)
    groups = {name: _get(content, name, file) for name in listed}
    variables_of = {
        name: _get(group, "var_names", f"input {name!r} of {file}", _NAMES)
        for name, group in groups.items()
    }
    known = [*groups, *sorted({v for variables in variables_of.values() for v in variables})]
    require(names, known, "rename: the preprocessing file has no variable or input")
    prefixes = _prefixes(prefix, groups)
    lengths = _lengths(groups)
    layouts: dict[str, Layout] = {}
    for name, group in groups.items():
        variables, where = variables_of[name], f"input {name!r} of {file}"
        if len(variables) == 1 and variables[0].endswith("mask") and name in lengths:
            layouts[name] = Mask()  # in the order of the file
            continue
        features, fills = [], []
        for variable in variables:
            info = _get(_get(group, "var_infos", where), variable, where)
            what = f"variable {variable!r} of {where}"
            path = prefixes[name] + names.get(variable, variable)
            features.append(_feature(path, info, what, order))
            fills.append(_get(info, "pad", what, _NUMBER, 0.0))
        # To weaver, a row that has nothing to repeat is 0.
        fill = fills if pad_mode == "constant" else 0.0
        layouts[name] = _layout(features, fill, lengths.get(name), pad_mode)
    others = [name for name, layout in layouts.items() if layout.jagged]
    for name in [name for name, layout in layouts.items() if isinstance(layout, Mask)]:
        fixed = lengths[name][0] if len(lengths[name]) == 1 else None
        beside = _counted(name, others)
        layouts[name] = Mask(fixed, beside=names.get(beside, beside))
    renamed = {names.get(name, name): layout for name, layout in layouts.items()}
    if len(renamed) < len(layouts):
        raise ConfigError(f"rename: two inputs would have one name, of {', '.join(renamed)}")
    require(replaced, renamed, "the preprocessing file has no input")
    return {**renamed, **replaced}, _labels(content, labels)


def _layout(features: list[Feature], fill: Any, lengths: list[int] | None, pad_mode: str) -> Layout:
    if lengths in (None, [1]):
        order = "FL" if lengths else "F" if len(features) > 1 else ""
        return Row(features, axis_order=order)
    if len(lengths) == 1:
        return Padded(features, lengths[0], fill=fill, pad_mode=pad_mode)
    return Bucketed(features, lengths, fill=fill, pad_mode=pad_mode)


def usual_output(inputs: Iterable[str]) -> str:
    """Return weaver's name of the output; its TorchScript exports number inputs and outputs."""
    return "softmax__0" if all(re.search(r"__\d+$", name) for name in inputs) else "softmax"


def _prefixes(prefix: str | Mapping[str, str], groups: Mapping[str, Any]) -> dict[str, str]:
    if isinstance(prefix, str):
        return dict.fromkeys(groups, prefix)
    known = sorted({*groups, *map(group_of, groups)})
    require(prefix, known, "prefix: the preprocessing file has no input or group")
    return {name: prefix.get(name, prefix.get(group_of(name), "")) for name in groups}


def _labels(content: Mapping[str, Any], labels: Any) -> list[str]:
    if isinstance(labels, (str, Path)):
        lines = read_text(labels, "the labels in").split("\n")
        return [line.strip() for line in lines if line.strip()]
    if labels is not None:
        are_names = isinstance(labels, Sequence) and all(isinstance(name, str) for name in labels)
        expect(are_names, "labels as a file or a list of names", labels)
        return list(labels)
    names = content.get("output_names")
    names = content.get("flav_names") if names is None else names
    are_listed = names is None or isinstance(names, (list, tuple, Mapping))
    expect(are_listed, "output_names to be a list of names", names, "the preprocessing file")
    if not names or _CLASSES in names:
        others = ", ".join(repr(str(n)) for n in names or () if n != _CLASSES)
        raise ConfigError(
            "the preprocessing file does not name all values of the model's output"
            + (f", which ends with {others}" if others else "")
            + "; the option labels names them: a file with one in each line, or in Python a list"
        )
    return [str(name).removeprefix("label_") for name in names]


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
    shift = _get(info, "median", where, _NUMBER, 0.0)
    require(info, _OF_VARIABLE, f"{where} has a key that weaver does not write,")
    scale = _get(info, "norm_factor", where, _NUMBER, 1.0)
    lower = _get(info, "lower_bound", where, _NUMBER, -_NO_LIMIT)
    upper = _get(info, "upper_bound", where, _NUMBER, _NO_LIMIT)
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
        nonfinite=_get(info, "replace_inf_value", where, _NUMBER, 0.0),
        nonfinite_last=order == "weaver",
    )


def _lengths(groups: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the lengths to which the rows of each group that is padded may be padded.

    A request has rows of one bucket, so that as many steps in each group waste least.
    """
    ranges = {}
    for name, group in groups.items():
        where = f"input {name!r} of the preprocessing file"
        key = "var_length" if "var_length" in group else "max_length"
        if key not in group:
            raise ConfigError(f"{where} has no var_length or max_length")
        most = _get(group, key, where, _WHOLE, 0)
        least = most if key == "var_length" else _get(group, "min_length", where, _WHOLE, most)
        if group[key] is not None:
            expect(most >= 1, f"{key} to be at least 1", most, where)
            ranges[name] = max(1, least), max(1, least, most)
    doublings = {name: math.ceil(math.log2(most / least)) for name, (least, most) in ranges.items()}
    steps = max(doublings.values(), default=0)
    lengths = {}
    for name, (least, most) in ranges.items():
        # Rounded, as 2 ** 0.5 ** 2 is a little more than 2.
        lengths[name] = np.ceil(np.geomspace(least, most, steps + 1).round(6))
        if doublings[name] == steps:
            lengths[name] = np.minimum(least * 2 ** np.arange(steps + 1), most)
    return {name: sorted({*map(int, each)}) for name, each in lengths.items()}


def _get(
    content: Any, key: str, where: str, kind: tuple[Any, str] = _OBJECT, default: Any = None
) -> Any:
    """Return a value of the file, of a kind; null is as good as none where there is a default."""
    if default is None:
        require([key], content, f"{where} has no")
    value: Any = content.get(key)
    if value is None and default is not None:
        return default
    types, expected = kind
    fits = isinstance(value, types) and not isinstance(value, bool)
    fits = fits and (kind is not _NAMES or all(isinstance(name, str) for name in value))
    expect(fits, f"{key!r} to be {expected}", value, where)
    return float(value) if kind is _NUMBER else value
