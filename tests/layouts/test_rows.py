"""Any awkward structure, built node by node, taken apart and put back as plain loops do."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
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
    UnmaskedArray,
)
from awkward.index import Index8, Index64
from hypothesis import assume, given
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea.layouts import Source, bind_inputs

DTYPES = ("float32", "float64", "int32", "int64", "uint8", "bool", "float16")
Kinds = tuple[Any, ...]
"""From the outside in: "list", an int for a regular axis, "option", and "x" for a number."""


@st.composite
def kinds_of(draw: Any, *, jagged: bool) -> Kinds:
    """Draw one to four list levels, each of which, or its contents, may be missing."""
    # The outermost axis is that of the events, which no row consumes.
    outer = st.sampled_from(["list", "list", 1, 2])
    levels = draw(st.lists(outer, min_size=1 if jagged else 0, max_size=3))
    levels.append(draw(st.sampled_from(["list", 3])) if jagged else "list")
    kinds: list[Any] = []
    for level in levels:
        kinds += ["option"] * draw(st.booleans())
        kinds.append(level)
    # Among the constituents of a row there is no None.
    kinds += ["option"] * (not jagged and draw(st.booleans()))
    return (*kinds, "x")


def data_of(kinds: Kinds) -> Any:
    """One value of the type."""
    kind, inner = kinds[0], kinds[1:]
    if kind == "x":
        return st.integers(0, 100)
    if kind == "option":
        return st.none() | data_of(inner)
    if kind == "list":
        return st.lists(data_of(inner), max_size=3)
    return st.lists(data_of(inner), min_size=kind, max_size=kind)


def something(kinds: Kinds) -> Any:
    """A value that must never be read."""
    kind, inner = kinds[0], kinds[1:]
    if kind == "x":
        return 111
    if kind == "list":
        return [something(inner)]
    return something(inner) if kind == "option" else [something(inner)] * kind


def concatenated(lists: list[list[Any]]) -> list[Any]:
    return [value for one in lists for value in one]


class Builder:
    """Builds contents whose buffers hold more than what is reachable, in another order."""

    def __init__(self, draw: Any, dtype: str) -> None:
        self.draw = draw
        self.dtype = dtype

    def build(self, kinds: Kinds, data: list[Any]) -> Content:
        if self.draw(st.integers(0, 4)) == 0:  # read through an index
            order = self.draw(st.permutations(range(len(data) + 1)))
            stored: list[Any] = [None] * len(order)
            for at, value in zip(order, [*data, something(kinds)], strict=True):
                stored[at] = value
            index = Index64(np.asarray(order[: len(data)], np.int64))
            return IndexedArray.simplified(index, self.node(kinds, stored))
        return self.node(kinds, data)

    def node(self, kinds: Kinds, data: list[Any]) -> Content:
        kind, inner = kinds[0], kinds[1:]
        if kind == "x":
            numbers = np.asarray(data, self.dtype)
            return NumpyArray(np.repeat(numbers, 2)[::2] if self.draw(st.booleans()) else numbers)
        if kind == "option":
            return self.option(inner, data)
        if kind != "list":
            return RegularArray(self.build(inner, concatenated(data)), kind, len(data))
        counts = np.asarray([len(one) for one in data], np.int64)
        if self.draw(st.booleans()):
            before = [something(inner)] * self.draw(st.integers(0, 2))
            offsets = len(before) + np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            content = self.build(inner, [*before, *concatenated(data), something(inner)])
            return ListOffsetArray(Index64(offsets), content)
        order = self.draw(st.permutations(range(len(data))))
        starts = np.zeros(len(data), np.int64)
        stored: list[Any] = []
        for i in order:
            stored.append(something(inner))
            starts[i] = len(stored)
            stored += data[i]
        return ListArray(Index64(starts), Index64(starts + counts), self.build(inner, stored))

    def option(self, inner: Kinds, data: list[Any]) -> Content:
        there = np.asarray([value is not None for value in data], bool)
        stored = [something(inner) if value is None else value for value in data]
        how = self.draw(st.sampled_from(["indexed", "bytes", "bits", "unmasked"]))
        if how == "unmasked" and there.all():
            return UnmaskedArray.simplified(self.build(inner, data))
        if how == "indexed":
            index = np.where(there, np.cumsum(there) - 1, -1)
            present = [value for value in data if value is not None]
            return IndexedOptionArray.simplified(Index64(index), self.build(inner, present))
        content = self.build(inner, stored)
        if how == "bits":
            packed = np.packbits(there, bitorder="little")
            return BitMaskedArray.simplified(
                ak.index.IndexU8(packed),
                content,
                valid_when=True,
                length=len(data),
                lsb_order=True,
            )
        return ByteMaskedArray.simplified(Index8((~there).view(np.int8)), content, valid_when=False)


@st.composite
def arrays(draw: Any, *, jagged: bool) -> tuple[Kinds, list[Any], ak.Array]:
    kinds = draw(kinds_of(jagged=jagged))
    plain = draw(st.lists(data_of(kinds[1:] if kinds[0] == "list" else kinds), max_size=5))
    if kinds[0] == "list":  # the outermost list is the axis of the events
        kinds = kinds[1:]
    dtype = draw(st.sampled_from(DTYPES))
    plain = as_bools(plain) if dtype == "bool" else plain
    array = ak.Array(Builder(draw, dtype).build(kinds, plain))
    assert array.tolist() == plain
    if draw(st.booleans()):
        first = draw(st.integers(0, len(plain)))
        plain, array = plain[first:], array[first:]
    if draw(st.booleans()):
        plain, array = plain[::-1], array[::-1]
    return kinds, plain, array


def as_bools(plain: Any) -> Any:
    if isinstance(plain, list):
        return [as_bools(one) for one in plain]
    return None if plain is None else plain > 50


def leaves(plain: Any, depth: int) -> list[Any]:
    """The rows, in order: what is there below `depth` lists."""
    if plain is None:
        return []
    if depth == 0:
        return [plain]
    return [row for one in plain for row in leaves(one, depth - 1)]


def numbered(plain: Any, depth: int, numbers: Any) -> Any:
    """The structure, with the next number in the place of each row."""
    if plain is None:
        return None
    if depth == 0:
        return next(numbers)
    return [numbered(one, depth - 1, numbers) for one in plain]


def axes(kinds: Kinds) -> int:
    return sum(kind not in ("option", "x") for kind in kinds) + 1


def type_of(kinds: Kinds, leaf: str) -> str:
    """What awkward calls the type, below the axis of the events."""
    text = leaf
    for kind in kinds[-2::-1]:
        if kind == "option":
            text = f"option[{text}]" if " * " in text else f"?{text}"
        else:
            text = f"{'var' if kind == 'list' else kind} * {text}"
    return text


@given(arrays(jagged=False))
def test_rows_of_any_structure(data: tuple[Kinds, list[Any], ak.Array]) -> None:
    kinds, plain, array = data
    depth = axes(kinds)
    rows = leaves(plain, depth)
    expected = np.asarray(rows, np.float32).reshape(-1, 1)
    np.testing.assert_array_equal(sonic.Row("pt").pack({"pt": array}), expected)
    inputs = bind_inputs({"x": sonic.Row("pt")}, {"pt": array})
    scores = inputs.rows.unflatten(NumpyArray(np.arange(len(rows), dtype=np.float32)))
    assert scores.tolist() == numbered(plain, depth, iter(range(len(rows))))
    assert str(scores.type) == f"{len(plain)} * {type_of(kinds, 'float32')}"
    events = [number for number, one in enumerate(plain) for _ in leaves([one], depth)]
    found = [inputs.rows.events_of(row, row + 1) for row in range(len(rows))]
    assert found == [(event, event + 1) for event in events]
    assert inputs.rows.event_numbers().tolist() == events


@given(arrays(jagged=True), st.integers(1, 4), st.integers(1, 3))
def test_padded_of_any_structure(
    data: tuple[Kinds, list[Any], ak.Array], length: int, size: int
) -> None:
    kinds, plain, array = data
    depth = axes(kinds) - 1
    rows = leaves(plain, depth)
    expected = np.full((len(rows), 1, length), -1, np.float32)
    present = np.zeros((len(rows), 1, length), np.float32)
    for i, row in enumerate(rows):
        for k, value in enumerate(row[:length]):
            expected[i, 0, k] = value
            present[i, 0, k] = 1
    layout = sonic.Padded("pt", length, fill=-1.0)
    # What may be meant as pairs i x j is refused.
    assume(not layout.bind(Source({"pt": array})).columns.split.square)
    np.testing.assert_array_equal(layout.pack({"pt": array}), expected)
    np.testing.assert_array_equal(sonic.Mask(length, of="pt").pack({"pt": array}), present)
    inputs = bind_inputs({"a": layout, "m": sonic.Mask(length)}, {"pt": array})
    for start in range(0, len(rows), size):
        stop = min(start + size, len(rows))
        piece = inputs.pack(start, stop)
        np.testing.assert_array_equal(piece["a"], expected[start:stop])
        np.testing.assert_array_equal(piece["m"], present[start:stop])
    scores = inputs.rows.unflatten(NumpyArray(np.arange(len(rows), dtype=np.float32)))
    assert scores.tolist() == numbered(plain, depth, iter(range(len(rows))))


@given(arrays(jagged=False))
def test_records_of_any_structure(data: tuple[Kinds, list[Any], ak.Array]) -> None:
    """As in files: the structure is that of the records, and the numbers are their fields."""
    _, plain, array = data
    depth = axes(data[0])

    def record(node: Content, **_: Any) -> Content | None:
        if not node.is_numpy:
            return None
        numbers = node.data.astype(np.float32)
        return RecordArray([NumpyArray(numbers), NumpyArray(2 * numbers)], ["one", "two"])

    records = ak.transform(record, array)
    rows = np.asarray(leaves(plain, depth), np.float32)
    tensor = sonic.Row(["two", "one"]).pack(records)
    np.testing.assert_array_equal(tensor, np.stack([2 * rows, rows], axis=1))


def test_the_first_event_that_differs_is_found() -> None:
    for first in range(7):
        counts = np.ones(7, int)
        other = counts.copy()
        other[first:] += 1
        one = ak.unflatten(np.zeros(counts.sum()), counts)
        two = ak.unflatten(np.zeros(other.sum()), other)
        with pytest.raises(sonic.errors.InputError, match=f"difference is in event {first}"):
            sonic.Row(["x", "y"]).pack({"x": one, "y": two})


def test_missing_objects_in_one_field_only_are_a_difference() -> None:
    one = ak.Array([[1.0, 2.0], [None, 3.0]])
    two = ak.Array([[1.0, 2.0], [4.0, 3.0]])
    with pytest.raises(sonic.errors.InputError, match="do not have the same objects"):
        sonic.Row(["x", "y"]).pack({"x": one, "y": two})


def test_events_of_rows_are_counted_in_the_array_that_was_passed() -> None:
    array = ak.Array([None, [[1.0], [2.0, 3.0]], [], [[], None, [4.0]]])
    rows = bind_inputs({"x": sonic.Row("pt")}, {"pt": array}).rows
    assert [rows.events_of(i, i + 1) for i in range(4)] == [(1, 2), (1, 2), (1, 2), (3, 4)]
    assert rows.events_of(0, 4) == (1, 4)
    assert rows.events_of(2, 2) == (0, 0)
