"""Models declared in a YAML file, for the command line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sonic_coffea import layouts
from sonic_coffea.errors import ConfigError, SonicError, expect, require
from sonic_coffea.layouts import Layout, Output
from sonic_coffea.model._declaration import Declaration

_LAYOUTS = ("Bucketed", "Dense", "Flat", "Mask", "Padded", "Pairwise", "Row", "Tokens")
# All arguments of a model but its name, inputs and outputs.
_OPTIONS = [*inspect.signature(Declaration).parameters][3:]
_KEYS = ("inputs", "model", "outputs", *_OPTIONS)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """A loader that refuses keys given twice, of which YAML's own keeps the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        keys = [(key.tag, key.value) for key, _ in node.value]
        for key, _ in node.value:
            if keys.count((key.tag, key.value)) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


def read(path: Path, name: str | None) -> dict[str, Any]:
    """Return the arguments of a `Model` that a YAML file has.

    Raises
    ------
    ConfigError
        Naming the place in the file that cannot be used, and what is expected there.
    """
    try:
        content = yaml.load(path.expanduser().read_text("utf-8"), _Loader)  # noqa: S506  a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path} as YAML: {' '.join(str(error).split())}") from None
    known = _mapping(content, str(path))
    require(known, _KEYS, f"{path}: no key")
    name = name or known.get("model")
    expect(isinstance(name, str), "the model's name as `model`", name, str(path))
    inputs = _mapping(known.get("inputs"), f"{path}, inputs")
    outputs = _mapping(known.get("outputs"), f"{path}, outputs")
    return {
        "name": name,
        "inputs": {k: _layout(v, f"{path}, input {k!r}") for k, v in inputs.items()},
        "outputs": {k: _output(v, f"{path}, output {k!r}") for k, v in outputs.items()},
        **{key: known[key] for key in _OPTIONS if key in known},
    }


def _mapping(content: Any, where: str) -> Mapping[str, Any]:
    expect(isinstance(content, dict) and content, "keys and values", content, where)
    mapping: Mapping[str, Any] = content
    return mapping


def _layout(content: Any, where: str) -> Layout:
    options = dict(_mapping(content, where))
    kind = options.pop("layout", None)
    require([kind], _LAYOUTS, f"{where}: no layout")
    if "parts" in options:
        parts = _mapping(options["parts"], f"{where}, parts")
        options["parts"] = {k: _layout(v, f"{where}, {k!r}") for k, v in parts.items()}
    for key in ("fields", "field", "of"):
        if key in options:
            options[key] = _fields(options[key], where)
    layout: Layout = _build(getattr(layouts, kind), options, where)
    return layout


def _fields(content: Any, where: str) -> Any:
    if isinstance(content, list):
        return [_fields(field, where) for field in content]
    if isinstance(content, dict):
        kinds = {"values": layouts.OneHot, "scaler": layouts.Scaled}
        kind = next((kinds[key] for key in kinds if key in content), layouts.Feature)
        return _build(kind, content, where)
    return content


def _output(content: Any, where: str) -> Output | None:
    if isinstance(content, list):
        content = {"labels": content}
    if isinstance(content, dict):
        output: Output = _build(layouts.Output, content, where)
        return output
    expect(content is None, "a list of labels, or nothing", content, where)
    return None


def _build(kind: Any, options: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**options)
    except SonicError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    except (TypeError, ValueError) as error:
        message = str(error).replace(f"{kind.__name__}.__init__()", kind.__name__)
        raise ConfigError(f"{where}: {message}") from None
