"""Inputs and outputs of a model that is to be served."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.transport import DATATYPES

# Tensor name to numpy's name of the type and the shape; an axis of any length is -1 or a name.
Declaration = Mapping[str, tuple[str, Sequence[int | str]]]

_TRITON_TYPES = {"bytes": "TYPE_STRING"} | {
    numpy: f"TYPE_{kserve}" for kserve, numpy in DATATYPES.items()
}
_NUMPY_TYPES = {triton: numpy for numpy, triton in _TRITON_TYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Name, Triton data type and shape of a tensor; -1 is an axis of any length.

    ``rows`` is what the length of the first axis is called, empty if it has no name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it with numpy's name of the type."""
        return {"name": self.name, "dtype": _NUMPY_TYPES[self.dtype], "shape": list(self.shape)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """The inputs and outputs of a model."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    @property
    def batched(self) -> bool:
        """Whether requests can be stacked: the first axis of every tensor is that of the rows.

        It has any length, and inputs call it by one name. Where it has several, as in a graph with
        nodes and row splits, stacked requests would be other graphs.
        """
        free = all(t.shape[:1] == (-1,) for t in (*self.inputs, *self.outputs))
        return free and len({t.rows for t in self.inputs}) <= 1


def declared(model: str, inputs: Declaration | None, outputs: Declaration | None) -> Interface:
    """Return a declared interface.

    First axes that are -1 are not known to be the same rows: of several inputs, those that are
    name them alike.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is no declaration, or one that cannot be.
    """
    if not inputs or not outputs:
        missing = " and ".join(
            name for name, value in (("inputs", inputs), ("outputs", outputs)) if not value
        )
        raise ConfigError(
            f"expected the {missing} of model {model!r}, which cannot be read from its file: "
            'Served(source, inputs={"x": ("float32", [-1, 8])}, '
            'outputs={"scores": ("float32", [-1, 2])})'
        )
    return Interface(
        inputs=tuple(_tensor(model, "input", *item) for item in inputs.items()),
        outputs=tuple(_tensor(model, "output", *item) for item in outputs.items()),
    )


def _tensor(model: str, kind: str, name: str, declaration: Any) -> TensorInfo:
    where = f"{kind} {name!r} of model {model!r}"
    try:
        dtype, shape = declaration
        axes = [(axis, int(axis)) if not isinstance(axis, str) else (axis, -1) for axis in shape]
    except (TypeError, ValueError):
        raise ConfigError(
            f'expected {where} as a type and a shape such as ("float32", [-1, 8]), '
            f"got {declaration!r}"
        ) from None
    if dtype not in _TRITON_TYPES:
        raise ConfigError(
            f"unknown type {dtype!r} of {where}; {nearest(str(dtype), _TRITON_TYPES)}"
        )
    if isinstance(shape, str) or any(length < 1 and length != -1 for _, length in axes):
        raise ConfigError(
            f"expected the shape of {where} to have lengths >= 1, -1 or names, got {shape!r}"
        )
    first = axes[0][0] if axes else ""
    return TensorInfo(
        name=name,
        dtype=_TRITON_TYPES[dtype],
        shape=tuple(length for _, length in axes),
        rows=first if isinstance(first, str) else name,
    )
