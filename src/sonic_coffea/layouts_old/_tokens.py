"""Several collections as one sequence of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from awkward.contents import Content, EmptyArray, RecordArray

from sonic_coffea.errors import ConfigError, FieldError
from sonic_coffea.layouts_old._columns import Columns, Filling, fill_rows
from sonic_coffea.layouts_old._declarations import DType, check_held, declare, order_of
from sonic_coffea.layouts_old._fields import Source
from sonic_coffea.layouts_old._formulae import base_name
from sonic_coffea.layouts_old._groups import Stamp
from sonic_coffea.layouts_old._layout import Bound, FieldsLayout, Layout
from sonic_coffea.layouts_old._padded import Padded
from sonic_coffea.layouts_old._row import Row
from sonic_coffea.layouts_old._rows import Int64, RowSelection, Split, Tensor
from sonic_coffea.layouts_old._scatter import Scatter
from sonic_coffea.layouts_old._texts import TEXT

FLAGS = ("onehot", "number")
Channel = tuple[str, int]
"""A name, and its number among the channels of a part with this name."""


@dataclass(frozen=True, slots=True, init=False)
class Tokens(Layout):
    """Several collections as one sequence of tokens: ``[N, L, F]``.

    Each collection has its own places in the sequence, as many as its length. The next collection
    follows. A channel holds the fields with the same last part of their paths: ``Jet.pt`` and
    ``MET.pt`` share the channel ``pt``.

    Parameters
    ----------
    parts : mapping
        Names of the collections, each with a `Padded` layout, or a `Row` for one token. Fields are
        paths in the record (``Jet.pt``), or in the collection with the name of the part (``pt``).
    flags : {"onehot", "number"} or mapping, optional
        Further channels that tell the collections apart. ``"onehot"``: one channel for each
        collection, 1 for its tokens. ``"number"``: one channel with the number of the collection,
        from 1. A mapping: one channel with the mapping's number of each collection. All are 0 in
        padding.
    fill : float
        Value of a field that a collection does not have. The padding of a collection is the `fill`
        of its own layout.
    axis_order : {"LF", "FL"}
        ``[N, L, F]`` or ``[N, F, L]``.

    Notes
    -----
    All parts must have the same dtype. A `Mask` beside this input is 1 for each token that is not
    padding.

    Examples
    --------
    >>> import awkward as ak
    >>> events = ak.Array(
    ...     [
    ...         {"Jet": [{"pt": 50.0, "eta": 0.5}], "MET": {"pt": 20.0}},
    ...         {"Jet": [], "MET": {"pt": 9.0}},
    ...     ]
    ... )
    >>> tokens = Tokens({"Jet": Padded(["Jet.pt", "Jet.eta"], 2), "MET": Row(["MET.pt"])})
    >>> tokens.pack(events).tolist()
    [[[50.0, 0.5], [0.0, 0.0], [20.0, 0.0]], [[0.0, 0.0], [0.0, 0.0], [9.0, 0.0]]]
    """

    jagged = True

    parts: tuple[tuple[str, Padded | Row], ...]
    flags: str | tuple[tuple[str, float], ...] | None
    fill: float
    axis_order: str
    dtype: DType
    channels: tuple[Channel, ...] = field(repr=False, compare=False)
    lengths: tuple[int, ...] = field(repr=False, compare=False)

    def __init__(
        self,
        parts: Mapping[str, Padded | Row],
        *,
        flags: str | Mapping[str, float] | None = None,
        fill: float = 0.0,
        axis_order: str = "LF",
    ) -> None:
        value: Any = parts
        if not isinstance(value, Mapping) or not parts:
            raise ConfigError(f"Tokens: expected a dict of collections, got {parts!r}")
        for name, part in parts.items():
            _check_part(name, part)
        order_of(axis_order, self, orders=("LF", "FL"))
        first, *others = ((name, part.dtype) for name, part in parts.items())
        for name, dtype in others:
            if dtype != first[1]:
                raise ConfigError(
                    f"Tokens: part {first[0]!r} has dtype {first[1]}, part {name!r} {dtype}; "
                    "expected the same"
                )
        if isinstance(flags, str) and flags not in FLAGS:
            raise ConfigError(f"Tokens: expected flags 'onehot' or 'number', got {flags!r}")
        chosen: Any = flags
        if isinstance(flags, Mapping):
            if set(flags) != set(parts):
                raise ConfigError(
                    f"Tokens: expected flags of {', '.join(parts)}, got {', '.join(flags)}"
                )
            chosen = tuple((name, float(flags[name])) for name in parts)
        check_held(fill, first[1], "Tokens", "fill")
        declare(self, parts=tuple(parts.items()), flags=chosen, fill=float(fill))
        declare(self, axis_order=axis_order, dtype=first[1], channels=_channels(parts))
        declare(self, lengths=(sum(part.padded_length(0) or 1 for part in parts.values()),))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for _, part in self.parts for name in part.columns)

    def row_shape(self, level: int) -> tuple[int, ...]:
        width = len(self.channels) + len(_flag_values(self, 0))
        shape = self.padded_length(level), width
        return shape if self.axis_order == "LF" else shape[::-1]

    def bind(self, source: Source) -> Bound:
        bound: list[_Part] = []
        start = 0
        for number, (name, part) in enumerate(self.parts):
            try:
                # A part packs its columns in places of the sequence, and not as it would itself.
                columns = FieldsLayout.bind(part, _PartSource(source, name)).columns
            except (ConfigError, FieldError) as error:
                raise error.within(f"part {name!r}") from None
            keys = _keys(part)
            slots = np.asarray([self.channels.index(key) for key in keys], np.int64)
            groups = tuple(replace(g, slots=slots[g.slots]) for g in columns.groups)
            fills = [self.fill] * len(self.channels)
            for slot, value in zip(slots, part.fill or [0.0] * len(slots), strict=True):
                fills[slot] = value
            stop = start + (part.padded_length(0) or 1)
            flags = _flag_values(self, number)
            lacking = [n for n in range(len(self.channels)) if n not in slots]
            behind = range(len(self.channels), len(self.channels) + len(flags))
            absent, nothing = (self.fill,) * len(lacking), (0.0,) * len(flags)
            lines = np.asarray([*lacking, *behind], np.int64)
            stamp = Stamp(lines, (*absent, *flags), (*absent, *nothing)) if len(lines) else None
            bound.append(
                _Part(
                    name,
                    replace(columns, groups=groups),
                    slice(start, stop),
                    part.jagged,
                    slots,
                    fills,
                    stamp,
                    isinstance(part, Padded) and part.pad_mode == "wrap",
                )
            )
            if number:
                rows, names = bound[0].columns.split.rows, (bound[0].name, name)
                rows.check_same(columns.split.rows, (f"part {names[0]!r}", f"part {names[1]!r}"))
            start = stop
        return Bound(self, _TokenColumns.of(bound))

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        by_field = out if self.axis_order == "FL" else out.transpose(0, 2, 1)
        assert isinstance(columns, _TokenColumns)  # noqa: S101
        each: list[Filling] = []
        for part in columns.parts:
            here = by_field[:, :, part.places]
            how: Any = {"wrap": part.wraps, "stamp": part.stamp}
            each += part.columns.fillings(here, part.fills, rows, **how)
        fill_rows(each, out)

    def count_elements(
        self, columns: Columns, rows: RowSelection, levels: Int64
    ) -> tuple[int, int, int]:
        assert isinstance(columns, _TokenColumns)  # noqa: S101
        each = [
            part.count_elements(here.columns, rows, levels * 0)
            for (_, part), here in zip(self.parts, columns.parts, strict=True)
        ]
        sent, truncated, padding = map(sum, zip(*each, strict=True))
        return sent, truncated, padding

    def content(self, tensor: Tensor, columns: Columns) -> Content:
        by_element = tensor if self.axis_order == "LF" else tensor.transpose(0, 2, 1)
        return columns.scattered(by_element, [f"{n}_{k}" if k else n for n, k in self.channels])


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A collection with the arrays of a call; its tokens have `places` in the sequence.

    Each of its fields has the channel of its slot. The stamp fills the channels that it lacks, and
    the flags behind. `fills` pad each channel, or its own tokens if it `wraps`.
    """

    name: str
    columns: Columns
    places: slice
    jagged: bool
    slots: Int64
    fills: list[float]
    stamp: Stamp | None
    wraps: bool

    @property
    def length(self) -> int:
        """How many places its tokens have."""
        return int(self.places.stop - self.places.start)

    def of_rows(self, lists: Content) -> Content:
        """Return what is in lists of one, unless the rows have lists."""
        return lists if self.jagged else lists.content


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _TokenColumns(Columns):
    """The columns of all parts; `split` has the tokens of each row."""

    parts: tuple[_Part, ...]

    @classmethod
    def of(cls, parts: list[_Part]) -> _TokenColumns:
        rows = parts[0].columns.split.rows
        counts = sum(part.columns.split.counts for part in parts)
        split = Split(rows, EmptyArray(), np.zeros(len(rows), np.int64), np.asarray(counts))
        columns = tuple(column for part in parts for column in part.columns.columns)
        return cls(split, columns, (), parts=tuple(parts))

    @property
    def collections(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    def present(self, rows: RowSelection, length: int) -> Tensor:
        del length
        each = [part.columns.present(rows, part.length) for part in self.parts]
        return np.concatenate(each, axis=1)

    def indices(self, rows: RowSelection, slots: Int64, length: int) -> Int64:
        del length
        each = [
            part.columns.indices(rows, slots - part.places.start, part.length)
            for part in self.parts
        ]
        return np.concatenate(each, axis=2)

    def mark(self, out: Tensor, rows: RowSelection) -> None:
        out[:, 0] = self.present(rows, out.shape[2])

    def scatter(self, width: int, dtype: DType, *, axes: int = 1) -> Scatter:
        assert axes == 1  # noqa: S101  others are refused, as there are several collections
        return _TokenScatter(self, width, dtype)

    def scattered(self, tensor: Tensor, names: Sequence[str]) -> Content:
        contents = []
        for part in self.parts:
            own = part.columns.scattered(
                tensor[:, part.places][:, :, part.slots], [names[slot] for slot in part.slots]
            )
            contents.append(part.of_rows(own))
        return RecordArray(contents, list(self.collections), length=len(tensor))


class _TokenScatter(Scatter):
    """Values of each token: a record of the parts."""

    def __init__(self, columns: _TokenColumns, width: int, dtype: DType) -> None:
        self._parts = [(part, part.columns.scatter(width, dtype)) for part in columns.parts]
        self.values = np.zeros((0, width), dtype)

    def place(self, rows: RowSelection, tensor: Tensor) -> None:
        for part, scatter in self._parts:
            scatter.place(rows, tensor[:, part.places])

    def content(
        self, names: list[str] | None, each: tuple[int, ...] = (), *, optional: bool = False
    ) -> Content:
        contents = [
            part.of_rows(scatter.content(names, each, optional=optional))
            for part, scatter in self._parts
        ]
        return RecordArray(contents, [part.name for part, _ in self._parts])


class _PartSource(Source):
    """Arrays in which a part's collection need not be named."""

    def __init__(self, source: Source, part: str) -> None:
        self._source, self._part = source, part

    def collection(self, path: str) -> tuple[Content | None, str]:
        return self._source.collection(self._path(path))

    def column(self, path: str) -> Content:
        return self._source.column(self._path(path))

    def _path(self, path: str) -> str:
        first, known = path.partition(".")[0].partition("[")[0], self._source.names()
        within = self._part in known and first in self._source.names(self._part)
        if first in known and within:
            raise FieldError(
                f"field {path!r} is one of the record and one of {self._part!r}; write "
                f"{f'{self._part}.{path}'!r}, or give the part another name"
            )
        inside = within or (self._part in known and first not in known)
        return f"{self._part}.{path}" if inside else path


def _check_part(name: str, part: Any) -> None:
    if not isinstance(part, (Padded, Row)):
        raise ConfigError(
            f"Tokens, part {name!r}: expected a Padded or a Row layout, got {type(part).__name__}"
        )
    if part.dtype == TEXT:
        raise ConfigError(f"Tokens, part {name!r}: tokens have numbers, and no strings")
    if part.axis_order not in ("F", "FL", "LF"):
        raise ConfigError(
            f"Tokens, part {name!r}: axis_order {part.axis_order!r} has no axis for the channels"
        )


def _keys(part: Padded | Row) -> list[Channel]:
    """Return the channels of a part; fields of the same name are numbered."""
    seen: Counter[str] = Counter()
    keys = []
    for feature in part.features:
        name = base_name(feature.name)
        if feature.only is not None:  # a category of its own
            name = f"{name}={feature.only:g}"
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def _channels(parts: Mapping[str, Padded | Row]) -> tuple[Channel, ...]:
    """Return the channels of all parts, in the order in which they come first."""
    channels: dict[Channel, None] = {}
    times: dict[str, tuple[str, int]] = {}
    for name, part in parts.items():
        keys = _keys(part)
        channels |= dict.fromkeys(keys)
        for channel, count in Counter(key for key, _ in keys).items():
            other, known = times.setdefault(channel, (name, count))
            if count != known:
                raise ConfigError(
                    f"Tokens: parts {other!r} and {name!r} have {known} and {count} fields called "
                    f"{channel!r}; which belong together is not known"
                )
    return tuple(channels)


def _flag_values(tokens: Tokens, number: int) -> tuple[float, ...]:
    """Return what the tokens of a part have in the channels of the flags."""
    if tokens.flags is None:
        return ()
    if isinstance(tokens.flags, tuple):
        return (tokens.flags[number][1],)
    if tokens.flags == "number":
        return (number + 1.0,)
    return tuple(float(n == number) for n in range(len(tokens.parts)))
