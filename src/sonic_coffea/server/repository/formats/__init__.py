"""formats: the kinds of model files, a module for each family.

A module of a format is read on both sides: `read` runs here, and `load` in the server's own
environment, where the module is copied beside the model. So it imports nothing of this package.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sonic_coffea.server.repository.formats import _function, _onnx, _torchscript, _trees

__all__ = [
    "FORMATS",
    "Contents",
    "Declaration",
    "Format",
    "Runner",
    "Served",
    "format_of",
    "scripts_of",
]

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
        and TorchScript need them. An axis of any length is -1 or a name. Triton batches requests
        only if the first axes of all inputs have one name, or if there is one input.
    files : sequence of path-like
        Files that the function reads or imports; they are copied beside its source.
    max_batch_size : int, optional
        The argument of `build_repository`, for this model.
    platform : {"python", "onnxruntime", "pytorch"}, optional
        The argument of `build_repository`, for this model.
    warmup : mapping, optional
        Input names with the shapes of the warm-up request, for a model with axes of any length:
        the shape of one row if the model is served in batches, otherwise of the whole tensor.
    """

    source: str | os.PathLike[str] | Callable[..., Mapping[str, Any]]
    _: dataclasses.KW_ONLY
    inputs: Declaration | None = None
    outputs: Declaration | None = None
    files: Sequence[str | os.PathLike[str]] = ()
    max_batch_size: int | None = None
    platform: str | None = None
    warmup: Mapping[str, Sequence[int]] | None = None


# From input tensors by name, and the names of the requested outputs, to outputs by name.
Runner = Callable[[dict[str, Any], tuple[str, ...]], dict[str, Any]]


# What a format reads from a model's source. "files" maps names in the version's folder to the files
# that are copied; `load` opens the first. "inputs" and "outputs" are the tensors, if the source
# describes them. "manifest" has further entries of the manifest.
Contents = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A kind of file: the endings of its names, and its native backend in NVIDIA's container.

    ``read`` takes the model to serve, and raises a ValueError that says what is wrong with its
    file; ``load`` takes a version's file, its manifest and a number of threads, in the process that
    runs the model. If ``prefers_native``, the native backend is the default.
    """

    read: Callable[[Served], Contents]
    load: Callable[[Path, dict[str, Any], int], Runner]
    suffixes: tuple[str, ...]
    native: str | None = None
    prefers_native: bool = False


FORMATS: Mapping[str, Format] = {
    "onnx": Format(_onnx.read, _onnx.load, (".onnx",), native="onnxruntime", prefers_native=True),
    # Its native backend wants names of outputs that end in their number.
    "torchscript": Format(_torchscript.read, _torchscript.load, (".pt",), native="pytorch"),
    "xgboost": Format(_trees.read_xgboost, _trees.load, (".json", ".ubj")),
    "lightgbm": Format(_trees.read_lightgbm, _trees.load, (".txt",)),
    "function": Format(_function.read, _function.load, (".py",)),
}
_MODEL = Path(__file__).parents[1] / "_python_backend.py"


def scripts_of(name: str) -> dict[str, Path]:
    """Return the scripts by which Triton's Python backend runs a format, by their names there."""
    return {"model.py": _MODEL, "sonic_runner.py": Path(inspect.getfile(FORMATS[name].read))}


def format_of(source: str | os.PathLike[str] | Callable[..., Any]) -> str | None:
    """Return the name of the format of a source, by the end of its name; None if there is none."""
    if callable(source):
        return "function"
    # A function is given as file.py:function.
    suffix = Path(source).suffix.lower().partition(":")[0]
    return next((name for name, f in FORMATS.items() if suffix in f.suffixes), None)
