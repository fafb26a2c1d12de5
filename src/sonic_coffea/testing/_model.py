"""Models of a fake server: tensors by name, and a function in place of a network."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError
from sonic_coffea.layouts import declared
from sonic_coffea.server.in_process import Function, KServeModel, Tensors
from sonic_coffea.transport import STRINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from sonic_coffea.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel(KServeModel):
    """A model of a `FakeServer`, with the parameters of `server.in_process.KServeModel`."""

    @classmethod
    def of(cls, model: Model, function: Function | None = None, **options: Any) -> FakeModel:
        """Return a fake model that fits a `sonic_coffea.Model`.

        Parameters
        ----------
        model : Model
            The declaration.
        function : callable, optional
            Makes the outputs from the inputs, both mappings of name to array. By default, the k-th
            value of a row is ``(1 + sin(m + k)) / 2``, where m is the mean of the row's numbers in
            the first input, or of the checksums of its strings. So equal rows have equal scores,
            and other rows have other scores, at any scale.
        **options
            `max_rows`, `versions` and `lists_tensors`.

        Raises
        ------
        ConfigError
            If there is no default for the declaration.
        """
        tensors = declared(model.inputs)
        flat = not all(layout.stacks for layout in model.inputs.values())
        by_row = all(o.per == "row" and o.splits is None for o in model.outputs.values())
        if function is None and any(o.dtype == STRINGS for o in model.outputs.values()):
            raise ConfigError(
                f"model {model.name!r} has an output of strings; give a function that makes them"
            )
        if function is None and (flat or not by_row):
            raise ConfigError(
                f"model {model.name!r} has more than one row for each object; give a function that "
                "makes its outputs"
            )
        # Row by row, a network can be asked for any length; a graph has its rows as a whole.
        rows: tuple[int, ...] = (-1,) if flat else ()
        inputs = {
            name: (dtype, (*rows, *(_NO_SHAPE if shape is None else shape)))
            for name, (dtype, shape) in tensors.items()
        }
        outputs = {name: (one.dtype, (*rows, *_inner(one))) for name, one in model.outputs.items()}
        if flat:
            options["max_rows"] = 0
        first = next(iter(tensors))
        made = function or _Scores(first, {n: (d, s[0]) for n, (d, s) in outputs.items()})
        return cls(inputs=inputs, outputs=outputs, function=made, **options)


_NO_SHAPE = (-1, -1)


def _inner(output: Any) -> tuple[int, ...]:
    # Slots are one number for each row; other constituents have their axes.
    chosen = output.choose == "slot"
    return (*(-1,) * (output.axes * (output.per == "constituent" and not chosen)), *output.last)


@dataclass(frozen=True, slots=True)
class _Scores:
    """The default scores; see `FakeModel.of`."""

    first: str
    outputs: Mapping[str, tuple[Any, int]]

    def __call__(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        tensor = inputs[self.first]
        if tensor.dtype == STRINGS:
            sums = [zlib.crc32(string) / 2**32 for string in tensor.flat]
            tensor = np.reshape(sums, tensor.shape)
        tensor = tensor.astype(np.float64)
        rows = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
        mean = rows.mean(axis=1, keepdims=True) if rows.shape[1] else np.zeros((len(rows), 1))
        return {
            name: ((1 + np.sin(mean + np.arange(width))) / 2).astype(dtype)
            for name, (dtype, width) in self.outputs.items()
        }
