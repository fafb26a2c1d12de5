"""Awkward arrays built node by node: any structure, any node, buffers in any order, with gaps."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import awkward as ak
import numpy as np
from awkward.contents import (
    BitMaskedArray,
    ByteMaskedArray,
    Content,
    IndexedArray,
    IndexedOptionArray,
    ListArray,
    ListOffsetArray,
    NumpyArray,
    RecordArray,
    RegularArray,
    UnionArray,
    UnmaskedArray,
)
from awkward.index import Index8, Index32, Index64, IndexU8, IndexU32
from hypothesis import strategies as st

CASES = int(os.environ.get("SONIC_ORACLE_CASES", "0"))
"""How many cases the long form tries; 0 for the short one."""
# Kernels are compiled for each pair of types, which the suite has no time for.
DTYPES = ("float32", "int32", "bool")
if CASES:
    DTYPES = (
        *("float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
Kinds = tuple[Any, ...]
"""From the outside in: "list", an int for lists of that length, "option", "maybe" for an option
under which nothing is missing; at the end the dtype of a number, a `Leaf`, or a dict of fields."""


class Leaf(NamedTuple):
    """Values of a type."""

    dtype: str
    values: Any


TEXT = Leaf("str", st.text("aµ", max_size=2))


def data_of(kinds: Kinds, *, wild: bool = False) -> Any:
    """Values of the type; wild ones may be numbers that a tensor cannot hold."""
    kind, inner = kinds[0], kinds[1:]
    if isinstance(kind, dict):
        return st.fixed_dictionaries({n: data_of(k, wild=wild) for n, k in kind.items()})
    if kind == "option":
        return st.none() | data_of(inner, wild=wild) | data_of(inner, wild=wild)
    if kind == "maybe":
        return data_of(inner, wild=wild)
    if kind == "list":
        return st.lists(data_of(inner, wild=wild), max_size=4)
    if isinstance(kind, int):
        return st.lists(data_of(inner, wild=wild), min_size=kind, max_size=kind)
    return kind.values if isinstance(kind, Leaf) else numbers_of(np.dtype(kind), wild=wild)


def numbers_of(dtype: np.dtype[Any], *, wild: bool) -> Any:
    """Numbers that every type of the kind holds exactly."""
    if dtype.kind == "b":
        return st.booleans()
    if dtype.kind == "f":
        floats = st.integers(0, 400).map(lambda n: n / 4)
        return floats | st.sampled_from([0.1, -1.0, 3e4, math.nan, math.inf]) if wild else floats
    whole = st.integers(0, 100)
    info = np.iinfo(dtype)
    return whole | st.sampled_from([int(info.min), int(info.max)]) if wild else whole


def something(kinds: Kinds) -> Any:
    """A value that must never be read."""
    kind, inner = kinds[0], kinds[1:]
    if isinstance(kind, dict):
        return {name: something(k) for name, k in kind.items()}
    if kind == "list":
        return [something(inner)]
    if kind in ("option", "maybe"):
        return something(inner)
    if isinstance(kind, int):
        return [something(inner)] * kind
    dtype = np.dtype(kind.dtype if isinstance(kind, Leaf) else kind)
    return {"f": math.nan, "U": "never"}.get(dtype.kind, 111)


def concatenated(lists: list[list[Any]]) -> list[Any]:
    return [value for values in lists for value in values]


class Builder:
    """Builds contents whose buffers hold more than what is reachable, in another order."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def build(self, kinds: Kinds, data: list[Any]) -> Content:
        if kinds[0] in ("option", "maybe"):
            return self.option(kinds[1:], data)
        how = self.draw(st.integers(0, 9))
        if how == 0:
            return self.indexed(kinds, data)
        if how == 1:
            return self.union(kinds, data)
        return self.node(kinds, data)

    def indexed(self, kinds: Kinds, data: list[Any]) -> Content:
        order = self.draw(st.permutations(range(len(data) + 1)))
        stored: list[Any] = [None] * len(order)
        for at, value in zip(order, [*data, something(kinds)], strict=True):
            stored[at] = value
        # awkward itself fails on an IndexU32 below an option.
        index = Index64(np.asarray(order[: len(data)], np.int64))
        return IndexedArray.simplified(index, self.node(kinds, stored))

    def union(self, kinds: Kinds, data: list[Any]) -> Content:
        """Build a union of two contents of the same kind; records differ by a field."""
        tags = self.draw(st.lists(st.integers(0, 1), min_size=len(data), max_size=len(data)))
        first = kinds[0]
        others = ({**first, "extra": ("int8",)},) if isinstance(first, dict) else kinds
        parts: list[list[Any]] = [[something(kinds)], []]
        index = []
        for tag, value in zip(tags, data, strict=True):
            index.append(len(parts[tag]))
            parts[tag].append({**value, "extra": 1} if tag and isinstance(first, dict) else value)
        contents = [self.node(kinds, parts[0]), self.node(others, parts[1])]
        return UnionArray(
            Index8(np.asarray(tags, np.int8)), Index64(np.asarray(index, np.int64)), contents
        )

    def index(self, values: Any) -> Any:
        kind = self.draw(st.sampled_from([Index64, Index32, IndexU32]))
        return kind(np.asarray(values, {Index64: "i8", Index32: "i4", IndexU32: "u4"}[kind]))

    def node(self, kinds: Kinds, data: list[Any]) -> Content:
        kind, inner = kinds[0], kinds[1:]
        if isinstance(kind, dict):
            fields = [self.build(k, [record[name] for record in data]) for name, k in kind.items()]
            return RecordArray(fields, list(kind), length=len(data))
        if isinstance(kind, int) and self.draw(st.booleans()):
            return RegularArray(self.build(inner, concatenated(data)), kind, len(data))
        if kind == "list" or isinstance(kind, int):
            return self.lists(inner, data)
        if kind is TEXT:
            return ak.Array(["never", *data])[1:].layout
        numbers = np.asarray(data, kind.dtype if isinstance(kind, Leaf) else kind)
        return NumpyArray(np.repeat(numbers, 2)[::2] if self.draw(st.booleans()) else numbers)

    def lists(self, inner: Kinds, data: list[Any]) -> Content:
        counts = np.asarray([len(values) for values in data], np.int64)
        if self.draw(st.booleans()):
            before = [something(inner)] * self.draw(st.integers(0, 2))
            offsets = len(before) + np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            content = self.build(inner, [*before, *concatenated(data), something(inner)])
            return ListOffsetArray(self.index(offsets), content)
        order = self.draw(st.permutations(range(len(data))))
        # Where an empty list starts means nothing, beyond the content or not.
        starts = np.full(len(data), self.draw(st.sampled_from([0, 1000])), np.int64)
        stored: list[Any] = []
        for i in order:
            stored.append(something(inner))
            if data[i]:
                starts[i] = len(stored)
                stored += data[i]
        kind = self.draw(st.sampled_from([Index64, Index32]))
        dtype = "i8" if kind is Index64 else "i4"
        # More stops than lists: what is beyond is not looked at.
        stops = np.append(starts + counts, [1000] * self.draw(st.integers(0, 1)))
        ends = (kind(ends.astype(dtype)) for ends in (starts, stops))
        return ListArray(*ends, self.build(inner, stored))

    def option(self, inner: Kinds, data: list[Any]) -> Content:
        is_present = np.asarray([value is not None for value in data], bool)
        stored = [something(inner) if value is None else value for value in data]
        how = self.draw(st.sampled_from(["indexed", "bytes", "bits", "unmasked"]))
        if how == "unmasked" and is_present.all():
            return UnmaskedArray.simplified(self.build(inner, data))
        if how == "indexed":
            index = np.where(is_present, np.cumsum(is_present) - 1, -1)
            present = [value for value in data if value is not None]
            return IndexedOptionArray.simplified(Index64(index), self.build(inner, present))
        content = self.build(inner, stored)
        if how == "bits":
            packed = np.packbits(is_present, bitorder="little")
            return BitMaskedArray.simplified(
                IndexU8(packed), content, valid_when=True, length=len(data), lsb_order=True
            )
        return ByteMaskedArray.simplified(
            Index8((~is_present).view(np.int8)), content, valid_when=False
        )


@st.composite
def structures(draw: Any, leaf: Kinds) -> Kinds:
    """Draw up to two axes above objects, which may be missing, as may lists of them."""
    kinds: list[Any] = ["option"] * draw(st.booleans())
    for level in draw(st.lists(st.sampled_from(["list", "list", 2]), max_size=2)):
        kinds += [level, *["option"] * draw(st.booleans())]
    return (*kinds, *leaf)


@st.composite
def arrays(draw: Any, kinds: Kinds, *, wild: bool = False, least: int = 0) -> ak.Array:
    """Draw an array of at least some events of a type; to be read with `ak.to_list`."""
    plain = draw(st.lists(data_of(kinds, wild=wild), min_size=least, max_size=5))
    array = ak.Array(Builder(draw).build(kinds, plain))
    if draw(st.booleans()):
        array = array[draw(st.integers(0, len(plain) - least)) :]
    if draw(st.booleans()):
        array = array[::-1]
    return array


@st.composite
def objects(draw: Any, *, wild: bool = False, pairs: bool = False, least: int = 0) -> ak.Array:
    """Draw ``events * … * {m, q, pf: var * {pt, id, s}, sv: var * {x}, image: 2 * 3 * number}``.

    Here s is text. Constituents, and numbers of objects and constituents, may be None. With
    `pairs`, they are not, as pairs of missing constituents are an error.
    """
    dtypes = st.sampled_from(DTYPES)
    maybe = st.sampled_from([(), (), ("maybe",) if pairs else ("option",)])

    def number() -> Kinds:
        return (*draw(maybe), draw(dtypes))

    def axis() -> Kinds:
        # A regular axis may be that of the constituents, and one of constituents may be an option.
        return (draw(st.sampled_from(["list", "list", 3])), *draw(maybe))

    leaf = {
        "m": number(),
        "q": (draw(dtypes),),
        "pf": (*axis(), {"pt": number(), "id": number(), "s": (*draw(maybe), TEXT)}),
        "sv": (*axis(), {"x": number()}),
        "image": (2, 3, *(("maybe",) * draw(st.booleans())), draw(dtypes)),
    }
    return draw(arrays(draw(structures((leaf,))), wild=wild, least=least))
