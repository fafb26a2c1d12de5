"""After the network: from a model's numbers to the scores that they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts._expressions import Term, expression_of, text_of

if TYPE_CHECKING:
    from sonic_coffea.layouts._structure import Tensor

OUTPUT_FUNCTIONS = ("softmax", "sigmoid", "odds")


def finished(values: Tensor, function: str | None, scale: float, shift: float) -> Tensor:
    """Return ``function(value) * scale + shift``; softmax is over the last axis."""
    if function is None and (scale, shift) == (1.0, 0.0):
        return values
    real = np.result_type(values.dtype, np.float32).type
    with np.errstate(over="ignore", divide="ignore"):
        if function == "softmax" and values.ndim > 1:
            values = np.exp(values - values.max(axis=-1, keepdims=True, initial=-np.inf))
            values /= values.sum(axis=-1, keepdims=True)
        elif function == "odds":
            values = values / (1 - values)
        elif function is not None:
            values = 1 / (1 + np.exp(-values))
    scores: Tensor = (values * real(scale) + real(shift)).astype(real)
    return scores


def check_discriminants(discriminants: Any, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the expressions by name, refusing other terms than the names, and names twice."""
    if not isinstance(discriminants, (Mapping, tuple)):
        raise ConfigError(f"expected discriminants as a dict of expressions, got {discriminants!r}")
    pairs = tuple(dict(discriminants).items())
    for name, text in pairs:
        if name in names or not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(
                f"an output's discriminants have names of their own and expressions, got {name!r}: "
                f"{text!r}"
            )
        for path, reduction in expression_of(text, "discriminant")[0]:
            if text_of(path) not in names or reduction:
                hint = nearest(text_of(path), names)
                raise ConfigError(f"discriminant {text!r}: no score {text_of(path)!r}; {hint}")
    return pairs


def discriminated(
    values: Tensor, names: Sequence[str], discriminants: Sequence[tuple[str, str]]
) -> tuple[Tensor, list[str]]:
    """Return scores ``[N, K]`` with the discriminants beside, and all names."""
    values = values.astype(np.result_type(values.dtype, np.float32))
    numbers: dict[Term, Tensor] = {
        ((name,), ""): values[:, place] for place, name in enumerate(names)
    }
    columns = [*values.T]
    with np.errstate(all="ignore"):
        for _, text in discriminants:
            computed = expression_of(text, "discriminant")[1](numbers)
            columns.append(np.broadcast_to(computed, len(values)))
    every = [*names, *(name for name, _ in discriminants)]
    return np.stack(columns, axis=1).astype(values.dtype), every
