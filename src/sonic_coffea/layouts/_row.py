"""Numbers per object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from awkward.contents import NumpyArray, RecordArray

from sonic_coffea.layouts._layout import DType, Fields, FieldsLayout, Tensor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._columns import Columns
    from sonic_coffea.layouts._fields import Feature
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

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        columns.list(out, columns.split.starts[rows], rows)

    def content(self, tensor: Tensor, columns: Columns) -> RecordArray:
        fields = [NumpyArray(np.ascontiguousarray(field)) for field in tensor.T]
        return RecordArray(fields, columns.names, length=len(tensor))
