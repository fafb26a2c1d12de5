"""Loops that fill tensors.

A kernel handles all fields of a tensor that share a type: gather, transform, cast, cut and pad in
one pass, row after row. Fields come as addresses of their buffers, so that one compilation serves
any number of them. Kernels return the first row with a number that cannot be sent, or -1; what is
wrong with it, `Columns` says.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from sonic_coffea.layouts_old._loops._compiler import call_entry, compiled, pointer_to
from sonic_coffea.layouts_old._loops._vectors import (
    choose_line,
    lanes_of,
    stamp_vector,
    transpose_square,
)


@compiled
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


@compiled
def _clip(value, lower, upper):
    # Written so that a NaN stays one, and so that it becomes two vector instructions.
    if value < lower:
        value = lower
    if value > upper:
        value = upper
    return value


@compiled
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


@compiled
def _interleave(target, step, source, lines, length, like):
    """Write ``source[lines, length]`` to ``target[length, step]``, in squares of 4 x 4.

    The last squares overlap those before.
    """
    size = like.itemsize
    if lines >= 4 and length >= 4:
        for place in range(0, length, 4):
            k = min(place, length - 4)
            for number in range(0, lines, 4):
                j = min(number, lines - 4)
                to = target + (k * step + j) * size
                transpose_square(
                    to, step * size, source + (j * length + k) * size, length * size, like
                )
        return
    from_ = carray(pointer_to(source), lines * length, like.dtype)
    to = carray(pointer_to(target), (length - 1) * step + lines, like.dtype)
    for k in range(length):
        for j in range(lines):
            to[k * step + j] = from_[j * length + k]


@compiled
def _stamped(line, length, count, value, behind, like):
    """Write numbers of an address before `count`, and of another from there on."""
    lanes = 32 // like.itemsize
    if lanes <= length:
        for place in range(0, length, lanes):
            k = min(place, length - lanes)
            stamp_vector(line + k * like.itemsize, count - k, value, behind, like)
        return
    to = carray(pointer_to(line), length, like.dtype)
    inside = carray(pointer_to(value), 1, like.dtype)[0]
    outside = carray(pointer_to(behind), 1, like.dtype)[0]
    for k in range(length):
        to[k] = inside if k < count else outside


@compiled
def padded(  # noqa: PLR0915
    from_row,
    to_row,
    place,
    offsets,
    addresses,
    size,
    dtype,
    index,
    transform,
    missing,
    starts,
    stops,
    fills,
    wrap,
    constants,
    apart,
    repeated,
):
    """Fill rows of a tensor, padding with `fills` as they are, or with elements again.

    Where the index is -1, a number is replaced by that of `missing`. Lines of constants follow the
    fields: `constants` is the address of the first row's, and the next row's are `apart` bytes
    behind. If elements pad, the last `repeated` constants pad, too.

    A tensor is a `place`: where it begins; how many rows follow each other at the inner stride,
    before the outer one goes on; their length, and the stride of elements. Its lines are at
    `offsets`. If elements are not contiguous, their lines are gathered in `scratch` before. Lines
    that are next to each other in the tensor, from `first` on, have the tensor's order there.
    """
    base, per, outer, inner, length, step, first, scratch = place
    if transform is not None:
        numbers, replace, functions, table, bounds = transform
    lanes = lanes_of(dtype, fills)
    own = len(addresses)
    width = fills.itemsize
    lines = len(offsets)
    bad = -1
    begin, part = base + from_row // per * outer * width, from_row % per
    for i in range(from_row, to_row):
        row = begin + part * inner * width
        start = starts[i]
        filled = stops[i] > start
        count = np.int32(min(stops[i] - start, length))
        unfit = np.int32(0)
        # Reading on to the end of the tensor and choosing is faster than two loops.
        whole = transform is None and index is None and start + length <= size and not wrap
        for j in range(lines):
            if step == 1:
                line = row + offsets[j] * width
            else:
                number = j if first < 0 else offsets[j] - first
                line = scratch + number * length * width
            if j >= own:
                inside = length if wrap and filled and j >= lines - repeated else np.int64(count)
                behind = fills.ctypes.data + j * width
                stamp = constants + i * apart + (j - own) * width
                _stamped(line, length, inside, stamp if filled else behind, behind, fills)
                continue
            to = carray(pointer_to(line), length, fills.dtype)
            fill = fills[j]
            values = carray(pointer_to(addresses[j]), size, dtype)
            if transform is not None:
                if index is None and functions[j] == 0:
                    shift, scale = numbers[0, j], numbers[1, j]
                    lower, upper = numbers[2, j], numbers[3, j]
                    here = values[start : start + count]
                    for k in range(count):
                        value = here[k]
                        sent = fills.dtype.type(_clip((value - shift) * scale, lower, upper))
                        to[k] = sent
                        # The difference of a number that is not finite to itself is NaN.
                        unfit = np.int32(unfit + ((value - value) + (sent - sent) != 0))
                elif index is None and functions[j] == -3:
                    only = numbers[7, j]
                    here = values[start : start + count]
                    for k in range(count):
                        value = here[k]
                        to[k] = fills.dtype.type(value == only)
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
                        sent = fills.dtype.type(value)
                        to[k] = sent
                        unfit = np.int32(unfit + (wrong + (sent - sent != 0) > 0))
            elif whole and 0 < lanes <= length:
                source = addresses[j] + start * width
                unfit = np.int32(unfit | choose_line(line, source, count, length, fill, dtype))
            # One loop instead of the two below would ask for each number what is known of a row.
            elif whole:
                here = values[start : start + length]
                for k in range(length):
                    value = fills.dtype.type(here[k])
                    inside = np.int32(k) < count
                    to[k] = value if inside else fill
                    unfit = np.int32(unfit + (inside and value - value != 0))
            else:
                for k in range(count):
                    at = start + k if index is None else index[start + k]
                    if missing is not None and at < 0:
                        to[k] = missing[j]
                        continue
                    value = fills.dtype.type(values[at])
                    to[k] = value
                    unfit = np.int32(unfit + (value - value != 0))
            if not whole:
                for k in range(count, length):
                    to[k] = to[k - count] if wrap and count > 0 else fill
        if step != 1 and first >= 0:
            _interleave(row + first * width, step, scratch, lines, length, fills)
        elif step != 1:
            for j in range(lines):
                to = carray(pointer_to(row + offsets[j] * width), length * step, fills.dtype)
                line = carray(pointer_to(scratch + j * length * width), length, fills.dtype)
                for k in range(length):
                    to[k * step] = line[k]
        part += 1
        if part == per:
            begin, part = begin + outer * width, 0
        if bad < 0 and unfit != 0:
            bad = i
    return bad


@compiled
def rows(out, slots, addresses, size, dtype, index, transform, missing, ids):
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
            value = carray(pointer_to(addresses[j]), size, dtype)[at]
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


@compiled
def in_turn(calls, count, step):
    """Make calls of kernels for `step` rows of `count` at a time: each once, before the next rows.

    Each of ``calls[n, 4]`` has the addresses of a function, of its arguments and of its result, and
    receives the first result that is not negative. The first two arguments are the first row, and
    the one behind the last. Returns the first call that failed, or -1.
    """
    for first in range(0, count, step):
        for n in range(len(calls)):
            function, arguments, result = calls[n, 0], calls[n, 1], calls[n, 2]
            rows_ = carray(pointer_to(arguments), 2, calls.dtype)
            rows_[0] = first
            rows_[1] = min(first + step, count)
            if call_entry(function, result, arguments) != 0:
                return n
            if calls[n, 3] < 0:
                calls[n, 3] = carray(pointer_to(result), 1, calls.dtype)[0]
    return -1
