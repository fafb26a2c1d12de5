"""Configurations of ensembles; Triton checks, as it loads one, whether its tensors connect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.server.repository._config import Config, tensor_config
from sonic_coffea.server.repository._sources import TRITON_TYPES, ModelSource, Tensor

if TYPE_CHECKING:
    from sonic_coffea.server.repository._served import Ensemble

_NUMPY_TYPES = {triton: numpy for numpy, triton in TRITON_TYPES.items()}


def ensemble_config(
    name: str, ensemble: Ensemble, configs: Mapping[str, Config]
) -> tuple[Config, ModelSource]:
    """Return the configuration of an ensemble of models with these configurations."""
    try:
        models = [model for model, _, _ in ensemble.steps]
    except (TypeError, ValueError):
        raise ConfigError(
            "expected steps as (model, {its input: tensor}, {its output: tensor}), "
            f"got {ensemble.steps!r}"
        ) from None
    limits = {m: int(_member(configs, m, "model").get("max_batch_size", 0)) for m in models}
    # Rows are those of all steps only if all have them; else tensors are whole.
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


def _ends(names: Sequence[str] | None, loose: Sequence[str]) -> Sequence[str]:
    names = loose if names is None else names
    if not names:
        raise ConfigError("expected steps with a tensor to begin and one to end at, got none")
    return names


def _member(members: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in members:
        raise ConfigError(f"no {what} is called {name!r}; {nearest(name, members)}")
    return members[name]
