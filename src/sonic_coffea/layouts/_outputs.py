"""The outputs of a model, put together from responses in the structure of the objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from awkward.contents import (
    ByteMaskedArray,
    Content,
    ListArray,
    ListOffsetArray,
    NumpyArray,
    RecordArray,
    RegularArray,
)
from awkward.index import Index8, Index64

from sonic_coffea.errors import ConfigError, ResponseError, nearest
from sonic_coffea.layouts._layout import declare
from sonic_coffea.layouts._texts import TEXT, Texts, dtype_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._inputs import Inputs
    from sonic_coffea.layouts._rows import RowSelection
    from sonic_coffea.layouts._scatter import Scatter, Tensor

PER = ("row", "constituent")
CHOOSE = ("argmax", "slot")
Inner = int | tuple[Any, ...] | None


@dataclass(frozen=True, slots=True, init=False)
class Output:
    """One output of a model: a record with its labels as fields, or numbers.

    Parameters
    ----------
    labels : sequence of str, optional
        Names of the values. Without labels, the output is a number, or an array of fixed `shape`.
    dtype : dtype
        Type of the output, float32 by default; compared with the server's. Scores have this type,
        but float32 for bfloat16. ``"string"`` for strings, such as the name of a class.
    shape : sequence of int, optional
        Shape of the array of each row, such as ``(128,)`` for an embedding. Without labels and
        shape, the server's shape counts; a lazy array, for which no server is asked, then has one
        number.
    per : {"row", "constituent"}
        Whether the model returns one value for each row, or one for each element of the axis that
        the row consumes: ``[N, L, K]`` for `Padded`, ``[sum n, K]`` for `Flat`. Values of elements
        come back in lists as long as the input's; elements that were truncated get None.
    axes : int
        Number of axes of elements: 2 for one value for each pair, ``[N, L, L, K]``, which becomes
        lists of lists of each row's own length.
    choose : {"argmax", "slot"}, optional
        The model chooses constituents. The result is an index into the row's list as it was before
        sorting, or None. ``"argmax"`` chooses the constituent with the greatest score, never
        padding: one for each label, or with `axes` of 2 or more, one for each axis; `labels` may
        name the axes. ``"slot"`` takes indices that the model returns: ``[N]``, or ``[N, K]`` with
        labels; an index of padding, or of no place, becomes None.
    of : str, optional
        The input to whose elements the values belong; by default, the first that consumes an axis.
    splits : str, optional
        Name of the model's output with the offsets of this output, if the model decides how many
        values a row has: ``[M, K]`` with offsets ``[N + 1]`` become a list for each row.

    Examples
    --------
    >>> Output(["q1", "q2", "b"], per="constituent", axes=3, choose="argmax").labels
    ('q1', 'q2', 'b')
    """

    labels: tuple[str, ...] | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    per: str
    axes: int
    choose: str | None
    of: str | None
    splits: str | None

    def __init__(
        self,
        labels: Sequence[str] | None = None,
        dtype: DTypeLike = "float32",
        *,
        shape: Sequence[int] | None = None,
        per: str = "row",
        axes: int = 1,
        choose: str | None = None,
        of: str | None = None,
        splits: str | None = None,
    ) -> None:
        given: Any = labels
        names = isinstance(given, Sequence) and not isinstance(given, str)
        if not (given is None or (names and all(isinstance(label, str) for label in given))):
            raise ConfigError(
                f"expected an output's labels as a list of names, got {given!r}; numbers without "
                "labels are None, and arrays of fixed shape an Output(shape=…)"
            )
        if labels is not None and len(set(labels)) != len(labels):
            raise ConfigError(f"an output's labels must differ, got {list(labels)}")
        if per not in PER:
            raise ConfigError(f"an output is per row or per constituent; {nearest(per, PER)}")
        by_row = per == "row"
        if of is not None and by_row:
            raise ConfigError(f"an output of {of!r} is per constituent; set per='constituent'")
        if splits is not None and not by_row:
            raise ConfigError("an output with splits of its own is not per constituent")
        declare(
            self,
            labels=None if labels is None else tuple(labels),
            dtype=dtype_of(dtype),
            shape=None if shape is None else tuple(_length(n) for n in shape),
            per=per,
            axes=axes,
            choose=choose,
            of=of,
            splits=splits,
        )
        if labels is not None and shape is not None:
            raise ConfigError(f"an output has labels or a shape, got {list(labels)} and {shape}")
        if axes < 1 or (axes > 1 and by_row):
            raise ConfigError(
                f"expected one axis of constituents or more, and per='constituent', got axes={axes}"
            )
        if choose is not None:
            self._check_choice(choose)

    def _check_choice(self, choose: str) -> None:
        """Refuse a choice that is none, or whose numbers nothing tells apart."""
        if choose not in CHOOSE:
            raise ConfigError(f"no choose={choose!r}; {nearest(choose, CHOOSE)}")
        if self.per == "row":
            raise ConfigError("an output that chooses constituents has per='constituent'")
        if self.dtype == TEXT:
            raise ConfigError("an output that chooses constituents has numbers, and no strings")
        if self.shape is not None:
            raise ConfigError("an output that chooses constituents has labels, and no shape")
        if choose == "slot" and (self.dtype.kind not in "iu" or self.axes > 1):
            raise ConfigError(
                "an output of slots has whole numbers, one for each label; set dtype='int64' and "
                f"leave axes out, got {self.dtype} and axes={self.axes}"
            )
        if self.axes > 1 and self.labels is not None and len(self.labels) != self.axes:
            raise ConfigError(
                f"expected a label for each of {self.axes} axes, got {', '.join(self.labels)}"
            )

    @property
    def score_dtype(self) -> np.dtype[Any]:
        """The type of the scores."""
        return np.dtype(np.float32) if self.dtype.name == "bfloat16" else self.dtype

    @property
    def is_typed(self) -> bool:
        """Whether the declaration alone says what the scores are."""
        return not (self.labels is None and self.shape is None and self.choose is None)

    @property
    def inner(self) -> Inner:
        """The number of labels of a row in the answer, or its shape; None if nothing tells.

        `...` stands for the axes of constituents, which are the input's.
        """
        if self.labels is not None and not (self.choose and self.axes > 1):
            return len(self.labels)
        if self.shape is None:
            return None
        return self.shape if self.per == "row" and self.splits is None else (..., *self.shape)

    @property
    def last(self) -> tuple[int, ...]:
        """The last axes of the answer, one number if nothing tells."""
        inner = 1 if self.inner is None else self.inner
        return (inner,) if isinstance(inner, int) else tuple(n for n in inner if n is not ...)

    def assemble(self, name: str, inputs: Inputs) -> Assembly:
        """Return what puts the answers of a call together."""
        if self.dtype == TEXT:
            return _Strings(name, self, inputs)
        if self.splits is not None:
            return _Collections(name, self, len(inputs.rows), self.splits)
        if self.choose is not None:
            return _Choices(name, self, inputs)
        if self.per == "constituent":
            return _Constituents(name, self, inputs)
        return ByRow(name, self, len(inputs.rows))

    def shaped(self, shape: Sequence[int]) -> Output:
        """Return it with the shape that a server tells, where none is declared."""
        if self.labels is not None or self.shape is not None or any(n < 0 for n in shape):
            return self
        return declare(copy(self), shape=() if tuple(shape) == (1,) else tuple(shape))

    def content(self, tensor: Tensor) -> Content:
        """Return one element for each of the first axis."""
        if self.labels is None:
            if self.shape is not None:
                self.check_shape(tensor.shape[1:])
                return NumpyArray(np.ascontiguousarray(tensor.reshape(len(tensor), *self.shape)))
            flat = tensor.ndim == 2 and tensor.shape[1] == 1
            return NumpyArray(np.ascontiguousarray(tensor[:, 0] if flat else tensor))
        by_row = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
        self.check_width(by_row.shape[1], tensor.shape[1:])
        columns = [NumpyArray(np.ascontiguousarray(column)) for column in by_row.T]
        return RecordArray(columns, list(self.labels), length=len(tensor))

    def check_width(self, width: int, shape: tuple[int, ...]) -> None:
        """Refuse an answer that has not as many values as there are labels."""
        if self.labels is not None and width != len(self.labels):
            raise ResponseError(
                f"expected {len(self.labels)} values for labels {', '.join(self.labels)}, "
                f"got shape {list(shape)}"
            )

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse numbers of another shape than the declared one, if there is one."""
        if self.shape is not None and shape not in (self.shape, (*self.shape, 1)):
            raise ResponseError(f"expected shape {list(self.shape)} of each, got {list(shape)}")

    def check_each(self, shape: tuple[int, ...]) -> None:
        """Refuse an answer whose numbers for each element are not those that are declared."""
        if self.labels is not None:
            self.check_width(math.prod(shape), shape)
        self.check_shape(shape)

    def blank(self, rows: int) -> Tensor:
        """Return the tensor of rows without answers."""
        last = () if self.inner is None else self.last
        return np.zeros((rows, *last), self.score_dtype)


def _length(number: Any) -> int:
    if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"an output's shape has lengths of at least 1, got {number!r}")
    return int(number)


class Assembly(Protocol):
    """One output of a call, as its answers come in, in any order."""

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        """Put the answer for some rows in its place.

        Raises
        ------
        ResponseError
            If it is not what was declared.
        """

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each number or array, of that of a row that the server tells."""

    def expect(self, shape: Sequence[int]) -> None:
        """Record the shape of a row that the server tells, for rows without an answer."""

    def content(self) -> Content:
        """Return one element, or list, for each row."""

    def typed(self) -> Content:
        """Return content of the type that any chunk has, while there is no answer."""


class ByRow:
    """One for each row."""

    def __init__(self, name: str, output: Output, rows: int) -> None:
        self._name, self._output, self._rows = name, output, rows
        self._whole: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The answers so far, as the model gives them."""
        return self._output.blank(self._rows) if self._whole is None else self._whole

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        tensor = _tensor(self._name, answer)
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise _misshapen(self._name, tensor, f"for {rows} rows")
        self._output.check_shape(tensor.shape[1:])
        if self._whole is None:
            self._whole = np.zeros((self._rows, *tensor.shape[1:]), tensor.dtype)
        _check_kind(self._name, self._whole, tensor)
        self._whole[selection] = tensor

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def expect(self, shape: Sequence[int]) -> None:
        self._output = self._output.shaped(shape)

    def content(self) -> Content:
        return self._output.content(self.tensor)

    typed = content


class _PerConstituent:
    """Of each element of the axis that the rows consume."""

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        jagged = [name for name, bound in inputs.bound.items() if bound.layout.jagged]
        if not jagged:
            raise ConfigError(
                f"output {name!r} is per constituent, but no input of the model has a jagged axis"
            )
        if output.of is not None and output.of not in jagged:
            raise ConfigError(
                f"output {name!r} is per constituent of {output.of!r}; {nearest(output.of, jagged)}"
            )
        of = output.of or jagged[0]
        self._name, self._output, self._inputs = name, output, inputs
        self._bound = inputs.bound[of]
        self._is_padded = self._bound.layout.padded_length(0) > 0
        if not self._is_padded and (output.axes > 1 or output.choose == "slot"):
            what = f"{output.axes} axes" if output.axes > 1 else "slots"
            raise ConfigError(
                f"output {name!r} has {what} of the constituents of input {of!r}, which is not "
                "padded; name another input with of=, or declare a padded one"
            )
        if self._bound.columns.several and (output.axes > 1 or output.choose):
            raise ConfigError(
                f"output {name!r} has pairs, or a choice, of the elements of input {of!r}, which "
                "are of several collections; name an input of one collection with of="
            )

    def _split(self, selection: RowSelection, answer: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Return the answer for some rows, and how many of its axes the elements have."""
        tensor = _tensor(self._name, answer)
        level = self._inputs.level_of(selection)
        expected = self._bound.layout.elements_shape(self._bound.columns, selection, level)
        expected += expected[-1:] * (self._output.axes - 1)
        if tensor.shape[: len(expected)] != expected:
            what = " rows of ".join(map(str, expected[:2]))
            pairs = f" in {self._output.axes} axes" if self._output.axes > 1 else ""
            raise _misshapen(self._name, tensor, f"for {what} constituents{pairs}")
        return tensor, len(expected)

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        # A server lists the axes of padded elements, not that of all elements of a request.
        return tuple(shape[self._output.axes * self._is_padded :])

    def expect(self, shape: Sequence[int]) -> None:
        self._output = self._output.shaped(self.inner(shape))


class _Constituents(_PerConstituent):
    """One for each element of the axis that the rows consume, or for each pair."""

    _scatter: Scatter | None = None
    _each: tuple[int, ...] = ()

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        del rows
        tensor, axes = self._split(selection, answer)
        each = tensor.shape[axes:] or (1,)
        self._output.check_each(each)
        if self._scatter is None:
            self._each = each
            self._scatter = self._empty(math.prod(each), tensor.dtype)
        elif (each, tensor.dtype) != (self._each, self._scatter.values.dtype):
            raise ResponseError(
                f"output {self._name!r} came back as {tensor.dtype} {list(each)} for each "
                f"constituent, before as {self._scatter.values.dtype} {list(self._each)}"
            )
        self._scatter.place(selection, tensor.reshape(*tensor.shape[:axes], math.prod(each)))

    def _empty(self, width: int, dtype: np.dtype[Any]) -> Scatter:
        return self._bound.columns.scatter(width, dtype, axes=self._output.axes)

    def content(self) -> Content:
        return self._content(optional=False)

    def typed(self) -> Content:
        return self._content(optional=self._is_padded)

    def _content(self, *, optional: bool) -> Content:
        scatter, each = self._scatter, self._each
        if scatter is None:
            each = self._output.last
            scatter = self._empty(math.prod(each), self._output.score_dtype)
        labels, shape = self._output.labels, self._output.shape
        if shape is None:
            shape = () if each == (1,) else each
        names = None if labels is None else list(labels)
        return scatter.content(names, shape, optional=optional)


class _Choices(_PerConstituent):
    """Which elements of a row a model chooses: their places in the row's list, or None."""

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        super().__init__(name, output, inputs)
        self._width = output.axes if output.axes > 1 else math.prod(output.last)
        self._chosen = np.full((len(inputs.rows), self._width), -1, np.int64)

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        columns = self._bound.columns
        counts = columns.split.counts_of(selection)
        if self._output.choose == "slot":
            tensor = _tensor(self._name, answer)
            if (
                tensor.shape not in ((rows, self._width), (rows,))
                or tensor.size != rows * self._width
            ):
                raise _misshapen(self._name, tensor, f"for {self._width} slots of {rows} rows")
            length = self._bound.layout.padded_length(self._inputs.level_of(selection))
            slots = tensor.reshape(rows, self._width).astype(np.int64)
        else:
            tensor, axes = self._split(selection, answer)
            each = math.prod(tensor.shape[axes:])
            wanted = 1 if self._output.axes > 1 else self._width
            if each != wanted:
                raise _misshapen(self._name, tensor, f"for {wanted} choices of each row")
            if not self._is_padded:
                tensor = _by_row(tensor.reshape(len(tensor), each), counts)
                axes = 2
            length = tensor.shape[1]
            slots = _greatest(tensor.reshape(*tensor.shape[:axes], each), counts, axes - 1)
        there = (slots >= 0) & (slots < np.minimum(counts, length)[:, np.newaxis])
        if columns.order is not None and len(columns.order):
            starts = columns.split.starts[selection][:, np.newaxis]
            slots = columns.order[np.where(there, starts + slots, 0)] - starts
        self._chosen[selection] = np.where(there, slots, -1)

    def content(self) -> Content:
        labels = self._output.labels
        if labels is not None:
            each = [_optional(column) for column in self._chosen.T]
            return RecordArray(each, list(labels), length=len(self._chosen))
        if self._output.axes == 1:
            return _optional(self._chosen[:, 0])
        return RegularArray(_optional(self._chosen.reshape(-1)), self._width, len(self._chosen))

    typed = content


def _optional(places: Tensor) -> Content:
    there = (places >= 0).view(np.int8)
    return ByteMaskedArray(Index8(there), NumpyArray(np.maximum(places, 0)), valid_when=True)


def _by_row(tensor: Tensor, counts: Tensor) -> Tensor:
    """Return ``[sum n, K]`` as ``[N, L, K]``."""
    out = np.zeros((len(counts), int(counts.max(initial=0)), tensor.shape[1]), tensor.dtype)
    within = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    out[np.repeat(np.arange(len(counts)), counts), within] = tensor
    return out


def _greatest(tensor: Tensor, counts: Tensor, axes: int) -> Tensor:
    """Return the slots of the greatest score of each row, of ``[N, L, …, K]``: ``[N, axes * K]``.

    Padding is left aside, and so are NaN and -inf, which stand for what cannot be chosen: -1.
    """
    rows, length, each = *tensor.shape[:2], tensor.shape[-1]
    if not length:
        return np.full((rows, axes * each), -1, np.int64)
    inside = np.arange(length) < counts[:, np.newaxis]
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
    found: Tensor = np.where(chosen, slots, -1).reshape(rows, axes * each)
    return found


class _Collections:
    """A new collection for each row."""

    def __init__(self, name: str, output: Output, rows: int, splits: str) -> None:
        self._name, self._output, self._splits = name, output, splits
        self._starts = np.zeros(rows, np.int64)
        self._stops = np.zeros(rows, np.int64)
        self._parts: list[Tensor] = []
        self._length = 0

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        tensor, splits = _tensor(self._name, answer), _tensor(self._splits, answer)
        offsets = splits.reshape(-1).astype(np.int64)
        if len(offsets) != rows + 1:
            raise _misshapen(self._splits, splits, f"for {rows} rows, which need {rows + 1}")
        if (
            tensor.ndim == 0
            or offsets[0] != 0
            or offsets[-1] != len(tensor)
            or np.any(np.diff(offsets) < 0)
        ):
            raise ResponseError(
                f"output {self._splits!r} does not split the {len(tensor)} of {self._name!r}: "
                f"it runs from {offsets[0]} to {offsets[-1]}"
            )
        if self._parts:
            _check_kind(self._name, self._parts[0], tensor)
        self._starts[selection] = offsets[:-1] + self._length
        self._stops[selection] = offsets[1:] + self._length
        self._parts.append(tensor)
        self._length += len(tensor)

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def expect(self, shape: Sequence[int]) -> None:
        self._output = self._output.shaped(shape)

    def content(self) -> Content:
        whole = np.concatenate(self._parts) if self._parts else self._output.blank(0)
        lists = ListArray(Index64(self._starts), Index64(self._stops), self._output.content(whole))
        packed: ListOffsetArray = lists.to_ListOffsetArray64(start_at_zero=True)
        return packed

    typed = content


class _Strings:
    """Strings, which are numbers as long as they are put together."""

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        self._name, self._texts = name, Texts([b""])
        numbers = declare(copy(output), dtype=np.dtype(np.int64))
        self._numbers = numbers.assemble(name, inputs)

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        tensor = _tensor(self._name, answer)
        if tensor.dtype != TEXT:
            raise ResponseError(f"output {self._name!r} came back as {tensor.dtype}, not strings")
        numbers = {**answer, self._name: self._texts.numbered(tensor)}
        self._numbers.place(selection, rows, numbers)

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._numbers.inner(shape)

    def expect(self, shape: Sequence[int]) -> None:
        self._numbers.expect(shape)

    def content(self) -> Content:
        return self._strings(self._numbers.content())

    def typed(self) -> Content:
        return self._strings(self._numbers.typed())

    def _strings(self, numbers: Content) -> Content:
        try:
            return self._texts.content(numbers)
        except UnicodeDecodeError as error:
            raise ResponseError(
                f"output {self._name!r} came back with bytes that are no UTF-8: {error.object!r}"
            ) from None


def _tensor(name: str, answer: Mapping[str, Tensor]) -> Tensor:
    if name not in answer:
        raise ResponseError(
            f"the answer lacks output {name!r}; it has {', '.join(answer) or 'none'}"
        )
    return answer[name]


def _misshapen(name: str, tensor: Tensor, expected: str) -> ResponseError:
    return ResponseError(f"output {name!r} came back with shape {list(tensor.shape)} {expected}")


def _check_kind(name: str, before: Tensor, now: Tensor) -> None:
    if before.shape[1:] != now.shape[1:] or before.dtype != now.dtype:
        raise ResponseError(
            f"output {name!r} came back as {now.dtype} {list(now.shape[1:])} a row, "
            f"before as {before.dtype} {list(before.shape[1:])}"
        )
