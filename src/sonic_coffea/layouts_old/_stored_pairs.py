"""Pairs of a row's elements that are in the arrays already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import InputError
from sonic_coffea.layouts_old._binding import bind_columns
from sonic_coffea.layouts_old._columns import Columns
from sonic_coffea.layouts_old._formulae import VECTORS
from sonic_coffea.layouts_old._nodes import read
from sonic_coffea.layouts_old._range import check_range, is_checked
from sonic_coffea.layouts_old._rows import Int64, Rows, RowSelection, Split, Tensor

if TYPE_CHECKING:
    from sonic_coffea.layouts_old._fields import Feature, Source


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredPairs(Columns):
    """Columns of pairs."""

    inner: Columns
    """The same with a row for each first element, and a last row without pairs."""
    other_counts: Int64
    """How many pairs each first element of a row has."""

    def write(self, out: Tensor, fills: Sequence[float], rows: RowSelection) -> None:
        """Fill ``out[n, C, L, M]``."""
        starts, counts = self.split.starts[rows], self.split.counts_of(rows)
        within = np.arange(out.shape[2])
        chosen = starts[:, np.newaxis] + within
        chosen[within >= counts[:, np.newaxis]] = -1
        with _rows_are_elements():
            self.inner.pad(out.transpose(0, 2, 1, 3), fills, chosen.reshape(-1))


@contextmanager
def _rows_are_elements() -> Iterator[None]:
    """Have errors name no rows: theirs are the first elements of pairs."""
    try:
        yield
    except InputError as error:
        raise type(error)(error.message) from None


def stored_pairs(
    source: Source,
    features: Sequence[Feature],
    *,
    target: np.dtype[Any],
    longest: tuple[int, int],
    between: bool,
) -> StoredPairs:
    """Read pairs; each outer list is a row.

    At most `longest` first and second elements of a row are sent. Pairs `between` two collections
    may have other numbers of second elements than of first ones.
    """
    what = f"field {features[0].name!r}"
    inner = bind_columns(source, features, jagged=True, target=None)
    levels = inner.split.rows.levels
    if not levels or levels[-1].is_option:
        raise InputError(
            f"{what} has {'None' if levels else 'one jagged axis'} where Pairwise "
            "needs i x j lists of pairs without None; to compute pairs of elements, name formulae, "
            f"or the fields of a four-vector: {' or '.join(f'({vector})' for vector in VECTORS)}"
        )
    offsets = np.asarray(read(levels[-1].offsets), np.int64)
    starts, sizes = offsets[:-1], np.diff(offsets)
    skeleton = inner.split.rows.outermost(len(levels) - 1)
    rows = Rows(skeleton, np.arange(len(starts)), contiguous=True)
    counts, other_counts = inner.split.counts, sizes
    if between:
        other_counts = np.zeros(len(sizes), np.int64)
        filled = sizes > 0
        other_counts[filled] = counts[starts[filled]]
    wrong = np.flatnonzero(counts != np.repeat(other_counts, sizes))
    if len(wrong):
        element = int(wrong[0])
        row = int(np.searchsorted(offsets, element, side="right")) - 1
        as_many = "one number of j for all i" if between else "as many j as i"
        here = f"beside one of {other_counts[row]}" if between else f"in one of {sizes[row]}"
        raise InputError(
            f"{what} has a list of {counts[element]} pairs {here} in event {rows.event_of(row)}; "
            f"expected i x j lists, with {as_many}"
            + ("" if between else "; for pairs of two collections, declare other=")
        )
    if is_checked(target):
        within = np.arange(len(counts)) - np.repeat(starts, sizes)
        stops = np.where(within < longest[0], inner.split.stops, inner.split.starts)
        with _rows_are_elements():
            check_range(inner.columns, replace(inner.split, stops=stops), target, longest[1])
    nothing = np.zeros(1, np.int64)
    extended = replace(
        inner.split,
        starts=np.concatenate((inner.split.starts, nothing)),
        stops=np.concatenate((inner.split.stops, nothing)),
    )
    split = Split(rows, inner.split.leaf, starts, offsets[1:])
    each = replace(inner, split=extended)
    return StoredPairs(split, inner.columns, (), inner=each, other_counts=other_counts)
