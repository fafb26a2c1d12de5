"""What puts an output of a call together, and the tensors of an answer, checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sonic_coffea.errors import ResponseError

if TYPE_CHECKING:
    from awkward.contents import Content

    from sonic_coffea.layouts_old._outputs import Output
    from sonic_coffea.layouts_old._rows import RowSelection, Tensor


class Assembly(ABC):
    """One output of a call, as its answers come in, in any order."""

    def __init__(self, name: str, output: Output) -> None:
        self._name, self._output = name, output

    @abstractmethod
    def place(self, selection: RowSelection, rows: int, answer: Mapping[str, Tensor]) -> None:
        """Put the answer for some rows in its place.

        Raises
        ------
        ResponseError
            If it is not what was declared.
        """

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each number or array, from the shape of a row on the server."""
        return tuple(shape)

    def expect(self, shape: Sequence[int]) -> None:
        """Record the shape of a row that the server tells, for rows without an answer."""
        self._output = self._output.shaped(self.inner(shape))

    @abstractmethod
    def content(self) -> Content:
        """Return one element, or list, for each row."""

    def typed(self) -> Content:
        """Return content of the type that other chunks have, for a call without answers."""
        return self.content()


def tensor_of(name: str, answer: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of an output; an answer without it is an error."""
    if name not in answer:
        raise ResponseError(
            f"the answer lacks output {name!r}; it has {', '.join(answer) or 'none'}"
        )
    return answer[name]


def misshapen(name: str, tensor: Tensor, expected: str) -> ResponseError:
    """Return the error for a tensor of another shape than expected."""
    return ResponseError(f"output {name!r} came back with shape {list(tensor.shape)} {expected}")


def check_kind(name: str, before: Tensor, now: Tensor) -> None:
    """Raise if an answer is of another kind than an earlier one."""
    if before.shape[1:] != now.shape[1:] or before.dtype != now.dtype:
        raise ResponseError(
            f"output {name!r} came back as {now.dtype} {list(now.shape[1:])} a row, "
            f"before as {before.dtype} {list(before.shape[1:])}"
        )
