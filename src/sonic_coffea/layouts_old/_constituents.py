"""Outputs of the elements of the axis that rows consume: values of each, or which are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import ByteMaskedArray, Content, NumpyArray, RecordArray, RegularArray
from awkward.index import Index8

from sonic_coffea.errors import ConfigError, ResponseError, nearest
from sonic_coffea.layouts_old._answers import Assembly, misshapen, tensor_of

if TYPE_CHECKING:
    from sonic_coffea.layouts_old._inputs import Inputs
    from sonic_coffea.layouts_old._outputs import Output
    from sonic_coffea.layouts_old._rows import RowSelection, Tensor
    from sonic_coffea.layouts_old._scatter import Scatter


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


class Choices(PerConstituent):
    """Which elements of a row a model chooses: their places in the row's list, or None."""

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        super().__init__(name, output, inputs)
        self._width = output.axes if output.axes > 1 else math.prod(output.last)
        self._collections = self._bound.columns.collections
        shape = len(inputs.rows), self._width, max(len(self._collections), 1)
        self._chosen = np.full(shape, -1, np.int64)

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        columns = self._bound.columns
        if self._output.choose == "slot":
            tensor = tensor_of(self._name, answer)
            if (
                tensor.shape not in ((rows, self._width), (rows,))
                or tensor.size != rows * self._width
            ):
                raise misshapen(self._name, tensor, f"for {self._width} slots of {rows} rows")
            length = self._bound.layout.padded_length(self._inputs.level_of(selection))
            slots = tensor.reshape(rows, self._width).astype(np.int64)
        else:
            tensor, axes = self._split(selection, answer)
            each = math.prod(tensor.shape[axes:])
            wanted = 1 if self._output.axes > 1 else self._width
            if each != wanted:
                raise misshapen(self._name, tensor, f"for {wanted} choices of each row")
            if not self._is_padded:
                counts = columns.split.counts_of(selection)
                tensor = _by_row(tensor.reshape(len(tensor), each), counts)
                axes = 2
            length = tensor.shape[1]
            inside = columns.present(selection, length)
            slots = _greatest(tensor.reshape(*tensor.shape[:axes], each), inside, axes - 1)
        self._chosen[selection] = columns.indices(selection, slots, length)

    def content(self) -> Content:
        labels = self._output.labels
        if labels is not None:
            each = [self._named(self._chosen[:, n]) for n in range(self._width)]
            return RecordArray(each, list(labels), length=len(self._chosen))
        if self._output.axes == 1:
            return self._named(self._chosen[:, 0])
        flat = self._chosen.reshape(-1, self._chosen.shape[-1])
        return RegularArray(self._named(flat), self._width, len(self._chosen))

    def _named(self, indices: Tensor) -> Content:
        """Return ``[n, K]`` as an index each; of several collections, as one in each of them."""
        each = [_optional(column) for column in indices.T]
        if not self._collections:
            return each[0]
        return RecordArray(each, list(self._collections), length=len(indices))


def _optional(places: Tensor) -> Content:
    is_present = (places >= 0).view(np.int8)
    return ByteMaskedArray(Index8(is_present), NumpyArray(np.maximum(places, 0)), valid_when=True)


def _by_row(tensor: Tensor, counts: Tensor) -> Tensor:
    """Return ``[sum n, K]`` as ``[N, L, K]``."""
    out = np.zeros((len(counts), int(counts.max(initial=0)), tensor.shape[1]), tensor.dtype)
    within = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    out[np.repeat(np.arange(len(counts)), counts), within] = tensor
    return out


def _greatest(tensor: Tensor, inside: Tensor, axes: int) -> Tensor:
    """Return the slots of the greatest score of each row, of ``[N, L, …, K]``: ``[N, axes * K]``.

    Padding is left aside, and so are NaN and -inf, which stand for what cannot be chosen: -1.
    """
    rows, length, each = *tensor.shape[:2], tensor.shape[-1]
    if not length:
        return np.full((rows, axes * each), -1, np.int64)
    scores = tensor.astype(np.float64)
    for axis in range(1, axes + 1):
        shape = [rows] + [1] * (axes + 1)
        shape[axis] = length
        scores[~np.broadcast_to(inside.reshape(shape), scores.shape)] = -np.inf
    scores = np.nan_to_num(
        scores.reshape(rows, length**axes, each), nan=-np.inf, posinf=np.inf, neginf=-np.inf
    )
    best = np.argmax(scores, axis=1)
    slots = np.stack(np.unravel_index(best, (length,) * axes), axis=1)
    chosen = scores.max(axis=1, keepdims=True) > -np.inf
    greatest: Tensor = np.where(chosen, slots, -1).reshape(rows, axes * each)
    return greatest
