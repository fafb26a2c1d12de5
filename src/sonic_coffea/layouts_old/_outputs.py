"""The declaration of a model's outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import Content, NumpyArray, RecordArray

from sonic_coffea.errors import ConfigError, ResponseError, nearest
from sonic_coffea.layouts_old._declarations import declare, length_of
from sonic_coffea.layouts_old._texts import TEXT, dtype_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts_old._rows import Tensor


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
        labels; an index of padding, or of no place, becomes None. Of `Tokens`, each choice is a
        record of the collections, with the index in the chosen one, and None in the others; a `Row`
        has the index 0.
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
        value: Any = labels
        names = isinstance(value, Sequence) and not isinstance(value, str)
        if not (value is None or (names and all(isinstance(label, str) for label in value))):
            raise ConfigError(
                f"expected an output's labels as a list of names, got {value!r}; numbers without "
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
            shape=None if shape is None else tuple(length_of(n, self) for n in shape),
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
        """Refuse an unknown choice, or numbers that nothing tells apart."""
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
        """Refuse an answer whose numbers for each element differ from the declaration."""
        self.check_width(math.prod(shape), shape)
        self.check_shape(shape)

    def blank(self, rows: int) -> Tensor:
        """Return the tensor of rows without answers."""
        last = () if self.inner is None else self.last
        return np.zeros((rows, *last), self.score_dtype)
