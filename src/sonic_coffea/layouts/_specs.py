"""The layouts that a model's inputs are declared with, and what they prepare from arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import awkward as ak
import numpy as np
from numpy.typing import DTypeLike, NDArray

from sonic_coffea.errors import ConfigError, FieldError, InputError, nearest
from sonic_coffea.layouts._fields import Feature, as_features, column
from sonic_coffea.layouts._rows import Rows, Split, split, unpad

Tensor = NDArray[Any]
TARGETS = ("float32", "float64", "float16", "int32", "int64", "int16", "int8", "uint8", "bool")


class Prepared(Protocol):
    """A layout bound to arrays: any slice of its rows can be packed, at any time, in any thread."""

    @property
    def rows(self) -> Rows:
        """The rows, and the structure above them."""

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of one row's tensor."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tensor's elements."""

    @property
    def filled(self) -> tuple[int, int]:
        """Elements along the consumed axis that hold data, and those that were cut off."""

    @property
    def capacity(self) -> int:
        """Elements along the consumed axis that the tensor has room for."""

    def pack(self, start: int, stop: int) -> Tensor:
        """Return the tensor of rows `start` to `stop`."""


@runtime_checkable
class Layout(Protocol):
    """How one input of a model is made from arrays."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tensor's elements."""

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of one row's tensor; -1 where it varies."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""

    def prepare(self, array: Any, cache: dict[Any, Rows] | None = None) -> Prepared:
        """Bind the layout to arrays; reads the columns named, and nothing else."""

    def pack(self, array: Any) -> Tensor:
        """Return the tensor that would be sent for `array`."""


def _target(dtype: DTypeLike, layout: str) -> np.dtype[Any]:
    try:
        target = np.dtype(dtype)
    except TypeError:
        target = None
    if target is None or target.name not in TARGETS:
        raise ConfigError(f"{layout} cannot make dtype {dtype!r}; {nearest(str(dtype), TARGETS)}")
    return target


@dataclass(frozen=True, slots=True, init=False)
class Row:
    """One row of numbers per object: ``events * objects * number`` becomes ``[N, F]``.

    Parameters
    ----------
    fields : sequence of str or Feature
        What the columns of the tensor are, in order.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pt": 50.0, "eta": 0.5}, {"pt": 30.0, "eta": -1.0}], []])
    >>> Row(["pt", "eta"]).pack(jets).tolist()
    [[50.0, 0.5], [30.0, -1.0]]
    """

    features: tuple[Feature, ...]
    dtype: np.dtype[Any]

    def __init__(
        self, fields: Sequence[str | Feature] | str | Feature, dtype: DTypeLike = "float32"
    ) -> None:
        object.__setattr__(self, "features", as_features(fields, "Row"))
        object.__setattr__(self, "dtype", _target(dtype, "Row"))

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of one row's tensor."""
        return (len(self.features),)

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        return tuple(f.name for f in self.features)

    def prepare(self, array: Any, cache: dict[Any, Rows] | None = None) -> Prepared:
        """Bind the layout to arrays; reads the columns named, and nothing else."""
        return _Columns(self, _splits(array, self.features, jagged=False, cache=cache))

    def pack(self, array: Any) -> Tensor:
        """Return the tensor of `array`, shape ``[N, F]``."""
        prepared = self.prepare(array)
        return prepared.pack(0, len(prepared.rows))

    def unpack(self, tensor: Tensor, array: Any) -> ak.Array:
        """Return the tensor in the structure of `array`, a record of the fields (the inverse)."""
        rows = self.prepare(array).rows
        return rows.unflatten(ak.to_layout(ak.zip(dict(zip(self.columns, tensor.T, strict=True)))))


@dataclass(frozen=True, slots=True, init=False)
class Padded:
    """A jagged axis cut or padded to `length`.

    ``events * jets * var * number`` becomes ``[N, F, L]``.

    Parameters
    ----------
    fields : sequence of str or Feature
        The channels of the tensor, in order.
    length : int
        Constituents kept of each row, the first ones; shorter rows are padded.
    fill : float or sequence of float
        What pads; one value for all fields, or one for each.
    axis_order : {"FL", "LF"}
        ``[N, F, L]``, as weaver's models want it, or ``[N, L, F]``.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pf": {"pt": [3.0, 2.0, 1.0]}}], [{"pf": {"pt": [4.0]}}]])
    >>> Padded("pf.pt", 2).pack(jets).tolist()
    [[[3.0, 2.0]], [[4.0, 0.0]]]
    """

    features: tuple[Feature, ...]
    length: int
    fill: tuple[float, ...]
    axis_order: str
    dtype: np.dtype[Any]

    def __init__(
        self,
        fields: Sequence[str | Feature] | str | Feature,
        length: int,
        fill: float | Sequence[float] = 0.0,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
    ) -> None:
        if axis_order not in ("FL", "LF"):
            raise ConfigError(f"Padded: expected axis_order 'FL' or 'LF', got {axis_order!r}")
        features = as_features(fields, "Padded")
        fills = tuple(fill) if isinstance(fill, Sequence) else (fill,) * len(features)
        if len(fills) != len(features):
            raise ConfigError(
                f"Padded: expected one fill or one for each of {len(features)} fields, "
                f"got {len(fills)}"
            )
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "length", _length(length, "Padded"))
        object.__setattr__(self, "fill", tuple(float(f) for f in fills))
        object.__setattr__(self, "axis_order", axis_order)
        object.__setattr__(self, "dtype", _target(dtype, "Padded"))

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of one row's tensor."""
        shape = (len(self.features), self.length)
        return shape if self.axis_order == "FL" else shape[::-1]

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        return tuple(f.name for f in self.features)

    def prepare(self, array: Any, cache: dict[Any, Rows] | None = None) -> Prepared:
        """Bind the layout to arrays; reads the columns named, and nothing else."""
        return _Columns(self, _splits(array, self.features, jagged=True, cache=cache))

    def pack(self, array: Any) -> Tensor:
        """Return the tensor of `array`, shape ``[N, F, L]`` or ``[N, L, F]``."""
        prepared = self.prepare(array)
        return prepared.pack(0, len(prepared.rows))

    def unpack(self, tensor: Tensor, array: Any) -> ak.Array:
        """Return the tensor as a jagged array of records (the inverse).

        What was cut off is None; what padded is gone.
        """
        prepared = _Columns(self, _splits(array, self.features, jagged=True, cache=None))
        by_field = tensor if self.axis_order == "FL" else tensor.transpose(0, 2, 1)
        counts = prepared.counts
        here = np.arange(self.length) < counts[:, None]
        flat = ak.zip({c: by_field[:, i][here] for i, c in enumerate(self.columns)})
        jagged = unpad(ak.to_layout(flat), counts, self.length)
        return prepared.rows.unflatten(jagged)


@dataclass(frozen=True, slots=True, init=False)
class Mask:
    """1 where there is a constituent, 0 where there is padding: ``[N, 1, L]``.

    Parameters
    ----------
    length : int
        As that of the `Padded` input which it belongs to.
    of : str, optional
        The field whose elements are counted; by default the first `Padded` input of the model.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak
    >>> Mask(3, of="pt").pack(ak.Array([{"pt": [3.0, 2.0]}])).tolist()
    [[[1.0, 1.0, 0.0]]]
    """

    length: int
    of: str | None
    dtype: np.dtype[Any]

    def __init__(self, length: int, of: str | None = None, *, dtype: DTypeLike = "float32") -> None:
        object.__setattr__(self, "length", _length(length, "Mask"))
        object.__setattr__(self, "of", of)
        object.__setattr__(self, "dtype", _target(dtype, "Mask"))

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of one row's tensor."""
        return (1, self.length)

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (self.of,) if self.of else ()

    def prepare(self, array: Any, cache: dict[Any, Rows] | None = None) -> Prepared:
        """Bind the layout to arrays; reads the field that is counted, and nothing else."""
        if self.of is None:
            raise ConfigError(
                "Mask does not know what to count; give of=, the name of a jagged field, "
                "or use it beside a Padded input"
            )
        (counted,) = _splits(array, (Feature(self.of),), jagged=True, cache=cache)
        return self.beside(counted)

    def beside(self, counted: Split) -> Prepared:
        """Bind the layout to a column that is already taken apart."""
        return _MaskOf(self, counted)

    def pack(self, array: Any) -> Tensor:
        """Return the tensor of `array`, shape ``[N, 1, L]``."""
        prepared = self.prepare(array)
        return prepared.pack(0, len(prepared.rows))


def _length(length: Any, layout: str) -> int:
    if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"{layout}: expected a length of at least 1, got {length!r}")
    return int(length)


def _splits(
    array: Any, features: Sequence[Feature], *, jagged: bool, cache: dict[Any, Rows] | None
) -> tuple[Split, ...]:
    cache = {} if cache is None else cache
    splits: list[Split] = []
    for feature in features:
        what = f"field {feature.name!r}"
        one = split(column(array, feature.name), jagged=jagged, what=what, cache=cache)
        if splits:
            _agree(splits[0].rows, one.rows, f"field {features[0].name!r}", what)
            if jagged and not _same_counts(splits[0], one):
                row = int(np.argmax(_counts(splits[0]) != _counts(one)))
                event = one.rows.events_of(row, row + 1)[0]
                raise InputError(
                    f"field {features[0].name!r} and {what} have lists of different lengths "
                    f"({_counts(splits[0])[row]} and {_counts(one)[row]}) at event {event}; "
                    "the fields of one input must come from the same collection"
                )
        splits.append(one)
    return tuple(splits)


def _counts(column_split: Split) -> NDArray[np.int64]:
    return column_split.stops - column_split.starts


def _same_counts(a: Split, b: Split) -> bool:
    return a.starts is b.starts or np.array_equal(_counts(a), _counts(b))


def _agree(first: Rows, other: Rows, first_name: str, other_name: str) -> None:
    if first is other or first.agrees(other):
        return
    if first.events != other.events:
        detail = f"{first.events} and {other.events} events"
    else:
        detail = f"the first difference is in event {first.first_difference(other)}"
    raise InputError(
        f"{first_name} and {other_name} do not have the same objects ({detail}); "
        "choose both from the same collection, with the same cuts"
    )


def _buffer(n: int, layout: Row | Padded | Mask) -> Tensor:
    # There is no half precision in compiled code: it is made from float32.
    dtype = np.dtype(np.float32) if layout.dtype == np.float16 else layout.dtype
    return np.empty((n, *layout.inner_shape), dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """A `Row` or `Padded` layout bound to its columns."""

    layout: Row | Padded
    splits: tuple[Split, ...]

    @property
    def rows(self) -> Rows:
        return self.splits[0].rows

    @property
    def inner_shape(self) -> tuple[int, ...]:
        return self.layout.inner_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.layout.dtype

    @property
    def counts(self) -> NDArray[np.int64]:
        return _counts(self.splits[0])

    @property
    def capacity(self) -> int:
        return len(self.rows) * (self.layout.length if isinstance(self.layout, Padded) else 1)

    @property
    def filled(self) -> tuple[int, int]:
        if isinstance(self.layout, Row):
            return len(self.rows), 0
        total = int(self.counts.sum())
        kept = int(np.minimum(self.counts, self.layout.length).sum())
        return kept, total - kept

    def pack(self, start: int, stop: int) -> Tensor:
        out = _buffer(stop - start, self.layout)
        if isinstance(self.layout, Padded) and self.layout.axis_order == "LF":
            view = out.transpose(0, 2, 1)
        else:
            view = out
        for f, (feature, column_split) in enumerate(
            zip(self.layout.features, self.splits, strict=True)
        ):
            bad = _fill(view, f, feature, column_split, self.layout, start, stop)
            if bad >= 0:
                event = self.rows.events_of(start + bad, start + bad + 1)[0]
                raise InputError(
                    f"field {feature.name!r} is NaN or infinite in event {event}; correct the "
                    f"input, or say what replaces it with Feature({feature.name!r}, nonfinite=…)",
                    rows=(start + bad, start + bad + 1),
                )
        return out.astype(self.layout.dtype, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class _MaskOf:
    """A `Mask` bound to the column that it counts."""

    layout: Mask
    counted: Split

    @property
    def rows(self) -> Rows:
        return self.counted.rows

    @property
    def inner_shape(self) -> tuple[int, ...]:
        return self.layout.inner_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.layout.dtype

    @property
    def capacity(self) -> int:
        return 0  # it is counted with the input that it masks

    @property
    def filled(self) -> tuple[int, int]:
        return 0, 0

    def pack(self, start: int, stop: int) -> Tensor:
        from sonic_coffea.layouts import _kernels

        out = _buffer(stop - start, self.layout)
        _kernels.mask(out, self.counted.starts[start:stop], self.counted.stops[start:stop])
        return out.astype(self.layout.dtype, copy=False)


def _fill(
    out: Tensor,
    f: int,
    feature: Feature,
    source: Split,
    layout: Row | Padded,
    start: int,
    stop: int,
) -> int:
    """Run the kernel of one field; return the first row that is not finite, or -1."""
    # Compiling takes seconds and importing numba a large part of one: only who packs pays.
    from sonic_coffea.layouts import _kernels

    values = source.values.view(np.uint8) if source.values.dtype == bool else source.values
    if values.dtype == np.float16:
        values = values.astype(np.float32)
    if isinstance(layout, Row):
        where: tuple[Any, ...] = (source.starts[start:stop],)
        copy, affine = _kernels.row_copy, _kernels.row_affine
    else:
        fill = out.dtype.type(layout.fill[f])
        where = (source.starts[start:stop], source.stops[start:stop], fill)
        copy, affine = _kernels.padded_copy, _kernels.padded_affine
    if feature.plain:
        return int(copy(out, f, values, source.index, *where))
    real = np.result_type(values.dtype, np.float32).type
    return int(
        affine(
            out,
            f,
            values if values.dtype.kind == "f" else values.astype(real),
            source.index,
            *where,
            real(feature.shift),
            real(feature.scale),
            real(-np.inf if feature.lower is None else feature.lower),
            real(np.inf if feature.upper is None else feature.upper),
            feature.nonfinite is not None,
            real(feature.nonfinite or 0.0),
        )
    )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedInputs:
    """All inputs of a model bound to arrays: the same rows in each."""

    inputs: dict[str, Prepared]
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        (first, prepared), *others = self.inputs.items()
        for name, other in others:
            _agree(prepared.rows, other.rows, f"input {first!r}", f"input {name!r}")
        object.__setattr__(self, "rows", prepared.rows)

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes in a request."""
        return sum(
            int(np.prod(p.inner_shape, dtype=np.int64)) * p.dtype.itemsize
            for p in self.inputs.values()
        )

    def pack(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the tensors of rows `start` to `stop`, by input."""
        return {name: prepared.pack(start, stop) for name, prepared in self.inputs.items()}


def prepare_inputs(layouts: Mapping[str, Layout], arrays: Any) -> PreparedInputs:
    """Bind the inputs of a model to arrays.

    Parameters
    ----------
    layouts : mapping
        Input names and their layouts.
    arrays : awkward array or dict
        One array of records that every input reads from, or a dict with an array for each input.
        A `Mask` may be left out of the dict.
    """
    by_input = _by_input(layouts, arrays)
    cache: dict[Any, Rows] = {}
    prepared: dict[str, Prepared] = {}
    counted: Split | None = None
    for name, layout in layouts.items():
        if isinstance(layout, Mask) and layout.of is None:
            continue
        try:
            one = layout.prepare(by_input[name], cache)
        except InputError as error:
            raise type(error)(f"input {name!r}: {error.message}") from None
        prepared[name] = one
        if counted is None and isinstance(layout, Padded) and isinstance(one, _Columns):
            counted = one.splits[0]
    for name, layout in layouts.items():
        if isinstance(layout, Mask) and layout.of is None:
            if counted is None:
                raise ConfigError(
                    f"input {name!r}: Mask needs of=, as the model has no Padded input"
                )
            prepared[name] = layout.beside(counted)
    return PreparedInputs({name: prepared[name] for name in layouts})


def _by_input(layouts: Mapping[str, Layout], arrays: Any) -> dict[str, Any]:
    if not isinstance(arrays, dict):
        return dict.fromkeys(layouts, arrays)
    free = {n for n, layout in layouts.items() if isinstance(layout, Mask) and layout.of is None}
    if set(arrays) & set(layouts):
        unknown = [name for name in arrays if name not in layouts]
        if unknown:
            raise FieldError(
                f"the model has no input {unknown[0]!r}; {nearest(unknown[0], layouts)}"
            )
        missing = [name for name in layouts if name not in arrays and name not in free]
        if missing:
            raise FieldError(
                f"no array for the model's input {missing[0]!r}; {nearest(missing[0], arrays)}"
            )
        return dict(arrays)
    # A dict of columns, shared by all inputs, rather than one of inputs.
    return dict.fromkeys(layouts, arrays)
