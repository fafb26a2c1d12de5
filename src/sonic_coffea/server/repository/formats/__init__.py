"""formats: the kinds of model files, a module for each family.

A module of a format is used on both sides: `read` runs here, and `load` in the server's own
environment, where the module is copied beside the model. So it imports nothing of this package.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sonic_coffea._extras import needed
from sonic_coffea.errors import ConfigError, expect, require
from sonic_coffea.server.repository.formats import _function, _onnx, _outputs, _torchscript, _trees
from sonic_coffea.transport import DATATYPES

# What a model is, as its versions' manifests begin: kind, file, inputs, outputs, platform, which is
# the backend, whether it is batched, and what the format adds.
Manifest = dict[str, Any]
# The files of a version's folder, by their names there; the backend opens the first.
Files = dict[str, Path]
# Name, numpy's name of the dtype, and shape, as in the manifest; -1 is an axis of any length.
Tensor = dict[str, Any]
TRITON_TYPES = {numpy: f"TYPE_{kserve}" for kserve, numpy in DATATYPES.items()}
TRITON_TYPES |= dict.fromkeys(("bytes", DATATYPES["BYTES"]), "TYPE_STRING")
# Tensor name to numpy's name of the type and the shape; an axis of any length is -1 or a name.
Declaration = Mapping[str, tuple[str, Sequence[int | str]]]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model to serve: its file or function, and what the file does not say.

    Parameters
    ----------
    source : path-like or callable
        An ONNX (``.onnx``), TorchScript (``.pt``), XGBoost (``.json``, ``.ubj``) or LightGBM
        (``.txt``) file, or a Python function: the function itself, or ``"file.py:function"``. The
        file that defines the function is copied; nothing is pickled.
    inputs, outputs : mapping, optional
        Tensor names with types and shapes, such as ``{"hits": ("float32", [-1, 4])}``. Functions
        and TorchScript need them. TorchScript's inputs are found by the names of its arguments, or
        by numbers after ``__``, or else by their order; its outputs by numbers, or by their order.
        An axis of any length is -1 or a name. Triton batches requests only if the first axes of all
        inputs have one name, or if there is one input.
    files : sequence of path-like
        Files that the function reads or imports; they are copied beside its source.
    max_batch_size : int, optional
        The argument of `build_repository`, for this model.
    platform : {"python", "onnxruntime", "pytorch"}, optional
        The argument of `build_repository`, for this model.
    warmup : mapping, optional
        Input names with the shapes of the warm-up request, for a model with axes of any length:
        the shape of one row if the model is served in batches, otherwise of the whole tensor.
        Other inputs have the shapes that they are declared with.
    """

    source: str | os.PathLike[str] | Callable[..., Mapping[str, Any]]
    _: dataclasses.KW_ONLY
    inputs: Declaration | None = None
    outputs: Declaration | None = None
    files: Sequence[str | os.PathLike[str]] = ()
    max_batch_size: int | None = None
    platform: str | None = None
    warmup: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for option in ("inputs", "outputs", "warmup"):
            value = getattr(self, option)
            is_dict = value is None or isinstance(value, Mapping)
            expect(is_dict, f"{option} as a dict by tensor", value)
        expect(is_list(self.files), "files as a list of paths", self.files)


def is_list(value: Any) -> bool:
    """Whether an option is a sequence, such as a list, and not one name."""
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)


# From input tensors by name, and the names of the requested outputs, to outputs by name.
Runner = Callable[[dict[str, Any], tuple[str, ...]], dict[str, Any]]


# What a format reads from a model's source. "files" maps names in the version's folder to the files
# that are copied; `load` opens the first. "inputs" and "outputs" are the tensors, if the source
# describes them. "manifest" has further entries of the manifest.
Contents = dict[str, Any]


# `read` takes the model to serve, and raises a ValueError that says what is wrong with its file;
# `load` takes a version's file, its manifest and a number of threads, in the process that runs the
# model.
FORMATS: Mapping[str, ModuleType] = {
    "onnx": _onnx,
    "torchscript": _torchscript,
    "xgboost": _trees,
    "lightgbm": _trees,
    "function": _function,
}
SUFFIXES = {
    ".onnx": "onnx",
    ".pt": "torchscript",
    ".json": "xgboost",
    ".ubj": "xgboost",
    ".txt": "lightgbm",
    ".py": "function",
}
# The backends that NVIDIA's container has for formats. That of TorchScript wants names of outputs
# that end in their number.
NATIVE = {"onnx": "onnxruntime", "torchscript": "pytorch"}
_MODEL = Path(__file__).parents[1] / "_python_backend.py"


def scripts_of(name: str) -> dict[str, Path]:
    """Return the scripts by which Triton's Python backend runs a format, by their names there."""
    modules = {"sonic_runner.py": FORMATS[name], "sonic_outputs.py": _outputs}
    return {"model.py": _MODEL, **{n: Path(str(m.__file__)) for n, m in modules.items()}}


def read_source(name: str, served: Served, platform: str | None) -> tuple[Manifest, Files]:
    """Read what a model is, without running it, and which files it is made of."""
    kind = "function"
    if not callable(served.source):
        # A function is also given as file.py:function.
        kind = SUFFIXES.get(Path(str(served.source)).suffix.lower().partition(":")[0], "")
    suffixes = f"a file of a kind that can be served ({', '.join(SUFFIXES)})"
    expect(kind, f"{suffixes} for model {name!r}", str(served.source))
    if served.files and kind != "function":
        raise ConfigError(f"files go with a function, and model {name!r} is of kind {kind}")
    platform = served.platform or platform or ("onnxruntime" if kind == "onnx" else "python")
    if platform not in ("python", NATIVE.get(kind)):
        raise ConfigError(
            f"platform {platform!r} cannot run model {name!r}, which is of kind {kind}; "
            "Served(source, platform='python') chooses another for one model"
        )
    try:
        with needed("onnx", f"reading {served.source}"):
            contents = FORMATS[kind].read(served)
        inputs, outputs = _declared(served, contents)
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}" if error.strerror else error
        raise ConfigError(f"{problem} (model {name!r})") from None
    except ValueError as error:
        raise ConfigError(f"{error} (model {name!r})") from None
    manifest = {
        "kind": kind,
        "file": next(iter(contents["files"])),
        "platform": platform,
        "inputs": [_tensor(name, *item) for item in inputs.items()],
        "outputs": [_tensor(name, *item) for item in outputs.items()],
        "batched": _batched(inputs, outputs),
        **contents.get("manifest", {}),
    }
    return manifest, contents["files"]


def _declared(served: Served, contents: Contents) -> tuple[Declaration, Declaration]:
    """Return the inputs and outputs as they are declared, or else as the source describes them."""
    declares = served.inputs is not None or served.outputs is not None
    inputs = served.inputs if declares else contents.get("inputs")
    outputs = served.outputs if declares else contents.get("outputs")
    if not inputs or not outputs:
        raise ValueError(
            "expected the inputs and outputs, which cannot be read from its file: "
            'Served(source, inputs={"x": ("float32", [-1, 8])}, '
            'outputs={"scores": ("float32", [-1, 2])})'
        )
    return inputs, outputs


def _tensor(model: str, name: str, declaration: Any) -> Tensor:
    where = f"tensor {name!r} of model {model!r}"
    try:
        dtype, axes = declaration
        shape = [-1 if isinstance(axis, str) else index(axis) for axis in axes]
    except (TypeError, ValueError):
        raise ConfigError(
            f'expected {where} as a type and a shape such as ("float32", [-1, 8]), '
            f"got {declaration!r}"
        ) from None
    are_lengths = shape and all(length >= 1 or length == -1 for length in shape)
    expect(are_lengths, f"axes of {where}, each of at least 1, or -1 for any", shape)
    require([dtype], TRITON_TYPES, f"{where} has an unknown type")
    return {"name": name, "dtype": dtype, "shape": shape}


def _batched(inputs: Declaration, outputs: Declaration) -> bool:
    """Whether requests can be stacked: the first axis of every tensor counts the rows.

    The axis has any length, and the same name in all inputs. A graph with nodes and row splits has
    axes of different names, and stacked requests would be another graph. First axes that are -1 may
    count different rows.
    """
    first = [shape[0] for _, shape in (*inputs.values(), *outputs.values())]
    rows = {axis if axis != -1 else i for i, axis in enumerate(first[: len(inputs)])}
    return len(rows) == 1 and all(axis == -1 or isinstance(axis, str) for axis in first)
