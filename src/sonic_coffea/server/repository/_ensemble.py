"""Ensembles: whether their tensors connect, and what Triton wants to know of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.server.repository._tensors import Interface, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sonic_coffea.server.repository._config import Config
    from sonic_coffea.server.repository._served import Ensemble


class _Tensor(NamedTuple):
    """A tensor of an ensemble, as the first step has it that takes or gives it."""

    dtype: str
    shape: tuple[int, ...]
    origin: str

    def __str__(self) -> str:
        return f"{self.origin} is {self.dtype} {list(self.shape)}"

    def connects(self, other: _Tensor) -> bool:
        """Whether both are of one type, and of shapes that can be the same."""
        return (
            self.dtype == other.dtype
            and len(self.shape) == len(other.shape)
            and all(a == b or -1 in (a, b) for a, b in zip(self.shape, other.shape, strict=True))
        )


def ensemble_config(
    name: str, ensemble: Ensemble, configs: Mapping[str, Config]
) -> tuple[Config, Interface]:
    """Return the configuration of an ensemble of models with these configurations.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If a step has no model, or its tensors do not connect.
    """
    try:
        return _config(name, ensemble, configs)
    except ConfigError as error:
        raise error.within(f"ensemble {name!r}") from None


def _config(
    name: str, ensemble: Ensemble, configs: Mapping[str, Config]
) -> tuple[Config, Interface]:
    if not ensemble.steps:
        raise ConfigError("expected at least one step, got none")
    for step in ensemble.steps:
        _check_step(step, configs)
    # Rows are those of all steps only if all have them; else tensors are whole.
    limits = {model: int(configs[model].get("max_batch_size", 0)) for model, *_ in ensemble.steps}
    batch = min(limits.values())
    taken: dict[str, _Tensor] = {}
    given: dict[str, _Tensor] = {}
    for model, inputs, outputs in ensemble.steps:
        rows = (-1,) if limits[model] > 0 and batch == 0 else ()
        for kind, mapping in (("input", inputs), ("output", outputs)):
            specs = {t["name"]: t for t in configs[model][kind]}
            for key, name_here in mapping.items():
                shape = (*rows, *map(int, specs[key]["dims"]))
                origin = f"{kind} {key!r} of {model!r}"
                tensor = _Tensor(specs[key]["data_type"], shape, origin)
                known = given.get(name_here)
                if kind == "output" and known is not None:
                    raise ConfigError(
                        f"tensor {name_here!r} is given by {known.origin} and by {origin}"
                    )
                known = known or taken.get(name_here)
                if known is not None and not tensor.connects(known):
                    raise ConfigError(f"tensor {name_here!r} does not connect: {known}, {tensor}")
                (taken if kind == "input" else given).setdefault(name_here, tensor)
    first, last = _ends(ensemble, taken, given)
    config = {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": batch,
        "input": [_spec(tensor, taken) for tensor in first],
        "output": [_spec(tensor, given) for tensor in last],
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


def _check_step(step: Any, configs: Mapping[str, Config]) -> None:
    try:
        model, inputs, outputs = step
        mappings = {"input": dict(inputs), "output": dict(outputs)}
    except (TypeError, ValueError):
        raise ConfigError(
            "expected a step as (model, {its input: tensor}, {its output: tensor}), "
            f"got {step!r}"
        ) from None
    if model not in configs:
        raise ConfigError(f"a step with model {model!r}; {nearest(model, configs)}")
    for kind, mapping in mappings.items():
        known = [t["name"] for t in configs[model].get(kind, ())]
        for key in mapping:
            if key not in known:
                raise ConfigError(f"model {model!r} has no {kind} {key!r}; {nearest(key, known)}")
    lacking = [t["name"] for t in configs[model]["input"] if t["name"] not in mappings["input"]]
    if lacking or not mappings["output"]:
        what = f"input {lacking[0]!r}" if lacking else "any output"
        raise ConfigError(f"no tensor is named for {what} of model {model!r}")


def _ends(
    ensemble: Ensemble, taken: Mapping[str, _Tensor], given: Mapping[str, _Tensor]
) -> tuple[Sequence[str], Sequence[str]]:
    loose = [tensor for tensor in taken if tensor not in given]
    inputs = loose if ensemble.inputs is None else ensemble.inputs
    outputs = ensemble.outputs
    if outputs is None:
        outputs = [tensor for tensor in given if tensor not in taken]
    for tensor in loose:
        if tensor not in inputs:
            raise ConfigError(
                f"tensor {tensor!r}, {taken[tensor].origin}, is given by no step and is no input "
                f"of the ensemble; {nearest(tensor, [*given, *inputs])}"
            )
    _check_known(inputs, loose, "its input {!r} goes to no step")
    _check_known(outputs, given, "its output {!r} is given by no step")
    if not inputs or not outputs:
        raise ConfigError("its steps run in a circle, with no tensor to begin or end at")
    return inputs, outputs


def _check_known(names: Iterable[str], known: Iterable[str], message: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{message.format(name)}; {nearest(name, known)}")


def _spec(tensor: str, known: Mapping[str, _Tensor]) -> Config:
    return {
        "name": tensor,
        "data_type": known[tensor].dtype,
        "dims": list(known[tensor].shape),
    }


def _info(tensor: str, known: Mapping[str, _Tensor], batch: int) -> TensorInfo:
    rows = (-1,) if batch else ()
    return TensorInfo(name=tensor, dtype=known[tensor].dtype, shape=(*rows, *known[tensor].shape))
