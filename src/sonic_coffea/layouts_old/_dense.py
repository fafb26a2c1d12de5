"""An array of fixed shape per object."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from awkward.contents import Content, NumpyArray, UnionArray

from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts_old._columns import Columns
from sonic_coffea.layouts_old._declarations import DType, declare, length_of
from sonic_coffea.layouts_old._fields import Column, Feature, Source
from sonic_coffea.layouts_old._groups import grouped
from sonic_coffea.layouts_old._layout import Bound, FieldsLayout, Shape
from sonic_coffea.layouts_old._nodes import split
from sonic_coffea.layouts_old._numbers import not_numbers, readable
from sonic_coffea.layouts_old._paths import path_of
from sonic_coffea.layouts_old._range import check_range
from sonic_coffea.layouts_old._rows import RowSelection, Split, Tensor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True, slots=True, init=False)
class Dense(FieldsLayout):
    """An array of fixed shape per object, such as an image.

    ``events * objects * 48 * 48 * number`` becomes ``[N, 48, 48]``.

    Parameters
    ----------
    field : str or Feature
        The field with the array of each object.
    shape : sequence of int, optional
        Shape of a row's array; by default, the regular axes of the field's type. An axis of length
        1 is added if the field lacks it, such as the channel of a grey image.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak, numpy as np
    >>> hits = ak.unflatten(ak.zip({"image": np.ones((3, 4, 4))}, depth_limit=1), [1, 2])
    >>> Dense("image", shape=(1, 4, 4)).pack(hits).shape
    (3, 1, 4, 4)
    """

    features: tuple[Feature, ...]
    shape: tuple[int, ...] | None
    dtype: DType

    def __init__(
        self,
        field: str | Feature,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike = "float32",
    ) -> None:
        checked = None if shape is None else tuple(length_of(n, self) for n in shape)
        self._declare(field, dtype, shape=checked)
        if len(self.features) != 1:
            raise ConfigError("Dense takes one field; several make several inputs")
        (feature,) = self.features
        if feature.paths != (feature.name,) or path_of(feature.name).pick is not None:
            raise ConfigError(f"Dense takes a field as it is, got {feature!r}")

    def row_shape(self, level: int) -> Shape:
        del level
        return self.shape

    def bind(self, source: Source) -> Bound:
        (feature,) = self.features
        what = f"field {feature.name!r}"
        layout = _of_one_type(source.column(feature.name).materialize())
        inner = _inner_shape(layout, what, optional=False)
        if self.shape is None and not inner:
            raise InputError(
                f"{what} has type {layout.form.type}, without axes of fixed length; "
                "give Dense the shape of a row"
            )
        shape = inner if self.shape is None else self.shape
        regular = _inner_shape(layout, what, optional=True)
        axes = len(shape) if regular[-len(shape) :] == shape else sum(n > 1 for n in shape)
        apart = split(layout, jagged=False, what=what, below=axes)
        size = math.prod(shape)
        # Rows that are not sent may be of other shapes.
        leaf = apart.leaf if apart.rows.contiguous else apart.leaf[apart.rows.ids]
        values = readable(_regular(leaf, size, what, shape), what)
        starts = np.arange(len(apart.rows)) * size
        elements = Split(apart.rows, NumpyArray(values), starts, starts + size)
        column = Column(feature, values, None)
        check_range([column], elements, self.dtype)
        columns = Columns(elements, (column,), grouped([column]))
        return Bound(declare(copy(self), shape=shape), columns)

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        columns.pad(out.reshape(len(out), 1, math.prod(out.shape[1:])), (0.0,), rows)

    def content(self, tensor: Tensor, columns: Columns) -> NumpyArray:
        del columns
        return NumpyArray(np.ascontiguousarray(tensor))


def _of_one_type(layout: Content) -> Content:
    """Return arrays without unions, where what is in them is alike."""

    def merged(node: Content, continuation: Callable[[], Content], **_: Any) -> Content | None:
        if not node.is_union:
            return None
        union = continuation()
        if not union.is_union:
            return union
        return UnionArray.simplified(union.tags, union.index, union.contents, mergebool=True)

    result: Content = ak.transform(merged, layout, highlevel=False)
    return result


def _inner_shape(layout: Content, what: str, *, optional: bool) -> tuple[int, ...]:
    """Return the lengths of the innermost axes that are of fixed length.

    Rows may be missing, so that axes above an option do not belong to a row, unless a declared
    shape has them too (`optional`).
    """
    shape: list[int] = []
    node = layout
    while not (node.is_numpy or node.is_unknown):
        if node.is_record or node.is_union:
            raise not_numbers(node, what)
        if node.is_regular:
            shape.append(int(node.size))
        elif node.is_list or (node.is_option and node.purelist_depth > 1 and not optional):
            shape = []
        node = node.content
    return (*shape, *(int(n) for n in getattr(node, "inner_shape", ())))


def _regular(leaf: Content, size: int, what: str, shape: Sequence[int]) -> NDArray[Any]:
    try:
        values = np.asarray(ak.to_numpy(leaf, allow_missing=False))
    except ValueError as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"{what} is not of fixed shape {list(shape)}: {problem}") from None
    if len(values) and values[0].size != size:
        raise InputError(
            f"{what} has {list(values.shape[1:])} numbers a row, expected {list(shape)}"
        )
    return values.reshape(-1)
