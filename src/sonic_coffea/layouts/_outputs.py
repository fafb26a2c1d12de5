"""The outputs of a model: their declaration, and how responses become scores of objects."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from threading import Lock
from typing import Any, ClassVar

import numpy as np
from awkward import contents
from awkward.contents import Content
from awkward.index import Index8, Index64

from sonic_coffea.errors import ConfigError, ResponseError, require
from sonic_coffea.layouts._batch import Inputs
from sonic_coffea.layouts._expressions import exact, expression_of, text_of
from sonic_coffea.layouts._layout import Bound, Part
from sonic_coffea.layouts._options import check_options, declare, equals, hashed, refuse
from sonic_coffea.layouts._padding import Axis, Scatter, content_of, places_of
from sonic_coffea.layouts._structure import STRING, RowSelection, Tensor, real_of, widened

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
    choices: ClassVar = {
        "choose": ("argmax", "slot"),
        "function": ("softmax", "sigmoid", "odds"),
        "per": ("row", "constituent"),
    }

    labels: Sequence[str] | None = None
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
        check_options(self, scale="finite", shift="finite")
        if isinstance(self.axes, list):
            declare(self, axes=tuple(self.axes))
        labels, axes, chosen, by_row = self.labels, self.axes, self.choose, self.per == "row"
        several = isinstance(axes, tuple)
        named = [of for of, _, _ in self.named_axes if of] if several else []
        valid = named or (isinstance(axes, int) and axes >= 1)
        numbers = self.dtype != STRING and not self.shape and not several
        computed = self.function or self.groups or self.discriminants or self._is_scaled
        names, indices = labels or (), self.dtype.kind in "iu" and axes == 1
        cases = {
            f"labels must differ, got {names}": len(set(names)) != len(names),
            f"expected labels or a shape, got {labels} and {self.shape}": (
                None not in (labels, self.shape)
            ),
            f"expected axes of constituents, and per='constituent', got axes={axes!r}": (
                not valid or (by_row and axes != 1)
            ),
            "of= or choose= needs per='constituent'": by_row and (self.of or chosen),
            f"of= is one of the inputs that axes= names, got {self.of!r} and {axes!r}": (
                several and self.of not in (None, *named)
            ),
            "an output with splits of its own is not per constituent": self.splits and not by_row,
            "an output that chooses constituents has labels or one number, a number of axes, and "
            "neither a shape, strings nor a function": chosen and (not numbers or computed),
            "an output of strings has no function": computed and self.dtype == STRING,
            f"slots are of dtype='int64', with axes left out, got {self.dtype} and {axes}": (
                chosen == "slot" and not indices
            ),
            "over= needs a function, scale or shift": (
                self.over is not None and not self.function and not self._is_scaled
            ),
            f"over= has labels of an output or indices, got {self.over!r}": (
                self.over is not None and labels is None and not self.shape
            ),
            f"expected a label for each of {axes} axes, got {', '.join(names)}": (
                chosen and axes != 1 and names and len(names) != axes
            ),
        }
        refuse("Output", cases)
        if self.groups is not None:
            groups = tuple((name, self._indices(members)) for name, members in self.groups)
            declare(self, groups=groups)
        if self.over is not None:
            declare(self, over=self._indices(self.over))
        if self.labels is not None or self.shape is not None:
            self.check_values((len(names),) if self.labels is not None else self.shape)
        self._check_discriminants()

    def _check_discriminants(self) -> None:
        """Refuse discriminants that have the name of a score, or read what is no score."""
        scores = self.labels or ()
        if self.groups is not None:
            scores = [name for name, _ in self.groups]
        for name, text in self.discriminants or ():
            if name in scores or not isinstance(name, str) or not isinstance(text, str):
                raise ConfigError(
                    "an output's discriminants have names of their own and expressions, got "
                    f"{name!r}: {text!r}"
                )
            read = [text_of(path) for path, _ in expression_of(text, "discriminant")[0]]
            require(read, scores, f"discriminant {text!r}: no score")

    def _indices(self, members: Any) -> Any:
        """Return the indices of some values, by labels or indices; or a slice of them."""
        if isinstance(members, slice):
            return members
        labels = self.labels or ()
        named = [member for member in members if isinstance(member, str)]
        require(named, labels, "an output has no label")
        indices = tuple(labels.index(m) if isinstance(m, str) else m for m in members)
        if len(set(indices)) < len(indices):
            raise ConfigError(f"Output: over= and groups have each value once, got {members!r}")
        return indices

    def check_values(self, each: tuple[int, ...]) -> None:
        """Refuse values of a shape for which softmax, `over` or `groups` have no meaning."""
        last, size, cases = (1, *each)[-1], math.prod(each), {}
        for name, members in self.groups or ():
            cases[f"group {name!r} has members beyond the {size} values"] = _beyond(members, size)
        if self.over is not None:
            has = f"over= has labels of an output or indices of its {last} values"
            cases[f"{has}, got {self.over!r}"] = _beyond(self.over, last)
        over = slice(None) if self.over is None else self.over
        count = len(range(last)[over] if isinstance(over, slice) else over)
        softmax = "softmax needs several values, got one number; sigmoid is a function of one"
        cases[softmax] = self.function == "softmax" and count == 1
        refuse("Output", cases)

    @property
    def named_axes(self) -> tuple[NamedAxis, ...]:
        """The axes between the rows and the values."""
        if isinstance(self.axes, int):
            return (("", 0, 0),) * self.axes
        return tuple(_axis(entry) for entry in self.axes if entry != "labels")

    @property
    def chosen(self) -> int:
        """How many elements of a row the model chooses."""
        return int(self.axes) if self.axes > 1 else math.prod(self.last)

    @property
    def is_typed(self) -> bool:
        """Whether the declaration alone says what the scores are."""
        declared = self.labels, self.shape, self.groups, self.choose
        return any(each is not None for each in declared)

    @property
    def inner(self) -> Inner:
        """The number of labels of a row in the response, or its shape; None if nothing tells.

        `...` stands for the axes of constituents, which are the input's.
        """
        if self.labels is not None and not (self.choose and self.axes != 1):
            several = isinstance(self.axes, tuple) and "labels" in self.axes
            after = self.axes[self.axes.index("labels") + 1 :] if several else ()
            return (..., len(self.labels), *(... for _ in after)) if after else len(self.labels)
        if self.shape is None:
            return None
        return self.shape if self.per == "row" and self.splits is None else (..., *self.shape)

    @property
    def last(self) -> tuple[int, ...]:
        """The last axes of the response: if nothing tells, what groups need, or one number."""
        inner = self.inner
        if inner is None:
            groups = (members for _, members in self.groups or () if isinstance(members, tuple))
            inner = 1 + max(chain.from_iterable(groups), default=0)
        return (inner,) if isinstance(inner, int) else tuple(n for n in inner if n is not ...)

    def labels_last(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose labels are the last axis."""
        if isinstance(self.axes, int) or "labels" not in self.axes:
            return tensor
        place = 1 + self.axes.index("labels")
        return np.moveaxis(tensor, place, -1) if place < tensor.ndim else tensor

    def content(self, tensor: Tensor) -> Content:
        """Return one element for each of the first axis."""
        each = tensor.shape[1:]
        if self.inner is not None:
            each = self.last
        elif each == (1,):
            each = ()
        values = self._finished(widened(tensor).reshape(len(tensor), *each))
        if self.labels is None and self.groups is None:
            return content_of(values)
        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        if self.groups is None:
            scores = dict(zip(self.labels or (), np.ascontiguousarray(flat.T), strict=True))
        else:
            scores = {name: flat[:, members].sum(axis=1) for name, members in self.groups}
        for name, text in self.discriminants or ():
            terms, compute = expression_of(text, "discriminant")
            with np.errstate(all="ignore"):
                score = compute({term: exact(scores[text_of(term[0])]) for term in terms})
            score = np.broadcast_to(score, len(flat))
            scores[name] = score.astype(real_of(values.dtype))
        columns = [content_of(column) for column in scores.values()]
        return contents.RecordArray(columns, list(scores), length=len(flat))

    @property
    def _is_scaled(self) -> bool:
        return (self.scale, self.shift) != (1.0, 0.0)

    def _finished(self, values: Tensor) -> Tensor:
        """Return ``function(value) * scale + shift`` of the values to which this applies."""
        if self.function is None and not self._is_scaled:
            return values
        scores = values.astype(real_of(values.dtype))
        part = ..., slice(None) if self.over is None else self.over
        x = scores[part]
        with np.errstate(all="ignore"):
            if self.function == "softmax":
                x = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
                x /= x.sum(axis=-1, keepdims=True)
            elif self.function == "odds":
                x = x / (1 - x)
            elif self.function is not None:
                x = 1 / (1 + np.exp(-x))
            scores[part] = x * scores.dtype.type(self.scale) + scores.dtype.type(self.shift)
        return scores

    def check_each(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a response whose numbers for each element differ from the declaration."""
        expected = ""
        lengths = [n for n in shape if n != 1] or [1]
        if self.labels is not None and lengths != [len(self.labels)]:
            expected = f"{len(self.labels)} values for labels {', '.join(self.labels)}"
        if self.shape is not None and shape not in (self.shape, (*self.shape, 1)):
            expected = f"shape {list(self.shape)} of each"
        if expected:
            raise ResponseError(f"output {name!r}: expected {expected}, got shape {list(shape)}")
        if self.labels is None and self.shape is None:  # else they were checked as declared
            self.check_values(shape)


def _beyond(members: Any, width: int) -> bool:
    """Whether some members of a group are not among the values, or a slice has none of them."""
    if isinstance(members, slice):
        ends = [end for end in (members.start, members.stop) if end is not None]
        return not range(width)[members] or any(abs(end) > width for end in ends)
    return not all(0 <= member < width for member in members)


def _axis(entry: Any) -> NamedAxis:
    """Return what an axis has: elements of an input, and other places."""
    if isinstance(entry, int) and not isinstance(entry, bool) and entry > 0:
        return None, entry, 0
    parts = re.fullmatch(r"(?:(\d+)\+)?([^+]+?)(?:\+(\d+))?", str(entry))
    if parts is None or not isinstance(entry, str):
        raise ConfigError(
            "an output's axis has an input's elements, such as 'pf' or '1+pf', or a fixed length, "
            f"got {entry!r}"
        )
    before, of, after = parts.groups(default="0")
    return of, int(before), int(after)


Response = Mapping[str, Tensor]


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
        each = {name: ByRow(name, output, inputs) for name, output in declared.items()}
        return cls(each, list(dict.fromkeys([*declared, *splits])))

    def of_rows(self, response: Response) -> Response:
        """Return a response with the axis of the rows."""
        return {n: t[np.newaxis] if n in self.without_axis else t for n, t in response.items()}

    def place(self, selection: RowSelection, rows: int, response: Response) -> None:
        """Put the response for some rows in its places; see `ByRow.place`."""
        with self.lock:
            for output in self.each.values():
                output.place(selection, rows, response)

    def content(self, *, optional: bool = False) -> Content:
        """Return the only output, or a record of all; see `ByRow.content`."""
        each = [output.content(optional=optional) for output in self.each.values()]
        return each[0] if len(each) == 1 else contents.RecordArray(each, list(self.each))


class ByRow:
    """One output of a call, as its responses come in, in any order.

    Its axes between the rows and the values are of the elements of inputs. If the model chooses
    elements, what is placed is the index of each choice in its row's list, of each collection. If
    the output has splits, it is where the values of each row begin and end in all that came in.

    Parameters
    ----------
    name : str
        The output's name.
    output : Output
        What it is.
    inputs : Inputs
        The inputs of the call.
    """

    def __init__(self, name: str, output: Output, inputs: Inputs) -> None:
        self.name, self.output, self._rows = name, output, len(inputs.rows)
        self._inputs: Any = None  # they refer to the arrays of the call
        self._bound: Bound | None = None
        self._parts: tuple[Part, ...] = ()
        self._is_padded = False
        self._axes: list[Axis] = []
        self._scatters: list[Scatter] = []
        self._kind: tuple[Any, ...] | None = None
        self._split: list[Tensor] = []
        self._split_values = 0
        if output.per == "constituent":
            self._find(inputs)

    def _find(self, inputs: Inputs) -> None:
        """Find the inputs of the output's axes."""
        jagged = [name for name, bound in inputs.bound.items() if bound.layout.jagged]
        what, axes = f"output {self.name!r}", self.output.named_axes
        self._inputs = inputs
        if not jagged:
            raise ConfigError(f"{what} is per constituent, but no input has a jagged axis")
        named = [of for of, _, _ in axes if of]
        of = self.output.of or [*named, *jagged][0]
        require((of, *named), jagged, f"{what} is per constituent of")
        has = "slots" if self.output.choose == "slot" else None
        if any(before + after for _, before, after in axes):
            has = "other places beside those"
        if len(axes) > 1:
            has = f"{len(axes)} axes"
        for name in (of, *named):
            layout, parts = inputs.bound[name].layout, inputs.bound[name].parts
            kind = "of several collections" if parts and not self.output.choose else None
            kind = kind if layout.padded_length(0) else "not padded"
            if has and kind:
                raise ConfigError(
                    f"{what}: has {has} of the elements of input {name!r}, which is {kind}; name "
                    "another input with of=, or declare a padded one of one collection"
                )
        bound = self._bound = inputs.bound[of]
        self._parts, self._is_padded = bound.parts, bound.layout.padded_length(0) > 0
        known = {"": bound, **inputs.bound}
        self._axes = [(None if of is None else known[of], b, a) for of, b, a in axes]

    @property
    def tensor(self) -> Tensor:
        """The responses so far, as the model gives them."""
        (scatter,) = self._targets()
        return scatter.values

    def place(self, selection: RowSelection, rows: int, response: Response) -> None:
        """Put the response for some rows in its place.

        Raises
        ------
        ResponseError
            If it is not what was declared.
        """
        output, splits = self.output, self.output.splits
        tensor = output.labels_last(self._tensor(self.name, response))
        expected = shape = self._shape(selection, rows)
        if splits is not None or output.choose == "slot":
            expected = tensor.shape[:1]
        if tensor.shape[: len(expected)] != expected:
            many = " rows of ".join(map(str, expected[:2]))
            what = "rows" if output.per == "row" else "constituents"
            raise misshapen(self.name, tensor, f"for {many} {what}")
        kind = tensor.dtype, tensor.shape[len(expected) :]
        before = self._kind or kind
        if output.choose is not None:
            tensor = self._chosen(selection, shape, tensor)
        else:
            output.check_each(self.name, kind[1])
            if before != kind:
                of = "a row" if output.per == "row" else "for each constituent"
                raise ResponseError(
                    f"output {self.name!r} came back as {kind[0]} {list(kind[1])} {of}, "
                    f"before as {before[0]} {list(before[1])}"
                )
        if splits is not None:
            tensor = self._ranges(tensor, self._tensor(splits, response), rows)
        self._kind = before
        self._scatters = self._targets()
        if len(self._scatters) == 1:
            self._scatters[0].place(selection, tensor)
            return
        for scatter, (_, _, places) in zip(self._scatters, self._parts, strict=True):
            scatter.place(selection, tensor[:, places])

    def _shape(self, selection: RowSelection, rows: int) -> tuple[int, ...]:
        """Return the first axes of the output for some rows."""
        if self._bound is None:
            return (rows,)
        if not self._is_padded:
            return (int(self._bound.columns.counts(selection).sum()),)
        bucket = self._inputs.bucket_of(selection)
        lengths = [each.layout.padded_length(bucket) if each else 0 for each, _, _ in self._axes]
        places = zip(lengths, self._axes, strict=True)
        return (rows, *(length + before + after for length, (_, before, after) in places))

    def _tensor(self, name: str, response: Response) -> Tensor:
        """Return a tensor of the response, refusing one that is absent or of another kind."""
        require([name], response, "the response has no output", ResponseError)
        tensor = response[name]
        if name == self.name and self.output.dtype == STRING:
            for string in tensor.reshape(-1).tolist():
                try:
                    string.decode()
                except (AttributeError, UnicodeDecodeError):
                    raise ResponseError(
                        f"output {name!r} came back with {string!r}, expected strings in UTF-8"
                    ) from None
        return tensor

    def _ranges(self, tensor: Tensor, ends: Tensor, rows: int) -> Tensor:
        """Keep the values of some rows, and return where those of each begin and end in all."""
        splits, count = self.output.splits, len(tensor) if tensor.ndim else 0
        offsets = ends.reshape(-1).astype(np.int64)
        if len(offsets) != rows + 1:
            raise misshapen(str(splits), ends, f"for {rows} rows, which need {rows + 1}")
        is_whole = tensor.ndim and offsets[0] == 0 and offsets[-1] == count
        if not is_whole or np.any(np.diff(offsets) < 0):
            raise ResponseError(
                f"output {splits!r} does not split the {count} of {self.name!r}: it runs from "
                f"{offsets[0]} to {offsets[-1]}"
            )
        first = self._split_values
        self._split.append(tensor)
        self._split_values += count
        return np.stack((offsets[:-1], offsets[1:]), axis=1) + first

    def _chosen(self, selection: RowSelection, shape: tuple[int, ...], tensor: Tensor) -> Tensor:
        """Return ``[n, choices, collections]``: the index of each choice in its row, or -1."""
        bound, width = self._bound, self.output.chosen
        assert bound is not None  # noqa: S101
        counts = bound.columns.counts(selection)
        rows, length = len(counts), shape[1] if len(shape) > 1 else int(counts.max(initial=1))
        axis = bound.axis(length)
        each = [
            places_of((part, 0, 0), selection, rows, here.stop - here.start)
            for _, part, here in axis
        ]
        places = np.concatenate([*each, np.full((rows, 1), -1)], axis=1)
        if self.output.choose == "slot":
            if tensor.shape not in ((rows, width), (rows,)) or tensor.size != rows * width:
                raise misshapen(self.name, tensor, f"for {width} slots of {rows} rows")
            slots = tensor.reshape(rows, width).astype(np.int64)
        else:
            width = 1 if self.output.axes > 1 else width
            if math.prod(tensor.shape[len(shape) :]) != width:
                raise misshapen(self.name, tensor, f"for {width} choices of each row")
            if len(shape) == 1:  # [sum n, K] becomes [N, L, K]
                padded: Tensor = np.zeros((rows, length, width), tensor.dtype)
                padded[bound.columns.present(selection, length)] = tensor.reshape(-1, width)
                tensor, shape = padded, (rows, length)
            slots = _greatest(tensor.reshape(*shape, width), places[:, :-1] >= 0)
        inside = [(slots >= here.start) & (slots < here.stop) for _, _, here in axis]
        indices = [np.take_along_axis(places, np.where(here, slots, -1), axis=1) for here in inside]
        return np.stack(indices, axis=2)

    def _targets(self) -> list[Scatter]:
        """Return where values are put: of each collection, or of all axes."""
        if self._scatters:
            return self._scatters
        parts = self._parts
        dtype, each = self._kind or (self.output.dtype, self.output.last)
        axes: list[list[Axis]] = [[(part, 0, 0)] for _, part, _ in parts] or [self._axes]
        if self.output.choose is not None:
            axes, dtype, each = [[]], np.dtype(np.int64), (self.output.chosen, len(parts) or 1)
        if self.output.splits is not None:
            dtype, each = np.dtype(np.int64), (2,)
        return [Scatter(of, self._rows, each, dtype) for of in axes]

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each number or array, from the shape of a row on the server.

        A server lists the axes of padded elements, not the axis of all elements of a request.
        """
        return tuple(shape[len(self._axes) * self._is_padded :])

    def expect(self, shape: Sequence[int]) -> None:
        """Record the shape of a row that the server tells, for rows without a response."""
        output, each = self.output, self.inner(shape)
        undeclared = output.labels is None and output.shape is None
        if undeclared and all(n > 0 for n in each):
            self.output = replace(output, shape=() if each == (1,) else each)

    def content(self, *, optional: bool = False) -> Content:
        """Return one element, or list, for each row.

        With `optional`, it has the type that other chunks may have, in which some are truncated.
        """
        output, (first, *others) = self.output, self._targets()
        if output.choose is not None:
            return self._choices(first.values)
        if output.splits is not None:
            nothing = np.zeros((0, *output.last), output.dtype)
            values = np.concatenate(self._split) if self._split else nothing
            starts, stops = (Index64(np.ascontiguousarray(ends)) for ends in first.values.T)
            lists = contents.ListArray(starts, stops, output.content(values))
            return lists.to_ListOffsetArray64(start_at_zero=True)
        optional = optional and self._is_padded
        each = [x.lists(output.content(x.values), optional=optional) for x in (first, *others)]
        if not self._parts:
            return each[0]
        return contents.RecordArray(each, [name for name, _, _ in self._parts])

    def _choices(self, chosen: Tensor) -> Content:
        """Return an index for each choice; of collections, one in each of them."""
        output, names = self.output, [name for name, _, _ in self._parts]
        count = 1 if output.labels is None else output.chosen
        each: list[Content] = []
        for choice in np.split(chosen, count, axis=1):
            indices = [
                contents.ByteMaskedArray(Index8(at >= 0), contents.NumpyArray(at), valid_when=True)
                for at in np.ascontiguousarray(choice.reshape(-1, chosen.shape[2]).T)
            ]
            each.append(contents.RecordArray(indices, names) if names else indices[0])
        if output.labels is not None:
            return contents.RecordArray(each, list(output.labels), length=len(chosen))
        if output.axes == 1:
            return each[0]
        return contents.RegularArray(each[0], output.chosen, len(chosen))


def _greatest(tensor: Tensor, inside: Tensor) -> Tensor:
    """Return the slots of the greatest score of each row, of ``[N, L, …, K]``: ``[N, axes * K]``.

    Padding is left aside, and so are NaN and -inf, which stand for what cannot be chosen: -1.
    """
    rows, *lengths, each = tensor.shape
    scores = widened(tensor)
    can_be = scores > -np.inf
    for axis in range(1, tensor.ndim - 1):
        others = [n for n in range(1, tensor.ndim) if n != axis]
        can_be &= np.expand_dims(inside, others)
    scores = np.where(can_be, scores, -np.inf).reshape(rows, -1, each)
    at = np.argmax(scores, axis=1)
    chosen = np.take_along_axis(scores, at[:, np.newaxis], axis=1) > -np.inf
    best = np.stack(np.unravel_index(at, lengths), axis=1)
    return np.where(chosen, best, -1).reshape(rows, -1)


def misshapen(name: str, tensor: Tensor, expected: str) -> ResponseError:
    """Return the error for a tensor of another shape than expected."""
    return ResponseError(f"output {name!r} came back with shape {list(tensor.shape)} {expected}")
