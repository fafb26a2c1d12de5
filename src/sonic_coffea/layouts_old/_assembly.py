"""The outputs of a call, put together from answers in the structure of the objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from awkward.contents import Content, ListArray, ListOffsetArray, RecordArray
from awkward.index import Index64

from sonic_coffea.errors import ResponseError
from sonic_coffea.layouts_old._answers import Assembly, check_kind, misshapen, tensor_of
from sonic_coffea.layouts_old._constituents import Choices, Constituents
from sonic_coffea.layouts_old._declarations import declare
from sonic_coffea.layouts_old._texts import TEXT, Texts

if TYPE_CHECKING:
    from sonic_coffea.layouts_old._inputs import Inputs
    from sonic_coffea.layouts_old._outputs import Output
    from sonic_coffea.layouts_old._rows import RowSelection, Tensor


def assemble(name: str, output: Output, inputs: Inputs) -> Assembly:
    """Return what puts the answers of a call together."""
    if output.dtype == TEXT:
        return _Strings(name, output, inputs)
    if output.splits is not None:
        return _Collections(name, output, len(inputs.rows), output.splits)
    if output.choose is not None:
        return Choices(name, output, inputs)
    if output.per == "constituent":
        return Constituents(name, output, inputs)
    return ByRow(name, output, len(inputs.rows))


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The outputs of a call; answers of several threads are put in their places one by one.

    Attributes
    ----------
    each : mapping of str to Assembly
        What puts each output together.
    tensors : list of str
        The tensors that a request asks for: the outputs, and their splits.
    without_axis : frozenset of str
        Outputs that come without the axis of the rows: each request has one.
    lock : Lock
        Held while an answer is put in its places; copies with another `without_axis` share it.
    """

    each: Mapping[str, Assembly]
    tensors: list[str]
    without_axis: frozenset[str] = frozenset()
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, declared: Mapping[str, Output], inputs: Inputs) -> Outputs:
        """Return what puts the outputs of a call together, by their declarations."""
        splits = [output.splits for output in declared.values() if output.splits is not None]
        each = {name: assemble(name, output, inputs) for name, output in declared.items()}
        return cls(each, list(dict.fromkeys([*declared, *splits])))

    def of_rows(self, answer: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return an answer with the axis of the rows."""
        if not self.without_axis:
            return answer
        return {n: t[np.newaxis] if n in self.without_axis else t for n, t in answer.items()}

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        """Put the answer for some rows in its places; see `Assembly.place`."""
        with self.lock:
            for output in self.each.values():
                output.place(selection, rows, answer)

    def content(self) -> Content:
        """Return the only output, or a record of all; see `Assembly.content`."""
        return self._record([output.content() for output in self.each.values()])

    def typed(self) -> Content:
        """Return content of the type that other chunks have; see `Assembly.typed`."""
        return self._record([output.typed() for output in self.each.values()])

    def _record(self, contents: list[Content]) -> Content:
        return contents[0] if len(contents) == 1 else RecordArray(contents, list(self.each))


class ByRow(Assembly):
    """One for each row."""

    def __init__(self, name: str, output: Output, rows: int) -> None:
        super().__init__(name, output)
        self._rows = rows
        self._whole: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The answers so far, as the model gives them."""
        return self._output.blank(self._rows) if self._whole is None else self._whole

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        tensor = tensor_of(self._name, answer)
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise misshapen(self._name, tensor, f"for {rows} rows")
        self._output.check_shape(tensor.shape[1:])
        if self._whole is None:
            self._whole = np.zeros((self._rows, *tensor.shape[1:]), tensor.dtype)
        check_kind(self._name, self._whole, tensor)
        self._whole[selection] = tensor

    def content(self) -> Content:
        return self._output.content(self.tensor)


class _Collections(Assembly):
    """A new collection for each row."""

    def __init__(self, name: str, output: Output, rows: int, splits: str) -> None:
        super().__init__(name, output)
        self._splits = splits
        self._starts = np.zeros(rows, np.int64)
        self._stops = np.zeros(rows, np.int64)
        self._parts: list[Tensor] = []
        self._length = 0

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        tensor, splits = tensor_of(self._name, answer), tensor_of(self._splits, answer)
        offsets = splits.reshape(-1).astype(np.int64)
        if len(offsets) != rows + 1:
            raise misshapen(self._splits, splits, f"for {rows} rows, which need {rows + 1}")
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
            check_kind(self._name, self._parts[0], tensor)
        self._starts[selection] = offsets[:-1] + self._length
        self._stops[selection] = offsets[1:] + self._length
        self._parts.append(tensor)
        self._length += len(tensor)

    def content(self) -> Content:
        whole = np.concatenate(self._parts) if self._parts else self._output.blank(0)
        lists = ListArray(Index64(self._starts), Index64(self._stops), self._output.content(whole))
        packed: ListOffsetArray = lists.to_ListOffsetArray64(start_at_zero=True)
        return packed


class _Strings(Assembly):
    """Strings; until the result is made, each has a number."""

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        super().__init__(name, output)
        self._texts = Texts([b""])
        numbers = declare(copy(output), dtype=np.dtype(np.int64))
        self._numbers = assemble(name, numbers, inputs)

    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        tensor = tensor_of(self._name, answer)
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
