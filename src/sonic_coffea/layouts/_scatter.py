"""Values per element of a jagged axis, put in their places as they come in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from awkward.contents import ByteMaskedArray, Content, ListOffsetArray, NumpyArray, RecordArray
from awkward.index import Index8, Index64
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sonic_coffea.layouts._rows import Int64, RowSelection, Split

Tensor = NDArray[Any]


class Elements(Protocol):
    """What has elements: columns."""

    @property
    def split(self) -> Split:
        """The elements of each row."""

    @property
    def order(self) -> Int64 | None:
        """How they are sorted."""

    @property
    def names(self) -> list[str]:
        """The names of the fields."""

    def __len__(self) -> int:
        """Return how many fields there are."""


class Scatter:
    """One value, or several, for each element of the rows.

    Parameters
    ----------
    columns : Elements
        Whose elements they are.
    width : int
        Values of each.
    dtype : dtype
        Type of the values.

    Attributes
    ----------
    values : array, shape ``[sum n, K]``
        Those of all rows, one row after the other; 0 where none came in.
    """

    def __init__(self, columns: Elements, width: int, dtype: np.dtype[Any]) -> None:
        self._split, self._order = columns.split, columns.order
        self._offsets = columns.split.offsets
        self.values = np.zeros((int(self._offsets[-1]), width), dtype)
        # Which values there are, once some have been truncated.
        self._kept: NDArray[np.bool_] | None = None

    def place(self, rows: RowSelection, tensor: Tensor) -> None:
        """Place ``[n, L, K]``, without what is padding, or ``[sum n, K]``.

        Raises
        ------
        ValueError
            If the tensor is not of the rows; compiled code would write beyond its memory.
        """
        starts, counts = self._split.starts[rows], self._split.counts_of(rows)
        length = len(counts) if tensor.ndim == 3 else int(counts.sum())
        kind = length, self.values.shape[1], self.values.dtype
        if (len(tensor), tensor.shape[-1], tensor.dtype) != kind:
            raise ValueError(f"expected {kind}, got {tensor.dtype} {tensor.shape}")
        if tensor.ndim == 3:
            from sonic_coffea.layouts import _kernels

            if self._kept is None and np.any(counts > tensor.shape[1]):
                self._kept = np.ones(len(self.values), np.bool_)
            where = (self._offsets[:-1][rows], counts, starts, self._order)
            _kernels.unpad(_bytes(self.values), self._kept, _bytes(tensor), *where)
            return
        within = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)
        if self._order is not None:
            first = np.repeat(starts, counts)
            within = self._order[first + within] - first
        self.values[np.repeat(self._offsets[:-1][rows], counts) + within] = tensor

    def content(self, names: list[str] | None) -> Content:
        """Return one list a row: records of `names`, or numbers."""
        values: Content
        if names is None:
            values = NumpyArray(self.values[:, 0] if self.values.shape[1] == 1 else self.values)
        else:
            values = RecordArray([NumpyArray(v) for v in self.values.T], names)
        if self._kept is not None:
            values = ByteMaskedArray(Index8(self._kept.view(np.int8)), values, valid_when=True)
        return ListOffsetArray(Index64(self._offsets), values)


def scattered(tensor: Tensor, columns: Elements) -> Content:
    """Return the values of all elements as lists of records of the columns' names."""
    scatter = Scatter(columns, len(columns), tensor.dtype)
    scatter.place(slice(0, len(columns.split.rows)), tensor)
    return scatter.content(columns.names)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a tensor with the bytes of its last axis as that axis."""
    whole = np.ascontiguousarray(tensor)
    size = whole.shape[-1] * whole.itemsize
    return whole.reshape(-1).view(np.uint8).reshape(*whole.shape[:-1], size)
