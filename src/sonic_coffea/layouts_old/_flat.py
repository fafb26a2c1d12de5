"""A jagged axis without padding."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, InputError, nearest
from sonic_coffea.layouts_old._declarations import DType, declare, order_of
from sonic_coffea.layouts_old._layout import (
    Bound,
    Constants,
    Fields,
    FieldsLayout,
    Layout,
    Shape,
    ordered,
)
from sonic_coffea.layouts_old._rows import Int64, RowSelection, Split, Tensor, offsets_of

if TYPE_CHECKING:
    from awkward.contents import Content
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts_old._columns import Columns
    from sonic_coffea.layouts_old._fields import Feature


@dataclass(frozen=True, slots=True, init=False)
class Flat(FieldsLayout):
    """A jagged axis without padding: all elements of a request's rows, one after the other.

    ``events * var * number`` becomes ``[sum n, F]``, and another input tells which element belongs
    to which row. It is meant for graphs and sets of any size.

    Parameters
    ----------
    fields : sequence of str or Feature
        The columns of the tensor, in order.
    splits : str or None
        Name of the model's input for the offsets, int64 ``[N + 1]``: row `i` has the elements from
        ``splits[i]`` to ``splits[i + 1]``, exclusive.
    batch : str or None
        Name of the model's input for the row number of each element, int64 ``[sum n]``.
    dtype, sort_by, sort_ascending, missing
        As in `Padded`.
    axis_order : {"LF", "FL", "L"}
        ``[sum n, F]``; ``[F, sum n]``, such as the ends of a graph's edges; or ``[sum n]`` of one
        field.
    refers_to : str, optional
        The model's `Flat` input to which the numbers refer: for the edges of a graph, its nodes. In
        the arrays, the numbers are indices into the row's elements; in the tensor, they are indices
        into the request's elements. Both start at 0.
    merge_rows : bool
        Whether rows may merge in a request, if neither `splits` nor `batch` tells them apart. By
        default, this is an error, unless another input with the same elements tells them apart, or
        each request has one row (``one_request_per`` of `Model`).

    Examples
    --------
    >>> import awkward as ak
    >>> hits = ak.Array([[{"x": 1.0}, {"x": 2.0}], [], [{"x": 3.0}]])
    >>> Flat("x").pack(hits).tolist()
    [[1.0], [2.0], [3.0]]
    """

    stacks = False
    jagged = True
    holds_strings = True

    features: tuple[Feature, ...]
    splits: str | None
    batch: str | None
    dtype: DType
    sort_by: str | None
    sort_ascending: bool
    missing: tuple[Any, ...] | None
    axis_order: str
    refers_to: str | None
    merge_rows: bool
    referred: Split | None = field(repr=False, compare=False)

    def __init__(  # noqa: PLR0913  what a declaration says
        self,
        fields: Fields,
        splits: str | None = "row_splits",
        *,
        batch: str | None = None,
        dtype: DTypeLike = "float32",
        sort_by: str | None = None,
        sort_ascending: bool = False,
        missing: Constants = None,
        axis_order: str = "LF",
        refers_to: str | None = None,
        merge_rows: bool = False,
    ) -> None:
        self._declare(fields, dtype, splits=splits, batch=batch, sort_by=sort_by, missing=missing)
        axis_order = order_of(axis_order, self, len(self.features))
        declare(self, axis_order=axis_order, merge_rows=bool(merge_rows))
        declare(self, sort_ascending=sort_ascending, refers_to=refers_to, referred=None)
        if refers_to is not None and self.dtype.name not in ("int32", "int64"):
            raise ConfigError(
                f"Flat: numbers that refer to the elements of {refers_to!r} are int32 or int64, "
                f"got {self.dtype.name}"
            )

    @property
    def merges(self) -> bool:  # type: ignore[override]
        separated = self.splits is not None or self.batch is not None or self.refers_to is not None
        return not separated and not self.merge_rows

    def among(self, inputs: Mapping[str, Layout]) -> Flat:
        if self.refers_to is None:
            return self
        flat = {name: layout for name, layout in inputs.items() if isinstance(layout, Flat)}
        if self.refers_to not in flat or flat[self.refers_to] is self:
            others = [name for name, layout in flat.items() if layout is not self]
            raise ConfigError(
                f"Flat: refers_to={self.refers_to!r} is no other Flat input of the model; "
                f"{nearest(self.refers_to, others)}"
            )
        if flat[self.refers_to].sort_by is not None:
            raise ConfigError(
                f"Flat: numbers refer to the elements of {self.refers_to!r} as they are given, and "
                "these are sorted; leave sort_by out, and sort them before"
            )
        return self

    def referring(self, bound: Bound, others: Mapping[str, Bound]) -> Bound:
        if self.refers_to is None:
            return bound
        referred = others[self.refers_to].columns.split
        return Bound(declare(copy(self), referred=referred), bound.columns)

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        others = dict.fromkeys(filter(None, (self.splits, self.batch)), (np.dtype(np.int64), ()))
        inner = {"LF": (len(self.features),), "FL": (-1,), "L": ()}[self.axis_order]
        return {name: (self.dtype, inner), **others}

    def tensor_shape(self, columns: Columns, rows: RowSelection, level: int) -> tuple[int, ...]:
        (length,) = self.elements_shape(columns, rows, level)
        return ordered(self.axis_order, len(self.features), length)

    def elements_shape(self, columns: Columns, rows: RowSelection, level: int) -> tuple[int, ...]:
        del level
        return (int(columns.split.counts_of(rows).sum()),)

    def row_bytes(self, columns: Columns, rows: Int64, level: int) -> Int64:
        del level
        per_element = len(self.features) * self.item_bytes(columns) + (8 if self.batch else 0)
        return columns.split.counts_of(rows) * per_element + (8 if self.splits else 0)

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        columns.list(self._by_element(out), None, rows)

    def make(
        self, name: str, columns: Columns, rows: RowSelection, level: int
    ) -> dict[str, Tensor]:
        """Return ``[sum n, F]``, with offsets or row numbers of the request's own."""
        tensors = FieldsLayout.make(self, name, columns, rows, level)
        counts = columns.split.counts_of(rows)
        if self.referred is not None:
            self._count_on(self._by_element(tensors[name]), self.referred, columns, rows)
        if self.splits:
            tensors[self.splits] = offsets_of(counts)
        if self.batch:
            tensors[self.batch] = np.repeat(np.arange(len(counts)), counts)
        return tensors

    def _count_on(
        self, numbers: Tensor, referred: Split, columns: Columns, rows: RowSelection
    ) -> None:
        """Let the numbers of each row count on from the elements of the rows before it."""
        counts, sizes = columns.split.counts_of(rows), referred.counts_of(rows)
        wrong = np.flatnonzero(
            np.any((numbers < 0) | (numbers >= np.repeat(sizes, counts)[:, np.newaxis]), axis=1)
        )
        if len(wrong):
            place = int(np.searchsorted(np.cumsum(counts), wrong[0], side="right"))
            row = columns.number(rows, place)
            raise InputError(
                f"field {self.features[0].name!r}, or one beside it, refers to no element of input "
                f"{self.refers_to!r} in event {referred.rows.event_of(row)}: got "
                f"{numbers[wrong[0]].tolist()} of {sizes[place]} elements; numbers count within "
                "the row, from 0 on",
                rows=(row, row + 1),
            )
        numbers += np.repeat(np.cumsum(sizes) - sizes, counts)[:, np.newaxis].astype(numbers.dtype)

    def content(self, tensor: Tensor, columns: Columns) -> Content:
        return columns.scattered(self._by_element(tensor), columns.names)

    def _by_element(self, tensor: Tensor) -> Tensor:
        """Return the view ``[sum n, F]`` of a tensor."""
        if self.axis_order == "L":
            return tensor[:, np.newaxis]
        return tensor if self.axis_order == "LF" else tensor.T
