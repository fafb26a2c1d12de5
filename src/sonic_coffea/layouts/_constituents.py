"""Outputs that have values for each element of the axis that rows consume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError, ResponseError, nearest
from sonic_coffea.layouts._answers import Assembly, misshapen, tensor_of

if TYPE_CHECKING:
    import numpy as np
    from awkward.contents import Content

    from sonic_coffea.layouts._inputs import Inputs
    from sonic_coffea.layouts._outputs import Output
    from sonic_coffea.layouts._rows import RowSelection
    from sonic_coffea.layouts._scatter import Scatter, Tensor


class PerConstituent(Assembly):
    """An output with values for each element of the axis that the rows consume."""

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        jagged = [name for name, bound in inputs.bound.items() if bound.layout.jagged]
        if not jagged:
            raise ConfigError(
                f"output {name!r} is per constituent, but no input of the model has a jagged axis"
            )
        if output.of is not None and output.of not in jagged:
            raise ConfigError(
                f"output {name!r} is per constituent of {output.of!r}; {nearest(output.of, jagged)}"
            )
        of = output.of or jagged[0]
        super().__init__(name, output)
        self._inputs = inputs
        self._bound = inputs.bound[of]
        self._is_padded = self._bound.layout.padded_length(0) > 0
        if not self._is_padded and (output.axes > 1 or output.choose == "slot"):
            what = f"{output.axes} axes" if output.axes > 1 else "slots"
            raise ConfigError(
                f"output {name!r} has {what} of the constituents of input {of!r}, which is not "
                "padded; name another input with of=, or declare a padded one"
            )
        if self._bound.columns.collections and output.axes > 1 and not output.choose:
            raise ConfigError(
                f"output {name!r} has values of pairs of the elements of input {of!r}, which are "
                "of several collections; name an input of one collection with of=, or the greatest "
                "with choose='argmax'"
            )

    def _split(self, selection: RowSelection, answer: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Return the answer for some rows, and how many of its axes the elements have."""
        tensor = tensor_of(self._name, answer)
        level = self._inputs.level_of(selection)
        expected = self._bound.layout.elements_shape(self._bound.columns, selection, level)
        expected += expected[-1:] * (self._output.axes - 1)
        if tensor.shape[: len(expected)] != expected:
            what = " rows of ".join(map(str, expected[:2]))
            pairs = f" in {self._output.axes} axes" if self._output.axes > 1 else ""
            raise misshapen(self._name, tensor, f"for {what} constituents{pairs}")
        return tensor, len(expected)

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        # A server lists the axes of padded elements, not the axis of all elements of a request.
        return tuple(shape[self._output.axes * self._is_padded :])


class Constituents(PerConstituent):
    """The values of a call, for each element of the consumed axis, or for each pair."""

    _scatter: Scatter | None = None
    _each: tuple[int, ...] = ()

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        del rows
        tensor, axes = self._split(selection, answer)
        each = tensor.shape[axes:] or (1,)
        self._output.check_each(each)
        if self._scatter is None:
            self._each = each
            self._scatter = self._empty(math.prod(each), tensor.dtype)
        elif (each, tensor.dtype) != (self._each, self._scatter.values.dtype):
            raise ResponseError(
                f"output {self._name!r} came back as {tensor.dtype} {list(each)} for each "
                f"constituent, before as {self._scatter.values.dtype} {list(self._each)}"
            )
        self._scatter.place(selection, tensor.reshape(*tensor.shape[:axes], math.prod(each)))

    def _empty(self, width: int, dtype: np.dtype[Any]) -> Scatter:
        return self._bound.columns.scatter(width, dtype, axes=self._output.axes)

    def content(self) -> Content:
        return self._content(optional=False)

    def typed(self) -> Content:
        return self._content(optional=self._is_padded)

    def _content(self, *, optional: bool) -> Content:
        scatter, each = self._scatter, self._each
        if scatter is None:
            each = self._output.last
            scatter = self._empty(math.prod(each), self._output.score_dtype)
        labels, shape = self._output.labels, self._output.shape
        if shape is None:
            shape = () if each == (1,) else each
        names = None if labels is None else list(labels)
        return scatter.content(names, shape, optional=optional)
