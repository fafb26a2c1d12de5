"""Ensembles: whether their tensors connect, and what Triton wants to know of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.server.repository._tensors import Interface, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sonic_coffea.server.repository._config import Config
    from sonic_coffea.server.repository._served import Ensemble

__all__ = ["ensemble_config"]

# Type and shape of a tensor, and the first tensor of a step that has them.
_Tensor = tuple[str, tuple[int, ...], str]


def ensemble_config(
    name: str, ensemble: Ensemble, configs: Mapping[str, Config]
) -> tuple[Config, Interface]:
    """Return the configuration of an ensemble of models with these configurations.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If a step has no model, or its tensors do not connect.
    """
    where = f"ensemble {name!r}"
    if not ensemble.steps:
        raise ConfigError(f"expected at least one step of {where}, got none")
    _check_steps(where, ensemble, configs)
    # Rows are those of all steps only if all have them; else tensors are whole.
    limits = [int(configs[model].get("max_batch_size", 0)) for model, *_ in ensemble.steps]
    batch = min(limits)
    taken: dict[str, _Tensor] = {}
    given: dict[str, _Tensor] = {}
    for (model, inputs, outputs), limit in zip(ensemble.steps, limits, strict=True):
        whole = limit > 0 and batch == 0
        for tensor, key, found in _tensors(configs[model], "input", inputs, whole=whole):
            known = given.get(tensor) or taken.get(tensor)
            _check_same(where, tensor, (*found, f"input {key!r} of {model!r}"), known)
            taken.setdefault(tensor, (*found, f"input {key!r} of {model!r}"))
        for tensor, key, found in _tensors(configs[model], "output", outputs, whole=whole):
            origin = f"output {key!r} of {model!r}"
            if tensor in given:
                raise ConfigError(
                    f"{where}: tensor {tensor!r} is given by {given[tensor][2]} and by {origin}"
                )
            _check_same(where, tensor, (*found, origin), taken.get(tensor))
            given[tensor] = (*found, origin)
    first, last = _ends(where, ensemble, taken, given)
    config = {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": batch,
        "input": [_config(tensor, taken) for tensor in first],
        "output": [_config(tensor, given) for tensor in last],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": model,
                    "model_version": -1,
                    "input_map": dict(inputs),
                    "output_map": dict(outputs),
                }
                for model, inputs, outputs in ensemble.steps
            ]
        },
    }
    return config, Interface(
        inputs=tuple(_info(tensor, taken, batch) for tensor in first),
        outputs=tuple(_info(tensor, given, batch) for tensor in last),
    )


def _check_steps(where: str, ensemble: Ensemble, configs: Mapping[str, Config]) -> None:
    for step in ensemble.steps:
        try:
            model, inputs, outputs = step
            mappings = {"input": dict(inputs), "output": dict(outputs)}
        except (TypeError, ValueError):
            raise ConfigError(
                f"expected a step of {where} as (model, {{its input: tensor}}, "
                f"{{its output: tensor}}), got {step!r}"
            ) from None
        if model not in configs:
            raise ConfigError(f"{where} has a step with model {model!r}; {nearest(model, configs)}")
        for kind, mapping in mappings.items():
            known = [t["name"] for t in configs[model].get(kind, ())]
            for key in mapping:
                if key not in known:
                    raise ConfigError(
                        f"{where}: model {model!r} has no {kind} {key!r}; {nearest(key, known)}"
                    )
        lacking = [t["name"] for t in configs[model]["input"] if t["name"] not in mappings["input"]]
        if lacking or not mappings["output"]:
            what = f"input {lacking[0]!r}" if lacking else "any output"
            raise ConfigError(f"{where}: no tensor is named for {what} of model {model!r}")


def _tensors(
    config: Config, kind: str, mapping: Mapping[str, str], *, whole: bool
) -> list[tuple[str, str, tuple[str, tuple[int, ...]]]]:
    specs: dict[str, Any] = {t["name"]: t for t in config[kind]}
    found = []
    for key, tensor in mapping.items():
        dims = tuple(int(n) for n in specs[key]["dims"])
        shape = (-1, *dims) if whole else dims
        found.append((tensor, key, (specs[key]["data_type"], shape)))
    return found


def _check_same(where: str, tensor: str, one: _Tensor, other: _Tensor | None) -> None:
    if other is None:
        return
    fits = len(one[1]) == len(other[1]) and all(
        a == b or -1 in (a, b) for a, b in zip(one[1], other[1], strict=True)
    )
    if one[0] != other[0] or not fits:
        raise ConfigError(
            f"{where}: tensor {tensor!r} does not connect: {other[2]} is {other[0]} "
            f"{list(other[1])}, {one[2]} is {one[0]} {list(one[1])}"
        )


def _ends(
    where: str, ensemble: Ensemble, taken: Mapping[str, _Tensor], given: Mapping[str, _Tensor]
) -> tuple[Sequence[str], Sequence[str]]:
    loose = [tensor for tensor in taken if tensor not in given]
    inputs = loose if ensemble.inputs is None else ensemble.inputs
    outputs = (
        [tensor for tensor in given if tensor not in taken]
        if ensemble.outputs is None
        else ensemble.outputs
    )
    for tensor in loose:
        if tensor not in inputs:
            raise ConfigError(
                f"{where}: tensor {tensor!r}, {taken[tensor][2]}, is given by no step and is no "
                f"input of the ensemble; {nearest(tensor, [*given, *inputs])}"
            )
    for tensor in inputs:
        if tensor not in loose:
            raise ConfigError(
                f"{where}: its input {tensor!r} goes to no step; {nearest(tensor, loose)}"
            )
    for tensor in outputs:
        if tensor not in given:
            raise ConfigError(
                f"{where}: its output {tensor!r} is given by no step; {nearest(tensor, given)}"
            )
    if not inputs or not outputs:
        raise ConfigError(f"{where}: its steps run in a circle, with no tensor to begin or end at")
    return inputs, outputs


def _config(tensor: str, known: Mapping[str, _Tensor]) -> Config:
    dtype, shape, _ = known[tensor]
    return {"name": tensor, "data_type": dtype, "dims": list(shape)}


def _info(tensor: str, known: Mapping[str, _Tensor], batch: int) -> TensorInfo:
    dtype, shape, _ = known[tensor]
    return TensorInfo(name=tensor, dtype=dtype, shape=(-1, *shape) if batch else shape)
