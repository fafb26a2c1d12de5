"""What a server serves: tensors by name, and a function that makes one of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray

from sonic_coffea.transport import kserve_name

Tensors = Mapping[str, NDArray[Any]]
Function = Callable[[Tensors], Tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class KServeModel:
    """A model of a `KServeServer`.

    Parameters
    ----------
    inputs, outputs : mapping
        By name, the dtype and the shape of one row; -1 where a length is free.
    function : callable
        Makes the outputs of the inputs, both mappings of name to array, rows first. What it raises
        is an error of the model.
    max_rows : int
        The most rows of a request; 0 for a model whose requests are never put together, and whose
        shapes have all axes.
    versions : tuple of str
        The versions that there are; requests without one get the last.
    digest : str
        The checksum of the file that it is made of, where it has one.
    """

    inputs: Mapping[str, tuple[Any, tuple[int, ...]]]
    outputs: Mapping[str, tuple[Any, tuple[int, ...]]]
    function: Function
    max_rows: int = 64
    versions: tuple[str, ...] = field(default=("1",))
    digest: str = ""

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a server says, with the axis of the rows."""
        return (-1, *shape) if self.max_rows else shape

    def described(self, tensors: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return KServe's datatype and the shape of some tensors, as a server says them."""
        return {
            name: (kserve_name(np.dtype(dtype)), self.shape_of(tuple(shape)))
            for name, (dtype, shape) in tensors.items()
        }
