"""The base of all layouts: the declaration, and its binding to the arrays of a call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from sonic_coffea.errors import ConfigError, InputError, nearest
from sonic_coffea.layouts._elements import Columns, bind_columns
from sonic_coffea.layouts._expressions import column_of
from sonic_coffea.layouts._features import (
    Feature,
    as_features,
    declare,
    equals,
    hashed,
    key_of,
    number_of,
    one_after_the_other,
    one_of,
    own_types,
)
from sonic_coffea.layouts._padding import listed
from sonic_coffea.layouts._source import Source
from sonic_coffea.layouts._structure import STRING, Structure, widened

if TYPE_CHECKING:
    import awkward as ak
    from awkward.contents import Content
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._structure import Int64, RowSelection, Tensor

DType = np.dtype[Any]
Field = str | float | tuple[str | int, ...] | Feature | tuple[Feature, ...]
Fields = Sequence[Field] | Field
Shape = tuple[int, ...] | None
Constants = float | str | Sequence[float] | Sequence[str] | None

_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
TARGETS = tuple(_NAMES.split())


class Batch(NamedTuple):
    """The rows of one request, and their bucket."""

    rows: RowSelection
    bucket: int = 0

    @property
    def size(self) -> int:
        """How many rows there are."""
        rows = self.rows
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


Part = tuple[str, "Bound", slice]
"""Elements with places along an axis: their collection's name, they themselves, and the places."""


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A layout with the arrays of a call: any rows can be packed, at any time, in any thread.

    Attributes
    ----------
    layout : Layout
        The layout.
    columns : Columns
        The fields that it reads; of `Tokens`, those of the first part.
    parts : tuple of Part
        The collections of `Tokens`.
    other : Columns or None
        The fields of what the rows of another input, or the second elements of pairs, have.
    """

    layout: Layout
    columns: Columns
    parts: tuple[Part, ...] = ()
    other: Columns | None = None

    @property
    def rows(self) -> Structure:
        """The rows, and the structure above them."""
        return self.columns.rows

    @property
    def buckets(self) -> int:
        """How many buckets there are; 1 if the layout pads all rows alike."""
        return max(len(self.layout.lengths), 1)

    def buckets_of(self, rows: RowSelection) -> Int64:
        """Return the bucket that each of some rows needs."""
        return np.searchsorted(self.layout.lengths[:-1], self.columns.counts(rows))

    def bucket_of(self, rows: RowSelection) -> int:
        """Return the bucket of rows that share a request: that of the longest."""
        return int(self.buckets_of(rows).max(initial=0)) if self.buckets > 1 else 0

    def counts(self, rows: RowSelection) -> Int64:
        """Return how many elements each of some rows has, in all collections."""
        if not self.parts:
            return self.columns.counts(rows)
        counts: Int64 = np.sum([part.counts(rows) for _, part, _ in self.parts], axis=0)
        return counts

    def axis(self, length: int) -> tuple[Part, ...]:
        """Return what has places along the axis of the elements, which is of some length."""
        return self.parts or (("", self, slice(0, length)),)

    def pack(self, name: str, batch: Batch, out: Tensor | None = None) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""
        return self.layout.make(name, self, batch, out)


class Layout(ABC):
    """How arrays become one input of a model.

    If the model has `Bucketed` inputs, each row has a bucket, and a request has rows of one bucket.
    It is the largest step that any group of the row needs among the lengths of that group. Each
    group is padded to its own length in that bucket, or to its last length. So a row's padding
    depends on that row only. Without `Bucketed` inputs, the bucket is 0.

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
    dependency : str or None
        The input that is bound before, as this one depends on its elements.
    lengths : tuple of int
        To what the layout pads jagged rows, in each bucket; none if it does not pad.
    """

    __slots__ = ()
    __eq__, __hash__ = equals, hashed
    dtype: Any
    stacks: ClassVar[bool] = True
    jagged: ClassVar[bool] = False
    holds_strings: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    dependency: ClassVar[str | None] = None
    lengths: ClassVar[tuple[int, ...]] = ()

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""

    @abstractmethod
    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        """Find the columns named, and read nothing else; `others` are bound inputs."""

    @abstractmethod
    def row_shape(self, bucket: int) -> Shape:
        """Return the shape of a row in a bucket; None if the arrays will tell.

        In bucket -1, what varies with the bucket is -1.
        """

    @abstractmethod
    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        """Write rows to a tensor."""

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        """Return the tensor of all rows with one element, or list, for each."""
        del tensor, bound
        raise ConfigError(f"{type(self).__name__} has no inverse")

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensors that an input makes: type and shape of a row, -1 where it varies."""
        return {name: (self.dtype, self.row_shape(-1))}

    def make(
        self, name: str, bound: Bound, batch: Batch, out: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""
        if out is None:
            out = np.empty(self.tensor_shape(bound, batch), self.dtype)
        self.write(out, bound, batch)
        return {name: out}

    def tensor_shape(self, bound: Bound, batch: Batch) -> tuple[int, ...]:
        """Return the shape of the tensor of some rows."""
        del bound
        return (batch.size, *(self.row_shape(batch.bucket) or ()))

    def elements_shape(self, bound: Bound, batch: Batch) -> tuple[int, ...]:
        """Return the first axes of an output that has values for each element of jagged rows."""
        del bound
        return batch.size, self.padded_length(batch.bucket)

    def padded_length(self, bucket: int) -> int:
        """Return the length to which jagged rows are padded in a bucket; 0 if they are not."""
        if not self.lengths:
            return 0
        varies = bucket < 0 and len(self.lengths) > 1
        return -1 if varies else self.lengths[min(max(bucket, 0), len(self.lengths) - 1)]

    def item_bytes(self, bound: Bound) -> int:
        """Return the bytes of a number, or of the longest string and its length."""
        if self.dtype != STRING:
            return int(self.dtype.itemsize)
        columns = bound.columns.terms.values()
        return max(len(s) for data, _, _ in columns for s in (b"", *data)) + 4

    def row_bytes(self, bound: Bound, batch: Batch) -> int | Int64:
        """Return the bytes of a row in a request: all the same, or of each of the rows."""
        return math.prod(self.row_shape(batch.bucket) or ()) * self.item_bytes(bound)

    def count_elements(
        self, bound: Bound, rows: RowSelection, buckets: Int64
    ) -> tuple[int, int, int]:
        """Return how many elements of jagged rows are sent, truncated, and padding.

        `buckets` has the bucket of each row.
        """
        axes = self.jagged_axes(bound, rows, buckets)
        sent = sum(int(np.minimum(counts, places).sum()) for counts, places in axes)
        truncated = sum(int(counts.sum()) for counts, _ in axes) - sent
        return sent, truncated, sum(int(np.sum(places)) for _, places in axes) - sent

    def jagged_axes(
        self, bound: Bound, rows: RowSelection, buckets: Int64
    ) -> list[tuple[Int64, Int64]]:
        """Return how many elements each row has, and places for them, of each jagged collection."""
        if not self.jagged:
            return []
        if bound.parts:
            each = [part for _, part, _ in bound.parts]
            return [axis for p in each for axis in p.layout.jagged_axes(p, rows, buckets)]
        counts = bound.columns.counts(rows)
        if not self.lengths:
            return [(counts, counts)]
        return [(counts, np.asarray(self.lengths)[np.minimum(buckets, len(self.lengths) - 1)])]

    def resolved(self, inputs: Mapping[str, Layout]) -> Layout:
        """Return the layout with what it takes over from a model's other inputs.

        Raises
        ------
        ConfigError
            If they do not tell what the declaration leaves open.
        """
        del inputs
        return self

    def pack(self, array: Any) -> Tensor:
        """Return the tensor that would be sent for `array`."""
        bound = self.bind(Source(array))
        rows = slice(0, len(bound.rows))
        return bound.pack("input", Batch(rows, bound.bucket_of(rows)))["input"]

    def unpack(self, tensor: Tensor, array: Any) -> ak.Array:
        """Return a tensor in the structure of `array`, with the fields' names (the inverse).

        Elements that were truncated are None; padding is gone.

        Raises
        ------
        InputError
            If the tensor has another shape than `pack` makes.
        """
        tensor = np.asarray(tensor)
        bound = self.bind(Source(array))
        rows = slice(0, len(bound.rows))
        expected = bound.layout.tensor_shape(bound, Batch(rows, bound.bucket_of(rows)))
        if tensor.shape != expected:
            raise InputError(
                f"{type(self).__name__}.unpack: expected a tensor of shape {list(expected)}, as "
                f"pack makes it of the array, got {list(tensor.shape)}"
            )
        return bound.rows.unflatten(bound.layout.content(widened(tensor), bound))


class FieldsLayout(Layout):
    """A layout of named fields."""

    __slots__ = ()
    named: ClassVar[str] = "fields"
    sort_by: Any = None
    sort_ascending: bool = False
    missing: Any = None

    @property
    def features(self) -> tuple[Feature, ...]:
        """The channels of the tensor."""
        features: tuple[Feature, ...] = getattr(self, self.named)
        return features

    @property
    def row_width(self) -> int:
        """The bytes of all channels of an element."""
        return len(self.features) * int(self.dtype.itemsize)

    @property
    def columns(self) -> tuple[str, ...]:
        key = key_of(self.sort_by, type(self).__name__)
        named = (*self.features, *((key,) if key else ()))
        return tuple(dict.fromkeys(column_of(path) for f in named for path in f.paths))

    def _declare(self) -> None:
        """Check the fields, the type, the key and what stands for missing numbers."""
        own_types(self)
        name = type(self).__name__
        features = as_features(getattr(self, self.named), name)
        target = target_of(self.dtype, self)
        declare(self, **{self.named: features, "dtype": target})
        key = key_of(self.sort_by, name)
        strings = target == STRING
        for feature in features:
            what, number = f"{name}, feature {feature.text!r}", feature.nonfinite
            if strings and not (feature.plain and feature.expression is None):
                raise ConfigError(f"{what}: strings are sent as they are, got {feature!r}")
            if strings and key is not None and feature.name == key.name:
                raise ConfigError(
                    f"{what}: elements are not sorted by strings; expected sort_by to be a field "
                    "of numbers"
                )
            if number is not None and not np.isfinite(number) and target.kind in "iub":
                raise ConfigError(
                    f"{what}: {target.name} cannot hold nonfinite={number}; declare a dtype of "
                    "real numbers"
                )
        if self.missing is not None:
            declare(self, missing=constants_of("missing", self.missing, self, len(features)))

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        del others
        return Bound(self, self.bound_columns(source))

    def bound_columns(self, source: Source, *, jagged: bool | None = None) -> Columns:
        """Find the columns of the fields."""
        missing = self.missing
        if self.dtype == STRING and missing is not None:
            missing = [text.encode() for text in missing]
        return bind_columns(
            source,
            self.features,
            jagged=self.jagged if jagged is None else jagged,
            missing=missing,
            key=key_of(self.sort_by, type(self).__name__),
            ascending=self.sort_ascending,
            strings=self.dtype == STRING,
        )

    def scattered(self, by_element: Tensor, bound: Bound) -> Content:
        """Return values of all elements, ``[N, L, F]`` or ``[sum n, F]``, as lists of records."""
        names = [feature.channel for feature in self.features]
        return listed(bound.columns, by_element, names)


def dtype_of(dtype: DTypeLike) -> DType:
    """Return the type that a declaration names; numpy has no bfloat16, and no such strings."""
    if isinstance(dtype, str) and dtype in ("string", "bfloat16"):
        return STRING if dtype == "string" else np.dtype(ml_dtypes.bfloat16)
    return STRING if dtype is str else np.dtype(dtype)


def dtype_name(dtype: DType) -> str:
    """Return the name of a type as a declaration has it."""
    return "string" if dtype == STRING else dtype.name


def target_of(dtype: DTypeLike, layout: Any) -> DType:
    """Return the type of a tensor, refusing one that is not supported."""
    name = type(layout).__name__
    target: np.dtype[Any] | None
    try:
        target = dtype_of(dtype).newbyteorder("=")
    except (TypeError, ValueError, SyntaxError):
        target = None
    if target is None or (target != STRING and target.name not in TARGETS):
        raise ConfigError(f"{name}: no dtype {dtype!r}; {nearest(str(dtype), TARGETS)}")
    if target == STRING and not layout.holds_strings:
        raise ConfigError(
            f"{name} holds numbers; strings are sent by Row, Padded, Bucketed and Flat"
        )
    return target


def constants_of(
    what: str, value: Any, layout: Layout, count: int, of: str = "fields"
) -> tuple[Any, ...]:
    """Return a constant for each field, refusing one that the tensor cannot hold."""
    name, dtype = type(layout).__name__, layout.dtype
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    expected = f"{name}: expected one {what} or a list of them"
    values = one_after_the_other(value, expected) if several else [value] * count
    if len(values) != count:
        raise ConfigError(
            f"{name}: expected one {what} or one for each of {count} {of}, got {len(values)}"
        )
    if dtype != STRING:
        return tuple(check_held(number, dtype, name, what) for number in values)
    for text in values:
        if not isinstance(text, str):
            raise ConfigError(f"{name}: expected {what} to be a string, such as '', got {text!r}")
    return tuple(map(str, values))


def check_held(value: Any, dtype: DType, layout: str, what: str) -> float:
    """Return a number of a declaration, refusing one that the tensor cannot hold."""
    number = number_of(value, f"{layout}: expected {what} to be a number")
    with np.errstate(all="ignore"):
        held = float(np.asarray(number, np.float64).astype(dtype))
    exact = dtype.kind in "iub"
    if (exact and held != number) or (np.isfinite(number) and not np.isfinite(held)):
        raise ConfigError(f"{layout}: {dtype.name} cannot hold the {what} {number!r}")
    # One NaN, so that text and equality are those of the declaration.
    return math.nan if math.isnan(number) else float(number)


def length_of(length: Any, declaration: object) -> int:
    """Return the length of an axis, refusing anything but a positive integer."""
    if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or length < 1:
        name = type(declaration).__name__
        raise ConfigError(f"{name}: expected a length of at least 1, got {length!r}")
    return int(length)


def shape_of(shape: Any, declaration: object) -> tuple[int, ...]:
    """Return the lengths of several axes."""
    expected = f"{type(declaration).__name__}: expected a list of lengths"
    return tuple(length_of(n, declaration) for n in one_after_the_other(shape, expected))


def lengths_of(lengths: Any, layout: Any) -> tuple[int, ...]:
    """Return the length, or lengths, to which rows are padded, which must ascend."""
    checked = shape_of(lengths if isinstance(lengths, Iterable) else (lengths,), layout)
    if not checked or list(checked) != sorted(set(checked)):
        raise ConfigError(f"{type(layout).__name__}: expected ascending lengths, got {lengths}")
    return checked


def order_of(
    axis_order: Any, layout: Layout, fields: int = 1, orders: Sequence[str] = ("FL", "LF", "L")
) -> None:
    """Refuse an order of a tensor's axes that is unknown, or lacks a needed axis."""
    expected = f"{type(layout).__name__}: expected axis_order"
    one_of(orders, axis_order, expected)
    if fields != 1:
        one_of(
            [order for order in orders if "F" in order], axis_order, f"{expected} of several fields"
        )


def ordered(axis_order: str, fields: int, length: int) -> tuple[int, ...]:
    """Return the shape of a row."""
    return {"FL": (fields, length), "LF": (length, fields), "L": (length,)}[axis_order]


def with_axes(tensor: Tensor, axis_order: str) -> Tensor:
    """Return the view ``[N, F, L]`` of a tensor, or ``[N, F, J, L]``."""
    if axis_order == "L":
        return tensor[:, np.newaxis]
    return tensor if axis_order == "FL" else np.moveaxis(tensor, -1, 1)
