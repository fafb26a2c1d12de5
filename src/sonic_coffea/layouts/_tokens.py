"""Several collections as one sequence of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from awkward.contents import Content, RecordArray

from sonic_coffea.errors import ConfigError
from sonic_coffea.layouts._fields import Bucketed, Padded, Row
from sonic_coffea.layouts._layout import Batch, Bound, Layout, Part
from sonic_coffea.layouts._options import check_options, declare, held, refuse
from sonic_coffea.layouts._padding import listed
from sonic_coffea.layouts._source import Source, within
from sonic_coffea.layouts._structure import STRING, Int64, RowSelection, Tensor

Channel = tuple[str, int]
"""A name, and its number among the channels of a part with this name."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens(Layout):
    """Several collections as one sequence of tokens: ``[N, L, F]``.

    Each collection has its own places in the sequence, as many as its length. The next collection
    follows. A channel holds the fields with the same last part of their paths: ``Jet.pt`` and
    ``MET.pt`` share the channel ``pt``. Each value of a `OneHot` has a channel of its own.
    Constants share a channel, in their order.

    Parameters
    ----------
    parts : mapping
        Names of the collections, each with a `Padded` layout, or a `Row` for one token. Fields are
        paths in the record (``Jet.pt``), or in the collection with the name of the part (``pt``).
    flags : {"onehot", "number"}, optional
        Further channels that tell the collections apart. ``"onehot"``: one channel for each
        collection, 1 for its tokens. ``"number"``: one channel with the number of the collection,
        from 1. All are 0 in padding.
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
    choices: ClassVar = {"axis_order": ("LF", "FL"), "flags": ("onehot", "number")}

    parts: Any
    _: KW_ONLY
    flags: str | None = None
    fill: float = 0.0
    axis_order: str = "LF"
    channels: tuple[Channel, ...] = field(init=False, repr=False)
    own: tuple[list[int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        parts = self.parts
        if not isinstance(parts, Mapping) or not {*map(type, parts)} <= {str, np.str_} or not parts:
            raise ConfigError(f"Tokens: expected a dict of collections by name, got {parts!r}")
        dtype: Any = getattr(next(iter(parts.values())), "dtype", None)
        for name, part in parts.items():
            is_one = isinstance(part, (Padded, Row)) and not isinstance(part, Bucketed)
            is_flat = is_one and not getattr(part, "outer", None) and part.dtype != STRING
            cases = {
                f"expected a Padded or a Row layout of numbers, got {part!r}": not is_flat,
                f"expected dtype {dtype}, as the first part has": is_flat and part.dtype != dtype,
            }
            refuse(f"Tokens, part {name!r}", cases)
        if self.flags == "number":
            held(len(parts), dtype, "Tokens", "flag")
        each = [_channels(part) for part in parts.values()]
        channels = tuple(dict.fromkeys(channel for keys in each for channel in keys))
        for name, keys in zip(parts, each, strict=True):
            for channel in channels:
                if channel[0] in dict(keys) and channel not in keys:
                    raise ConfigError(
                        f"Tokens: part {name!r} has fewer fields called {channel[0]!r} than "
                        "another part; which belong together is not known"
                    )
        declare(
            self,
            parts=tuple((str(n), replace(part, axis_order="FL")) for n, part in parts.items()),
            fill=held(self.fill, dtype, "Tokens", "fill"),
            channels=channels,
            own=tuple([channels.index(key) for key in keys] for keys in each),
        )

    @property
    def dtype(self) -> Any:
        return self.parts[0][1].dtype

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for _, part in self.parts for name in part.columns)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (sum(part.padded_length(0) for _, part in self.parts),)

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.channels) + len(self._flags_of(0))

    def _flags_of(self, number: int) -> list[float]:
        """Return what the tokens of a part have in the channels of the flags."""
        one_hot = [float(n == number) for n in range(len(self.parts))]
        return {None: [], "onehot": one_hot, "number": [number + 1.0]}[self.flags]

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        del others
        bound: list[Part] = []
        start = 0
        for name, part in self.parts:
            stop = start + part.padded_length(0)
            with within(f"part {name!r}"):
                each = part.bind(source.within(name))
            bound.append((name, each, slice(start, stop)))
            bound[0][1].rows.check_same(each.rows, (f"part {bound[0][0]!r}", f"part {name!r}"))
            start = stop
        return Bound(self, bound[0][1].columns, tuple(bound))

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        by_channel, width = np.moveaxis(self.by_element(out), -1, 1), len(self.channels)
        for number, (name, part, places) in enumerate(bound.parts):
            own, here = self.own[number], by_channel[:, :, places]
            first = own[0]
            if part.layout.jagged and own == list(range(first, first + len(own))):
                part.layout.write(here[:, first : first + len(own)], part, batch)
            else:
                here[:, own] = part.layout.make(name, part, batch)[name]
            here[:, [*set(range(width)).difference(own)]] = self.fill
            present = part.columns.present(batch.rows, here.shape[2])
            for channel, flag in enumerate(self._flags_of(number), width):
                here[:, channel] = np.where(present, flag, 0.0)

    def count_elements(self, bound: Bound, rows: RowSelection, buckets: Int64) -> tuple[int, ...]:
        each = [part.layout.count_elements(part, rows, buckets) for _, part, _ in bound.parts]
        return tuple(map(sum, zip(*each, strict=True)))

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        by_element = self.by_element(tensor)
        contents = [
            listed(part, by_element[:, places][:, :, own], [self.channels[n][0] for n in own])
            for own, (_, part, places) in zip(self.own, bound.parts, strict=True)
        ]
        return RecordArray(contents, [name for name, _ in self.parts], length=len(tensor))


def _channels(part: Any) -> list[Channel]:
    """Return the channels of a part; fields of the same name are numbered.

    A category, or a constant, has a name of its own.
    """
    seen: Counter[str] = Counter()
    channels = []
    for feature in part.features:
        name = feature.last + feature.suffix
        if not feature.terms and feature.text == feature.expression:
            name = "[constant]"  # no field has brackets in its name
        channels.append((name, seen[name]))
        seen[name] += 1
    return channels
