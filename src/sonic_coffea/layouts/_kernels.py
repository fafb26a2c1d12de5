"""Compiled loops from awkward's buffers into a request's buffer.

A kernel handles all fields of a tensor that share a type: gather, transform, cast, cut and pad in
one pass, row after row. Fields come as addresses of their buffers, so that one compilation serves
any number of them. Kernels release the GIL, are cached on disk, and return the first row with a
number that cannot be sent, or -1; what is wrong with it, `Columns` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from sonic_coffea.layouts._disk import keep

Kernel = Callable[..., Any]


def _compiled(function: Kernel) -> Kernel:
    kernel: Kernel = numba.njit(nogil=True, error_model="numpy")(function)
    keep(kernel, function)
    return kernel


@intrinsic
def _pointer(typing_context, address):
    """Make a pointer of an address."""
    del typing_context, address

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _copy(typing_context, target, source, size):
    """Copy bytes from one address to another."""
    del typing_context, target, source, size

    def generate(context, builder, signature, arguments):
        del signature
        pointers = [builder.inttoptr(a, cgutils.voidptr_t) for a in arguments[:2]]
        copy = builder.module.declare_intrinsic(
            "llvm.memcpy", [cgutils.voidptr_t, cgutils.voidptr_t, cgutils.intp_t]
        )
        builder.call(copy, [*pointers, arguments[2], cgutils.false_bit])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_compiled
def address(values):
    """Return where numbers lie; numpy would make a dict, or an object, to say so."""
    return values.ctypes.data


@_compiled
def _apply(function, power, value):
    if function == -1:
        value = value**power
    elif function == 1:
        value = np.log(value)
    elif function == 2:
        value = np.log1p(value)
    elif function == 3:
        value = np.sqrt(value)
    elif function == 4:
        value = np.abs(value)
    elif function == 5:
        value = np.exp(value)
    elif function == 6:
        value = np.tanh(value)
    elif function == 7:
        value = np.sin(value)
    elif function == 8:
        value = np.cos(value)
    elif function == 9:
        value = np.log10(value)
    elif function == 10:
        value = np.arctan(value)
    elif function == 11:
        value = np.sinh(value)
    elif function == 12:
        value = np.cosh(value)
    elif function == 13:
        value = np.arcsinh(value)
    elif function == 14:
        value = -np.log1p(-value) if value < 0 else np.log1p(value)
    return value


@cache
def load() -> None:
    """Have numba get ready, which takes about a second in each process."""
    _apply(0, 0.0, 0.0)


@_compiled
def _clip(value, lower, upper):
    # Written so that a NaN stays one, and so that it becomes two vector instructions.
    if value < lower:
        value = lower
    if value > upper:
        value = upper
    return value


@_compiled
def _sent(numbers, replace, function, table, bounds, j, value):
    """Return a number transformed; and 1 if it must not be sent, -1 if it may be NaN."""
    if bounds[j] < bounds[j + 1] and not np.isnan(value):
        key = value
        value = numbers[8, j]
        for c in range(bounds[j], bounds[j + 1]):
            if table[0, c] == key:
                value = table[1, c]
    value = _clip(value, numbers[4, j], numbers[5, j])
    if function >= -1:
        value = _apply(function, numbers[7, j], value)
    wrong = np.int32(0)
    if not np.isfinite(value):
        wrong = np.int32(1)
        if replace:
            value = numbers[6, j]
            wrong = np.int32(0 if np.isfinite(value) else -1)
    value = _clip((value - numbers[0, j]) * numbers[1, j], numbers[2, j], numbers[3, j])
    return value, wrong


@_compiled
def padded(  # noqa: PLR0915
    out, slots, addresses, size, like, index, transform, missing, starts, stops, fills, wrap
):
    """Fill ``out[:, slots, :]``, padding with `fills` as they are, or with elements again.

    Where the index is -1, there is what is `missing`, as it is.
    """
    if transform is not None:
        numbers, replace, functions, table, bounds = transform
    length = out.shape[2]
    bad = -1
    for i in range(out.shape[0]):
        start = starts[i]
        count = np.int32(min(stops[i] - start, length))
        unfit = np.int32(0)
        # Reading on to the end of the tensor and choosing is faster than two loops.
        whole = transform is None and index is None and start + length <= size and not wrap
        for j in range(len(slots)):
            to = out[i, slots[j]]
            fill = fills[j]
            values = carray(_pointer(addresses[j]), size, like.dtype)
            if transform is not None:
                if index is None and functions[j] == 0:
                    shift, scale = numbers[0, j], numbers[1, j]
                    lower, upper = numbers[2, j], numbers[3, j]
                    here = values[start : start + count]
                    for k in range(count):
                        value = here[k]
                        sent = out.dtype.type(_clip((value - shift) * scale, lower, upper))
                        to[k] = sent
                        # The difference of a number that is not finite to itself is NaN.
                        unfit = np.int32(unfit + ((value - value) + (sent - sent) != 0))
                elif index is None and functions[j] == -3:
                    only = numbers[7, j]
                    here = values[start : start + count]
                    for k in range(count):
                        value = here[k]
                        to[k] = out.dtype.type(value == only)
                        unfit = np.int32(unfit + (value - value != 0))
                else:
                    for k in range(count):
                        at = start + k if index is None else index[start + k]
                        if missing is not None and at < 0:
                            to[k] = missing[j]
                            continue
                        value, wrong = _sent(
                            numbers, replace[j], functions[j], table, bounds, j, values[at]
                        )
                        sent = out.dtype.type(value)
                        to[k] = sent
                        unfit = np.int32(unfit + (wrong + (sent - sent != 0) > 0))
            elif whole:
                here = values[start : start + length]
                for k in range(length):
                    value = out.dtype.type(here[k])
                    inside = np.int32(k) < count
                    to[k] = value if inside else fill
                    unfit = np.int32(unfit + (inside and value - value != 0))
            else:
                for k in range(count):
                    at = start + k if index is None else index[start + k]
                    if missing is not None and at < 0:
                        to[k] = missing[j]
                        continue
                    value = out.dtype.type(values[at])
                    to[k] = value
                    unfit = np.int32(unfit + (value - value != 0))
            if not whole:
                for k in range(count, length):
                    to[k] = to[k - count] if wrap and count > 0 else fill
        if bad < 0 and unfit > 0:
            bad = i
    return bad


@_compiled
def rows(out, slots, addresses, size, like, index, transform, missing, ids):
    """Fill ``out[:, slots]`` with one number a row."""
    if transform is not None:
        numbers, replace, functions, table, bounds = transform
    bad = -1
    for i in range(out.shape[0]):
        at = ids[i] if index is None else index[ids[i]]
        unfit = np.int32(0)
        if missing is not None and at < 0:
            for j in range(len(slots)):
                out[i, slots[j]] = missing[j]
            continue
        for j in range(len(slots)):
            value = carray(_pointer(addresses[j]), size, like.dtype)[at]
            if transform is not None:
                value, wrong = _sent(numbers, replace[j], functions[j], table, bounds, j, value)
                sent = out.dtype.type(value)
                unfit = np.int32(unfit + (wrong + (sent - sent != 0) > 0))
            else:
                sent = out.dtype.type(value)
                unfit = np.int32(unfit + (sent - sent != 0))
            out[i, slots[j]] = sent
        if bad < 0 and unfit > 0:
            bad = i
    return bad


@_compiled
def repeated(out, slots, numbers, starts, stops, fills, wrap):
    """Fill ``out[:, slots, :]`` with one number for all elements of a row.

    There are `numbers` for the rows that have elements only.
    """
    length = out.shape[2]
    place = 0
    for i in range(out.shape[0]):
        filled = stops[i] > starts[i]
        count = np.int32(length if wrap and filled else min(stops[i] - starts[i], length))
        for j in range(len(slots)):
            to = out[i, slots[j]]
            fill = fills[j]
            number = numbers[place, slots[j]] if filled else fill
            for k in range(length):
                to[k] = number if np.int32(k) < count else fill
        place += filled


@_compiled
def constants(out, slots, numbers, fills, starts, stops):
    """Fill ``out[:, slots, :]`` with a number for all elements, and with `fills` behind."""
    length = out.shape[2]
    for i in range(out.shape[0]):
        count = min(stops[i] - starts[i], length)
        for j in range(len(slots)):
            to = out[i, slots[j]]
            for k in range(count):
                to[k] = numbers[j]
            for k in range(count, length):
                to[k] = fills[j]


@_compiled
def mask(out, starts, stops):
    """Fill ``out[:, 0, :]`` with 1 where there is a constituent and 0 elsewhere."""
    length = out.shape[2]
    for i in range(out.shape[0]):
        count = min(stops[i] - starts[i], length)
        for k in range(count):
            out[i, 0, k] = 1
        for k in range(count, length):
            out[i, 0, k] = 0


@_compiled
def positions(out, starts, stops):
    """Write the positions of all elements of the rows, one row after the other."""
    at = 0
    for i in range(len(starts)):
        for k in range(starts[i], stops[i]):
            out[at] = k
            at += 1


@_compiled
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


@_compiled
def unpad(out, kept, tensor, length, axes, offsets, counts, starts, order):
    """Copy what is no padding of ``tensor[n, length**axes, bytes]`` to ``out[offsets[i]:, bytes]``.

    A row has as many elements as it counts to the power of `axes`. With an `order`, elements go
    back to where they were. What was truncated becomes zero, and `kept`, if there is one, False.
    """
    size = tensor.shape[2]
    whole = tensor.shape[1] * size
    source, target = tensor.ctypes.data, out.ctypes.data
    for i in range(tensor.shape[0]):
        total = counts[i]
        count = min(total, length)
        first = offsets[i]
        if total > length:
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
            rest, one, other, step, stride = run, 0, first, length, total
            for _ in range(axes - 1):
                place = rest % count
                rest //= count
                one += place * step
                other += (place if order is None else order[starts[i] + place] - starts[i]) * stride
                step *= length
                stride *= total
            begin = source + i * whole + one * size
            if order is None:
                _copy(target + other * size, begin, count * size)
                if kept is not None:
                    for at in range(other, other + count):
                        kept[at] = True
            else:
                for k in range(count):
                    at = other + order[starts[i] + k] - starts[i]
                    _copy(target + at * size, begin + k * size, size)
                    if kept is not None:
                        kept[at] = True
