"""What every layout is: a declaration, and what that becomes with the arrays of a call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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
    from awkward.forms import Form
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._rows import Int64, Rows, RowSelection

Fields = Sequence[str | Feature] | str | Feature
Tensor = NDArray[Any]
DType = np.dtype[Any]
Shape = tuple[int, ...] | None

_NAMES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
TARGETS = tuple(_NAMES.split())


class Layout(ABC):
    """How one input of a model is made from arrays.

    Attributes
    ----------
    stacks : bool
        Whether a server may stack the rows of several requests; not, if tensors count within one.
    jagged : bool
        Whether the rows consume the innermost jagged axis.
    """

    __slots__ = ()
    stacks: ClassVar[bool] = True
    jagged: ClassVar[bool] = False

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""

    @abstractmethod
    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensors that an input makes: type and shape of a row, -1 where it varies."""

    @abstractmethod
    def bind(self, source: Source) -> Bound:
        """Read the columns named, and nothing else."""

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

    def depth(self, form: Form) -> int:
        """Return how many axes a column has from the rows on, their own included."""
        del form
        return 2 if self.jagged else 1

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
        rows = slice(0, len(bound.rows))
        expected = bound.tensor_shape(rows, bound.bucket_of(rows))
        if tensor.shape != expected:
            raise InputError(
                f"{type(self).__name__}.unpack: expected a tensor of shape {list(expected)}, as "
                f"pack makes it of the array, got {list(tensor.shape)}"
            )
        return bound.rows.unflatten(bound.content(tensor))


class FieldsLayout(Layout):
    """A layout of named fields."""

    __slots__ = ()
    features: tuple[Feature, ...]
    dtype: DType

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        sort_by = getattr(self, "sort_by", None)
        return (*(f.name for f in self.features), *((sort_by,) if sort_by else ()))

    def _declare(self, fields: Fields, dtype: DTypeLike, **values: Any) -> None:
        """Set the attributes, as the classes are frozen."""
        features = as_features(fields, type(self).__name__)
        declare(self, features=features, dtype=target_of(dtype, self), **values)

    def _bind(self, source: Source) -> Columns:
        return bind_columns(
            source,
            self.features,
            jagged=self.jagged,
            target=self.dtype,
            sort_by=getattr(self, "sort_by", None),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Bound(ABC):
    """One input of a model with the arrays of a call.

    Any of its rows can be packed, at any time, in any thread. Where the model has a `Bucketed`
    input, the rows of a request have a bucket: the length to which they are padded; else that is 0.
    """

    jagged: ClassVar[bool] = False

    dtype: DType
    columns: Columns

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""
        return self.columns.split.rows

    @property
    def buckets(self) -> tuple[int, ...]:
        """The lengths of which a request has one; none if its rows need no bucket."""
        return ()

    def bucket_of(self, rows: RowSelection) -> int:
        """Return the bucket of rows that share a request: that of the longest."""
        if not self.buckets:
            return 0
        most = self.columns.split.counts_of(rows).max(initial=0)
        return self.buckets[min(int(np.searchsorted(self.buckets, most)), len(self.buckets) - 1)]

    def padded_length(self, bucket: int) -> int:
        """Return the length to which jagged rows are padded in a request; 0 if they are not."""
        del bucket
        return 0

    @abstractmethod
    def shape(self, bucket: int) -> tuple[int, ...]:
        """Return the shape of a row in a request of a bucket."""

    @abstractmethod
    def fill(self, out: Tensor, rows: RowSelection) -> None:
        """Write the rows to a tensor."""

    def content(self, tensor: Tensor) -> Content:
        """Return the tensor of all rows with one element, or list, for each."""
        del tensor
        raise ConfigError(f"{type(self).__name__.removeprefix('Bound')} has no inverse")

    def tensor_shape(self, rows: RowSelection, bucket: int) -> tuple[int, ...]:
        """Return the shape of the tensor that `pack` makes."""
        return (len(self.columns.split.starts[rows]), *self.shape(bucket))

    def constituents_shape(self, rows: RowSelection, bucket: int) -> tuple[int, ...]:
        """Return the first axes of an output that has values for each element of jagged rows."""
        return len(self.columns.split.starts[rows]), self.padded_length(bucket)

    def row_bytes(self, bucket: int, rows: Int64) -> int | Int64:
        """Return the bytes of a row in a request: all the same, or of each of the rows."""
        del rows
        return math.prod(self.shape(bucket)) * self.dtype.itemsize

    def count_elements(self, rows: RowSelection) -> tuple[int, int, int]:
        """Return how many elements of jagged rows are sent, truncated, and padding."""
        del rows
        return 0, 0, 0

    def pack(self, name: str, rows: RowSelection, bucket: int) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""
        shape = self.tensor_shape(rows, bucket)
        out = empty(shape, np.dtype(np.float32) if self.dtype in HALF else self.dtype)
        self.fill(out, rows)
        return {name: out.astype(self.dtype, copy=False)}


def declare(layout: Layout, **values: Any) -> None:
    """Set the attributes of a frozen layout."""
    for name, value in values.items():
        object.__setattr__(layout, name, value)


def target_of(dtype: DTypeLike, layout: Layout) -> DType:
    """Return the type of a tensor, refusing one that cannot be made."""
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
