"""Several collections as one sequence of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import RecordArray

from sonic_coffea.errors import ConfigError, FieldError
from sonic_coffea.layouts._expressions import path_of
from sonic_coffea.layouts._features import Feature, declare, own_types
from sonic_coffea.layouts._jagged import Padded
from sonic_coffea.layouts._layout import Batch, Bound, DType, Layout, Part, check_held, order_of
from sonic_coffea.layouts._padding import listed
from sonic_coffea.layouts._row import Row
from sonic_coffea.layouts._structure import STRING, Tensor

if TYPE_CHECKING:
    from awkward.contents import Content

    from sonic_coffea.layouts._source import Source

FLAGS = ("onehot", "number")
Channel = tuple[str, int]
"""A name, and its number among the channels of a part with this name."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens(Layout):
    """Several collections as one sequence of tokens: ``[N, L, F]``.

    Each collection has its own places in the sequence, as many as its length. The next collection
    follows. A channel holds the fields with the same last part of their paths: ``Jet.pt`` and
    ``MET.pt`` share the channel ``pt``. Constants share a channel, in their order.

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

    parts: Any
    _: KW_ONLY
    flags: Any = None
    fill: float = 0.0
    axis_order: str = "LF"

    def __post_init__(self) -> None:
        own_types(self)
        parts = self.parts
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigError(f"Tokens: expected a dict of collections, got {parts!r}")
        for name, part in parts.items():
            _check_part(name, part)
        order_of(self.axis_order, self, orders=("LF", "FL"))
        first, *others = ((name, part.dtype) for name, part in parts.items())
        for name, dtype in others:
            if dtype != first[1]:
                raise ConfigError(
                    f"Tokens: part {first[0]!r} has dtype {first[1]}, part {name!r} {dtype}; "
                    "expected the same"
                )
        declare(self, flags=_flags(self.flags, list(parts), first[1]))
        declare(self, fill=check_held(self.fill, first[1], "Tokens", "fill"))
        declare(self, parts=tuple((str(name), part) for name, part in parts.items()))
        _channels(self.parts)

    @property
    def dtype(self) -> Any:
        return self.parts[0][1].dtype

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for _, part in self.parts for name in part.columns)

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        return (sum(part.padded_length(0) or 1 for _, part in self.parts),)

    def row_shape(self, bucket: int) -> tuple[int, ...]:
        width = len(_channels(self.parts)) + len(self._flags_of(0))
        shape = self.padded_length(bucket), width
        return shape if self.axis_order == "LF" else shape[::-1]

    def _flags_of(self, number: int) -> tuple[float, ...]:
        """Return what the tokens of a part have in the channels of the flags."""
        if self.flags is None:
            return ()
        if isinstance(self.flags, tuple):
            return (self.flags[number][1],)
        if self.flags == "number":
            return (number + 1.0,)
        return tuple(float(n == number) for n in range(len(self.parts)))

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        del others
        bound: list[Part] = []
        start = 0
        for name, part in self.parts:
            stop = start + (part.padded_length(0) or 1)
            try:
                each = replace(part, axis_order="FL").bind(source.within(name))
            except (ConfigError, FieldError) as error:
                raise error.within(f"part {name!r}") from None
            bound.append((name, each, slice(start, stop)))
            bound[0][1].rows.check_same(each.rows, (f"part {bound[0][0]!r}", f"part {name!r}"))
            start = stop
        return Bound(self, bound[0][1].columns, tuple(bound))

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        by_field = out if self.axis_order == "FL" else out.transpose(0, 2, 1)
        channels = _channels(self.parts)
        for number, (name, part, places) in enumerate(bound.parts):
            slots = [channels.index(key) for key in _keys(part.layout)]
            by_field[:, sorted({*range(len(channels))}.difference(slots)), places] = self.fill
            if part.layout.jagged and slots == list(range(slots[0], slots[0] + len(slots))):
                part.pack(name, batch, by_field[:, slots[0] : slots[0] + len(slots), places])
            else:
                by_field[:, slots, places] = part.pack(name, batch)[name]
            present = np.arange(places.stop - places.start) < part.counts(batch.rows)[:, np.newaxis]
            for place, flag in enumerate(self._flags_of(number)):
                by_field[:, len(channels) + place, places] = np.where(present, flag, 0.0)

    def content(self, tensor: Tensor, bound: Bound) -> Content:
        by_element = tensor if self.axis_order == "LF" else tensor.transpose(0, 2, 1)
        channels, contents = _channels(self.parts), []
        names = [f"{name}_{k}" if k else name for name, k in channels]
        for _, part, places in bound.parts:
            slots = [channels.index(key) for key in _keys(part.layout)]
            values = by_element[:, places][:, :, slots]
            lists = listed(part.columns, values, [names[slot] for slot in slots])
            contents.append(lists if part.layout.jagged else lists.content)
        return RecordArray(contents, [name for name, _ in self.parts], length=len(tensor))


def _flags(
    flags: Any, parts: Sequence[str], dtype: DType
) -> str | tuple[tuple[str, float], ...] | None:
    """Return the flags of the parts, refusing anything that the tensor cannot hold."""
    if flags is None:
        return None
    if isinstance(flags, Mapping):
        if set(flags) != set(parts):
            raise ConfigError(
                f"Tokens: expected flags of {', '.join(parts)}, got {', '.join(map(str, flags))}"
            )
        return tuple((str(n), check_held(flags[n], dtype, "Tokens", "flag")) for n in parts)
    if not isinstance(flags, str) or flags not in FLAGS:
        raise ConfigError(
            "Tokens: expected flags 'onehot' or 'number', or a dict with a number for each of "
            f"{', '.join(parts)}, got {flags!r}"
        )
    if flags == "number":
        check_held(len(parts), dtype, "Tokens", "flag")
    return str(flags)


def _check_part(name: Any, part: Any) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"Tokens: expected names of collections to be strings, got {name!r}")
    if not isinstance(part, (Padded, Row)) or len(part.lengths) > 1 or getattr(part, "outer", None):
        raise ConfigError(
            f"Tokens, part {name!r}: expected a Padded or a Row layout, got {type(part).__name__}"
        )
    if part.dtype == STRING:
        raise ConfigError(f"Tokens, part {name!r}: tokens have numbers, and no strings")
    if part.axis_order not in ("F", "FL", "LF"):
        raise ConfigError(
            f"Tokens, part {name!r}: axis_order {part.axis_order!r} has no axis for the channels"
        )


def _keys(part: Any) -> list[Channel]:
    """Return the channels of a part; fields of the same name are numbered."""
    seen: Counter[str] = Counter()
    keys = []
    for feature in part.features:
        name = _name_of(feature)
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def _name_of(feature: Feature) -> str:
    """Return the name of a feature's channel; a category, or a constant, has one of its own."""
    if not feature.terms and feature.text == feature.expression:
        return "[constant]"  # no field has brackets in its name
    name = next(step for step in reversed(path_of(feature.name)) if isinstance(step, str))
    return name if feature.only is None else f"{name}={feature.only:g}"


def _channels(parts: tuple[tuple[str, Padded | Row], ...]) -> list[Channel]:
    """Return the channels of all parts, in the order in which they come first."""
    channels: dict[Channel, None] = {}
    times: dict[str, tuple[str, int]] = {}
    for name, part in parts:
        keys = _keys(part)
        channels |= dict.fromkeys(keys)
        for channel, count in Counter(key for key, _ in keys).items():
            other, known = times.setdefault(channel, (name, count))
            if count != known:
                raise ConfigError(
                    f"Tokens: parts {other!r} and {name!r} have {known} and {count} fields called "
                    f"{channel!r}; which belong together is not known"
                )
    return list(channels)
