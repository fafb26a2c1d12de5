"""Outputs that choose elements of a row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from awkward.contents import ByteMaskedArray, Content, NumpyArray, RecordArray, RegularArray
from awkward.index import Index8

from sonic_coffea.layouts._answers import misshapen, tensor_of
from sonic_coffea.layouts._constituents import PerConstituent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sonic_coffea.layouts._inputs import Inputs
    from sonic_coffea.layouts._outputs import Output
    from sonic_coffea.layouts._rows import RowSelection
    from sonic_coffea.layouts._scatter import Tensor


class Choices(PerConstituent):
    """Which elements of a row a model chooses: their places in the row's list, or None."""

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        super().__init__(name, output, inputs)
        self._width = output.axes if output.axes > 1 else math.prod(output.last)
        self._chosen = np.full((len(inputs.rows), self._width), -1, np.int64)

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        columns = self._bound.columns
        counts = columns.split.counts_of(selection)
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
                tensor = _by_row(tensor.reshape(len(tensor), each), counts)
                axes = 2
            length = tensor.shape[1]
            slots = _greatest(tensor.reshape(*tensor.shape[:axes], each), counts, axes - 1)
        there = (slots >= 0) & (slots < np.minimum(counts, length)[:, np.newaxis])
        if columns.order is not None and len(columns.order):
            starts = columns.split.starts[selection][:, np.newaxis]
            slots = columns.order[np.where(there, starts + slots, 0)] - starts
        self._chosen[selection] = np.where(there, slots, -1)

    def content(self) -> Content:
        labels = self._output.labels
        if labels is not None:
            each = [_optional(column) for column in self._chosen.T]
            return RecordArray(each, list(labels), length=len(self._chosen))
        if self._output.axes == 1:
            return _optional(self._chosen[:, 0])
        return RegularArray(_optional(self._chosen.reshape(-1)), self._width, len(self._chosen))

    typed = content


def _optional(places: Tensor) -> Content:
    there = (places >= 0).view(np.int8)
    return ByteMaskedArray(Index8(there), NumpyArray(np.maximum(places, 0)), valid_when=True)


def _by_row(tensor: Tensor, counts: Tensor) -> Tensor:
    """Return ``[sum n, K]`` as ``[N, L, K]``."""
    out = np.zeros((len(counts), int(counts.max(initial=0)), tensor.shape[1]), tensor.dtype)
    within = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    out[np.repeat(np.arange(len(counts)), counts), within] = tensor
    return out


def _greatest(tensor: Tensor, counts: Tensor, axes: int) -> Tensor:
    """Return the slots of the greatest score of each row, of ``[N, L, …, K]``: ``[N, axes * K]``.

    Padding is left aside, and so are NaN and -inf, which stand for what cannot be chosen: -1.
    """
    rows, length, each = *tensor.shape[:2], tensor.shape[-1]
    if not length:
        return np.full((rows, axes * each), -1, np.int64)
    inside = np.arange(length) < counts[:, np.newaxis]
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
    found: Tensor = np.where(chosen, slots, -1).reshape(rows, axes * each)
    return found
