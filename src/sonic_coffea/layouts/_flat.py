"""A jagged axis without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sonic_coffea.layouts._layout import Bound, DType, Fields, FieldsLayout, Shape, Tensor
from sonic_coffea.layouts._rows import offsets_of
from sonic_coffea.layouts._scatter import Scatter

if TYPE_CHECKING:
    from awkward.contents import Content
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._fields import Feature, Source
    from sonic_coffea.layouts._rows import Int64, RowSelection


@dataclass(frozen=True, slots=True, init=False)
class Flat(FieldsLayout):
    """A jagged axis without padding: all elements of a request's rows, one after the other.

    ``events * var * number`` becomes ``[sum n, F]``, and another input says which element belongs
    to which row. For graphs and sets of any size.

    Parameters
    ----------
    fields : sequence of str or Feature
        The columns of the tensor, in order.
    splits : str or None
        Name of the model's input for the offsets, int64 ``[N + 1]``: row `i` is elements
        ``splits[i]`` to ``splits[i + 1]``.
    batch : str or None
        Name of the model's input for each element's row, int64 ``[sum n]``.
    dtype, sort_by
        As of `Padded`.

    Examples
    --------
    >>> import awkward as ak
    >>> hits = ak.Array([[{"x": 1.0}, {"x": 2.0}], [], [{"x": 3.0}]])
    >>> Flat("x").pack(hits).tolist()
    [[1.0], [2.0], [3.0]]
    """

    stacks = False
    jagged = True

    features: tuple[Feature, ...]
    splits: str | None
    batch: str | None
    dtype: DType
    sort_by: str | None

    def __init__(
        self,
        fields: Fields,
        splits: str | None = "row_splits",
        *,
        batch: str | None = None,
        dtype: DTypeLike = "float32",
        sort_by: str | None = None,
    ) -> None:
        self._declare(fields, dtype, splits=splits, batch=batch, sort_by=sort_by)

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensors that the input makes."""
        integer = np.dtype(np.int64)
        shapes: dict[str, tuple[DType, Shape]] = {name: (self.dtype, (len(self.features),))}
        return shapes | {other: (integer, ()) for other in (self.splits, self.batch) if other}

    def bind(self, source: Source) -> BoundFlat:
        """Read the columns named, and nothing else."""
        return BoundFlat(self.dtype, self._bind(source), self.splits, self.batch)


@dataclass(frozen=True, slots=True, eq=False)
class BoundFlat(Bound):
    """`Flat` with its arrays."""

    jagged = True

    splits: str | None
    batch: str | None

    def shape(self, bucket: int) -> tuple[int, ...]:
        """Return ``(F,)``, of each element."""
        del bucket
        return (len(self.columns),)

    def tensor_shape(self, rows: RowSelection, bucket: int) -> tuple[int, ...]:
        """Return ``(sum n, F)``."""
        return (*self.constituents_shape(rows, bucket), len(self.columns))

    def constituents_shape(self, rows: RowSelection, bucket: int) -> tuple[int, ...]:
        """Return ``(sum n,)``."""
        del bucket
        return (int(self.columns.split.counts_of(rows).sum()),)

    def row_bytes(self, bucket: int, rows: Int64) -> Int64:
        """Return the bytes of each row."""
        del bucket
        per_element = len(self.columns) * self.dtype.itemsize + (8 if self.batch else 0)
        return self.columns.split.counts_of(rows) * per_element + (8 if self.splits else 0)

    def count_elements(self, rows: RowSelection) -> tuple[int, int, int]:
        """Return how many elements are sent; none is truncated, none is padding."""
        return int(self.columns.split.counts_of(rows).sum()), 0, 0

    def fill(self, out: Tensor, rows: RowSelection) -> None:
        """Write ``[sum n, F]``."""
        self.columns.list(out, self.columns.split.positions(rows), rows)

    def pack(self, name: str, rows: RowSelection, bucket: int) -> dict[str, Tensor]:
        """Return ``[sum n, F]``, with offsets or row numbers of the request's own."""
        tensors = Bound.pack(self, name, rows, bucket)
        counts = self.columns.split.counts_of(rows)
        if self.splits:
            tensors[self.splits] = offsets_of(counts)
        if self.batch:
            tensors[self.batch] = np.repeat(np.arange(len(counts)), counts)
        return tensors

    def content(self, tensor: Tensor) -> Content:
        """Return a list of records for each row."""
        scatter = Scatter(self.columns, len(self.columns), tensor.dtype)
        scatter.place(slice(0, len(self.rows)), tensor)
        return scatter.content(self.columns.names)
