"""Layouts of fields: numbers, arrays, and jagged axes, padded or not; and their masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
from awkward.contents import Content

from sonic_coffea.errors import ConfigError, InputError, require
from sonic_coffea.layouts._elements import Columns, Elements, bind_columns, padding, with_lists
from sonic_coffea.layouts._expressions import column_of, path_of
from sonic_coffea.layouts._features import Feature, Fields, Name, SortBy, as_features, key_of
from sonic_coffea.layouts._layout import Batch, Bound, Layout, Shape, shaped
from sonic_coffea.layouts._options import DType, check_options, declare, one_for_each, refuse
from sonic_coffea.layouts._padding import content_of, listed, pad
from sonic_coffea.layouts._source import Source, of_field
from sonic_coffea.layouts._structure import (
    STRING,
    Int64,
    Place,
    RowSelection,
    Structure,
    Tensor,
    column_at,
    offsets_of,
    ranges,
)

Constants = float | str | Sequence[float] | Sequence[str] | None


class FieldsLayout(Layout):
    """A layout of named fields."""

    __slots__ = ()
    fields_option: ClassVar[str] = "fields"
    sort_by: SortBy = None
    missing: Any = None
    pad: str = "after"

    @property
    def features(self) -> tuple[Feature, ...]:  # type: ignore[override]
        features: tuple[Feature, ...] = getattr(self, self.fields_option)
        return features

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.features)

    @property
    def key(self) -> Feature | None:
        """What the elements of a row are sorted by."""
        return key_of(self.sort_by, type(self).__name__)

    @property
    def columns(self) -> tuple[str, ...]:
        named = [*self.features, *filter(None, [self.key])]
        return tuple(dict.fromkeys(column_of(path) for f in named for path in f.paths))

    def __post_init__(self, **checks: str) -> None:
        """Check the options, and what fields have to do with them."""
        name = type(self).__name__
        declare(self, **{self.fields_option: as_features(getattr(self, self.fields_option), name)})
        check_options(self, **checks)
        dtype, strings, sorted_by = self.dtype, self.dtype == STRING, self.key
        no_axis = f"axis_order {self.axis_order!r} has no axis for several fields"
        refuse(name, {no_axis: self.width > 1 and self.axis_order in ("", "L")})
        for feature in self.features:
            computed = not feature.plain or feature.expression is not None
            by_text = sorted_by is not None and feature.term in sorted_by.terms
            integers = dtype.kind in "iub" and not np.isfinite(feature.nonfinite or 0.0)
            replaced = f"{dtype.name} cannot hold nonfinite={feature.nonfinite}"
            cases = {
                f"strings are sent as they are, and sort nothing, got {feature!r}": strings
                and (computed or by_text),
                f"{replaced}; declare a real dtype": integers,
            }
            refuse(f"{name}, feature {feature.text!r}", cases)
        if self.missing is not None:
            one_for_each("missing", self, len(self.features))

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        del others
        strings, missing = self.dtype == STRING, self.missing
        if strings and missing is not None:
            missing = [text.encode() for text in missing]
        columns = bind_columns(
            source,
            self.features,
            jagged=self.jagged,
            missing=missing,
            key=self.key,
            strings=strings,
        )
        columns.transforms_missing = self.pad == "before"
        return Bound(self, columns)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        """Write all elements one after the other."""
        by_channel, start = self.by_element(out).reshape(-1, self.width).T, 0
        for _, elements in bound.columns.blocks(batch.rows, self.width * self.dtype.itemsize):
            elements.values(out.dtype, by_channel[:, start : start + elements.size])
            start += elements.size

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        names = [feature.channel for feature in self.features]
        return listed(bound, self.by_element(tensor), names)


@dataclass(frozen=True, slots=True, eq=False)
class Row(FieldsLayout):
    """One row of numbers per object: ``events * objects * number`` becomes ``[N, F]``.

    A number of an outer object, such as an event's, is repeated for each of its objects.

    Parameters
    ----------
    fields : sequence of str, number, Feature or OneHot
        The columns of the tensor, in order. ``"Jet[0].pt"`` is the pt of the leading jet, and
        ``"Jet[:3].pt"`` gives three columns.
    dtype : dtype
        Type of the tensor, float32 by default; ``"string"`` for strings.
    axis_order : {"F", "FL", "LF", ""}
        ``"F"``: ``[N, F]``. ``"FL"``, for weaver's models: ``[N, F, 1]``. ``"LF"``: ``[N, 1, F]``.
        ``""``: ``[N]`` of one field.
    missing : float or str, or sequence of them, optional
        Replacement for objects that are not there and for numbers that are None: one value for
        all fields, or one for each. By default, such an object or number raises an `InputError`.
    pad : {"after", "before"}
        Whether what is missing is replaced after the other numbers are transformed, or before, so
        that `missing` is transformed, too. Of an expression, it replaces the result.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pt": 50.0, "eta": 0.5}, {"pt": 30.0, "eta": -1.0}], []])
    >>> Row(["pt", "eta"]).pack(jets).tolist()
    [[50.0, 0.5], [30.0, -1.0]]
    >>> Row(["pt", "eta"], axis_order="LF").pack(jets).shape
    (2, 1, 2)
    >>> events = ak.Array([{"Jet": [{"pt": 50.0}, {"pt": 30.0}], "MET": {"pt": 80.0}}])
    >>> Row(["Jet[:3].pt", "MET.pt"], missing=0.0).pack(events).tolist()
    [[50.0, 30.0, 0.0, 80.0]]
    """

    holds_strings = True
    length: ClassVar[int] = 1
    choices: ClassVar = {"axis_order": ("F", "FL", "LF", ""), "pad": ("after", "before")}

    fields: Fields
    dtype: Any = "float32"
    _: KW_ONLY
    axis_order: str = "F"
    missing: Constants = None
    pad: str = "after"


@dataclass(frozen=True, slots=True, eq=False)
class Dense(FieldsLayout):
    """An array of fixed shape per object, such as an image.

    ``events * objects * 48 * 48 * number`` becomes ``[N, 48, 48]``.

    Parameters
    ----------
    field : str or Feature
        The field with the array of each object.
    shape : sequence of int, optional
        Shape of a row's array; by default, the regular axes of the field's type. The field has this
        shape, but may lack axes of length 1, such as the channel of a grey image.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak, numpy as np
    >>> hits = ak.unflatten(ak.zip({"image": np.ones((3, 4, 4))}, depth_limit=1), [1, 2])
    >>> Dense("image", shape=(1, 4, 4)).pack(hits).shape
    (3, 1, 4, 4)
    """

    fields_option = "field"
    axis_order = ""
    length: ClassVar[int] = 1

    field: Fields
    shape: Any = None
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        FieldsLayout.__post_init__(self)
        (feature,) = self.features
        is_one = len(feature.terms) == len(feature.paths) == 1
        is_picked = any(isinstance(step, int) for path in feature.paths for step in path)
        single = f"one field is taken, as it is, got {feature!r}"
        refuse("Dense", {single: not is_one or is_picked})

    def row_shape(self, bucket: int) -> Shape:
        del bucket
        shape: Shape = self.shape
        return shape

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        del others
        ((term,),) = (feature.terms for feature in self.features)
        place, data, at = source.numbers(*term)
        column = (*column_at(data, at, None), False, "")
        with of_field(term[0]):
            above, shape = _split(place, self.shape)
        offsets = np.arange(len(above) + 1) * math.prod(shape)
        columns = Columns(above, offsets, self.features, {term: column})
        return Bound(replace(self, shape=shape), columns)

    def by_element(self, tensor: Tensor) -> Tensor:
        """Return the numbers of all rows, one after the other."""
        return tensor.reshape(-1, 1)

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        del bound
        return content_of(tensor)


def _split(place: Place, declared: Shape) -> tuple[Structure, tuple[int, ...]]:
    """Return what is above each row's array, and the array's shape, which must be declared's."""
    chain, lists = place.rows.chain, place.rows.chain[1:]
    if declared is None:
        regular = takewhile(
            lambda each: each.size is not None and (each is place.rows or not each.gaps),
            reversed(lists),
        )
        declared = tuple(int(each.size or 0) for each in regular)[::-1]
        if not declared:
            kind = place.node.form.type
            raise InputError(f"has type {kind}, without axes of fixed length; give its shape")
    for shape in dict.fromkeys((declared, tuple(n for n in declared if n > 1))):
        start = len(lists) - len(shape)
        # Lists that happen to have one object each are no axis of length 1.
        if start >= 0 and all(
            np.all(each.counts == n) and (n > 1 or each.size == 1)
            for each, n in zip(lists[start:], shape, strict=True)
        ):
            if any(each.absent.any() for each in lists[start:]):
                raise InputError("has None; fill it with ak.fill_none")
            return chain[start], declared
    got = [sorted({*each.counts.tolist()}) for each in lists[-len(declared) :]]
    raise InputError(
        f"has arrays of lengths {got}, expected {list(declared)}; np.moveaxis brings axes into "
        "another order"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Padded(FieldsLayout):
    """A jagged axis padded, or truncated, to `length`.

    ``events * jets * var * number`` becomes ``[N, F, L]``.

    Parameters
    ----------
    fields : sequence of str or Feature
        The channels of the tensor, in order.
    length : int
        Constituents kept of each row, the first ones; shorter rows are padded at the end.
    fill : float or str, or sequence of them, optional
        The padding: one value for all fields, or one for each. By default, 0 or the empty string.
    axis_order : {"FL", "LF", "L"}
        ``"FL"``, for weaver's models: ``[N, F, L]``. ``"LF"``: ``[N, L, F]``. ``"L"``: ``[N, L]``
        of one field.
    dtype : dtype
        Type of the tensor, float32 by default; ``"string"`` for strings.
    sort_by : str or Feature, optional
        Field, or expression such as ``"-pf.pt"``, by which a row's constituents are sorted,
        descending, before they are truncated.
    pad_mode : {"constant", "wrap"}
        ``"wrap"`` repeats the row's own constituents, from the first one; a row without
        constituents is padded with `fill`.
    missing : float or str, or sequence of them, optional
        Replacement for numbers that are None, and for indices that refer to no object: one value
        for all fields, or one for each. By default, they raise an `InputError`. So do lists of an
        object that is not there, such as ``"Jet[0].pf.pt"`` of an event without jets; with
        `missing`, these have no constituents.
    pad : {"after", "before"}
        Whether rows are padded after their numbers are transformed, or before, so that `fill` and
        `missing` are transformed, too. In an expression, `fill` is then the number of each field of
        the elements. Constants and numbers of outer objects are then the same in padding.
    outer : int, optional
        Lists kept of each row, if a row has lists of constituents, such as the leading jets of an
        event: ``[N, F, J, L]``, or ``[N, J, L, F]`` in the order ``"LF"``. Rows with fewer lists
        are padded. It has no inverse.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pf": {"pt": [1.0, 2.0, 3.0]}}], [{"pf": {"pt": [4.0]}}]])
    >>> Padded("pf.pt", 2, sort_by="pf.pt").pack(jets).tolist()
    [[[3.0, 2.0]], [[4.0, 0.0]]]
    >>> Padded("pf.pt", 3, outer=2).pack(jets).tolist()
    [[[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]], [[[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]]
    """

    jagged = True
    holds_strings = True
    choices: ClassVar = {
        "axis_order": ("FL", "LF", "L"),
        "pad": ("after", "before"),
        "pad_mode": ("constant", "wrap"),
    }

    fields: Fields
    length: int | Sequence[int]
    fill: Constants = None
    axis_order: str = "FL"
    dtype: Any = "float32"
    _: KW_ONLY
    sort_by: SortBy = None
    pad_mode: str = "constant"
    missing: Constants = None
    pad: str = "after"
    outer: int | None = None

    def __post_init__(self) -> None:
        lengths = "lengths" if isinstance(self, Bucketed) else "length"
        FieldsLayout.__post_init__(self, length=lengths, outer="length")
        if self.fill is None:
            declare(self, fill="" if self.dtype == STRING else 0.0)
        one_for_each("fill", self, len(self.features))
        several = self.outer is not None and isinstance(self.length, tuple)
        refuse(type(self).__name__, {"expected Padded where outer= is given": several})

    @property
    def lengths(self) -> tuple[int, ...]:
        return super(Padded, self).lengths if self.outer is None else (self.outer,)

    @property
    def axes(self) -> str:
        return self.axis_order if self.outer is None else self.axis_order.replace("L", "LL")

    def row_shape(self, bucket: int) -> Shape:
        if self.outer is None:
            return FieldsLayout.row_shape(self, bucket)
        return shaped(self.axes, self.width, (self.outer, *super(Padded, self).lengths))

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        bound = FieldsLayout.bind(self, source, others)
        if self.outer is None:
            return bound
        rows, name = bound.rows, self.features[0].text
        if rows.outer is None:
            raise InputError(f"field {name!r} has no lists of lists, which outer= needs")
        if rows.absent.any():
            raise InputError(f"field {name!r} has None among its lists; use ak.drop_none")
        if self.pad == "before" and any(by_row for _, _, by_row, _ in bound.columns.terms.values()):
            raise InputError(
                f"field {name!r} is padded before an expression that reads numbers of the whole "
                "list, which lists of padding lack; leave pad='before' or outer= out"
            )
        lists = Columns(rows.outer, rows.offsets)
        return Bound(self, lists, inner=bound.columns)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        if bound.inner is not None:
            self._write_lists(self.by_element(out), bound, batch)
            return
        wrap, by_channel = self.pad_mode == "wrap", self.by_element(out).swapaxes(1, 2)
        width, longest = self.width * self.dtype.itemsize, by_channel.shape[2]
        for here, elements in bound.columns.blocks(batch.rows, width, longest):
            values, padded = elements.values(out.dtype), elements.counts < (1 if wrap else longest)
            fills = self._fills(bound.columns, elements.rows, padded)
            pad(by_channel[here], values, elements.starts, elements.counts, fills, wrap=wrap)

    def _fills(self, columns: Columns, rows: RowSelection, padded: Tensor | slice) -> Tensor:
        """Return ``[n, F]``: what pads rows, of which some need it."""
        fill: Any = self.fill
        fills = np.empty((len(columns.numbers(rows)), self.width), self.dtype)
        if self.dtype == STRING:
            fills[:] = [text.encode() for text in fill]
        elif self.pad == "before":
            fills[padded] = padding(columns, fill, self.dtype, columns.numbers(rows)[padded])
        else:
            fills[:] = fill
        return fills

    def _write_lists(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        """Fill ``out[N, J, L, F]``: each list is padded as a row, a missing list as an empty row.

        Padding that is transformed does not depend on the row, as `bind` makes sure.
        """
        outer, inner = bound.columns, bound.inner
        alone = replace(self, outer=None, axis_order="LF")
        assert inner is not None and outer.offsets is not None  # noqa: S101, PT018
        counts = np.minimum(outer.counts(batch.rows), out.shape[1])
        present = outer.present(batch.rows, out.shape[1])
        lists = ranges(outer.offsets[:-1][batch.rows], counts)
        try:
            out[present] = alone.make("", Bound(alone, inner), Batch(lists))[""]
        except InputError as error:  # its rows are lists
            raise type(error)(error.message) from None
        rows = np.repeat(outer.numbers(batch.rows), out.shape[1] - counts)
        fills = self._fills(replace(inner, rows=outer.rows), rows, slice(None))
        out[~present] = fills[:, np.newaxis]

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        if self.outer is not None:
            raise ConfigError("Padded with outer= has no inverse")
        return FieldsLayout.content(self, tensor, bound)


class Bucketed(Padded):
    """A jagged axis padded to the next of several lengths.

    ``events * jets * var * number`` becomes ``[n, F, L]``. Rows of the same padded length share a
    request, so `L` differs between requests.

    A model may have several such inputs, each with its own lengths. An input needs the first,
    second or later of its lengths for a row; the latest that any input needs counts for all inputs.
    With lengths (12, 24, 48) for candidates and (1, 4) for vertices, a jet of 20 candidates and 3
    vertices is padded to 24 and 4, and a jet of 40 candidates and no vertex to 48 and 4. Other rows
    of the request make no difference.

    Parameters
    ----------
    fields : sequence of str or Feature
        The channels of the tensor, in order.
    lengths : sequence of int
        Lengths to which rows are padded; longer rows are truncated to the last length.
    fill, axis_order, dtype, sort_by, pad_mode, missing, pad
        As in `Padded`.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": [4.0]}])
    >>> Bucketed("pt", lengths=(2, 4, 8)).pack(jets).shape
    (2, 1, 4)
    """

    __slots__ = ()

    def __init__(
        self, fields: Any, lengths: Sequence[int] = (16, 32, 64, 128), *more: Any, **options: Any
    ) -> None:
        Padded.__init__(self, fields, lengths, *more, **options)


@dataclass(frozen=True, slots=True, eq=False)
class Flat(FieldsLayout):
    """A jagged axis without padding: all elements of a request's rows, one after the other.

    ``events * var * number`` becomes ``[sum n, F]``, and another input tells which element belongs
    to which row. It is meant for graphs and sets of any size.

    Parameters
    ----------
    fields : sequence of str or Feature
        The columns of the tensor, in order.
    splits : str or None
        Name of the model's input for the offsets, int64 ``[N + 1]``: row `i` has the elements from
        ``splits[i]`` to ``splits[i + 1]``, exclusive.
    batch : str or None
        Name of the model's input for the row number of each element, int64 ``[sum n]``.
    dtype, sort_by, missing
        As in `Padded`.
    axis_order : {"LF", "FL", "L"}
        ``[sum n, F]``; ``[F, sum n]``, such as the ends of a graph's edges; or ``[sum n]`` of one
        field.
    refers_to : str, optional
        The model's `Flat` input to which the numbers refer: for the edges of a graph, its nodes. In
        the arrays, the numbers are indices into the row's elements; in the tensor, they are indices
        into the request's elements. Both start at 0.

    Examples
    --------
    >>> import awkward as ak
    >>> hits = ak.Array([[{"x": 1.0}, {"x": 2.0}], [], [{"x": 3.0}]])
    >>> Flat("x").pack(hits).tolist()
    [[1.0], [2.0], [3.0]]
    """

    stacks = False
    jagged = True
    holds_strings = True
    choices: ClassVar = {"axis_order": ("LF", "FL", "L")}

    fields: Fields
    splits: str | None = "row_splits"
    _: KW_ONLY
    batch: str | None = None
    dtype: Any = "float32"
    sort_by: SortBy = None
    missing: Constants = None
    axis_order: str = "LF"
    refers_to: str | None = None

    def __post_init__(self) -> None:
        FieldsLayout.__post_init__(self)
        both = f"splits and batch are two inputs, got {self.splits!r} for both"
        indices = f"numbers that refer to elements are int32 or int64, got {self.dtype.name}"
        whole = self.refers_to is None or self.dtype.name in ("int32", "int64")
        same = self.splits is not None and self.splits == self.batch
        refuse("Flat", {both: same, indices: not whole})

    @property
    def merges(self) -> bool:  # type: ignore[override]
        return self.splits is None and self.batch is None and self.refers_to is None

    @property
    def dependency(self) -> str | None:  # type: ignore[override]
        return self.refers_to

    def resolved(self, inputs: Mapping[str, Layout]) -> Flat:
        if self.refers_to is None:
            return self
        flat = {n: x for n, x in inputs.items() if isinstance(x, Flat) and x is not self}
        require([self.refers_to], flat, "Flat: refers_to= is no other Flat input:")
        if flat[self.refers_to].sort_by is not None:
            raise ConfigError(
                f"Flat: numbers refer to the elements of {self.refers_to!r} as they are given, and "
                "these are sorted; leave sort_by out, and sort them before"
            )
        return self

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        bound = FieldsLayout.bind(self, source)
        if self.refers_to is None:
            return bound
        if others is None:
            raise ConfigError(
                f"Flat: the numbers refer to input {self.refers_to!r}, which a layout alone does "
                "not have; pack both with Model.pack"
            )
        return replace(bound, referred=others[self.refers_to].columns)

    def row_shape(self, bucket: int) -> Shape:
        del bucket
        return shaped(self.axis_order, self.width, (-1,))[1:]

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        others = dict.fromkeys(filter(None, (self.splits, self.batch)), (np.dtype(np.int64), ()))
        return {name: (self.dtype, self.row_shape(-1)), **others}

    def tensor_shape(self, bound: Bound, batch: Batch) -> tuple[int, ...]:
        elements = int(bound.columns.counts(batch.rows).sum())
        return shaped(self.axis_order, self.width, (elements,))

    def row_bytes(self, bound: Bound, batch: Batch) -> Int64:
        per_element = len(self.features) * self.item_bytes(bound) + (8 if self.batch else 0)
        return bound.columns.counts(batch.rows) * per_element + (8 if self.splits else 0)

    def make(self, name: str, bound: Bound, batch: Batch) -> dict[str, Tensor]:
        """Return ``[sum n, F]``, with offsets or row numbers of the request's own."""
        tensors = FieldsLayout.make(self, name, bound, batch)
        counts = bound.columns.counts(batch.rows)
        if self.splits:
            tensors[self.splits] = offsets_of(counts)
        if self.batch:
            tensors[self.batch] = np.repeat(np.arange(len(counts)), counts)
        if bound.referred is not None:
            sizes = bound.referred.counts(batch.rows)
            self._count_on(self.by_element(tensors[name]), bound, batch, counts, sizes)
        return tensors

    def _count_on(
        self, numbers: Tensor, bound: Bound, batch: Batch, counts: Int64, sizes: Int64
    ) -> None:
        """Let the numbers of each row count on from the elements of the rows before it."""
        largest = np.repeat(sizes, counts)[:, np.newaxis]
        wrong = np.any((numbers < 0) | (numbers >= largest), axis=1)
        if wrong.any():
            what = f"field {self.features[0].text!r}, or one beside it, refers to no element of"
            each = zip(numbers.tolist(), largest[:, 0], strict=True)
            Elements(bound.columns, batch.rows).refuse(
                wrong,
                f"{what} input {self.refers_to!r} in event {{event}}: got {{value}} elements; "
                "numbers count within the row, from 0 on",
                [f"{got} of {size}" for got, size in each],
            )
        numbers += np.repeat(np.cumsum(sizes) - sizes, counts)[:, np.newaxis].astype(numbers.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Mask(Layout):
    """1 where there is a constituent, 0 where there is padding: ``[N, 1, L]``, or ``[N, L]``.

    Parameters
    ----------
    length : int, optional
        Length of the mask. By default, it is the length of the input whose elements are counted;
        beside `Bucketed`, it differs between requests.
    of : str, optional
        The field whose elements are counted, instead of an input's. The elements are not read, so
        they may be of any type, such as records.
    beside : str, optional
        The model's input whose elements are counted; by default, the first jagged input. Beside a
        `Row`, each row is one element.
    axis_order : {"FL", "LF", "L"}
        ``[N, 1, L]``, ``[N, L, 1]`` or ``[N, L]``.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak
    >>> Mask(3, of="pt").pack(ak.Array([{"pt": [3.0, 2.0]}])).tolist()
    [[[1.0, 1.0, 0.0]]]
    """

    choices: ClassVar = {"axis_order": ("FL", "LF", "L")}

    length: int | Sequence[int] | None = None
    of: Name | None = None
    _: KW_ONLY
    beside: str | None = None
    axis_order: str = "FL"
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        several = isinstance(self.length, Iterable)
        check_options(self, length="lengths" if several else "length", of="name")
        both = f"expected of={self.of!r} or beside={self.beside!r}, got both"
        refuse("Mask", {both: self.of is not None and self.beside is not None})

    @property
    def columns(self) -> tuple[str, ...]:
        return (column_of(self.of),) if self.of else ()

    @property
    def dependency(self) -> str | None:  # type: ignore[override]
        return self.beside

    def resolved(self, inputs: Mapping[str, Layout]) -> Mask:
        counted = [name for name, layout in inputs.items() if layout.jagged]
        beside = self.beside
        if self.of is None:
            beside = beside or next(iter(counted), None)
            able = [name for name, layout in inputs.items() if not isinstance(layout, Mask)]
            needs = "Mask needs of=, or beside= an input whose elements are counted, got beside"
            require([beside], able, needs)
            counted = [str(beside)]
        if self.lengths:
            return replace(self, beside=beside)
        lengths = {inputs[name].lengths for name in counted} - {()}
        if len(lengths) != 1:
            why = "the inputs have several" if lengths else "no input is padded"
            raise ConfigError(f"Mask needs a length, as {why}")
        return replace(self, length=lengths.pop(), beside=beside)

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        if self.beside is not None and others is not None:
            other = others[self.beside]
            return Bound(self, other.columns, other.parts)
        if self.of is None:
            raise ConfigError(
                "Mask does not know what to count; give of=, the name of a jagged field, "
                "or use it beside a Padded input"
            )
        path = path_of(self.of)
        rows, lists = with_lists(source.place(path, lists=True), path).rows.chain[-2:]
        columns = Columns(rows, lists.offsets)
        # In a model, the inputs tell the length; by itself, the longest row does.
        longest = int(columns.counts(slice(0, len(columns.rows))).max(initial=1))
        return Bound(self if self.lengths else replace(self, length=longest), columns)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        present = self.by_element(out)[..., 0]
        for _, part, places in bound.axis(present.shape[1]):
            here = present[:, places]
            here[:] = part.columns.present(batch.rows, here.shape[1])
            present[:, places.stop :] = 0  # a mask may be longer than the tokens
