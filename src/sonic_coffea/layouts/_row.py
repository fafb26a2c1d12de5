"""Numbers per object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from awkward.contents import NumpyArray, RecordArray

from sonic_coffea.layouts._layout import Bound, DType, Fields, FieldsLayout, Shape, Tensor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._fields import Feature, Source
    from sonic_coffea.layouts._rows import RowSelection


@dataclass(frozen=True, slots=True, init=False)
class Row(FieldsLayout):
    """One row of numbers per object: ``events * objects * number`` becomes ``[N, F]``.

    Parameters
    ----------
    fields : sequence of str or Feature
        What the columns of the tensor are, in order.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pt": 50.0, "eta": 0.5}, {"pt": 30.0, "eta": -1.0}], []])
    >>> Row(["pt", "eta"]).pack(jets).tolist()
    [[50.0, 0.5], [30.0, -1.0]]
    """

    features: tuple[Feature, ...]
    dtype: DType

    def __init__(self, fields: Fields, dtype: DTypeLike = "float32") -> None:
        self._declare(fields, dtype)

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensor that the input makes."""
        return {name: (self.dtype, (len(self.features),))}

    def bind(self, source: Source) -> BoundRow:
        """Read the columns named, and nothing else."""
        return BoundRow(self.dtype, self._bind(source))


@dataclass(frozen=True, slots=True, eq=False)
class BoundRow(Bound):
    """`Row` with its arrays."""

    def shape(self, bucket: int) -> tuple[int, ...]:
        """Return ``(F,)``."""
        del bucket
        return (len(self.columns),)

    def fill(self, out: Tensor, rows: RowSelection) -> None:
        """Write ``[n, F]``."""
        self.columns.list(out, self.columns.split.starts[rows], rows)

    def content(self, tensor: Tensor) -> RecordArray:
        """Return a record for each row."""
        fields = [NumpyArray(np.ascontiguousarray(field)) for field in tensor.T]
        return RecordArray(fields, self.columns.names, length=len(tensor))
