"""The files and tensors of a model, from its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.server.repository.formats import (
    FORMATS,
    Declaration,
    Served,
    format_of,
    scripts_of,
)
from sonic_coffea.transport import DATATYPES

TRITON_TYPES = {numpy: f"TYPE_{kserve}" for kserve, numpy in DATATYPES.items()}
TRITON_TYPES |= dict.fromkeys(("bytes", DATATYPES["BYTES"]), "TYPE_STRING")
# Name, numpy's name of the dtype, and shape, as in the manifest; -1 is an axis of any length.
Tensor = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The files and tensors of a model.

    ``files`` maps names in the version's folder to the files that are copied; the backend opens the
    first. ``scripts`` maps names to the scripts that run it. ``manifest`` has further entries of
    the manifest.
    """

    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    batched: bool
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    scripts: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    manifest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    platform: str = "python"

    @property
    def file(self) -> str:
        """The name of the file that the backend opens; empty where there is none."""
        return next(iter(self.files), "")


def read_source(name: str, served: Served, platform: str | None) -> ModelSource:
    """Read what a model is, without running it."""
    kind = format_of(served.source)
    if kind is None:
        suffixes = ", ".join(suffix for f in FORMATS.values() for suffix in f.suffixes)
        raise ConfigError(
            f"expected a file of a kind that can be served ({suffixes}) for model {name!r}, "
            f"got {served.source}"
        )
    if served.files and kind != "function":
        raise ConfigError(f"files go with a function, and model {name!r} is of kind {kind}")
    native = FORMATS[kind].native
    usual = native if FORMATS[kind].prefers_native else None
    platform = served.platform or platform or usual or "python"
    if platform not in ("python", native):
        raise ConfigError(
            f"platform {platform!r} cannot run model {name!r}, which is of kind {kind}; "
            "Served(source, platform='python') chooses another for one model"
        )
    try:
        contents = FORMATS[kind].read(served)
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}" if error.strerror else error
        raise ConfigError(f"{problem} (model {name!r})") from None
    except ValueError as error:
        raise ConfigError(f"{error} (model {name!r})") from None
    inputs, outputs = contents.get("inputs"), contents.get("outputs")
    if served.inputs is not None or served.outputs is not None:
        inputs, outputs = served.inputs, served.outputs
    if not inputs or not outputs:
        raise ConfigError(
            f"expected the inputs and outputs of model {name!r}, which cannot be read from its "
            'file: Served(source, inputs={"x": ("float32", [-1, 8])}, '
            'outputs={"scores": ("float32", [-1, 2])})'
        )
    return ModelSource(
        kind=kind,
        inputs=[_tensor(name, *item) for item in inputs.items()],
        outputs=[_tensor(name, *item) for item in outputs.items()],
        batched=_batched(inputs, outputs),
        files=contents["files"],
        scripts=scripts_of(kind) if platform == "python" else {},
        manifest=contents.get("manifest", {}),
        platform=platform,
    )


def _tensor(model: str, name: str, declaration: Any) -> Tensor:
    where = f"tensor {name!r} of model {model!r}"
    try:
        dtype, axes = declaration
        shape = [-1 if isinstance(axis, str) else int(axis) for axis in axes]
    except (TypeError, ValueError):
        raise ConfigError(
            f'expected {where} as a type and a shape such as ("float32", [-1, 8]), '
            f"got {declaration!r}"
        ) from None
    if dtype not in TRITON_TYPES:
        raise ConfigError(f"unknown type {dtype!r} of {where}; {nearest(str(dtype), TRITON_TYPES)}")
    return {"name": name, "dtype": dtype, "shape": shape}


def _batched(inputs: Declaration, outputs: Declaration) -> bool:
    """Whether requests can be stacked: the first axis of every tensor counts the rows.

    The axis has any length, and the same name in all inputs. A graph with nodes and row splits has
    axes of different names, and stacked requests would be another graph. First axes that are -1 may
    count different rows.
    """
    first = [shape[0] if shape else 1 for _, shape in (*inputs.values(), *outputs.values())]
    rows = {axis if axis != -1 else i for i, axis in enumerate(first[: len(inputs)])}
    return len(rows) == 1 and all(axis == -1 or isinstance(axis, str) for axis in first)
