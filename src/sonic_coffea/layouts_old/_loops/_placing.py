"""Loops over the places of elements: masks, positions, sorting, and the way back."""

from __future__ import annotations

import numpy as np

from sonic_coffea.layouts_old._loops._compiler import compiled
from sonic_coffea.layouts_old._loops._vectors import copy_bytes


@compiled
def mask(out, starts, stops):
    """Fill ``out[:, 0, :]`` with 1 where there is a constituent and 0 elsewhere."""
    length = out.shape[2]
    for i in range(out.shape[0]):
        count = np.int32(min(stops[i] - starts[i], length))
        to = out[i, 0]
        for k in range(length):
            to[k] = np.int32(k) < count
    return -1


@compiled
def positions(out, starts, stops):
    """Write the positions of all elements of the rows, one row after the other."""
    at = 0
    for i in range(len(starts)):
        for k in range(starts[i], stops[i]):
            out[at] = k
            at += 1
    return -1


@compiled
def sort(order, keys, index, starts, stops, ascending):
    """Write, at the elements' positions, the positions of each row's elements in their order.

    Returns the first row with a key that is not finite, or -1.
    """
    bad = -1
    for i in range(len(starts)):
        start, stop = starts[i], stops[i]
        # Insertion keeps equals in order, and rows are short and nearly sorted.
        for k in range(start, stop):
            key = keys[k] if index is None else keys[index[k]]
            if bad < 0 and not np.isfinite(key):
                bad = i
            m = k - 1
            while m >= start:
                other = keys[order[m]] if index is None else keys[index[order[m]]]
                if not (key < other if ascending else other < key):
                    break
                order[m + 1] = order[m]
                m -= 1
            order[m + 1] = k
    return bad


@compiled
def unpad(out, kept, tensor, length, axes, offsets, counts, starts, order):
    """Copy what is no padding of ``tensor[n, length**axes, bytes]`` to ``out[offsets[i]:, bytes]``.

    A row has as many elements as it counts to the power of `axes`. With an `order`, elements go
    back to where they were. What was truncated becomes zero, and `kept`, if there is one, False;
    it has been True.
    """
    size = tensor.shape[2]
    whole = tensor.shape[1] * size
    source, target = tensor.ctypes.data, out.ctypes.data
    for i in range(tensor.shape[0]):
        total = counts[i]
        count = min(total, length)
        first = offsets[i]
        truncated = total > length
        if truncated:
            elements = 1
            for _ in range(axes):
                elements *= total
            for at in range(first, first + elements):
                out[at] = 0
                if kept is not None:
                    kept[at] = False
        runs = 1
        for _ in range(axes - 1):
            runs *= count
        for run in range(runs):
            # Where the last axis begins, by the places on the axes before.
            rest, from_, to, step, stride = run, 0, first, length, total
            for _ in range(axes - 1):
                place = rest % count
                rest //= count
                from_ += place * step
                to += (place if order is None else order[starts[i] + place] - starts[i]) * stride
                step *= length
                stride *= total
            begin = source + i * whole + from_ * size
            if order is None:
                copy_bytes(target + to * size, begin, count * size)
                if truncated and kept is not None:
                    for at in range(to, to + count):
                        kept[at] = True
            else:
                for k in range(count):
                    at = to + order[starts[i] + k] - starts[i]
                    copy_bytes(target + at * size, begin + k * size, size)
                    if truncated and kept is not None:
                        kept[at] = True
    return -1
