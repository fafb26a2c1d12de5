"""The base of all layouts: the declaration, and its binding to the arrays of a call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts_old._binding import bind_columns
from sonic_coffea.layouts_old._declarations import DType, check_held, check_strings, declare, target_of
from sonic_coffea.layouts_old._fields import Feature, OneHot, Source, as_features
from sonic_coffea.layouts_old._memory import empty, empty_tensor
from sonic_coffea.layouts_old._paths import path_of
from sonic_coffea.layouts_old._range import HALF
from sonic_coffea.layouts_old._texts import TEXT, Numbered, Texts

if TYPE_CHECKING:
    import awkward as ak
    from awkward.contents import Content
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts_old._columns import Columns
    from sonic_coffea.layouts_old._rows import Int64, Rows, RowSelection, Tensor

Field = str | float | Feature | OneHot
Fields = Sequence[Field] | Field
Shape = tuple[int, ...] | None

Constants = float | str | Sequence[float] | Sequence[str] | None


class Layout(ABC):
    """How arrays become one input of a model.

    If the model has `Bucketed` inputs, each row has a level, and a request has rows of one level.
    The level is the largest step that any group of the row needs among the lengths of that group.
    Each group is padded to its own length at that level, or to its last length. So a row's padding
    depends on that row only. Without `Bucketed` inputs, the level is 0.

    Attributes
    ----------
    dtype : dtype
        Type of the tensor.
    columns : tuple of str
        The fields that are read.
    stacks : bool
        Whether a server may stack the rows of several requests; not, if tensors count within one.
    jagged : bool
        Whether the rows consume the innermost jagged axis.
    holds_strings : bool
        Whether its tensors may be of strings.
    merges : bool
        Whether nothing tells the rows of a request apart.
    refers_to : str or None
        The input to whose elements its numbers refer.
    lengths : tuple of int
        To what the layout pads jagged rows, at each level; none if it does not pad.
    """

    __slots__ = ()
    dtype: DType
    stacks: ClassVar[bool] = True
    jagged: ClassVar[bool] = False
    holds_strings: ClassVar[bool] = False
    merges: bool = False
    refers_to: str | None = None
    lengths: tuple[int, ...] = ()

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""

    @abstractmethod
    def bind(self, source: Source) -> Bound:
        """Read the columns named, and nothing else."""

    @abstractmethod
    def row_shape(self, level: int) -> Any:
        """Return the shape of a row in a request of a level; None if the arrays will tell.

        At level -1, what varies with the level is -1.
        """

    @abstractmethod
    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        """Write rows to a tensor."""

    def content(self, tensor: Tensor, columns: Columns) -> Content:
        """Return the tensor of all rows with one element, or list, for each."""
        del tensor, columns
        raise ConfigError(f"{type(self).__name__} has no inverse")

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensors that an input makes: type and shape of a row, -1 where it varies."""
        return {name: (self.dtype, self.row_shape(-1))}

    def make(
        self, name: str, columns: Columns, rows: RowSelection, level: int
    ) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""
        shape = self.tensor_shape(columns, rows, level)
        moved = self._moved()
        out = (empty_tensor if moved == self.dtype else empty)(shape, moved)
        self.write(out, columns, rows)
        if self.dtype == TEXT and columns.texts is not None:
            return {name: columns.texts.tensor(out)}
        return {name: out.astype(self.dtype, copy=False)}

    def _moved(self) -> DType:
        """Return the type that kernels write: they lack half precision, and move no strings."""
        if self.dtype == TEXT:
            return np.dtype(np.int64)
        return np.dtype(np.float32) if self.dtype in HALF else self.dtype

    def item_bytes(self, columns: Columns) -> int:
        """Return the bytes of a number, or of the longest string and its length."""
        if columns.texts is None or self.dtype != TEXT:
            return self.dtype.itemsize
        return columns.texts.longest + 4

    def tensor_shape(self, columns: Columns, rows: RowSelection, level: int) -> tuple[int, ...]:
        """Return the shape of the tensor of some rows."""
        return (len(columns.split.starts[rows]), *self.row_shape(level))

    def elements_shape(self, columns: Columns, rows: RowSelection, level: int) -> tuple[int, ...]:
        """Return the first axes of an output that has values for each element of jagged rows."""
        return len(columns.split.starts[rows]), self.padded_length(level)

    def padded_length(self, level: int) -> int:
        """Return the length to which jagged rows are padded in a request; 0 if they are not."""
        if not self.lengths:
            return 0
        varies = level < 0 and len(self.lengths) > 1
        return -1 if varies else self.lengths[min(max(level, 0), len(self.lengths) - 1)]

    def row_bytes(self, columns: Columns, rows: Int64, level: int) -> int | Int64:
        """Return the bytes of a row in a request: all the same, or of each of the rows."""
        del rows
        return int(math.prod(self.row_shape(level))) * self.item_bytes(columns)

    def count_elements(
        self, columns: Columns, rows: RowSelection, levels: Int64
    ) -> tuple[int, int, int]:
        """Return how many elements of jagged rows are sent, truncated, and padding.

        `levels` has the level of each row's request.
        """
        if not self.jagged:
            return 0, 0, 0
        if not self.lengths:
            return int(columns.split.counts_of(rows).sum()), 0, 0
        lengths = np.asarray(self.lengths)[np.minimum(levels, len(self.lengths) - 1)]
        (counts, places), *others = self.jagged_axes(columns, rows, lengths)
        sent = np.minimum(counts, places)
        for other_counts, other_places in others:
            counts, places = counts * other_counts, places * other_places
            sent = sent * np.minimum(other_counts, other_places)
        total = int(sent.sum())
        return total, int(counts.sum()) - total, int(places.sum()) - total

    def jagged_axes(
        self, columns: Columns, rows: RowSelection, lengths: Int64
    ) -> list[tuple[Int64, Int64]]:
        """Return how many elements each row has, and places for them, on each axis of elements.

        `lengths` are the places on the first axis.
        """
        return [(columns.split.counts_of(rows), lengths)]

    def among(self, inputs: Mapping[str, Layout]) -> Layout:
        """Return the layout with what it takes over from a model's other inputs.

        Raises
        ------
        ConfigError
            If they do not tell what the declaration leaves open.
        """
        del inputs
        return self

    def doubt(self, columns: Columns) -> str | None:
        """Return why other rows may be meant, unless another input has these rows."""
        del columns
        return None

    def counted_input(self, jagged: Sequence[str]) -> str | None:
        """Return the input whose columns the layout shares, of the jagged ones, if it reads none.

        Raises
        ------
        ConfigError
            If there is no such input.
        """
        del jagged
        return None

    def referring(self, bound: Bound, others: Mapping[str, Bound]) -> Bound:
        """Return the binding with what it needs of the other inputs' bindings."""
        del others
        return bound

    def pack(self, array: Any) -> Tensor:
        """Return the tensor that would be sent for `array`."""
        bound = self.bind(Source(array))
        doubt = self.doubt(bound.columns)
        if doubt is not None:
            raise InputError(f"{type(self).__name__}: {doubt}")
        rows = slice(0, len(bound.rows))
        return bound.pack("input", rows, bound.level_of(rows))["input"]

    def unpack(self, tensor: Tensor, array: Any) -> ak.Array:
        """Return a tensor in the structure of `array`, with the fields' names (the inverse).

        Elements that were truncated are None; padding is gone.

        Raises
        ------
        InputError
            If the tensor has another shape than `pack` makes.
        """
        bound = self.bind(Source(array))
        layout, columns, rows = bound.layout, bound.columns, slice(0, len(bound.rows))
        expected = layout.tensor_shape(columns, rows, bound.level_of(rows))
        if tensor.shape != expected:
            raise InputError(
                f"{type(self).__name__}.unpack: expected a tensor of shape {list(expected)}, as "
                f"pack makes it of the array, got {list(tensor.shape)}"
            )
        if layout.dtype == TEXT:
            texts = Texts()
            numbers = layout.content(texts.numbered(tensor), columns)
            return bound.rows.unflatten(texts.content(numbers))
        # awkward has no bfloat16.
        held = tensor.astype(np.float32) if tensor.dtype in HALF[1:] else tensor
        return bound.rows.unflatten(layout.content(held, columns))


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A layout with the arrays of a call: any rows can be packed, at any time, in any thread."""

    layout: Layout
    columns: Columns

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""
        return self.columns.split.rows

    @property
    def levels(self) -> int:
        """How many levels there are; 1 if the layout pads all rows alike."""
        return max(len(self.layout.lengths), 1)

    def levels_of(self, rows: RowSelection) -> Int64:
        """Return the level that each of some rows needs."""
        return np.searchsorted(self.layout.lengths[:-1], self.columns.split.counts_of(rows))

    def level_of(self, rows: RowSelection) -> int:
        """Return the level of rows that share a request: the level of the longest."""
        return int(self.levels_of(rows).max(initial=0)) if self.levels > 1 else 0

    def pack(self, name: str, rows: RowSelection, level: int) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""
        return self.layout.make(name, self.columns, rows, level)


class FieldsLayout(Layout):
    """A layout of named fields."""

    __slots__ = ()
    features: tuple[Feature, ...]
    sort_by: str | None = None
    sort_ascending: bool = False
    missing: tuple[Any, ...] | None = None
    fill: tuple[Any, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        names = [path for feature in self.features for path in feature.paths]
        names += [feature.name for feature in self.features if feature.index]
        names += [self.sort_by] if self.sort_by else []
        return tuple(dict.fromkeys(path_of(name).column for name in names))

    def _declare(self, fields: Fields, dtype: DTypeLike, **values: Any) -> None:
        """Check the fields, the type and what stands for missing numbers; set all values."""
        features = as_features(fields, type(self).__name__)
        target = target_of(dtype, self)
        if target == TEXT:
            check_strings(features, values.get("sort_by"), type(self).__name__)
        for feature in features:
            number = feature.nonfinite
            if number is not None and not np.isfinite(number) and target.kind in "iub":
                raise ConfigError(
                    f"{type(self).__name__}, feature {feature.name!r}: {target.name} cannot hold "
                    f"nonfinite={number}; declare a dtype of real numbers"
                )
        declare(self, features=features, dtype=target)
        if values.get("missing") is not None:
            values["missing"] = self._one_for_each("missing", values["missing"], len(features))
        declare(self, **values)

    def _one_for_each(
        self, what: str, value: Any, count: int, of: str = "fields"
    ) -> tuple[Any, ...]:
        """Return a constant for each field, refusing one that the tensor cannot hold."""
        name = type(self).__name__
        several = isinstance(value, Sequence) and not isinstance(value, str)
        numbers = tuple(value) if several else (value,) * count
        if len(numbers) != count:
            raise ConfigError(
                f"{name}: expected one {what} or one for each of {count} {of}, got {len(numbers)}"
            )
        wrong = [n for n in numbers if isinstance(n, str) != (self.dtype == TEXT)]
        if wrong:
            kind = "a string, such as ''" if self.dtype == TEXT else "a number"
            raise ConfigError(f"{name}: expected {what} to be {kind}, got {wrong[0]!r}")
        if self.dtype == TEXT:
            return numbers
        for number in numbers:
            check_held(number, self.dtype, name, what)
        return tuple(map(float, numbers))

    def bind(self, source: Source) -> Bound:
        missing, texts = self.missing, None
        if self.dtype == TEXT:
            # What pads has its number before threads pack.
            texts = Texts(self.fill)
            source = Numbered(source, self.features, texts)
            missing = missing and tuple(texts.numbers_of(missing))
        columns = bind_columns(
            source,
            self.features,
            jagged=self.jagged,
            target=self._moved() if texts else self.dtype,
            sort_by=self.sort_by,
            longest=self.lengths[-1] if self.lengths else None,
            ascending=self.sort_ascending,
            missing=missing,
        )
        return Bound(self, replace(columns, texts=texts) if texts else columns)

    def row_shape(self, level: int) -> Shape:
        del level
        return (len(self.features),)


def ordered(axis_order: str, fields: int, length: int) -> tuple[int, ...]:
    """Return the shape of a row."""
    return {"FL": (fields, length), "LF": (length, fields), "L": (length,)}[axis_order]


def with_axes(tensor: Tensor, axis_order: str) -> Tensor:
    """Return the view ``[N, F, L]`` of a tensor."""
    if axis_order == "L":
        return tensor[:, np.newaxis]
    return tensor if axis_order == "FL" else tensor.transpose(0, 2, 1)
