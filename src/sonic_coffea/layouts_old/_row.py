"""Rows of numbers, one row for each object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import NumpyArray, RecordArray

from sonic_coffea.layouts_old._declarations import DType, order_of
from sonic_coffea.layouts_old._layout import Bound, Constants, Fields, FieldsLayout
from sonic_coffea.layouts_old._leading import leading_columns
from sonic_coffea.layouts_old._range import check_range
from sonic_coffea.layouts_old._texts import TEXT

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts_old._columns import Columns
    from sonic_coffea.layouts_old._fields import Feature, Source
    from sonic_coffea.layouts_old._rows import RowSelection, Tensor


@dataclass(frozen=True, slots=True, init=False)
class Row(FieldsLayout):
    """One row of numbers per object: ``events * objects * number`` becomes ``[N, F]``.

    A number of an outer object, such as an event's, is repeated for each of its objects.

    Parameters
    ----------
    fields : sequence of str, number, Feature or OneHot
        The columns of the tensor, in order. ``"Jet[0].pt"`` is the pt of the leading jet, and
        ``"Jet[:3].pt"`` gives three columns.
    dtype : dtype
        Type of the tensor, float32 by default; ``"string"`` for strings.
    axis_order : {"F", "FL", "LF", ""}
        ``"F"``: ``[N, F]``. ``"FL"``, for weaver's models: ``[N, F, 1]``. ``"LF"``: ``[N, 1, F]``.
        ``""``: ``[N]`` of one field.
    missing : float or str, or sequence of them, optional
        Replacement for objects that are not there and for numbers that are None: one value for
        all fields, or one for each. It is sent untransformed. By default, such an object or
        number raises an `InputError`.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pt": 50.0, "eta": 0.5}, {"pt": 30.0, "eta": -1.0}], []])
    >>> Row(["pt", "eta"]).pack(jets).tolist()
    [[50.0, 0.5], [30.0, -1.0]]
    >>> Row(["pt", "eta"], axis_order="LF").pack(jets).shape
    (2, 1, 2)
    >>> events = ak.Array([{"Jet": [{"pt": 50.0}, {"pt": 30.0}], "MET": {"pt": 80.0}}])
    >>> Row(["Jet[:3].pt", "MET.pt"], missing=0.0).pack(events).tolist()
    [[50.0, 30.0, 0.0, 80.0]]
    """

    holds_strings = True

    features: tuple[Feature, ...]
    dtype: DType
    axis_order: str
    missing: tuple[Any, ...] | None

    def __init__(
        self,
        fields: Fields,
        dtype: DTypeLike = "float32",
        *,
        axis_order: str = "F",
        missing: Constants = None,
    ) -> None:
        self._declare(fields, dtype, axis_order=axis_order, missing=missing)
        order_of(axis_order, self, len(self.features), ("F", "FL", "LF", ""))

    def bind(self, source: Source) -> Bound:
        leading = None
        if self.dtype != TEXT:
            leading = leading_columns(source, self.features, self.missing)
        if leading is None:
            return FieldsLayout.bind(self, source)
        check_range(leading.columns, leading.split, self.dtype)
        return Bound(self, leading)

    def row_shape(self, level: int) -> tuple[int, ...]:
        del level
        axes = {"F": len(self.features), "L": 1}
        return tuple(axes[axis] for axis in self.axis_order)

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        columns.list(out.reshape(len(out), len(self.features)), None, rows)

    def content(self, tensor: Tensor, columns: Columns) -> RecordArray:
        by_row = tensor.reshape(len(tensor), len(columns))
        fields = [NumpyArray(np.ascontiguousarray(field)) for field in by_row.T]
        return RecordArray(fields, columns.names, length=len(tensor))
