"""The outputs of a call, put together from responses in the structure of the objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import (
    ByteMaskedArray,
    Content,
    ListArray,
    NumpyArray,
    RecordArray,
    RegularArray,
)
from awkward.index import Index8, Index64

from sonic_coffea.errors import ConfigError, ResponseError, nearest
from sonic_coffea.layouts._layout import Batch, Bound
from sonic_coffea.layouts._output import Output
from sonic_coffea.layouts._padding import Axis, Scatter, places_of
from sonic_coffea.layouts._structure import STRING, RowSelection, Tensor

if TYPE_CHECKING:
    from sonic_coffea.layouts._batch import Inputs

Response = Mapping[str, Tensor]


def assemble(name: str, output: Output, inputs: Inputs) -> ByRow:
    """Return what puts an output of a call together."""
    rows = len(inputs.rows)
    if output.splits is not None:
        parts: list[Tensor] = []
        return ByRow(
            name,
            output,
            rows,
            lambda *response: _collected(name, output, parts, *response),
            lambda ends: _collections(output, parts, ends),
        )
    if output.choose is not None:
        bound = _of(name, output, inputs)
        collections = [part for part, _, _ in bound.parts]
        return ByRow(
            name,
            output,
            rows,
            lambda *response: _chosen(name, output, inputs, bound, *response),
            lambda chosen: _choices(output, collections, chosen),
        )
    if output.per == "constituent":
        return Values(name, output, inputs)
    return ByRow(name, output, rows)


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

    def content(self) -> Content:
        """Return the only output, or a record of all; see `ByRow.content`."""
        return self._record([output.content() for output in self.each.values()])

    def typed(self) -> Content:
        """Return content of the type that other chunks have; see `ByRow.typed`."""
        return self._record([output.typed() for output in self.each.values()])

    def _record(self, contents: list[Content]) -> Content:
        return contents[0] if len(contents) == 1 else RecordArray(contents, list(self.each))


class ByRow:
    """One output of a call, as its responses come in, in any order: one for each row.

    Parameters
    ----------
    name : str
        The output's name.
    output : Output
        What it is.
    rows : int
        How many rows there are.
    convert : callable, optional
        Returns an array of whole numbers for each of some rows, of a response; -1 where there is
        none.
    finish : callable, optional
        Returns one element, or list, for each row, of these arrays.
    """

    def __init__(
        self,
        name: str,
        output: Output,
        rows: int,
        convert: Callable[[RowSelection, int, Response], Tensor] | None = None,
        finish: Callable[[Tensor], Content] | None = None,
    ) -> None:
        self.name, self.output, self._rows = name, output, rows
        self._convert, self._finish = convert, finish
        self._whole: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The responses so far, as the model gives them."""
        return self.output.blank(self._rows) if self._whole is None else self._whole

    def place(self, selection: RowSelection, rows: int, response: Response) -> None:
        """Put the response for some rows in its place.

        Raises
        ------
        ResponseError
            If it is not what was declared.
        """
        if self._convert is not None:
            tensor = self._convert(selection, rows, response)
        else:
            tensor = tensor_of(self.name, self.output, response)
            if tensor.ndim == 0 or tensor.shape[0] != rows:
                raise misshapen(self.name, tensor, f"for {rows} rows")
            self.output.check_each(tensor.shape[1:])
        if self._whole is None:
            shape = self._rows, *tensor.shape[1:]
            nothing = -1 if self._finish is not None else 0
            self._whole = np.full(shape, nothing, tensor.dtype)
        check_kind(self.name, self._whole, tensor)
        self._whole[selection] = tensor

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each number or array, from the shape of a row on the server."""
        return tuple(shape)

    def expect(self, shape: Sequence[int]) -> None:
        """Record the shape of a row that the server tells, for rows without a response."""
        self.output = self.output.shaped(self.inner(shape))

    def content(self) -> Content:
        """Return one element, or list, for each row."""
        if self._finish is None:
            return self.output.content(self.tensor)
        nothing = np.full((self._rows, 1), -1)
        return self._finish(nothing if self._whole is None else self._whole)

    def typed(self) -> Content:
        """Return content of the type that other chunks have, for a call without responses."""
        return self.content()


class Values(ByRow):
    """The values of a call, for each element of the consumed axis, or along several axes."""

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        super().__init__(name, output, len(inputs.rows))
        self._inputs, self._bound = inputs, _of(name, output, inputs)
        self._axes = _axes(output, inputs, self._bound)
        self._is_padded = self._bound.layout.padded_length(0) > 0
        self._scatters: list[Scatter] = []
        self._each: tuple[int, ...] = ()

    def place(self, selection: RowSelection, rows: int, response: Response) -> None:
        del rows
        tensor = tensor_of(self.name, self.output, response)
        expected = _expected(self.output, self._inputs, self._bound, selection)
        tensor = self.output.labels_last(tensor)
        if tensor.shape[: len(expected)] != expected:
            raise misshapen(self.name, tensor, _of_shape(self.output, expected))
        each = tensor.shape[len(expected) :] or (1,)
        self.output.check_each(each)
        if not self._scatters:
            self._make(each, tensor.dtype)
        elif (each, tensor.dtype) != (self._each, self._scatters[0].dtype):
            raise ResponseError(
                f"output {self.name!r} came back as {tensor.dtype} {list(each)} for each "
                f"constituent, before as {self._scatters[0].dtype} {list(self._each)}"
            )
        tensor = tensor.reshape(*expected, *each)
        parts = self._bound.parts or (("", None, slice(None)),)
        for scatter, (_, _, places) in zip(self._scatters, parts, strict=True):
            scatter.place(selection, tensor[:, places] if self._bound.parts else tensor)

    def _make(self, each: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._each = each
        self._scatters = [Scatter(axes, self._rows, each, dtype) for axes in self._axes]

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        # A server lists the axes of padded elements, not the axis of all elements of a request.
        return tuple(shape[len(self._axes[0]) * self._is_padded :])

    def content(self) -> Content:
        return self._content(optional=False)

    def typed(self) -> Content:
        return self._content(optional=self._is_padded)

    def _content(self, *, optional: bool) -> Content:
        if not self._scatters:
            self._make(self.output.last or (1,), self.output.dtype)
        contents = []
        for axes, scatter in zip(self._axes, self._scatters, strict=True):
            values = self.output.content(scatter.values.reshape(-1, *self._each))
            lists = scatter.lists(values, optional=optional)
            is_list = len(axes) > 1 or axes[0][0] is None or axes[0][0].offsets is not None
            contents.append(lists if is_list else lists.content)
        if not self._bound.parts:
            return contents[0]
        return RecordArray(contents, [name for name, _, _ in self._bound.parts])


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


def check_kind(name: str, before: Tensor, now: Tensor) -> None:
    """Raise if a response is of another kind than an earlier one."""
    if before.shape[1:] != now.shape[1:] or before.dtype != now.dtype:
        raise ResponseError(
            f"output {name!r} came back as {now.dtype} {list(now.shape[1:])} a row, "
            f"before as {before.dtype} {list(before.shape[1:])}"
        )


def _of(name: str, output: Output, inputs: Inputs) -> Bound:
    """Return the input whose elements an output has values for."""
    jagged = [name for name, bound in inputs.bound.items() if bound.layout.jagged]
    if not jagged:
        raise ConfigError(
            f"output {name!r} is per constituent, but no input of the model has a jagged axis"
        )
    named = [axis[0] for axis in output.named_axes if axis[0] is not None]
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
    return bound


def _axes(output: Output, inputs: Inputs, bound: Bound) -> list[list[Axis]]:
    """Return the axes of an output, for each collection of the input."""
    if bound.parts:
        return [[(columns, 0, 0)] for _, columns, _ in bound.parts]
    axes: list[Axis] = []
    for of, before, after in output.named_axes:
        if of is None:
            axes.append((bound.columns if before < 0 else None, max(before, 0), after))
        else:
            axes.append((inputs.bound[of].columns, before, after))
    return [axes]


def _expected(
    output: Output, inputs: Inputs, bound: Bound, selection: RowSelection
) -> tuple[int, ...]:
    """Return the first axes of an output for some rows."""
    batch = Batch(selection, inputs.bucket_of(selection))
    shape = bound.layout.elements_shape(bound, batch)
    lengths = []
    for of, before, after in output.named_axes:
        if of is None and before >= 0:
            lengths.append(before + after)
        elif len(shape) > 1:
            layout = bound.layout if of is None else inputs.bound[of].layout
            lengths.append(layout.padded_length(batch.bucket) + max(before, 0) + after)
        else:
            return shape
    return (batch.size, *lengths)


def _of_shape(output: Output, expected: tuple[int, ...]) -> str:
    what = " rows of ".join(map(str, expected[:2]))
    axes = len(output.named_axes)
    return f"for {what} constituents" + (f" in {axes} axes" if axes > 1 else "")


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
        check_kind(name, parts[0], tensor)
    first = sum(map(len, parts))
    parts.append(tensor)
    return np.stack((offsets[:-1], offsets[1:]), axis=1) + first


def _collections(output: Output, parts: list[Tensor], ends: Tensor) -> Content:
    """Return a new collection for each row."""
    whole = np.concatenate(parts) if parts else output.blank(0)
    starts, stops = (np.ascontiguousarray(np.maximum(ends[:, k], 0)) for k in (0, -1))
    lists = ListArray(Index64(starts), Index64(stops), output.content(whole))
    return lists.to_ListOffsetArray64(start_at_zero=True)


def _chosen(
    name: str,
    output: Output,
    inputs: Inputs,
    bound: Bound,
    selection: RowSelection,
    rows: int,
    response: Response,
) -> Tensor:
    """Return the indices ``[n, W, C]`` of the elements that a model chooses, in each collection."""
    width, length = output.choices, bound.layout.padded_length(inputs.bucket_of(selection))
    if output.choose == "slot":
        tensor = tensor_of(name, output, response)
        if tensor.shape not in ((rows, width), (rows,)) or tensor.size != rows * width:
            raise misshapen(name, tensor, f"for {width} slots of {rows} rows")
        slots = tensor.reshape(rows, width).astype(np.int64)
    else:
        tensor = tensor_of(name, output, response)
        expected = _expected(output, inputs, bound, selection)
        if tensor.shape[: len(expected)] != expected:
            raise misshapen(name, tensor, _of_shape(output, expected))
        each, axes = math.prod(tensor.shape[len(expected) :]), len(expected) - 1
        wanted = 1 if output.axes > 1 else width
        if each != wanted:
            raise misshapen(name, tensor, f"for {wanted} choices of each row")
        if axes == 0:
            tensor, axes = _by_row(tensor.reshape(-1, each), bound.columns.counts(selection)), 1
            length = tensor.shape[1]
        slots = tensor.reshape(*tensor.shape[: axes + 1], each)
    places = np.concatenate(
        [
            places_of((columns, 0, 0), selection, rows, here.stop - here.start)
            for _, columns, here in bound.axis(length)
        ],
        axis=1,
    )
    if output.choose != "slot":
        slots = _greatest(slots, places >= 0, slots.ndim - 2)
    chosen = []
    for _, _, here in bound.axis(length):
        inside = (slots >= here.start) & (slots < here.stop)
        found = np.take_along_axis(places, np.where(inside, slots, 0), axis=1) if length else slots
        chosen.append(np.where(inside, found, -1))
    return np.stack(chosen, axis=2)


def _by_row(tensor: Tensor, counts: Tensor) -> Tensor:
    """Return ``[sum n, K]`` as ``[N, L, K]``."""
    out = np.zeros((len(counts), int(counts.max(initial=0)), tensor.shape[1]), tensor.dtype)
    out[np.arange(out.shape[1]) < counts[:, np.newaxis]] = tensor
    return out


def _greatest(tensor: Tensor, inside: Tensor, axes: int) -> Tensor:
    """Return the slots of the greatest score of each row, of ``[N, L, …, K]``: ``[N, axes * K]``.

    Padding is left aside, and so are NaN and -inf, which stand for what cannot be chosen: -1.
    """
    rows, length, each = *tensor.shape[:2], tensor.shape[-1]
    if not length:
        return np.full((rows, axes * each), -1, np.int64)
    scores = tensor.astype(np.float64)
    for axis in range(1, axes + 1):
        shape = [rows] + [1] * (axes + 1)
        shape[axis] = length
        scores[~np.broadcast_to(inside.reshape(shape), scores.shape)] = -np.inf
    scores = np.nan_to_num(
        scores.reshape(rows, length**axes, each), nan=-np.inf, posinf=np.inf, neginf=-np.inf
    )
    best = np.argmax(scores, axis=1)
    slots = np.stack(np.unravel_index(best, (length,) * axes), axis=1)
    chosen = scores.max(axis=1, keepdims=True) > -np.inf
    greatest: Tensor = np.where(chosen, slots, -1).reshape(rows, axes * each)
    return greatest


def _choices(output: Output, collections: Sequence[str], chosen: Tensor) -> Content:
    """Return ``[N, W, C]`` as an index for each choice; of collections, as one in each of them."""
    if chosen.ndim == 2:  # no response
        chosen = np.full((len(chosen), output.choices, max(len(collections), 1)), -1)
    if output.labels is not None:
        each = [_named(chosen[:, n], collections) for n in range(output.choices)]
        return RecordArray(each, list(output.labels), length=len(chosen))
    if output.axes == 1:
        return _named(chosen[:, 0], collections)
    flat = _named(chosen.reshape(-1, chosen.shape[-1]), collections)
    return RegularArray(flat, output.choices, len(chosen))


def _named(indices: Tensor, collections: Sequence[str]) -> Content:
    each = [_optional(column) for column in indices.T]
    return RecordArray(each, list(collections), length=len(indices)) if collections else each[0]


def _optional(places: Tensor) -> Content:
    is_present = (places >= 0).view(np.int8)
    return ByteMaskedArray(Index8(is_present), NumpyArray(np.maximum(places, 0)), valid_when=True)
