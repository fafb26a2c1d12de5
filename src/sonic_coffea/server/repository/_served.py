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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Models that a server runs one after another, called as one.

    Parameters
    ----------
    steps : sequence of tuple
        Each step is ``(model, {model's input: tensor}, {model's output: tensor})``; the names of
        the tensors are the ensemble's own. A model is built by the same call as the ensemble, or
        is in the repository already.
    inputs, outputs : sequence of str, optional
        Inputs and outputs of the ensemble. By default, the inputs are the tensors that no step
        returns, and the outputs those that no step takes. A name that no step has is an error.
    """

    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]
    inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
