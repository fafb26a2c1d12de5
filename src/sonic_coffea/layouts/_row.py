"""One row for each object: numbers, or an array of fixed shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts._elements import Columns, Elements
from sonic_coffea.layouts._expressions import path_of
from sonic_coffea.layouts._features import declare
from sonic_coffea.layouts._layout import (
    Batch,
    Bound,
    Constants,
    FieldsLayout,
    Shape,
    order_of,
    shape_of,
)
from sonic_coffea.layouts._padding import content_of
from sonic_coffea.layouts._source import Source, numbers, of_field
from sonic_coffea.layouts._structure import Levels, Structure, Tensor

if TYPE_CHECKING:
    from awkward.contents import Content


@dataclass(frozen=True, slots=True, eq=False)
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

    fields: Any
    dtype: Any = "float32"
    _: KW_ONLY
    axis_order: str = "F"
    missing: Constants = None

    def __post_init__(self) -> None:
        self._declare()
        order_of(self.axis_order, self, len(self.features), ("F", "FL", "LF", ""))

    def row_shape(self, bucket: int) -> tuple[int, ...]:
        del bucket
        axes = {"F": len(self.features), "L": 1}
        return tuple(axes[axis] for axis in self.axis_order)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        by_row = out.reshape(len(out), len(self.features))
        is_plain = all(feature.plain for feature in self.features)
        for here, elements in bound.columns.blocks(batch.rows, self.row_width):
            if is_plain:
                elements.values(out.dtype, by_row[here].T)
            else:
                by_row[here] = elements.values(out.dtype).T

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        del bound
        return content_of(tensor, [feature.channel for feature in self.features])


@dataclass(frozen=True, slots=True, eq=False)
class Dense(FieldsLayout):
    """An array of fixed shape per object, such as an image.

    ``events * objects * 48 * 48 * number`` becomes ``[N, 48, 48]``.

    Parameters
    ----------
    field : str or Feature
        The field with the array of each object.
    shape : sequence of int, optional
        Shape of a row's array; by default, the regular axes of the field's type. The field has this
        shape, but may lack axes of length 1, such as the channel of a grey image.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak, numpy as np
    >>> hits = ak.unflatten(ak.zip({"image": np.ones((3, 4, 4))}, depth_limit=1), [1, 2])
    >>> Dense("image", shape=(1, 4, 4)).pack(hits).shape
    (3, 1, 4, 4)
    """

    named = "field"

    field: Any
    shape: Any = None
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        self._declare()
        if self.shape is not None:
            declare(self, shape=shape_of(self.shape, self))
        if len(self.features) != 1:
            raise ConfigError("Dense takes one field; several make several inputs")
        (feature,) = self.features
        path = path_of(feature.name)
        if feature.paths != (path,) or any(isinstance(step, int) for step in path):
            raise ConfigError(f"Dense takes a field as it is, got {feature!r}")

    def row_shape(self, bucket: int) -> Shape:
        del bucket
        shape: Shape = self.shape
        return shape

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        del others
        (feature,) = self.features
        place = source.place(path_of(feature.name))
        with of_field(feature.name):
            data, at = numbers(place)
            above, shape = _split(place, self.shape)
        rows = Structure(place.events, above)
        size = math.prod(shape)
        column = (data[at], None, False) if isinstance(at, slice) else (data, at, False)
        offsets = np.arange(len(rows) + 1) * size
        columns = Columns(rows, offsets, self.features, {feature.terms[0]: column})
        return Bound(replace(self, shape=shape), columns)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        Elements(bound.columns, batch.rows).values(out.dtype, out.reshape(1, out.size))

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        del bound
        return content_of(tensor, None, tensor.shape[1:])


def _split(place: Structure, declared: Shape) -> tuple[Levels, tuple[int, ...]]:
    """Return the levels above each row's array, and the array's shape, which must be declared's."""
    levels = place.levels
    lists = [i for i, level in enumerate(levels) if level.is_list]
    if declared is None:
        regular = takewhile(
            lambda i: levels[i].size is not None and (i == lists[-1] or levels[i + 1].is_list),
            reversed(lists),
        )
        declared = tuple(int(levels[i].size or 0) for i in regular)[::-1]
        if not declared:
            raise InputError(
                f"has type {place.type}, without axes of fixed length; give Dense the shape of a "
                "row"
            )
    for shape in dict.fromkeys((declared, tuple(n for n in declared if n > 1))):
        inner = lists[len(lists) - len(shape) :] if len(shape) <= len(lists) else []
        # Lists that happen to have one object each are no axis of length 1.
        fits = [
            np.all(levels[i].counts == n) and (n > 1 or levels[i].size == 1)
            for i, n in zip(inner, shape, strict=False)
        ]
        if len(fits) == len(shape) and all(fits):
            start = inner[0] if inner else len(levels)
            if any(np.any(level.data < 0) for level in levels[start:]):
                raise InputError("has None; fill it with ak.fill_none")
            return levels[:start], declared
    inner = lists[max(len(lists) - len(declared), 0) :]
    counts = [np.unique(levels[i].counts).tolist() for i in inner]
    if not counts or any(len(sizes) != 1 for sizes in counts):
        raise InputError(f"is not of fixed shape; expected {list(declared)}")
    got = [size for (size,) in counts]
    hint = "; np.moveaxis brings axes into another order" if sorted(got) == sorted(declared) else ""
    raise InputError(f"has {got} numbers a row, expected {list(declared)}{hint}")
