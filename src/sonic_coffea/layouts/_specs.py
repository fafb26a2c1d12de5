"""The layouts that a model's inputs are declared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import awkward as ak
import ml_dtypes
import numpy as np

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts._bound import (
    Bound,
    BoundDense,
    BoundFlat,
    BoundMask,
    BoundPadded,
    BoundRow,
    Tensor,
)
from sonic_coffea.layouts._columns import bind
from sonic_coffea.layouts._fields import Feature, Source, as_features

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._columns import Columns

Fields = Sequence[str | Feature] | str | Feature
DType = np.dtype[Any]
Shape = tuple[int, ...] | None

TARGETS = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
)


@runtime_checkable
class Layout(Protocol):
    """How one input of a model is made from arrays."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensors that an input makes: type and shape of a row, -1 where it varies."""

    def bind(self, source: Source) -> Bound:
        """Read the columns named, and nothing else."""

    def pack(self, array: Any) -> Tensor:
        """Return the tensor that would be sent for `array`."""


class _Reading:
    """What layouts of fields have in common."""

    __slots__ = ()
    features: tuple[Feature, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        sort_by = getattr(self, "sort_by", None)
        return (*self._names, *((sort_by,) if sort_by else ()))

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features)

    def bind(self, source: Source) -> Bound:
        """Read the columns named, and nothing else."""
        raise NotImplementedError

    def pack(self, array: Any) -> Tensor:
        """Return the tensor that would be sent for `array`."""
        bound = self.bind(Source(array))
        return bound.pack("input", slice(0, len(bound.rows)), bound.longest)["input"]


@dataclass(frozen=True, slots=True, init=False)
class Row(_Reading):
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
    dtype: DType

    def __init__(self, fields: Fields, dtype: DTypeLike = "float32") -> None:
        _set(self, features=as_features(fields, "Row"), dtype=_target(dtype, "Row"))

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensor that the input makes."""
        return {name: (self.dtype, (len(self.features),))}

    def bind(self, source: Source) -> BoundRow:
        """Read the columns named, and nothing else."""
        return BoundRow(self.dtype, bind(source, self.features, jagged=False, target=self.dtype))

    def unpack(self, tensor: Tensor, array: Any) -> ak.Array:
        """Return the tensor in the structure of `array`, a record of the fields (the inverse)."""
        rows = self.bind(Source(array)).rows
        return rows.unflatten(ak.to_layout(ak.zip(dict(zip(self._names, tensor.T, strict=True)))))


@dataclass(frozen=True, slots=True, init=False)
class Padded(_Reading):
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
    sort_by : str, optional
        Field by which a row's constituents are sorted, descending, before the cut.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([[{"pf": {"pt": [1.0, 2.0, 3.0]}}], [{"pf": {"pt": [4.0]}}]])
    >>> Padded("pf.pt", 2, sort_by="pf.pt").pack(jets).tolist()
    [[[3.0, 2.0]], [[4.0, 0.0]]]
    """

    features: tuple[Feature, ...]
    length: int
    fill: tuple[float, ...]
    axis_order: str
    dtype: DType
    sort_by: str | None

    def __init__(
        self,
        fields: Fields,
        length: int,
        fill: float | Sequence[float] = 0.0,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
        *,
        sort_by: str | None = None,
    ) -> None:
        features = as_features(fields, "Padded")
        _set(
            self,
            features=features,
            length=_length(length, "Padded"),
            fill=_fills(fill, features, _target(dtype, "Padded"), "Padded"),
            axis_order=_order(axis_order, "Padded"),
            dtype=_target(dtype, "Padded"),
            sort_by=sort_by,
        )

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensor that the input makes."""
        shape = (len(self.features), self.length)
        return {name: (self.dtype, shape if self.axis_order == "FL" else shape[::-1])}

    def bind(self, source: Source) -> BoundPadded:
        """Read the columns named, and nothing else."""
        return BoundPadded(
            self.dtype, _jagged(self, source), self.fill, self.axis_order, (self.length,)
        )

    def unpack(self, tensor: Tensor, array: Any) -> ak.Array:
        """Return the tensor as a jagged array of records (the inverse).

        What was cut off is None; what padded is gone.
        """
        bound = self.bind(Source(array))
        by_constituent = tensor.transpose(0, 2, 1) if self.axis_order == "FL" else tensor
        content = bound.elements.unpad(by_constituent, list(self._names))
        return bound.rows.unflatten(content)


@dataclass(frozen=True, slots=True, init=False)
class Bucketed(_Reading):
    """A jagged axis padded to the next of a few lengths; rows of like length share a request.

    ``events * jets * var * number`` becomes ``[n, F, L]``, with another `L` in each request.

    Parameters
    ----------
    fields : sequence of str or Feature
        The channels of the tensor, in order.
    lengths : sequence of int
        What rows are padded to; longer rows are cut to the last.
    fill, axis_order, dtype, sort_by
        As of `Padded`.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": [4.0]}])
    >>> Bucketed("pt", lengths=(2, 4, 8)).pack(jets).shape
    (2, 1, 4)
    """

    features: tuple[Feature, ...]
    lengths: tuple[int, ...]
    fill: tuple[float, ...]
    axis_order: str
    dtype: DType
    sort_by: str | None

    def __init__(
        self,
        fields: Fields,
        lengths: Sequence[int] = (16, 32, 64, 128),
        fill: float | Sequence[float] = 0.0,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
        *,
        sort_by: str | None = None,
    ) -> None:
        features = as_features(fields, "Bucketed")
        sizes = tuple(_length(n, "Bucketed") for n in lengths)
        if not sizes or list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"Bucketed: expected ascending lengths, got {list(lengths)}")
        _set(
            self,
            features=features,
            lengths=sizes,
            fill=_fills(fill, features, _target(dtype, "Bucketed"), "Bucketed"),
            axis_order=_order(axis_order, "Bucketed"),
            dtype=_target(dtype, "Bucketed"),
            sort_by=sort_by,
        )

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensor that the input makes."""
        shape = (len(self.features), -1)
        return {name: (self.dtype, shape if self.axis_order == "FL" else shape[::-1])}

    def bind(self, source: Source) -> BoundPadded:
        """Read the columns named, and nothing else."""
        return BoundPadded(
            self.dtype, _jagged(self, source), self.fill, self.axis_order, self.lengths
        )


@dataclass(frozen=True, slots=True, init=False)
class Flat(_Reading):
    """A jagged axis without padding: all elements of a request's rows, one after the other.

    ``events * var * number`` becomes ``[sum n, F]``, and another input says which element belongs
    to which row. For graphs and sets of any size.

    Parameters
    ----------
    fields : sequence of str or Feature
        The columns of the tensor, in order.
    splits : str or None
        Name of the model's input for the offsets, int64 ``[N + 1]``: row `i` is elements
        ``splits[i]`` to ``splits[i + 1]``.
    batch : str or None
        Name of the model's input for each element's row, int64 ``[sum n]``.
    dtype, sort_by
        As of `Padded`.

    Examples
    --------
    >>> import awkward as ak
    >>> hits = ak.Array([[{"x": 1.0}, {"x": 2.0}], [], [{"x": 3.0}]])
    >>> Flat("x").pack(hits).tolist()
    [[1.0], [2.0], [3.0]]
    """

    features: tuple[Feature, ...]
    splits: str | None
    batch: str | None
    dtype: DType
    sort_by: str | None

    def __init__(
        self,
        fields: Fields,
        splits: str | None = "row_splits",
        *,
        batch: str | None = None,
        dtype: DTypeLike = "float32",
        sort_by: str | None = None,
    ) -> None:
        _set(
            self,
            features=as_features(fields, "Flat"),
            splits=splits,
            batch=batch,
            dtype=_target(dtype, "Flat"),
            sort_by=sort_by,
        )

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensors that the input makes."""
        whole = np.dtype(np.int64)
        made: dict[str, tuple[DType, Shape]] = {name: (self.dtype, (len(self.features),))}
        made.update({other: (whole, ()) for other in (self.splits, self.batch) if other})
        return made

    def bind(self, source: Source) -> BoundFlat:
        """Read the columns named, and nothing else."""
        return BoundFlat(self.dtype, _jagged(self, source), self.splits, self.batch)


@dataclass(frozen=True, slots=True, init=False)
class Mask:
    """1 where there is a constituent, 0 where there is padding: ``[N, 1, L]``.

    Parameters
    ----------
    length : int, optional
        By default that of the input which it belongs to: of each request beside `Bucketed`.
    of : str, optional
        The field whose elements are counted, instead of those of an input.
    beside : str, optional
        The model's input whose elements are counted; by default the first one that is jagged.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak
    >>> Mask(3, of="pt").pack(ak.Array([{"pt": [3.0, 2.0]}])).tolist()
    [[[1.0, 1.0, 0.0]]]
    """

    length: int | None
    of: str | None
    beside: str | None
    dtype: DType

    def __init__(
        self,
        length: int | None = None,
        of: str | None = None,
        *,
        beside: str | None = None,
        dtype: DTypeLike = "float32",
    ) -> None:
        if of is not None and beside is not None:
            raise ConfigError(f"Mask: expected of={of!r} or beside={beside!r}, got both")
        checked = None if length is None else _length(length, "Mask")
        _set(self, length=checked, of=of, beside=beside, dtype=_target(dtype, "Mask"))

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (self.of,) if self.of else ()

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensor that the input makes."""
        return {name: (self.dtype, (1, -1 if self.length is None else self.length))}

    def bind(self, source: Source) -> BoundMask:
        """Read the field that is counted, and nothing else."""
        if self.of is None:
            raise ConfigError(
                "Mask does not know what to count; give of=, the name of a jagged field, "
                "or use it beside a Padded input"
            )
        counted = bind(source, (Feature(self.of),), jagged=True, target=self.dtype)
        return BoundMask(self.dtype, counted, self.length)

    def bind_beside(self, other: Any) -> BoundMask:
        """Bind the layout to an input that has been bound, and has a jagged axis."""
        fixed = other.lengths[0] if len(other.lengths) == 1 else None
        return BoundMask(self.dtype, other.columns, self.length or fixed)

    def pack(self, array: Any) -> Tensor:
        """Return the tensor of `array`, shape ``[N, 1, L]``."""
        bound = self.bind(Source(array))
        return bound.pack("input", slice(0, len(bound.rows)), bound.longest)["input"]


@dataclass(frozen=True, slots=True, init=False)
class Dense(_Reading):
    """An array of fixed shape per object, such as an image.

    ``events * objects * 48 * 48 * number`` becomes ``[N, 48, 48]``.

    Parameters
    ----------
    field : str or Feature
        What is sent.
    shape : sequence of int, optional
        Shape of a row's array; by default the regular axes of the field's type. An axis of length
        1 that the field lacks is added, such as the channel of a grey image.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak, numpy as np
    >>> hits = ak.unflatten(ak.zip({"image": np.ones((3, 4, 4))}, depth_limit=1), [1, 2])
    >>> Dense("image", shape=(1, 4, 4)).pack(hits).shape
    (3, 1, 4, 4)
    """

    features: tuple[Feature, ...]
    shape: tuple[int, ...] | None
    dtype: DType

    def __init__(
        self,
        field: str | Feature,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike = "float32",
    ) -> None:
        checked = None if shape is None else tuple(_length(n, "Dense") for n in shape)
        features = as_features(field, "Dense")
        if len(features) != 1:
            raise ConfigError("Dense takes one field; several make several inputs")
        _set(self, features=features, shape=checked, dtype=_target(dtype, "Dense"))

    def tensors(self, name: str) -> dict[str, tuple[DType, Shape]]:
        """Return the tensor that the input makes; without a shape, the arrays will tell."""
        return {name: (self.dtype, self.shape)}

    def bind(self, source: Source) -> BoundDense:
        """Read the field, and nothing else."""
        return BoundDense.of(source, self.features[0], self.shape, self.dtype)


def _set(layout: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(layout, name, value)


def _jagged(layout: Padded | Bucketed | Flat, source: Source) -> Columns:
    return bind(source, layout.features, jagged=True, target=layout.dtype, sort_by=layout.sort_by)


def _target(dtype: DTypeLike, layout: str) -> DType:
    if dtype == "bfloat16":
        dtype = ml_dtypes.bfloat16
    try:
        target = np.dtype(dtype)
    except TypeError:
        target = None
    if target is None or target.name not in TARGETS:
        raise ConfigError(f"{layout} cannot make dtype {dtype!r}; {nearest(str(dtype), TARGETS)}")
    return target


def _length(length: Any, layout: str) -> int:
    if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"{layout}: expected a length of at least 1, got {length!r}")
    return int(length)


def _order(axis_order: str, layout: str) -> str:
    if axis_order not in ("FL", "LF"):
        raise ConfigError(f"{layout}: expected axis_order 'FL' or 'LF', got {axis_order!r}")
    return axis_order


def _fills(
    fill: float | Sequence[float], features: tuple[Feature, ...], target: DType, layout: str
) -> tuple[float, ...]:
    fills = tuple(fill) if isinstance(fill, Sequence) else (fill,) * len(features)
    if len(fills) != len(features):
        raise ConfigError(
            f"{layout}: expected one fill or one for each of {len(features)} fields, "
            f"got {len(fills)}"
        )
    for one in fills:
        with np.errstate(all="ignore"):
            held = float(np.asarray(one, np.float64).astype(target))
        exact = target.kind in "iub"
        if (exact and held != one) or (np.isfinite(one) and not np.isfinite(held)):
            raise ConfigError(f"{layout}: {target.name} cannot hold the fill {one!r}")
    return tuple(float(f) for f in fills)
