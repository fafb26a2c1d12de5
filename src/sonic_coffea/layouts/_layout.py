"""The base of all layouts: the declaration, and its binding to the arrays of a call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import awkward as ak
import numpy as np
from awkward.contents import Content

from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts._elements import Columns
from sonic_coffea.layouts._features import Feature
from sonic_coffea.layouts._options import DType, equals, hashed
from sonic_coffea.layouts._source import Source, check_index, has_no_data
from sonic_coffea.layouts._structure import STRING, Int64, RowSelection, Structure, Tensor, widened

Shape = tuple[int, ...] | None


class Batch(NamedTuple):
    """The rows of one request, and their bucket."""

    rows: RowSelection
    bucket: int = 0


Part = tuple[str, "Bound", slice]
"""Elements with places along an axis: their collection's name, they themselves, and the places."""


@dataclass(slots=True, eq=False)
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
    inner : Columns or None
        The elements of the lists, if each element of a row is a list.
    referred : Columns or None
        The elements to which the numbers refer.
    """

    layout: Layout
    columns: Columns
    parts: tuple[Part, ...] = ()
    inner: Columns | None = None
    referred: Columns | None = None

    @property
    def rows(self) -> Structure:
        """The rows, and the structure above them."""
        return self.columns.rows

    def buckets_of(self, rows: RowSelection) -> Int64:
        """Return the bucket that each of some rows needs."""
        return np.searchsorted(self.layout.lengths[:-1], self.columns.counts(rows))

    def bucket_of(self, rows: RowSelection) -> int:
        """Return the bucket of rows that share a request: that of the longest."""
        is_bucketed = len(self.layout.lengths) > 1
        return int(self.buckets_of(rows).max(initial=0)) if is_bucketed else 0

    def axis(self, length: int) -> tuple[Part, ...]:
        """Return what has places along the axis of the elements, which is of some length."""
        return self.parts or (("", self, slice(0, length)),)


class Layout(ABC):
    """How arrays become one input of a model.

    If the model has `Bucketed` inputs, each row has a bucket, and a request has rows of one bucket.
    Each input needs its first, second or later length for the row; the bucket is the latest of
    these, counted from 0. Each input is padded to its own length in that bucket, or to its last
    length. So a row's padding depends on that row only. Without `Bucketed` inputs, it is 0.

    Attributes
    ----------
    dtype : dtype
        Type of the tensor.
    columns : tuple of str
        The fields that are read.
    features : tuple of Feature
        The channels, if fields make them.
    stacks : bool
        Whether a server may stack the rows of several requests; not, if tensors count within one.
    jagged : bool
        Whether the rows consume the innermost jagged axis.
    holds_strings : bool
        Whether its tensors may be of strings.
    merges : bool
        Whether nothing tells the rows of a request apart.
    dependency : str or None
        The input that is bound before, as this one counts its elements.
    length : int or tuple of int
        To what the layout pads jagged rows, in each bucket; there is none if it does not pad.
    axis_order : str
        The axes of a row's tensor: F, or C, for the channels, and L for the places of elements.
    width : int
        How many channels there are.
    """

    __slots__ = ()
    __eq__, __hash__ = equals, hashed
    dtype: Any
    features: ClassVar[tuple[Feature, ...]] = ()
    stacks: ClassVar[bool] = True
    jagged: ClassVar[bool] = False
    holds_strings: ClassVar[bool] = False
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    merges: ClassVar[bool] = False
    dependency: ClassVar[str | None] = None
    axis_order: str
    width: ClassVar[int] = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """To what the layout pads jagged rows, in each bucket."""
        length: Any = getattr(self, "length", None)
        if length is None:
            return ()
        return length if isinstance(length, tuple) else (length,)

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""

    @abstractmethod
    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        """Find the columns named, and read nothing else; `others` are bound inputs."""

    @property
    def axes(self) -> str:
        """The axes of a row's tensor, with one L for each axis of places."""
        return self.axis_order

    def row_shape(self, bucket: int) -> Shape:
        """Return the shape of a row in a bucket; None if the arrays will tell.

        In bucket -1, what varies with the bucket is -1.
        """
        return shaped(self.axes, self.width, repeat(self.padded_length(bucket)))

    def by_element(self, tensor: Tensor) -> Tensor:
        """Return the view of a tensor whose last axis is that of the channels."""
        places = self.axes.replace("C", "F")
        if "F" not in places:
            return tensor[..., np.newaxis]
        order = [*range(tensor.ndim)]
        order.append(order.pop(places.index("F") - len(places)))
        by_element: Tensor = tensor.transpose(order)
        return by_element

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

    def make(self, name: str, bound: Bound, batch: Batch) -> dict[str, Tensor]:
        """Return the tensors of some rows, by the names of the model's inputs."""
        out = np.empty(self.tensor_shape(bound, batch), self.dtype)
        self.write(out, bound, batch)
        return {name: out}

    def tensor_shape(self, bound: Bound, batch: Batch) -> tuple[int, ...]:
        """Return the shape of the tensor of some rows."""
        return (len(bound.columns.numbers(batch.rows)), *(self.row_shape(batch.bucket) or ()))

    def padded_length(self, bucket: int) -> int:
        """Return the length to which jagged rows are padded in a bucket; 0 if they are not.

        In bucket -1, a length that varies with the bucket is -1.
        """
        lengths = self.lengths
        if bucket < 0 and len(lengths) > 1:
            return -1
        return lengths[min(bucket, len(lengths) - 1)] if lengths else 0

    def item_bytes(self, bound: Bound) -> int:
        """Return the bytes of a number, or of the longest string and its length."""
        if self.dtype != STRING:
            return int(self.dtype.itemsize)
        # Beside the strings, it reads numbers that sort them or refer to them.
        texts = (data for data, *_ in bound.columns.terms.values() if data.dtype == STRING)
        return max((len(s) for data in texts for s in data), default=0) + 4

    def row_bytes(self, bound: Bound, batch: Batch) -> int | Int64:
        """Return the bytes of a row in a request: all the same, or of each of the rows."""
        return math.prod(self.row_shape(batch.bucket) or ()) * self.item_bytes(bound)

    def count_elements(self, bound: Bound, rows: RowSelection, buckets: Int64) -> tuple[int, ...]:
        """Return how many elements of jagged rows are sent, truncated, and padding.

        `buckets` has the bucket of each row.
        """
        if not self.jagged:
            return 0, 0, 0
        counts = places = bound.columns.counts(rows)
        if self.lengths:
            places = np.asarray(self.lengths)[np.minimum(buckets, len(self.lengths) - 1)]
        sent = int(np.minimum(counts, places).sum())
        return sent, int(counts.sum()) - sent, int(places.sum()) - sent

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
        bound, batch = self._whole(array)
        return bound.layout.make("input", bound, batch)["input"]

    def unpack(self, tensor: Tensor, array: Any) -> ak.Array:
        """Return a tensor in the structure of `array`, with the fields' names (the inverse).

        Elements that were truncated are None; padding is gone. Channels of one name are numbered:
        ``pt``, ``pt_1``.

        Raises
        ------
        InputError
            If the tensor has another shape than `pack` makes, masked values, or strings that are
            not of type bytes.
        """
        is_masked, tensor = np.ma.is_masked(tensor), np.asarray(tensor)
        bound, batch = self._whole(array)
        expected = bound.layout.tensor_shape(bound, batch)
        if tensor.shape != expected:
            raise InputError(
                f"{type(self).__name__}.unpack: expected a tensor of shape {list(expected)}, as "
                f"pack makes it of the array, got {list(tensor.shape)}"
            )
        texts = tensor.flat if tensor.dtype == STRING else ()
        is_other = (tensor.dtype == STRING) != (self.dtype == STRING)
        if is_masked or is_other or not all(isinstance(text, bytes) for text in texts):
            raise InputError(
                f"{type(self).__name__}.unpack: expected values without a mask, and strings of "
                "type bytes, as pack makes them"
            )
        return bound.rows.unflatten(bound.layout.content(widened(tensor), bound))

    def _whole(self, array: Any) -> tuple[Bound, Batch]:
        if has_no_data(array):
            raise InputError("layouts pack arrays that are in memory; compute lazy ones")
        if isinstance(array, dict):
            check_index(array)
        bound = self.bind(Source(array))
        rows = slice(0, len(bound.rows))
        return bound, Batch(rows, bound.bucket_of(rows))


def shaped(axes: str, width: int, lengths: Iterable[int]) -> tuple[int, ...]:
    """Return the shape of axes of places, of some lengths, and of the channels."""
    each = iter(lengths)
    return tuple([next(each) if axis == "L" else width for axis in axes])
