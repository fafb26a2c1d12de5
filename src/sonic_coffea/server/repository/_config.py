"""The configurations of models and ensembles in Triton's format."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.server.repository._sources import TRITON_TYPES, ModelSource, Tensor
from sonic_coffea.transport import read_model_config

if TYPE_CHECKING:
    from pathlib import Path

    from sonic_coffea.server.repository.formats import Served

FILE = "config.pbtxt"
Config = dict[str, Any]
Labels = Mapping[str, Mapping[str, Sequence[str]] | Sequence[str]]
Versions = Literal["all", "latest"] | Sequence[int]
# Rows of a request if nobody says how many: as many as have these bytes, within limits.
_ROWS, _MOST_ROWS, _REQUEST_BYTES = 1024, 65_536, 1_000_000
_NUMPY_TYPES = {triton: numpy for numpy, triton in TRITON_TYPES.items()}


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


def read_config(folder: Path) -> Config:
    """Return the configuration in a model's folder."""
    path = folder / FILE
    try:
        return read_model_config(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"expected a model configuration in {path}: {error}") from None


def model_config(
    name: str,
    served: Served,
    source: ModelSource,
    *,
    max_batch_size: int | None,
    dynamic_batching: bool | Mapping[str, Any] | None,
    instances: int,
    threads: int | None,
    warmup: bool,
) -> Config:
    """Return the configuration of a model, without its labels and versions."""
    limit = max_batch_size if served.max_batch_size is None else served.max_batch_size
    if limit is None:
        limit = _rows_of_request(source)
    check_integer(f"max_batch_size of model {name!r}", limit, 0)
    if limit:
        _check_first_axes(name, source)
    batched = source.batched and limit > 0
    # Only the Python backend is held to the CPU: the native ones use a GPU where there is one.
    kind = {"kind": "KIND_CPU"} if source.platform == "python" else {}
    config: Config = {
        "name": name,
        "backend": source.platform,
        "max_batch_size": limit if batched else 0,
        "input": [tensor_config(t, batched=batched) for t in source.inputs],
        "output": [tensor_config(t, batched=batched) for t in source.outputs],
        "instance_group": [{"count": instances, **kind}],
    }
    batching = {} if dynamic_batching is True else dynamic_batching
    if isinstance(batching, Mapping) and batched:
        config["dynamic_batching"] = dict(batching)
    if threads is not None:
        key = {"python": "intra_op_threads", "onnxruntime": "intra_op_thread_count"}.get(
            source.platform, "INTRA_OP_THREAD_COUNT"
        )
        config["parameters"] = {key: {"string_value": str(threads)}}
    # Zeros of any length need not be what a model can run: somebody has to say which.
    shapes = served.warmup or {t["name"]: t["dims"] for t in config["input"]}
    if warmup and not any(-1 in shape for shape in shapes.values()):
        sample = {
            t["name"]: {"data_type": t["data_type"], "dims": shape, "zero_data": True}
            for t in config["input"]
            if (shape := list(shapes.get(t["name"], ())))
        }
        config["model_warmup"] = [{"name": "zeros", "batch_size": 1, "inputs": sample}]
    return config


def _rows_of_request(source: ModelSource) -> int:
    """Return how many rows a request may have if nobody says so."""
    tensors = [*source.inputs, *source.outputs]
    lengths = [length for tensor in tensors for length in tensor["shape"][1:]]
    if -1 in lengths or any(tensor["dtype"] == "bytes" for tensor in tensors):
        return _ROWS
    row: int = sum(np.dtype(t["dtype"]).itemsize * math.prod(t["shape"][1:]) for t in tensors)
    return min(max(_ROWS, _REQUEST_BYTES // max(row, 1)), _MOST_ROWS)


def ensemble_config(
    name: str, ensemble: Ensemble, configs: Mapping[str, Config]
) -> tuple[Config, ModelSource]:
    """Return the configuration of an ensemble of models with these configurations.

    Triton checks, as it loads an ensemble, whether its tensors connect.
    """
    try:
        models = [model for model, _, _ in ensemble.steps]
    except (TypeError, ValueError):
        raise ConfigError(
            "expected steps as (model, {its input: tensor}, {its output: tensor}), "
            f"got {ensemble.steps!r}"
        ) from None
    limits = {m: int(_member(configs, m, "model").get("max_batch_size", 0)) for m in models}
    # An ensemble is batched only if all its steps are.
    batch = min(limits.values(), default=0)
    consumed: dict[str, Tensor] = {}
    produced: dict[str, Tensor] = {}
    for model, inputs, outputs in ensemble.steps:
        rows = [-1] if limits[model] > 0 else []
        for kind, names, known in (("input", inputs, consumed), ("output", outputs, produced)):
            specs = {t["name"]: t for t in configs[model].get(kind, ())}
            for key, tensor in names.items():
                spec = _member(specs, key, f"{kind} of {model!r}")
                dtype, dims = _NUMPY_TYPES[spec["data_type"]], [int(n) for n in spec["dims"]]
                known.setdefault(tensor, {"name": tensor, "dtype": dtype, "shape": [*rows, *dims]})
    first = [tensor for tensor in consumed if tensor not in produced]
    last = [tensor for tensor in produced if tensor not in consumed]
    source = ModelSource(
        kind="ensemble",
        inputs=[_member(consumed, t, "input") for t in _ends(ensemble.inputs, first)],
        outputs=[_member(produced, t, "output") for t in _ends(ensemble.outputs, last)],
        batched=batch > 0,
    )
    steps = [
        {"model_name": m, "model_version": -1, "input_map": dict(i), "output_map": dict(o)}
        for m, i, o in ensemble.steps
    ]
    config = {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": batch,
        "input": [tensor_config(t, batched=batch > 0) for t in source.inputs],
        "output": [tensor_config(t, batched=batch > 0) for t in source.outputs],
        "ensemble_scheduling": {"step": steps},
    }
    return config, source


def _check_first_axes(name: str, source: ModelSource) -> None:
    """Refuse a network that was exported for one number of rows: others would fail one by one."""
    if source.kind != "onnx":
        return
    fixed = [t for t in source.inputs if t["shape"] and t["shape"][0] >= 0]
    for tensor in fixed[:1]:
        axes = {t["name"]: {0: "rows"} for t in (*source.inputs, *source.outputs) if t["shape"]}
        raise ConfigError(
            f"input {tensor['name']!r} of model {name!r} has a first axis of fixed length, "
            f"{tensor['shape'][0]}, and takes no other number of rows; export it with an axis of "
            f"any length: torch.onnx.export(..., dynamic_axes={axes}). If this axis does not count "
            "rows, say so by Served(file, max_batch_size=0), and declare Model(one_request_per=...)"
        )


def version_policy(versions: Versions | None) -> Config:
    if versions is None or versions == "all":
        return {"all": {}}
    if versions == "latest":
        return {"latest": {"num_versions": 1}}
    return {"specific": {"versions": list(versions)}}


def add_labels(
    config: Config,
    outputs: Sequence[Tensor],
    labels: Mapping[str, Sequence[str]] | Sequence[str] | None,
) -> dict[str, str]:
    """Add the labels of outputs to a configuration; return the files that hold them, by name."""
    name, lengths = (
        config["name"],
        {output["name"]: [1, *output["shape"]][-1] for output in outputs},
    )
    if not isinstance(labels, Mapping | None):
        if isinstance(labels, str) or len(lengths) != 1:
            raise ConfigError(
                f"expected labels of model {name!r} as a mapping of output name to labels, "
                f"got {labels!r}; its outputs are {', '.join(lengths)}"
            )
        labels = {next(iter(lengths)): labels}
    files = {}
    for output, names in (labels or {}).items():
        if output not in lengths:
            raise ConfigError(
                f"labels for an output {output!r} that model {name!r} does not have; "
                f"{nearest(output, lengths)}"
            )
        if lengths[output] not in (-1, len(names)):
            raise ConfigError(
                f"expected {lengths[output]} labels for output {output!r} of model {name!r}, "
                f"got {len(names)}: {', '.join(names)}"
            )
        file = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', output)}_labels.txt"
        config["output"][list(lengths).index(output)]["label_filename"] = file
        files[file] = "".join(f"{label}\n" for label in names)
    return files


def tensor_config(tensor: Tensor, *, batched: bool) -> Config:
    dims = tensor["shape"][1:] if batched else tensor["shape"]
    config: Config = {"name": tensor["name"], "data_type": TRITON_TYPES[tensor["dtype"]]}
    # Triton has no tensors without axes: one number a row travels as an axis of one.
    return config | ({"dims": dims} if dims else {"dims": [1], "reshape": {"shape": []}})


def check_integer(option: str, value: object, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        raise ConfigError(f"expected {option} to be an integer >= {least}, got {value!r}")


def _ends(names: Sequence[str] | None, loose: Sequence[str]) -> Sequence[str]:
    names = loose if names is None else names
    if not names:
        raise ConfigError("expected steps with a tensor to begin and one to end at, got none")
    return names


def _member(members: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in members:
        raise ConfigError(f"no {what} is called {name!r}; {nearest(name, members)}")
    return members[name]
