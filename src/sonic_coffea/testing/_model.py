"""Models of a fake server: tensors by name, and a function in place of a network."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, expect
from sonic_coffea.layouts import declared
from sonic_coffea.model import Model
from sonic_coffea.transport import STRINGS, kserve_name

Tensors = Mapping[str, NDArray[Any]]
Function = Callable[[Tensors], Tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """A model of a `FakeServer`.

    Parameters
    ----------
    inputs, outputs : mapping
        Names, each with the dtype and the shape of one row; -1 is any length. Strings have the
        dtype object, and each string is of type bytes.
    function : callable
        Makes the outputs from the inputs, both mappings of name to array, rows first. Its
        exceptions become errors of the model.
    max_rows : int
        Greatest number of rows of a request; 0 for a model without batching, whose shapes have all
        axes.
    versions : tuple of str
        Versions of the model; a request without a version gets the last.
    digest : str
        Checksum of the model's file, if there is one.
    lists_tensors : bool
        Whether the metadata lists inputs and outputs; some runtimes of other servers do not.
    """

    inputs: Mapping[str, tuple[Any, tuple[int, ...]]]
    outputs: Mapping[str, tuple[Any, tuple[int, ...]]]
    function: Function
    max_rows: int = 64
    versions: tuple[str, ...] = ("1",)
    digest: str = ""
    lists_tensors: bool = True

    def described(self, tensors: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return KServe's datatype and the shape of some tensors, as a server says them."""
        rows = (-1,) if self.max_rows else ()
        return {
            name: (kserve_name(np.dtype(dtype)), (*rows, *shape))
            for name, (dtype, shape) in tensors.items()
        }

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
            `max_rows`, `versions` (by default, that of the declaration, or 1) and `lists_tensors`.

        Raises
        ------
        ConfigError
            If something else is given, or there is no default for the declaration.
        """
        expect(isinstance(model, Model), "a sonic_coffea.Model", model)
        expect(function is None or callable(function), "a function", function)
        tensors = declared(model.inputs)
        flat = not all(layout.stacks for layout in model.inputs.values())
        # Row by row, a network can be asked for any length; a graph has its rows as a whole.
        rows: tuple[int, ...] = (-1,) if flat or model.one_request_per else ()
        inputs = {
            name: (dtype, (*rows, *((-1, -1) if shape is None else shape)))
            for name, (dtype, shape) in tensors.items()
        }
        outputs = {name: (o.dtype, _inner(o)) for name, o in model.outputs.items()}
        if rows:
            options["max_rows"] = 0
        if function is None:
            if flat or any(
                o.dtype == STRINGS or o.per != "row" or o.splits is not None
                for o in model.outputs.values()
            ):
                raise ConfigError(
                    f"model {model.name!r} has an output of strings, or more than one row for each "
                    "object; give a function that makes its outputs"
                )
            function = _default_scores(next(iter(tensors)), outputs)
        outputs = {name: (dtype, (*rows, *shape)) for name, (dtype, shape) in outputs.items()}
        if model.version is not None:
            options.setdefault("versions", (model.version,))
        return cls(inputs=inputs, outputs=outputs, function=function, **options)


def _inner(output: Any) -> tuple[int, ...]:
    # Slots are one number for each row; other constituents have their axes.
    if output.per == "row" or output.choose == "slot":
        return tuple(output.last)
    axes = output.axes if isinstance(output.axes, tuple) else (-1,) * output.axes
    if "labels" not in axes:
        axes = (*axes, *output.last)
    lengths = {"labels": len(output.labels or ())}
    return tuple(axis if isinstance(axis, int) else lengths.get(axis, -1) for axis in axes)


def _default_scores(
    first_input: str, outputs: Mapping[str, tuple[Any, tuple[int, ...]]]
) -> Function:
    """Return the function that `FakeModel.of` documents."""

    def scores(inputs: Tensors) -> dict[str, NDArray[Any]]:
        tensor = inputs[first_input]
        if tensor.dtype == STRINGS:
            sums = [zlib.crc32(string) / 2**32 for string in tensor.flat]
            tensor = np.reshape(sums, tensor.shape)
        tensor = tensor.astype(np.float64)
        rows = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
        mean = rows.mean(axis=1) if rows.shape[1] else np.zeros(len(rows))
        values = {}
        for name, (dtype, shape) in outputs.items():
            places = np.arange(math.prod(shape)).reshape(shape)
            values[name] = ((1 + np.sin(np.add.outer(mean, places))) / 2).astype(dtype)
        return values

    return scores
