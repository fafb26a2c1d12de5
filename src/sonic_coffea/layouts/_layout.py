"""What every layout is: a declaration, and what that becomes with the arrays of a call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, InputError, nearest
from sonic_coffea.layouts._columns import Columns, bind_columns
from sonic_coffea.layouts._fields import Feature, Source, as_features
from sonic_coffea.layouts._memory import empty
from sonic_coffea.layouts._range import HALF

if TYPE_CHECKING:
    import awkward as ak
    from awkward.contents import Content
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._rows import Int64, Rows, RowSelection

T = TypeVar("T")
Fields = Sequence[str | Feature] | str | Feature
Tensor = NDArray[Any]
DType = np.dtype[Any]
Shape = tuple[int, ...] | None

_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
TARGETS = tuple(_NAMES.split())


class Layout(ABC):
    """How arrays become one input of a model.

    Where the model has a `Bucketed` input, the rows of a request have a bucket: the length to which
    they are padded; else that is 0.

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
    buckets : tuple of int
        The lengths of which a request has one; none if the rows need no bucket.
    """

    __slots__ = ()
    dtype: DType
    stacks: ClassVar[bool] = True
    jagged: ClassVar[bool] = False
    buckets: tuple[int, ...] = ()

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""

    @abstractmethod
    def bind(self, source: Source) -> Bound:
        """Read the columns named, and nothing else."""

    @abstractmethod
    def row_shape(self, bucket: int) -> Any:
        """Return the shape of a row in a request of a bucket; None if the arrays will tell."""

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
        self, name: str, columns: Columns, rows: RowSelection, bucket: int
    ) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""
        shape = self.tensor_shape(columns, rows, bucket)
        out = empty(shape, np.dtype(np.float32) if self.dtype in HALF else self.dtype)
        self.write(out, columns, rows)
        return {name: out.astype(self.dtype, copy=False)}

    def tensor_shape(self, columns: Columns, rows: RowSelection, bucket: int) -> tuple[int, ...]:
        """Return the shape of the tensor of some rows."""
        return (len(columns.split.starts[rows]), *self.row_shape(bucket))

    def elements_shape(self, columns: Columns, rows: RowSelection, bucket: int) -> tuple[int, ...]:
        """Return the first axes of an output that has values for each element of jagged rows."""
        return len(columns.split.starts[rows]), self.padded_length(bucket)

    def padded_length(self, bucket: int) -> int:
        """Return the length to which jagged rows are padded in a request; 0 if they are not."""
        return bucket if self.buckets else 0

    def row_bytes(self, columns: Columns, rows: Int64, bucket: int) -> int | Int64:
        """Return the bytes of a row in a request: all the same, or of each of the rows."""
        del columns, rows
        return int(math.prod(self.row_shape(bucket))) * self.dtype.itemsize

    def count_elements(self, counts: Int64) -> tuple[int, int, int]:
        """Return how many elements of jagged rows are sent, truncated, and padding."""
        return (int(counts.sum()) if self.jagged else 0), 0, 0

    def counted_input(self, jagged: Sequence[str]) -> str | None:
        """Return the input to which the layout is bound instead of to arrays, of the jagged ones.

        Raises
        ------
        ConfigError
            If there is no such input.
        """
        del jagged
        return None

    def bind_beside(self, counted: Bound) -> Bound:
        """Bind the layout to another input; see `counted_input`."""
        raise NotImplementedError

    def pack(self, array: Any) -> Tensor:
        """Return the tensor that would be sent for `array`."""
        bound = self.bind(Source(array))
        rows = slice(0, len(bound.rows))
        return bound.pack("input", rows, bound.bucket_of(rows))["input"]

    def unpack(self, tensor: Tensor, array: Any) -> ak.Array:
        """Return a tensor in the structure of `array`, with the fields' names (the inverse).

        Elements that were truncated are None; padding is gone.

        Raises
        ------
        InputError
            If the tensor has another shape than that of `pack`.
        """
        bound = self.bind(Source(array))
        layout, columns, rows = bound.layout, bound.columns, slice(0, len(bound.rows))
        expected = layout.tensor_shape(columns, rows, bound.bucket_of(rows))
        if tensor.shape != expected:
            raise InputError(
                f"{type(self).__name__}.unpack: expected a tensor of shape {list(expected)}, as "
                f"pack makes it of the array, got {list(tensor.shape)}"
            )
        return bound.rows.unflatten(layout.content(tensor, columns))


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A layout with the arrays of a call: any rows can be packed, at any time, in any thread."""

    layout: Layout
    columns: Columns

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""
        return self.columns.split.rows

    def bucket_of(self, rows: RowSelection) -> int:
        """Return the bucket of rows that share a request: that of the longest."""
        buckets = self.layout.buckets
        if not buckets:
            return 0
        most = self.columns.split.counts_of(rows).max(initial=0)
        return buckets[min(int(np.searchsorted(buckets, most)), len(buckets) - 1)]

    def pack(self, name: str, rows: RowSelection, bucket: int) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""
        return self.layout.make(name, self.columns, rows, bucket)


class FieldsLayout(Layout):
    """A layout of named fields."""

    __slots__ = ()
    features: tuple[Feature, ...]
    sort_by: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (*(f.name for f in self.features), *((self.sort_by,) if self.sort_by else ()))

    def _declare(self, fields: Fields, dtype: DTypeLike, **values: Any) -> None:
        features = as_features(fields, type(self).__name__)
        declare(self, features=features, dtype=target_of(dtype, self), **values)

    def bind(self, source: Source) -> Bound:
        columns = bind_columns(
            source, self.features, jagged=self.jagged, target=self.dtype, sort_by=self.sort_by
        )
        return Bound(self, columns)

    def row_shape(self, bucket: int) -> Shape:
        del bucket
        return (len(self.features),)


def declare(layout: T, **values: Any) -> T:
    """Set the attributes of a frozen declaration."""
    for name, value in values.items():
        object.__setattr__(layout, name, value)
    return layout


def target_of(dtype: DTypeLike, layout: Layout) -> DType:
    """Return the type of a tensor, refusing one that is not supported."""
    try:
        target = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    except TypeError:
        target = None
    if target is None or target.name not in TARGETS:
        raise ConfigError(
            f"{type(layout).__name__} cannot make dtype {dtype!r}; {nearest(str(dtype), TARGETS)}"
        )
    return target


def length_of(length: Any, layout: Layout) -> int:
    """Return the length of an axis, refusing what is none."""
    if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or length < 1:
        name = type(layout).__name__
        raise ConfigError(f"{name}: expected a length of at least 1, got {length!r}")
    return int(length)
