"""`Served` and `Ensemble`: models with more than the name of a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Tensor name to numpy's name of the type and the shape; an axis of any length is -1 or a name.
Declaration = Mapping[str, tuple[str, Sequence[int | str]]]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model to serve: where it comes from, and what cannot be read from there.

    Parameters
    ----------
    source : path-like or callable
        An ONNX (``.onnx``), TorchScript (``.pt``), XGBoost (``.json``, ``.ubj``) or LightGBM
        (``.txt``) file, or a Python function: itself, or as ``"file.py:function"``. The file of a
        function is copied as source; nothing is pickled.
    inputs, outputs : mapping, optional
        Tensor names with types and shapes, ``{"hits": ("float32", [-1, 4])}``, for functions and
        TorchScript. An axis of any length is -1 or a name; requests are stacked only if the first
        axes of all inputs are of one name, or there is one input.
    files : sequence of path-like
        More files that a function reads or imports; they are copied beside its source.
    max_batch_size : int, optional
        As in `build_repository`, for this model.
    platform : {"python", "onnxruntime", "pytorch"}, optional
        As in `build_repository`, for this model.
    warmup : mapping, optional
        Input names and their shapes, for a model with axes of any length: of one row if the model
        is served in batches, else of one request.
    """

    source: str | os.PathLike[str] | Callable[..., Mapping[str, Any]]
    _: dataclasses.KW_ONLY
    inputs: Declaration | None = None
    outputs: Declaration | None = None
    files: Sequence[str | os.PathLike[str]] = ()
    max_batch_size: int | None = None
    platform: str | None = None
    warmup: Mapping[str, Sequence[int]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Models that a server runs one after another, called as one.

    Parameters
    ----------
    steps : sequence of tuple
        ``(model, {its input: tensor}, {its output: tensor})``, where tensors have names of the
        ensemble's own. The models are built together with it, or in the repository already.
    inputs, outputs : sequence of str, optional
        The tensors that it takes and gives; by default those that no step gives, and those that no
        step takes. Named here, they are checked.
    """

    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]
    inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
