"""From elements to padded places by one loop, and back by one index map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import awkward as ak
import numpy as np
from awkward import contents
from awkward.contents import Content
from awkward.index import Index8, Index64

from sonic_coffea._files import others_write
from sonic_coffea.layouts._layout import Bound
from sonic_coffea.layouts._structure import STRING, Int64, RowSelection, Tensor, offsets_of, ranges


def _pad(out: Any, values: Any, starts: Any, counts: Any, fills: Any, wrap: Any) -> None:
    """Copy each row's elements of ``values[F, n]`` to ``out[N, F, L]``, and fill what is behind."""
    rows, channels, length = out.shape
    for i in range(rows):
        start, count = starts[i], min(counts[i], length)
        for f in range(channels):
            # Loops from 0 over one axis, without conditions, handle several numbers at a time.
            row, target, fill = values[f, start : start + count], out[i, f], fills[i, f]
            behind = target[count:]
            for k in range(count):
                target[k] = row[k]
            for k in range(length - count):
                behind[k] = fill
            if wrap and count > 0:
                for k in range(length - count):
                    behind[k] = row[k % count]


@cache
def _compiled(*, cached: bool) -> Callable[..., Any]:
    """Return the compiled loop; numba unpickles cached code, which no stranger may write."""
    import numba

    folder = numba.config.CACHE_DIR
    cached = cached and not (folder and others_write(folder))
    compiled: Callable[..., Any] = numba.njit(cache=cached, nogil=True)(_pad)
    return compiled


def pad(
    out: Tensor, values: Tensor, starts: Int64, counts: Int64, fills: Tensor, *, wrap: bool = False
) -> None:
    """Fill ``out[N, F, L]``: behind the elements of a row are its ``fills[N, F]``, or these again.

    All have the same type.
    """
    if out.dtype == STRING:
        _pad(out, values, starts, counts, fills, wrap)
        return
    # Bytes are moved, so that one loop serves all types of a size.
    bits = np.dtype(f"u{out.itemsize}")
    arguments = out.view(bits), values.view(bits), starts, counts, fills.view(bits), wrap
    try:
        _compiled(cached=True)(*arguments)
    except Exception:  # noqa: BLE001  whatever is wrong with numba's folder costs time only
        _compiled(cached=False)(*arguments)


@cache
def load_loop() -> None:
    """Load the loop: the first time in a process, this would be taken for packing."""
    some, one = np.zeros((1, 1, 1), np.float32), np.ones(1, np.int64)
    pad(some, some[0], one - 1, one, some[0])


Axis = tuple[Bound | None, int, int]
"""The elements that have places along an axis, and how many other places are before and after."""


def places_of(axis: Axis, rows: RowSelection, count: int, length: int) -> Int64:
    """Return ``[n, L]``: the index in its row's list of what each place has, -1 for padding."""
    bound, before, after = axis
    if bound is None:
        return np.broadcast_to(np.arange(length), (count, length))
    columns, counts = bound.columns, bound.columns.counts(rows)
    index = np.full((count, length), -1)
    index[:, :before] = np.arange(before)
    index[:, length - after :] = counts[:, np.newaxis] + before + np.arange(after)
    inner = index[:, before : length - after]
    present = columns.present(rows, inner.shape[1])
    inner[present] = columns.chosen(rows, np.full_like(counts, before), present.sum(axis=1))
    return index


def _whole(values: Tensor) -> Tensor:
    """Return ``[n, K]`` as n items, each of which numpy moves as a whole."""
    size = values.shape[1] * values.itemsize
    if values.dtype == STRING or not size:
        return values
    return np.ascontiguousarray(values).view(np.dtype((np.void, size)))[:, 0]


class Scatter:
    """Values of rows along some axes, put where they belong, in any order.

    Parameters
    ----------
    axes : sequence of Axis
        The axes of the tensor between the rows and each one's values.
    rows : int
        How many rows there are.
    each : tuple of int
        The shape of each one's values.
    dtype : dtype
        Their type.
    """

    def __init__(
        self, axes: Sequence[Axis], rows: int, each: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._axes = axes
        self._counts = [
            np.full(rows, before + after, np.int64)
            + (0 if bound is None else bound.columns.counts(slice(0, rows)))
            for bound, before, after in axes
        ]
        self._offsets = offsets_of(np.prod([np.ones(rows, np.int64), *self._counts], axis=0))
        self._kept = np.ones(self._offsets[-1], np.bool_)
        """Which values are there, and not truncated."""
        self.values = np.zeros((len(self._kept), *each), dtype)
        """All values ``[M, …]``, one row after the other; 0 where none came in, or are sent."""

    def place(self, rows: RowSelection, tensor: Tensor) -> None:
        """Place ``[n, …, K]`` without padding; of axes without padding, ``[sum n, K]``."""
        # In the type of the values, as items are moved without being converted.
        each, width = tensor.astype(self.values.dtype, copy=False), math.prod(self.values.shape[1:])
        sent, placed = (_whole(x.reshape(-1, width)) for x in (each, self.values))
        begins = self._offsets[:-1][rows]
        sizes = counts = self._offsets[1:][rows] - begins
        is_padded = tensor.ndim > self.values.ndim
        others = (not x or x.columns.key or before + after for x, before, after in self._axes)
        if len(self._axes) > 1 or any(others):
            valid, places = self._lie(rows, tensor, begins, is_padded=is_padded)
            placed[places] = sent[valid] if is_padded else sent
            if len(places) < sizes.sum():
                self._kept[ranges(begins, sizes)] = False
                self._kept[places] = True
            return
        # A row's values are those of its elements, in their order.
        if is_padded:
            counts = np.minimum(sizes, tensor.shape[1])
            sent = sent[(np.arange(tensor.shape[1]) < sizes[:, np.newaxis]).reshape(-1)]
            self._kept[ranges(begins + counts, sizes - counts)] = False
        if isinstance(rows, slice):
            own = slice(self._offsets[rows.start], self._offsets[rows.stop])
            placed[own][self._kept[own]] = sent
        else:
            placed[ranges(begins, counts)] = sent

    def _lie(
        self, rows: RowSelection, tensor: Tensor, begins: Int64, *, is_padded: bool
    ) -> tuple[Tensor, Int64]:
        """Return which values of a tensor are no padding, and their places in all values."""
        index: Tensor = np.zeros(len(begins), np.int64)
        valid: Tensor = np.ones(len(begins), np.bool_)
        for number, (axis, all_counts) in enumerate(zip(self._axes, self._counts, strict=True), 1):
            counts = all_counts[rows]
            length = tensor.shape[number] if is_padded else int(counts.max(initial=0))
            above = (len(begins), *(1,) * number)
            places = places_of(axis, rows, len(begins), length).reshape(*above[:-1], length)
            index = index[..., np.newaxis] * counts.reshape(above) + places
            valid = valid[..., np.newaxis] & (places >= 0)
        index += begins.reshape(-1, *(1,) * len(self._axes))
        return valid.reshape(-1), index[valid]

    def lists(self, values: Content, *, optional: bool = False) -> Content:
        """Return content of all values as lists of each row, if it has lists of elements.

        Values are of an option type if some have been truncated, or may be (`optional`).
        """
        if not self._kept.all():
            values = contents.ByteMaskedArray(
                Index8(self._kept.view(np.int8)), values, valid_when=True
            )
        elif optional:
            values = contents.UnmaskedArray(values)
        for place in reversed(range(len(self._axes))):
            above = np.prod(self._counts[:place], axis=0, dtype=np.int64)
            counts: Int64 = np.repeat(self._counts[place], above)
            bound, before, after = self._axes[place]
            if bound is None:
                values = contents.RegularArray(values, before + after, zeros_length=len(counts))
            elif bound.columns.offsets is not None:
                values = contents.ListOffsetArray(Index64(offsets_of(counts)), values)
        return values


def listed(bound: Bound, tensor: Tensor, names: Sequence[str]) -> Content:
    """Return ``[N, L, F]`` or ``[sum n, F]`` of all rows as records of `names`, or lists of them.

    A name that is there several times is numbered: ``pt``, ``pt_1``.
    """
    different: list[str] = []
    for name in names:
        each = (f"{name}_{number}" if number else name for number in range(len(names)))
        taken = ({*names} - {name}).union(different)
        different.append(next(one for one in each if one not in taken))
    rows = len(bound.rows)
    scatter = Scatter([(bound, 0, 0)], rows, tensor.shape[-1:], tensor.dtype)
    scatter.place(slice(0, rows), tensor)
    return scatter.lists(content_of(scatter.values, different))


def content_of(values: Tensor, names: Sequence[str] | None = None) -> Content:
    """Return ``[n, K]`` as records of `names`; without names, numbers or strings of any shape."""
    if names is not None:
        fields = [content_of(column) for column in values.T]
        return contents.RecordArray(fields, list(names), length=len(values))
    if values.dtype != STRING:
        return contents.NumpyArray(np.ascontiguousarray(values))
    texts = [text.decode() if isinstance(text, bytes) else "" for text in values.reshape(-1)]
    content: Content = ak.from_iter([*texts, ""], highlevel=False)[:-1]
    for size in reversed(values.shape[1:]):
        content = contents.RegularArray(content, size, zeros_length=len(values))
    return content
