"""The declaration of a model's outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, ResponseError, nearest
from sonic_coffea.layouts._features import (
    declare,
    equals,
    hashed,
    one_of,
    own_types,
    refuse,
    texts_of,
)
from sonic_coffea.layouts._finish import (
    OUTPUT_FUNCTIONS,
    check_discriminants,
    discriminated,
    finished,
)
from sonic_coffea.layouts._layout import shape_of, target_of
from sonic_coffea.layouts._padding import content_of
from sonic_coffea.layouts._structure import STRING, Tensor, widened

if TYPE_CHECKING:
    from awkward.contents import Content


PER = ("row", "constituent")
CHOOSE = ("argmax", "slot")
Inner = int | tuple[Any, ...] | None
NamedAxis = tuple[str | None, int, int]
"""The input whose elements have places along an axis, and how many places are before and after.

Without a name, the places are fixed; an empty one is the input that the output belongs to.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One output of a model: a record with its labels as fields, or numbers.

    Parameters
    ----------
    labels : sequence of str, optional
        Names of the values. Without labels, the output is a number, or an array of fixed `shape`.
    dtype : dtype
        Type of the output, float32 by default; compared with the server's. Scores have this type,
        but float32 for float16 and bfloat16. ``"string"`` for strings, such as the name of a class.
    shape : sequence of int, optional
        Shape of the array of each row, such as ``(128,)`` for an embedding. Without labels and
        shape, the server's shape counts; a lazy array, for which no server is asked, then has one
        number.
    per : {"row", "constituent"}
        Whether the model returns one value for each row, or one for each element of the axis that
        the row consumes: ``[N, L, K]`` for `Padded`, ``[sum n, K]`` for `Flat`. Values of elements
        come back in lists as long as the input's; elements that were truncated get None.
    axes : int or sequence
        The axes between the rows and each value, for values of constituents. A number of axes of
        the same elements: 2 for one value for each pair, ``[N, L, L, K]``, which becomes lists of
        lists of each row's own length. Or what each axis has: the name of an input, whose elements
        it has, also with other places beside, as in ``"1+pf"`` for a class token; a fixed length;
        or ``"labels"``, if these are not the last axis. ``("labels", "pf")`` is ``[N, K, L]``,
        ``("pf", "sv")`` is ``[N, L, M]``, and ``(8, "pf")`` is ``[N, 8, L]``.
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
    function : {"softmax", "sigmoid", "odds"}, optional
        What makes scores of the model's numbers; softmax is over the labels, or the last axis, and
        odds are ``s / (1 - s)``.
    scale, shift : float
        After the function, `scale` multiplies, and `shift` is added.
    over : sequence of str or int, or slice, optional
        The labels, or indices, to which function, scale and shift apply; others stay as they are.
    groups : mapping, optional
        Names of sums of values, each with the labels, or indices, that are summed, or a slice of
        them: ``{"QCD": slice(309, 314)}``. The record then has the groups alone.
    discriminants : mapping, optional
        Names of further scores, each with an expression of labels, or else groups:
        ``{"TvsQCD": "top / (top + qcd)"}``. 0 / 0 is NaN.

    Examples
    --------
    >>> Output(["q1", "q2", "b"], per="constituent", axes=3, choose="argmax").labels
    ('q1', 'q2', 'b')
    """

    holds_strings = True

    labels: Any = None
    dtype: Any = "float32"
    _: KW_ONLY
    shape: Any = None
    per: str = "row"
    axes: Any = 1
    choose: str | None = None
    of: str | None = None
    splits: str | None = None
    function: str | None = None
    scale: float = 1.0
    shift: float = 0.0
    groups: Any = None
    over: Any = None
    discriminants: Any = None

    __eq__, __hash__ = equals, hashed

    def __post_init__(self) -> None:
        own_types(self)
        labels, shape, axes = self.labels, self.shape, self.axes
        if labels is not None:
            labels = texts_of(labels, "Output: expected labels as a list of names")
        if isinstance(axes, list):
            axes = tuple(axes)
        declare(
            self,
            labels=labels,
            dtype=target_of(self.dtype, self),
            shape=None if shape is None else shape_of(shape, self),
            axes=axes,
        )
        one_of(PER, self.per, "Output: expected per")
        if self.function is not None:
            one_of(OUTPUT_FUNCTIONS, self.function, "Output: expected function")
        by_row, several = self.per == "row", isinstance(axes, tuple) and axes
        named = several and any(of for of, _, _ in self.named_axes)
        further = self.groups or self.discriminants or (self.scale, self.shift) != (1.0, 0.0)
        chosen, strings = self.choose is not None, self.dtype == STRING
        refuse(
            "Output",
            (
                labels is not None and len(set(labels)) != len(labels),
                f"labels must differ, got {labels}",
            ),
            (
                labels is not None and shape is not None,
                f"expected labels or a shape, got {labels} and {shape}",
            ),
            (
                not (named or (isinstance(axes, int) and axes >= 1)) or (axes != 1 and by_row),
                f"expected axes of constituents, and per='constituent', got axes={axes!r}",
            ),
            (self.of is not None and by_row, f"an output of {self.of!r} needs per='constituent'"),
            (
                self.splits is not None and not by_row,
                "an output with splits of its own is not per constituent",
            ),
            (chosen and by_row, "an output that chooses constituents needs per='constituent'"),
            (chosen and strings, "an output that chooses constituents has numbers, and no strings"),
            (
                chosen and shape is not None,
                "an output that chooses constituents has labels, and no shape",
            ),
            (chosen and several, "an output that chooses constituents has a number of axes"),
            (
                (self.function or further) and (chosen or strings),
                "an output of strings, or that chooses constituents, has no function",
            ),
        )
        if self.choose is not None:
            one_of(CHOOSE, self.choose, "Output: expected choose")
            refuse(
                "Output",
                (
                    self.choose == "slot" and (self.dtype.kind not in "iu" or axes > 1),
                    f"slots are of dtype='int64', with axes left out, got {self.dtype} and {axes}",
                ),
                (
                    axes > 1 and labels is not None and len(labels) != axes,
                    f"expected a label for each of {axes} axes, got {', '.join(labels or ())}",
                ),
            )
        if self.groups is not None:
            items = self.groups.items() if isinstance(self.groups, Mapping) else self.groups
            declare(self, groups=tuple((name, self._grouped(group)) for name, group in items))
        if self.over is not None:
            width = len(labels) if labels is not None else (0, *(self.shape or ()))[-1]
            over = self._grouped(self.over)
            if not width or (isinstance(over, tuple) and not all(0 <= n < width for n in over)):
                raise ConfigError(f"over= has labels of an output or indices, got {self.over!r}")
            declare(self, over=over)
        if self.discriminants is not None:
            names = self.labels or () if self.groups is None else [name for name, _ in self.groups]
            declare(self, discriminants=check_discriminants(self.discriminants, names))

    def _grouped(self, members: Any) -> Any:
        """Return the indices of a group's values, or a slice of them."""
        if isinstance(members, slice):
            return members
        members = [members] if isinstance(members, (str, int)) else members
        labels = self.labels or ()
        for member in members:
            if isinstance(member, str) and member not in labels:
                raise ConfigError(f"an output has no label {member!r}; {nearest(member, labels)}")
        return tuple(labels.index(m) if isinstance(m, str) else int(m) for m in members)

    @property
    def named_axes(self) -> tuple[NamedAxis, ...]:
        """The axes between the rows and the values."""
        if isinstance(self.axes, int):
            return (("", 0, 0),) * self.axes
        return tuple(_axis(entry) for entry in self.axes if entry != "labels")

    @property
    def choices(self) -> int:
        """How many elements the model chooses."""
        return int(self.axes) if self.axes > 1 else math.prod(self.last)

    @property
    def is_typed(self) -> bool:
        """Whether the declaration alone says what the scores are."""
        undeclared = self.labels is None and self.shape is None and self.groups is None
        return not (undeclared and self.choose is None)

    @property
    def inner(self) -> Inner:
        """The number of labels of a row in the response, or its shape; None if nothing tells.

        `...` stands for the axes of constituents, which are the input's.
        """
        if self.labels is not None and not (self.choose and self.axes != 1):
            return len(self.labels)
        if self.shape is None:
            return None
        return self.shape if self.per == "row" and self.splits is None else (..., *self.shape)

    @property
    def last(self) -> tuple[int, ...]:
        """The last axes of the response, one number if nothing tells."""
        inner = 1 if self.inner is None else self.inner
        return (inner,) if isinstance(inner, int) else tuple(n for n in inner if n is not ...)

    def shaped(self, shape: Sequence[int]) -> Output:
        """Return it with the shape that a server tells, where none is declared."""
        undeclared = self.labels is None and self.shape is None
        if not undeclared or self.groups or any(n < 0 for n in shape):
            return self
        shaped = replace(self)
        declare(shaped, shape=() if tuple(shape) == (1,) else tuple(shape))
        return shaped

    def labels_last(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose labels are the last axis."""
        if isinstance(self.axes, int) or "labels" not in self.axes:
            return tensor
        place = 1 + self.axes.index("labels")
        return np.moveaxis(tensor, place, -1) if place < tensor.ndim else tensor

    def content(self, tensor: Tensor) -> Content:
        """Return one element for each of the first axis."""
        each = tensor.shape[1:]
        self.check_each(each)
        if self.labels is not None:
            each = (len(self.labels),)
        elif self.shape is not None:
            each = self.shape
        elif each == (1,):
            each = ()
        values = self._finished(widened(tensor).reshape(len(tensor), *each))
        if self.groups is not None:
            flat = values.reshape(len(values), math.prod(values.shape[1:]))
            sums = [flat[:, m if isinstance(m, slice) else list(m)].sum(1) for _, m in self.groups]
            return self._record(np.stack(sums, axis=1), [name for name, _ in self.groups])
        if self.discriminants:
            return self._record(values, self.labels)
        return content_of(values, self.labels, each)

    def _record(self, values: Tensor, names: Sequence[str]) -> Content:
        return content_of(*discriminated(values, names, self.discriminants or ()))

    def _finished(self, values: Tensor) -> Tensor:
        """Return the scores that a model's numbers mean."""
        how = self.function, self.scale, self.shift
        if self.over is None:
            return finished(values, *how)
        part = self.over if isinstance(self.over, slice) else list(self.over)
        scores = values.astype(np.result_type(values.dtype, np.float32))
        scores[..., part] = finished(scores[..., part], *how)
        return scores

    def check_each(self, shape: tuple[int, ...]) -> None:
        """Refuse a response whose numbers for each element differ from the declaration."""
        if self.labels is not None and math.prod(shape) != len(self.labels):
            raise ResponseError(
                f"expected {len(self.labels)} values for labels {', '.join(self.labels)}, "
                f"got shape {list(shape)}"
            )
        if self.shape is not None and shape not in (self.shape, (*self.shape, 1)):
            raise ResponseError(f"expected shape {list(self.shape)} of each, got {list(shape)}")

    def blank(self, rows: int) -> Tensor:
        """Return the tensor of rows without responses."""
        last = () if self.inner is None else self.last
        if self.groups is not None and self.labels is None:
            ends = [m.stop or 0 if isinstance(m, slice) else 1 + max(m) for _, m in self.groups]
            last = (max(ends),)
        return np.zeros((rows, *last), self.dtype)


def _axis(entry: Any) -> NamedAxis:
    """Return what an axis has: elements of an input, and other places."""
    if isinstance(entry, int) and not isinstance(entry, bool) and entry > 0:
        return None, entry, 0
    if isinstance(entry, str) and entry:
        first, *others = entry.split("+")
        if len(others) == 1 and first.isdigit():
            return others[0], int(first), 0
        if len(others) == 1 and others[0].isdigit():
            return first, 0, int(others[0])
        if not others:
            return entry, 0, 0
    raise ConfigError(
        f"an output's axis has an input's elements, such as 'pf' or '1+pf', or a fixed length, got "
        f"{entry!r}"
    )
