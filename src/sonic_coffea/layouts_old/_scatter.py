"""Values for each element of a jagged axis, put in their places in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
from awkward.contents import (
    ByteMaskedArray,
    Content,
    ListOffsetArray,
    NumpyArray,
    RecordArray,
    UnmaskedArray,
)
from awkward.index import Index8, Index64

from sonic_coffea.layouts_old import _kernels
from sonic_coffea.layouts_old._memory import empty
from sonic_coffea.layouts_old._rows import Int64, RowSelection, Split, Tensor, offsets_of


class Scatter:
    """Values of each element of the rows, `width` of them, or with 2 `axes` of each pair of a row.

    Attributes
    ----------
    values : array, shape ``[sum n, K]``
        The values of all rows, one row after the other; undefined until `place` sets them.
    """

    def __init__(
        self, split: Split, order: Int64 | None, width: int, dtype: np.dtype[Any], *, axes: int = 1
    ) -> None:
        self._split, self._order, self._axes = split, order, axes
        self._counts = split.counts
        self._offsets = offsets_of(self._counts**axes)
        self.values = empty((int(self._offsets[-1]), width), dtype)
        self._open = np.ones(len(self._counts), np.bool_)
        # Which values there are, once some have been truncated.
        self._kept: Tensor | None = None

    def place(self, rows: RowSelection, tensor: Tensor) -> None:
        """Place ``[n, L, K]``, of pairs ``[n, L, L, K]``, without padding, or ``[sum n, K]``.

        Raises
        ------
        ValueError
            If the tensor is not of the rows; compiled code would write beyond its memory.
        """
        starts, counts = self._split.starts[rows], self._split.counts_of(rows)
        is_padded = tensor.ndim > 2
        size = len(counts) if is_padded else int(counts.sum())
        kind = size, self.values.shape[1], self.values.dtype
        if (len(tensor), tensor.shape[-1], tensor.dtype) != kind:
            raise ValueError(f"expected {kind}, got {tensor.dtype} {tensor.shape}")
        if is_padded:
            length = tensor.shape[1]
            if tensor.shape[1:-1] != (length,) * self._axes:
                raise ValueError(f"expected {self._axes} axes of {length}, got {tensor.shape}")
            if self._kept is None and np.any(counts > length):
                self._kept = np.ones(len(self.values), np.bool_)
            flat = tensor.reshape(len(tensor), length**self._axes, tensor.shape[-1])
            where = (self._offsets[:-1][rows], counts, starts, self._order)
            sizes = (length, self._axes)
            _kernels.unpad(_bytes(self.values), self._kept, _bytes(flat), *sizes, *where)
            self._open[rows] = False
            return
        within = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
        if self._order is not None:
            first = np.repeat(starts, counts)
            within = self._order[first + within] - first
        self.values[np.repeat(self._offsets[:-1][rows], counts) + within] = tensor
        self._open[rows] = False

    def content(
        self, names: list[str] | None, each: tuple[int, ...] = (), *, optional: bool = False
    ) -> Content:
        """Return one list a row: records of `names`, or numbers, or arrays of the shape `each`.

        Values are of an option type if some have been truncated, or may be (`optional`). They are 0
        where none came in, below a None, too; the kernel clears truncated values.
        """
        if self._open.any():
            self.values[np.repeat(self._open, np.diff(self._offsets))] = 0
        values: Content
        if names is None:
            shape = (len(self.values), *each)
            values = NumpyArray(np.ascontiguousarray(self.values.reshape(shape)))
        else:
            values = RecordArray([NumpyArray(v) for v in self.values.T], names)
        if self._kept is not None:
            values = ByteMaskedArray(Index8(self._kept.view(np.int8)), values, valid_when=True)
        elif optional:
            values = UnmaskedArray(values)
        for axis in range(self._axes - 1, -1, -1):
            counts = np.repeat(self._counts, self._counts**axis)
            values = ListOffsetArray(Index64(offsets_of(counts)), values)
        return values


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor with the bytes of its last axis as that axis."""
    whole = np.ascontiguousarray(tensor)
    size = whole.shape[-1] * whole.itemsize
    return whole.reshape(-1).view(np.uint8).reshape(*whole.shape[:-1], size)
