"""The rows that numbers belong to, taken apart once; results are put back into their lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import awkward as ak
import numpy as np
from awkward import contents
from awkward.contents import Content
from awkward.index import Index8, Index64
from numpy.typing import NDArray

from sonic_coffea.errors import InputError, shortened
from sonic_coffea.layouts._expressions import Path, text_of

Tensor = NDArray[Any]
Int64 = NDArray[np.int64]
RowSelection = slice | Int64
"""Rows of a call: a range of them, or their numbers."""

STRINGS = frozenset({"string", "bytestring"})

STRING = np.dtype(object)
"""The type of tensors of strings: each is of type bytes."""


NO_CODES = np.zeros(0, np.int64)
"""Those of rows without gaps."""


@dataclass(slots=True, eq=False)  # frozen ones take longer, and each call has several
class Structure:
    """Rows: events, or what is in the lists of other rows; some of them may be missing.

    `codes` and `gaps` are the rows' own option: options inside each other are one.

    Attributes
    ----------
    offsets : array of int64
        Where the list of each outer row begins, and the end; of events, 0 and how many there are.
    outer : Structure or None
        The rows that have the lists; None for events.
    size : int or None
        The length of all lists, if their type says so.
    codes : array of int64
        The number of the row at each place of the lists. Where there is none, -1, -2, … for the
        first, second, … of the gaps. Empty without gaps.
    gaps : tuple of str
        What None means, from the outside in: the object is None (``""``), a picked one is not there
        (``"Jet[0]"``), its number is None (``"None"``), or there may be no objects at all
        (``"plain"``), as in a column of numbers. Without gaps, nothing can be missing.
    """

    offsets: Int64
    outer: Structure | None = None
    size: int | None = None
    codes: Int64 = field(default_factory=lambda: NO_CODES)
    gaps: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(np.count_nonzero(self.codes >= 0) if self.gaps else self.offsets[-1])

    @property
    def chain(self) -> tuple[Structure, ...]:
        """All structures from the events to this one."""
        return (self,) if self.outer is None else (*self.outer.chain, self)

    @property
    def depth(self) -> int:
        """How many lists there are."""
        return 0 if self.outer is None else 1 + self.outer.depth

    @property
    def events(self) -> int:
        """How many events there are, also of those that are None."""
        return int(self.offsets[-1]) if self.outer is None else self.outer.events

    @property
    def counts(self) -> Int64:
        """The length of each list."""
        return np.diff(self.offsets)

    @property
    def all_places(self) -> Structure:
        """The structure of all places of the lists, also of those without a row."""
        return Structure(self.offsets, self.outer, self.size) if self.gaps else self

    @property
    def index(self) -> Int64:
        """The number of the row at each place, and -1 for None."""
        return np.maximum(self.codes, -1) if self.gaps else np.arange(len(self))

    @property
    def absent(self) -> Any:
        """The places without a row; False if nothing can be missing."""
        return self.codes < 0 if self.gaps else np.False_

    @property
    def is_optional(self) -> bool:
        """Whether anything may be missing, by the type."""
        return any(rows.gaps for rows in self.chain)

    def only(self, present: Tensor, gap: str = "") -> Structure:
        """Return the rows that are present; the gap is what None means in place of the others."""
        codes = np.where(present, np.cumsum(present) - 1, -1 - len(self.gaps))
        codes = through(codes, self.codes) if self.gaps else codes
        return Structure(self.offsets, self.outer, self.size, codes, (*self.gaps, gap))

    def unflatten(self, content: Content, attrs: Mapping[str, Any] | None = None) -> ak.Array:
        """Return `content`, one element for each row, in the structure."""
        if self.gaps:
            content = contents.IndexedOptionArray.simplified(Index64(self.index), content)
        if self.outer is None:
            return ak.Array(content, attrs=attrs)
        if self.size is None:
            content = contents.ListOffsetArray(Index64(self.offsets), content)
        else:
            content = contents.RegularArray(content, self.size, zeros_length=len(self.offsets) - 1)
        return self.outer.unflatten(content, attrs)

    def event_of(self, row: int) -> int:
        """Return the event that a row belongs to."""
        return int(self.event_numbers()[row])

    def event_numbers(self) -> Int64:
        """Return the number of the event that each row belongs to."""
        return self.repeated(np.arange(self.events))

    def repeated(self, numbers: Tensor, depth: int = 0) -> Tensor:
        """Repeat the numbers of the places at some depth, one for each row in them."""
        if self.outer is not None and self.depth > depth:
            numbers = np.repeat(self.outer.repeated(numbers, depth), self.counts)
        return numbers[self.codes >= 0] if self.gaps else numbers

    def check_same(self, other: Structure, fields: tuple[Path | str, Path | str]) -> None:
        """Raise unless another field, part or input has the same rows.

        Raises
        ------
        InputError
            Naming the first event that differs.
        """
        difference = self.difference(other)
        if difference is None:
            return
        detail, correct = difference
        names = (f if isinstance(f, str) else f"field {text_of(f)!r}" for f in fields)
        raise InputError(
            f"{' and '.join(names)} do not have the same objects ({detail}); {correct}"
        )

    def difference(self, other: Structure) -> tuple[str, str] | None:
        """Return how other rows differ from these, if they do, and what to do about it."""
        chain, other_chain = self.chain, other.chain
        events, other_events = chain[0].events, other_chain[0].events
        first = "the first difference is in event"
        correct = "choose both from the same collection, with the same cuts"
        if events != other_events:
            return f"{events} and {other_events} events", correct
        for mine, theirs in zip(chain, other_chain, strict=False):
            if mine.outer is not None:
                for place in _differing(mine.offsets, theirs.offsets)[:1]:
                    return f"{first} {mine.outer.event_of(place - 1)}", correct
            for place in _differing(mine.absent, theirs.absent)[:1]:
                correct = "leave out what lacks one, as in model(ak.mask(events, has_both))"
                return f"{first} {mine.all_places.event_of(place)}, where one is None", correct
        return None if len(chain) == len(other_chain) else (f"{first} 0", correct)

    def align(self, other: Structure, fields: tuple[Path | str, Path | str]) -> Int64 | None:
        """Return the number of the element of another field for each row.

        Elements of outer objects are repeated. -1 stands for a missing one; None for all numbers in
        their order.

        Raises
        ------
        InputError
            If the other field has other lists.
        """
        chain, depth = self.chain, other.depth
        outer = chain[depth].all_places if depth < len(chain) else self
        if outer.offsets is not other.offsets:
            outer.check_same(other.all_places, fields)
        if depth == self.depth and not len(_differing(self.absent, other.absent)):
            return None
        return self.repeated(other.index, depth)


def _differing(one: Any, other: Any) -> Int64:
    """Return the places at which two arrays differ."""
    return NO_CODES if one is other else (one != other).nonzero()[0]


class Place(NamedTuple):
    """Where the numbers, records or strings of a path are.

    Attributes
    ----------
    rows : Structure
        What they belong to.
    node : awkward content
        What holds them.
    at : slice or array of int64
        Where these are in the node: a range, or the place of each.
    """

    rows: Structure
    node: Content
    at: slice | Int64


def through(places: Int64, index: Int64) -> Int64:
    """Return the place that each of an index has; what is negative there stays so."""
    if not len(places):
        return index
    return np.where(index < 0, index, places[np.maximum(index, 0)])


def column_at(data: Tensor, at: slice | Int64, index: Int64 | None) -> tuple[Tensor, Int64 | None]:
    """Return numbers, and the place in them of each of an index into those that lie at `at`."""
    if isinstance(at, slice):
        return data[at], index
    return data, at if index is None else through(at, index)


def is_pick(gap: str) -> bool:
    """Whether what is missing was picked, such as ``Jet[0]``."""
    return "[" in gap


def offsets_of(counts: Int64) -> Int64:
    """Return where lists of some lengths begin, one after the other; and the end."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges(starts: Int64, counts: Int64) -> Int64:
    """Return ``start, start + 1, …`` of each list, one list after the other."""
    offsets = offsets_of(counts)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)


def read(buffer: Any) -> Tensor:
    """Return the numbers of an awkward buffer, reading them from the file if need be."""
    data = buffer.data
    if isinstance(data, np.ndarray):
        return data
    return np.asarray(data.materialize() if hasattr(data, "materialize") else data)


@cache
def real_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which numpy computes with numbers of a type and real ones."""
    return np.result_type(dtype, np.float32)


def widened(tensor: Tensor) -> Tensor:
    """Return numbers in a type that awkward has, and can reduce: of 16 bits, in float32."""
    half = tensor.dtype.kind not in "biuO" and tensor.dtype.itemsize < 4
    return tensor.astype(np.float32) if half else tensor


def whole(node: Content, gap: str = "") -> Place:
    """Return all elements of an array, taken apart."""
    return down(Structure(np.array([0, node.length])), node, slice(0, node.length), gap)


def down(rows: Structure, node: Content, at: slice | Int64, gap: str = "") -> Place:
    """Go down through lists and options to numbers, records or strings; only lists are read.

    A number that is None has the gap. With one, lists and records may be missing where their object
    is not; below lists, a record that is None is an object that is not there.
    """
    outer = gap and "plain"
    while not _is_leaf(node):
        if node.is_numpy:
            node = node.to_RegularArray()
        elif node.is_union:
            has_none = node.contents[0].is_option  # then all of them are
            index, node = _of_union(node[at])
            if has_none:
                rows = rows.only(index >= 0, gap if _is_number(node) else outer)
            at = slice(0, node.length)
            if node.is_union:
                break
        elif node.is_option or node.is_indexed:
            index = _index_of(node, at)
            present = index[index >= 0] if node.is_option else index
            if node.is_option:
                rows = rows.only(index >= 0, gap if _is_number(node.content) else outer)
            if node.is_indexed or len(present) < len(index):
                at = present
            node = node.content
        else:
            offsets, at = _lists_of(node, at)
            rows = Structure(offsets, rows, node.size if node.is_regular else None)
            outer, node = "", node.content
    return Place(rows, node, at)


def _is_number(node: Content) -> bool:
    """Whether numbers or strings are in an array, and neither lists nor records."""
    each = node.content if node.is_indexed else node
    return _is_leaf(each) and not each.is_record


def _is_leaf(node: Content) -> bool:
    if node.is_numpy:
        return not node.inner_shape
    return node.is_record or node.is_unknown or node.parameter("__array__") in STRINGS


def _lists_of(node: Content, at: slice | Int64) -> tuple[Int64, slice | Int64]:
    """Return the offsets of some lists, and where their elements lie; buffers are read once."""
    if isinstance(at, slice) and at.start < at.stop and hasattr(node, "offsets"):
        offsets = np.asarray(read(node.offsets)[at.start : at.stop + 1], np.int64)
        return offsets - offsets[0], slice(int(offsets[0]), int(offsets[-1]))
    starts, stops = (np.asarray(read(x)[at], np.int64) for x in (node.starts, node.stops))
    counts = stops - starts
    if len(starts) and np.array_equal(starts[1:], stops[:-1]):
        return offsets_of(counts), slice(int(starts[0]), int(stops[-1]))
    return offsets_of(counts), ranges(starts, counts)


def _index_of(node: Content, at: slice | Int64) -> Int64:
    """Return where elements of an option, or an index, lie in its content; -1 for None."""
    if node.is_indexed:
        return np.asarray(read(node.index)[at], np.int64)
    places = np.arange(at.start, at.stop) if isinstance(at, slice) else at
    if not hasattr(node, "mask"):  # nothing can be missing
        return places
    masked = node.to_ByteMaskedArray() if hasattr(node, "lsb_order") else node
    present = read(masked.mask)[at].astype(np.bool_) == masked.valid_when
    return np.where(present, places, -1)


def _of_union(union: Content) -> tuple[Int64, Content]:
    """Return a union as one kind of lists or numbers, if it is not one of records.

    The first array is negative where elements are None, which are left out.

    Raises
    ------
    InputError
        If lists and numbers are mixed, or integers that no type holds together.
    """
    tags, kinds = np.asarray(read(union.tags)), []
    index = np.array(read(union.index)[: len(tags)], np.int64)
    for tag, content in enumerate(union.contents):
        here, kind = tags == tag, content
        if kind.is_option:
            index[here], kind = _index_of(kind, index[here]), kind.content
        chosen = kind[index[here & (index >= 0)]]  # merging copies all there is
        kinds.append(chosen.to_RegularArray() if chosen.is_numpy else chosen)
    tags = tags[index >= 0]
    merged = _in_order(tags, kinds)
    are_lists = [kind.is_list and kind.parameter("__array__") not in STRINGS for kind in kinds]
    types = [getattr(leaf(node), "dtype", STRING).kind for node in (merged, *kinds)]
    if any(are_lists) != all(are_lists) or (types[0] == "f" and set(types[1:]) <= {*"iub"}):
        raise InputError(f"mixes types ({shortened(union.form.type)}); expected one")
    if merged.is_union and all(are_lists):  # of records that differ
        counts = np.asarray(ak.num(ak.Array(merged), axis=1))
        inner = [kind.to_ListOffsetArray64(start_at_zero=True).content for kind in kinds]
        content = _in_order(np.repeat(tags, counts), inner)
        sizes = {kind.size if kind.is_regular else None for kind in kinds}
        merged = contents.ListOffsetArray(Index64(offsets_of(counts)), content)
        if len(sizes) == 1 and None not in sizes:
            merged = contents.RegularArray(content, sizes.pop(), len(tags))
    return index, merged


def _in_order(tags: Tensor, kinds: Sequence[Content]) -> Content:
    """Return the next element of its kind for each tag."""
    index = np.zeros(len(tags), np.int64)
    for tag in range(len(kinds)):
        index[tags == tag] = np.arange(np.count_nonzero(tags == tag))
    return contents.UnionArray.simplified(Index8(tags), Index64(index), kinds, mergebool=True)


def leaf(node: Content) -> Content:
    """Return what is below lists, options and indexes."""
    return leaf(node.content) if node.is_list or node.is_option or node.is_indexed else node
