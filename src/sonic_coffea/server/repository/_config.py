"""The configuration of a served model, as Triton wants it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from sonic_coffea.errors import ConfigError, nearest

if TYPE_CHECKING:
    from sonic_coffea.server.repository._tensors import Interface, TensorInfo

Config = dict[str, Any]
Labels = Mapping[str, Mapping[str, Sequence[str]] | Sequence[str]]
Versions = Literal["all", "latest"] | Sequence[int]

_BATCHING_KEYS = ("max_queue_delay_microseconds", "preferred_batch_size", "preserve_ordering")


def model_config(
    name: str,
    interface: Interface,
    *,
    backend: str,
    max_batch_size: int,
    batching: Mapping[str, Any] | None,
    instances: int,
    threads: int | None,
    warmup: Mapping[str, Sequence[int]] | None,
    zeros: bool,
) -> Config:
    """Return the configuration of a model, without its labels and versions."""
    batched = max_batch_size > 0
    config: Config = {"name": name, "backend": backend, "max_batch_size": max_batch_size}
    config |= tensors(interface, batched=batched)
    if batching is not None and batched:
        config["dynamic_batching"] = dict(batching)
    group: dict[str, Any] = {"count": instances}
    # Only the Python backend is held to the CPU: the native ones use a GPU where there is one.
    if backend == "python":
        group["kind"] = "KIND_CPU"
    config["instance_group"] = [group]
    if threads is not None:
        key = {"python": "intra_op_threads", "onnxruntime": "intra_op_thread_count"}.get(
            backend, "INTRA_OP_THREAD_COUNT"
        )
        config["parameters"] = {key: {"string_value": str(threads)}}
    shapes = _warmup_shapes(name, config["input"], warmup) if zeros else {}
    if shapes:
        sample = {
            t["name"]: {"data_type": t["data_type"], "dims": shapes[t["name"]], "zero_data": True}
            for t in config["input"]
        }
        config["model_warmup"] = [{"name": "zeros", "batch_size": 1, "inputs": sample}]
    return config


def tensors(interface: Interface, *, batched: bool) -> Config:
    """Return the parts of a configuration that say what a model takes and gives."""
    return {
        "input": [_tensor(t, batched=batched) for t in interface.inputs],
        "output": [_tensor(t, batched=batched) for t in interface.outputs],
    }


def interface_of(config: Config) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return type, lengths and reshape of each tensor in a configuration, read or made."""
    return {
        (kind, t["name"]): (
            t["data_type"],
            tuple(int(n) for n in t["dims"]),
            tuple(int(n) for n in t["reshape"].get("shape", ())) if "reshape" in t else None,
        )
        for kind in ("input", "output")
        for t in config.get(kind, ())
    }


def version_policy(versions: Versions) -> Config:
    """Return which versions the server is to load."""
    if versions == "all":
        return {"all": {}}
    if versions == "latest":
        return {"latest": {"num_versions": 1}}
    numbers: list[Any] = list(versions)
    if not numbers or any(type(n) is not int or n < 1 for n in numbers):
        raise ConfigError(
            f"expected versions 'all', 'latest' or a list of numbers >= 1, got {versions!r}"
        )
    return {"specific": {"versions": sorted(set(numbers))}}


def batching_options(
    value: bool | Mapping[str, Any] | None,  # noqa: FBT001
) -> dict[str, Any] | None:
    """Return the options of Triton's dynamic batching; None is without."""
    if value is None or value is False:
        return None
    options: dict[str, Any] = {} if value is True else dict(value)
    for key in options:
        if key not in _BATCHING_KEYS:
            raise ConfigError(
                f"expected an option of dynamic_batching, got {key!r}; "
                f"{nearest(key, _BATCHING_KEYS)}"
            )
    return options


def check_labels(
    name: str, interface: Interface, labels: Mapping[str, Sequence[str]] | Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the labels of each output that has some."""
    if labels is None:
        return {}
    outputs = {output.name: output for output in interface.outputs}
    if not isinstance(labels, Mapping):
        if isinstance(labels, str) or len(outputs) != 1:
            raise ConfigError(
                f"expected labels of model {name!r} as a mapping of output name to labels, "
                f"got {labels!r}; its outputs are {', '.join(outputs)}"
            )
        labels = {next(iter(outputs)): labels}
    checked = {}
    for output, names in labels.items():
        if output not in outputs:
            raise ConfigError(
                f"labels for an output {output!r} that model {name!r} does not have; "
                f"{nearest(output, outputs)}"
            )
        shape = outputs[output].shape
        length = shape[-1] if shape else 1
        if length not in (-1, len(names)):
            raise ConfigError(
                f"expected {length} labels for output {output!r} of model {name!r}, "
                f"got {len(names)}: {', '.join(names)}"
            )
        checked[output] = tuple(names)
    return checked


def label_file(output: str) -> str:
    """Return the name of the file with an output's labels."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', output)}_labels.txt"


def _tensor(tensor: TensorInfo, *, batched: bool) -> Config:
    dims = tensor.shape[1:] if batched else tensor.shape
    # Triton has no tensors without axes: one number a row travels as an axis of one.
    config: Config = {"name": tensor.name, "data_type": tensor.dtype, "dims": list(dims or (1,))}
    return config if dims else {**config, "reshape": {"shape": []}}


def _warmup_shapes(
    name: str, inputs: Sequence[Config], warmup: Mapping[str, Sequence[int]] | None
) -> dict[str, list[int]]:
    """Return the shapes to warm up with; none where a length is free and nobody says which."""
    known = {t["name"]: t["dims"] for t in inputs}
    if warmup is None:
        return {} if any(-1 in dims for dims in known.values()) else known
    fits = warmup.keys() == known.keys() and all(
        len(shape) == len(known[key])
        and all(dim in (-1, n) and n > 0 for dim, n in zip(known[key], shape, strict=True))
        for key, shape in warmup.items()
    )
    if not fits:
        raise ConfigError(
            f"expected warmup of model {name!r} with the shapes {known}, lengths in the places of "
            f"-1, got {dict(warmup)}"
        )
    return {key: list(shape) for key, shape in warmup.items()}
