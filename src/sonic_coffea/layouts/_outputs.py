"""What a model gives, put together from the answers in the structure of what was sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
from awkward.contents import Content, ListArray, ListOffsetArray, NumpyArray, RecordArray
from awkward.index import Index64

from sonic_coffea.errors import ConfigError, ResponseError, nearest
from sonic_coffea.layouts._layout import declare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._inputs import Inputs
    from sonic_coffea.layouts._rows import RowSelection
    from sonic_coffea.layouts._scatter import Scatter, Tensor

PER = ("row", "constituent")


@dataclass(frozen=True, slots=True, init=False)
class Output:
    """One output of a model: a record of its labels, or plain numbers.

    Parameters
    ----------
    labels : sequence of str, optional
        Names of the values; without them there is a number, or an array of fixed shape.
    dtype : dtype
        What the model gives, float32 by default; checked against the server. Scores have the same,
        of bfloat16 float32.
    per : {"row", "constituent"}
        Whether the model gives one for each row, or one for each element of the axis that the row
        consumes: ``[N, L, K]`` for `Padded`, ``[sum n, K]`` for `Flat`. The latter return with the
        counts of the input, and None for what was truncated.
    of : str, optional
        The input whose elements they are, if the rows of several consume an axis; the first one by
        default.
    splits : str, optional
        Name of the model's output with the offsets of this one, if it has another multiplicity
        than the input: ``[M, K]`` with offsets ``[N + 1]`` become a list for each row.
    """

    labels: tuple[str, ...] | None
    dtype: np.dtype[Any]
    per: str
    of: str | None
    splits: str | None

    def __init__(
        self,
        labels: Sequence[str] | None = None,
        dtype: DTypeLike = "float32",
        *,
        per: str = "row",
        of: str | None = None,
        splits: str | None = None,
    ) -> None:
        if isinstance(labels, str):
            raise ConfigError(f"an output's labels are a list of names, got the string {labels!r}")
        if labels is not None and len(set(labels)) != len(labels):
            raise ConfigError(f"an output's labels must differ, got {list(labels)}")
        if per not in PER:
            raise ConfigError(f"an output is per row or per constituent; {nearest(per, PER)}")
        if of is not None and per != "constituent":
            raise ConfigError(f"an output of {of!r} is per constituent; set per='constituent'")
        if splits is not None and per != "row":
            raise ConfigError("an output with splits of its own is not per constituent")
        names = None if labels is None else tuple(labels)
        dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        declare(self, labels=names, dtype=dtype, per=per, of=of, splits=splits)

    @property
    def score_dtype(self) -> np.dtype[Any]:
        """The type of the scores."""
        return np.dtype(np.float32) if self.dtype.name == "bfloat16" else self.dtype

    @property
    def width(self) -> int | None:
        """Values of each, where labels tell."""
        return None if self.labels is None else len(self.labels)

    def assemble(self, name: str, inputs: Inputs) -> Assembly:
        """Return what puts the answers of a call together."""
        if self.splits is not None:
            return _Collections(name, self, len(inputs.rows), self.splits)
        if self.per == "constituent":
            return _Constituents(name, self, inputs)
        return ByRow(name, self, len(inputs.rows))

    def content(self, tensor: Tensor) -> Content:
        """Return one element for each of the first axis."""
        if self.labels is None:
            flat = tensor.ndim == 2 and tensor.shape[1] == 1
            return NumpyArray(np.ascontiguousarray(tensor[:, 0]) if flat else tensor)
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

    def blank(self, rows: int) -> Tensor:
        """Return the tensor of rows without answers."""
        shape = (rows,) if self.labels is None else (rows, len(self.labels))
        return np.zeros(shape, self.score_dtype)


class Assembly(Protocol):
    """One output of a call, as its answers come in, in any order."""

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        """Put the answer for some rows in its place.

        Raises
        ------
        ResponseError
            If it is not what was declared.
        """

    def content(self) -> Content:
        """Return one element, or list, for each row."""


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
        if self._whole is None:
            self._whole = np.zeros((self._rows, *tensor.shape[1:]), tensor.dtype)
        _check_kind(self._name, self._whole, tensor)
        self._whole[selection] = tensor

    def content(self) -> Content:
        return self._output.content(self.tensor)


class _Constituents:
    """One for each element of the axis that the rows consume."""

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
        self._name, self._output, self._inputs = name, output, inputs
        self._bound = inputs.bound[output.of or jagged[0]]
        self._scatter: Scatter | None = None

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        tensor = _tensor(self._name, answer)
        del rows
        level = self._inputs.level_of(selection)
        expected = self._bound.layout.elements_shape(self._bound.columns, selection, level)
        axes = len(expected)
        if tensor.ndim == axes:
            tensor = tensor[..., np.newaxis]
        if tensor.ndim != axes + 1 or tensor.shape[:axes] != expected:
            what = " rows of ".join(map(str, expected))
            raise _misshapen(self._name, tensor, f"for {what} constituents")
        self._output.check_width(tensor.shape[-1], tensor.shape[axes:])
        if self._scatter is None:
            self._scatter = self._bound.columns.scatter(tensor.shape[-1], tensor.dtype)
        _check_kind(self._name, self._scatter.values, tensor[:, 0] if axes == 2 else tensor)
        self._scatter.place(selection, tensor)

    def content(self) -> Content:
        scatter = self._scatter or self._bound.columns.scatter(
            self._output.width or 1, self._output.score_dtype
        )
        return scatter.content(None if self._output.labels is None else list(self._output.labels))


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

    def content(self) -> Content:
        whole = np.concatenate(self._parts) if self._parts else self._output.blank(0)
        lists = ListArray(Index64(self._starts), Index64(self._stops), self._output.content(whole))
        packed: ListOffsetArray = lists.to_ListOffsetArray64(start_at_zero=True)
        return packed


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
