"""The outputs of a call, put together from responses in the structure of the objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from awkward.contents import (
    ByteMaskedArray,
    Content,
    ListArray,
    NumpyArray,
    RecordArray,
    RegularArray,
    UnmaskedArray,
)
from awkward.index import Index8, Index64

from sonic_coffea.errors import ConfigError, ResponseError, nearest
from sonic_coffea.layouts._batch import bind_inputs
from sonic_coffea.layouts._layout import Batch, Bound, Part
from sonic_coffea.layouts._output import Output
from sonic_coffea.layouts._padding import Axis, Scatter, places_of
from sonic_coffea.layouts._structure import STRING, RowSelection, Tensor

if TYPE_CHECKING:
    from sonic_coffea.layouts._batch import Inputs
    from sonic_coffea.layouts._layout import Layout

Response = Mapping[str, Tensor]
Convert = Callable[[RowSelection, int, Response], Tensor]
Kind = tuple[tuple[int, ...], np.dtype[Any]]


def assemble(name: str, output: Output, inputs: Inputs) -> ByRow:
    """Return what puts an output of a call together."""
    rows = len(inputs.rows)
    if output.splits is not None:
        parts: list[Tensor] = []
        convert: Convert = partial(_collected, name, output, parts)
        return ByRow(name, output, rows, None, convert, partial(_collections, output, parts), (2,))
    if output.per == "row":
        return ByRow(name, output, rows)
    elements = Constituents.of(name, output, inputs)
    if output.choose is None:
        return ByRow(name, output, rows, elements)
    collections = [part for part, _, _ in elements.parts]
    convert = partial(_chosen, name, output, elements)
    finish = partial(_choices, output, collections)
    each = output.choices, max(len(collections), 1)
    return ByRow(name, output, rows, None, convert, finish, each)


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The outputs of a call; responses of several threads are put in their places one by one.

    Attributes
    ----------
    each : mapping of str to ByRow
        What puts each output together.
    tensors : list of str
        The tensors that a request asks for: the outputs, and their splits.
    without_axis : frozenset of str
        Outputs that come without the axis of the rows: each request has one.
    lock : Lock
        Held while a response is put in its places; copies with another `without_axis` share it.
    """

    each: Mapping[str, ByRow]
    tensors: list[str]
    without_axis: frozenset[str] = frozenset()
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, declared: Mapping[str, Output], inputs: Inputs) -> Outputs:
        """Return what puts the outputs of a call together, by their declarations."""
        splits = [output.splits for output in declared.values() if output.splits is not None]
        each = {name: assemble(name, output, inputs) for name, output in declared.items()}
        return cls(each, list(dict.fromkeys([*declared, *splits])))

    def of_rows(self, response: Response) -> Response:
        """Return a response with the axis of the rows."""
        if not self.without_axis:
            return response
        return {n: t[np.newaxis] if n in self.without_axis else t for n, t in response.items()}

    def place(self, selection: RowSelection, rows: int, response: Response) -> None:
        """Put the response for some rows in its places; see `ByRow.place`."""
        with self.lock:
            for output in self.each.values():
                output.place(selection, rows, response)

    def content(self, *, optional: bool = False) -> Content:
        """Return the only output, or a record of all; see `ByRow.content`."""
        contents = [output.content(optional=optional) for output in self.each.values()]
        return contents[0] if len(contents) == 1 else RecordArray(contents, list(self.each))


class ByRow:
    """One output of a call, as its responses come in, in any order.

    Parameters
    ----------
    name : str
        The output's name.
    output : Output
        What it is.
    rows : int
        How many rows there are.
    elements : Constituents, optional
        What the axes between the rows and the values have; by default, there are none.
    convert : callable, optional
        Returns an array of whole numbers for each of some rows, of a response.
    finish : callable, optional
        Returns one element, or list, for each row, of these arrays.
    each : tuple of int, optional
        The shape of these arrays.
    """

    def __init__(
        self,
        name: str,
        output: Output,
        rows: int,
        elements: Constituents | None = None,
        convert: Convert | None = None,
        finish: Callable[[Tensor], Content] | None = None,
        each: tuple[int, ...] | None = None,
    ) -> None:
        self.name, self.output, self._rows = name, output, rows
        self._elements = elements or Constituents()
        self._convert, self._finish, self._each = convert, finish, each
        self._scatters: list[Scatter] = []

    @property
    def tensor(self) -> Tensor:
        """The responses so far, as the model gives them."""
        (scatter,) = self._scatters or self._blank()
        return scatter.values

    def place(self, selection: RowSelection, rows: int, response: Response) -> None:
        """Put the response for some rows in its place.

        Raises
        ------
        ResponseError
            If it is not what was declared.
        """
        expected: tuple[int, ...] = (rows,)
        if self._convert is not None:
            tensor = self._convert(selection, rows, response)
        else:
            expected = self._elements.shape(selection, rows)
            tensor = self.output.labels_last(tensor_of(self.name, self.output, response))
            check_axes(self.name, self.output, tensor, expected)
            self.output.check_each(tensor.shape[len(expected) :])
        each = tensor.shape[len(expected) :]
        if not self._scatters:
            self._scatters = self._made(each, tensor.dtype)
        known = self._scatters[0]
        check_kind(self.name, self.output, (known.each, known.dtype), (each, tensor.dtype))
        places: list[Any] = [(slice(None), here) for _, _, here in self._elements.parts]
        for scatter, here in zip(self._scatters, places or [()], strict=True):
            scatter.place(selection, tensor[here])

    def _made(self, each: tuple[int, ...], dtype: np.dtype[Any]) -> list[Scatter]:
        return [Scatter(axes, self._rows, each, dtype) for axes in self._elements.collections]

    def _blank(self) -> list[Scatter]:
        if self._each is not None:
            return self._made(self._each, np.dtype(np.int64))
        blank = self.output.blank(0)
        return self._made(blank.shape[1:], blank.dtype)

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each number or array, from the shape of a row on the server.

        A server lists the axes of padded elements, not the axis of all elements of a request.
        """
        return tuple(shape[len(self._elements.axes) * self._elements.is_padded :])

    def expect(self, shape: Sequence[int]) -> None:
        """Record the shape of a row that the server tells, for rows without a response."""
        self.output = self.output.shaped(self.inner(shape))

    def content(self, *, optional: bool = False) -> Content:
        """Return one element, or list, for each row.

        With `optional`, it has the type that other chunks may have, in which some are truncated.
        """
        finish = self.output.content if self._finish is None else self._finish
        optional = optional and self._elements.is_padded
        contents = [
            scatter.lists(finish(scatter.values), optional=optional)
            for scatter in self._scatters or self._blank()
        ]
        parts = self._elements.parts
        if not parts:
            return contents[0]
        each = zip(parts, contents, strict=True)
        lists = [x.content if part.columns.offsets is None else x for (_, part, _), x in each]
        return RecordArray(lists, [name for name, _, _ in parts])


@dataclass(frozen=True, slots=True, eq=False)
class Constituents:
    """The axes between the rows and the values of an output, whose elements are inputs'.

    Attributes
    ----------
    inputs : Inputs, optional
        The inputs of the call.
    bound : Bound, optional
        The input whose elements the values belong to; without it, there is a value for each row.
    axes : sequence
        The input of each axis, or None, and how many other places are before and after.
    """

    inputs: Inputs | None = None
    bound: Bound | None = None
    axes: Sequence[tuple[Bound | None, int, int]] = ()

    @classmethod
    def of(cls, name: str, output: Output, inputs: Inputs) -> Constituents:
        """Find the inputs of an output's axes."""
        jagged = [name for name, bound in inputs.bound.items() if bound.layout.jagged]
        if not jagged:
            raise ConfigError(
                f"output {name!r} is per constituent, but no input of the model has a jagged axis"
            )
        named = [of for of, _, _ in output.named_axes if of]
        of = output.of or (named[0] if named else jagged[0])
        for wanted in (of, *named):
            if wanted not in jagged:
                raise ConfigError(
                    f"output {name!r} is per constituent of {wanted!r}; {nearest(wanted, jagged)}"
                )
        bound = inputs.bound[of]
        several = len(output.named_axes) > 1
        if not bound.layout.padded_length(0) and (several or output.choose == "slot"):
            what = f"{len(output.named_axes)} axes" if several else "slots"
            raise ConfigError(
                f"output {name!r} has {what} of the constituents of input {of!r}, which is not "
                "padded; name another input with of=, or declare a padded one"
            )
        if bound.parts and several and not output.choose:
            raise ConfigError(
                f"output {name!r} has values of pairs of the elements of input {of!r}, which are "
                "of several collections; name an input of one collection with of=, or the greatest "
                "with choose='argmax'"
            )
        known = {"": bound, **inputs.bound}
        axes = [(None if of is None else known[of], b, a) for of, b, a in output.named_axes]
        return cls(inputs, bound, axes)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The collections of tokens."""
        return () if self.bound is None else self.bound.parts

    @property
    def is_padded(self) -> bool:
        """Whether the elements are padded."""
        return self.bound is not None and self.bound.layout.padded_length(0) > 0

    @property
    def collections(self) -> list[list[Axis]]:
        """The axes of the values of each collection."""
        if self.parts:
            return [[(part.columns, 0, 0)] for _, part, _ in self.parts]
        return [[(each.columns if each else None, b, a) for each, b, a in self.axes]]

    def shape(self, selection: RowSelection, rows: int) -> tuple[int, ...]:
        """Return the first axes of the output for some rows."""
        if self.inputs is None or self.bound is None:
            return (rows,)
        batch = Batch(selection, self.inputs.bucket_of(selection))
        shape = self.bound.layout.elements_shape(self.bound, batch)
        if len(shape) == 1:
            return shape
        places = [
            (each.layout.padded_length(batch.bucket) if each else 0) + before + after
            for each, before, after in self.axes
        ]
        return (rows, *places)


def tensor_of(name: str, output: Output, response: Response) -> Tensor:
    """Return the tensor of an output; a response without it, or of another kind, is an error."""
    if name not in response:
        raise ResponseError(
            f"the answer lacks output {name!r}; it has {', '.join(response) or 'none'}"
        )
    tensor = response[name]
    if output.dtype == STRING:
        if tensor.dtype != STRING:
            raise ResponseError(f"output {name!r} came back as {tensor.dtype}, not strings")
        for string in tensor.reshape(-1).tolist():
            try:
                string.decode()
            except UnicodeDecodeError:
                raise ResponseError(
                    f"output {name!r} came back with bytes that are no UTF-8: {string!r}"
                ) from None
    return tensor


def misshapen(name: str, tensor: Tensor, expected: str) -> ResponseError:
    """Return the error for a tensor of another shape than expected."""
    return ResponseError(f"output {name!r} came back with shape {list(tensor.shape)} {expected}")


def check_axes(name: str, output: Output, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise if a response has other first axes than expected."""
    if tensor.shape[: len(expected)] != expected:
        what = f"for {' rows of '.join(map(str, expected[:2]))}"
        axes = len(output.named_axes)
        each = f"constituents in {axes} axes" if axes > 1 else "constituents"
        raise misshapen(name, tensor, f"{what} {'rows' if output.per == 'row' else each}")


def check_kind(name: str, output: Output, before: Kind, now: Kind) -> None:
    """Raise if a response is of another kind than an earlier one."""
    if before != now:
        of = "a row" if output.per == "row" else "for each constituent"
        raise ResponseError(
            f"output {name!r} came back as {now[1]} {list(now[0])} {of}, "
            f"before as {before[1]} {list(before[0])}"
        )


def _collected(
    name: str,
    output: Output,
    parts: list[Tensor],
    selection: RowSelection,
    rows: int,
    response: Response,
) -> Tensor:
    """Keep the new collections of some rows, and return where each begins and ends."""
    splits = str(output.splits)
    tensor = tensor_of(name, output, response)
    ends = tensor_of(splits, Output(dtype="int64"), response)
    del selection
    offsets = ends.reshape(-1).astype(np.int64)
    if len(offsets) != rows + 1:
        raise misshapen(splits, ends, f"for {rows} rows, which need {rows + 1}")
    whole = tensor.ndim and offsets[0] == 0 and offsets[-1] == len(tensor)
    if not whole or np.any(np.diff(offsets) < 0):
        raise ResponseError(
            f"output {splits!r} does not split the {len(tensor) if tensor.ndim else 0} of "
            f"{name!r}: it runs from {offsets[0]} to {offsets[-1]}"
        )
    if parts:
        kinds = [(each.shape[1:], each.dtype) for each in (parts[0], tensor)]
        check_kind(name, output, *kinds)
    first = sum(map(len, parts))
    parts.append(tensor)
    return np.stack((offsets[:-1], offsets[1:]), axis=1) + first


def _collections(output: Output, parts: list[Tensor], ends: Tensor) -> Content:
    """Return a new collection for each row."""
    whole = np.concatenate(parts) if parts else output.blank(0)
    starts, stops = (Index64(np.ascontiguousarray(side, np.int64)) for side in ends.T)
    lists = ListArray(starts, stops, output.content(whole))
    return lists.to_ListOffsetArray64(start_at_zero=True)


def _chosen(
    name: str,
    output: Output,
    elements: Constituents,
    selection: RowSelection,
    rows: int,
    response: Response,
) -> Tensor:
    """Return the indices ``[n, W, C]`` of the elements that a model chooses, in each collection."""
    bound, inputs, width = elements.bound, elements.inputs, output.choices
    assert bound is not None and inputs is not None  # noqa: S101, PT018
    length = bound.layout.padded_length(inputs.bucket_of(selection))
    tensor = tensor_of(name, output, response)
    if output.choose == "slot":
        if tensor.shape not in ((rows, width), (rows,)) or tensor.size != rows * width:
            raise misshapen(name, tensor, f"for {width} slots of {rows} rows")
        slots = tensor.reshape(rows, width).astype(np.int64)
    else:
        expected = elements.shape(selection, rows)
        check_axes(name, output, tensor, expected)
        wanted = 1 if output.axes > 1 else width
        if math.prod(tensor.shape[len(expected) :]) != wanted:
            raise misshapen(name, tensor, f"for {wanted} choices of each row")
        slots = tensor.reshape(*expected, wanted)
        if len(expected) == 1:
            slots = _by_row(slots, bound.columns.counts(selection))
            length = slots.shape[1]
    axes = bound.axis(length)
    each = [places_of((c.columns, 0, 0), selection, rows, p.stop - p.start) for _, c, p in axes]
    places = np.concatenate(each, axis=1)
    if output.choose != "slot":
        slots = _greatest(slots, places >= 0)
    chosen = []
    for _, _, here in axes:
        inside = (slots >= here.start) & (slots < here.stop)
        found = np.take_along_axis(places, np.where(inside, slots, 0), axis=1) if length else slots
        chosen.append(np.where(inside, found, -1))
    return np.stack(chosen, axis=2)


def _by_row(tensor: Tensor, counts: Tensor) -> Tensor:
    """Return ``[sum n, K]`` as ``[N, L, K]``."""
    out = np.zeros((len(counts), int(counts.max(initial=0)), tensor.shape[1]), tensor.dtype)
    out[np.arange(out.shape[1]) < counts[:, np.newaxis]] = tensor
    return out


def _greatest(tensor: Tensor, inside: Tensor) -> Tensor:
    """Return the slots of the greatest score of each row, of ``[N, L, …, K]``: ``[N, axes * K]``.

    Padding is left aside, and so are NaN and -inf, which stand for what cannot be chosen: -1.
    """
    rows, *lengths, each = tensor.shape
    if not lengths[0]:
        return np.full((rows, len(lengths) * each), -1, np.int64)
    scores = np.where(np.isnan(tensor), -np.inf, tensor.astype(np.float64))
    for axis in range(1, tensor.ndim - 1):
        others = [n for n in range(1, tensor.ndim) if n != axis]
        scores = np.where(np.expand_dims(inside, others), scores, -np.inf)
    scores = scores.reshape(rows, -1, each)
    best = np.stack(np.unravel_index(np.argmax(scores, axis=1), lengths), axis=1)
    chosen = scores.max(axis=1, keepdims=True) > -np.inf
    return np.where(chosen, best, -1).reshape(rows, -1)


def _choices(output: Output, collections: Sequence[str], chosen: Tensor) -> Content:
    """Return ``[N, W, C]`` as an index for each choice; of collections, as one in each of them."""
    if output.labels is not None:
        each = [_named(chosen[:, n], collections) for n in range(output.choices)]
        return RecordArray(each, list(output.labels), length=len(chosen))
    if output.axes == 1:
        return _named(chosen[:, 0], collections)
    flat = _named(chosen.reshape(-1, chosen.shape[-1]), collections)
    return RegularArray(flat, output.choices, len(chosen))


def _named(indices: Tensor, collections: Sequence[str]) -> Content:
    each = [
        ByteMaskedArray(
            Index8((places >= 0).view(np.int8)), NumpyArray(np.maximum(places, 0)), valid_when=True
        )
        for places in indices.T
    ]
    return RecordArray(each, list(collections), length=len(indices)) if collections else each[0]


def trace(
    layouts: Mapping[str, Layout],
    outputs: Mapping[str, Output],
    arrays: Any,
    *,
    optional: bool = False,
) -> ak.Array:
    """Touch the fields that layouts read, and return what stands for the scores.

    Parameters
    ----------
    layouts : mapping
        Input names and their layouts.
    outputs : mapping
        Output names, and what they are.
    arrays : awkward array or dict
        As in `bind_inputs`, without data.
    optional : bool
        Whether scores may be None where objects are not.

    Raises
    ------
    FieldError, InputError
        If a field is missing, or has no axis where one is needed.
    """
    inputs = bind_inputs(layouts, arrays)
    content = Outputs.of(outputs, inputs).content(optional=True)
    scores = inputs.rows.unflatten(UnmaskedArray.simplified(content) if optional else content)
    return ak.Array(scores.layout.to_typetracer(forget_length=True))
