"""Compiled loops from awkward's buffers into a request's buffer.

A kernel handles all fields of a tensor that share a type: gather, transform, cast, cut and pad in
one pass, row after row. Fields come as addresses of their buffers, so that one compilation serves
any number of them. Kernels return the first row with a number that cannot be sent, or -1; what is
wrong with it, `Columns` says. This module is imported only where something is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

Kernel = Callable[..., Any]


def compiled(function: Kernel) -> Kernel:
    """Compile a function for whatever it is called with, without what Python would need."""
    kernel: Kernel = numba.njit(
        error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
    )(function)
    return kernel


def entry(kernel: Kernel, kinds: tuple[Any, ...]) -> Kernel:
    """Return a function that takes the address of a kernel's arguments, as int64 one by one.

    Of an array these are its address, its shape, and its strides if it is not contiguous.
    """
    names: dict[str, Any] = {"kernel": kernel, "carray": carray, "pointer": _pointer}
    names["strided"] = np.lib.stride_tricks.as_strided
    used = 0

    def taken(number: int) -> str:
        nonlocal used
        used += number
        return "".join(f"p[{n}], " for n in range(used - number, used))

    def dtype_of(code: str) -> str:
        name = f"t{len(names)}"
        names[name] = np.dtype(code)
        return name

    def argument(kind: Any) -> str:
        if kind is None:
            return "None"
        if kind is bool:
            return f"({taken(1)})[0] != 0"
        if kind is int:
            return f"({taken(1)})[0]"
        if isinstance(kind, str):
            return dtype_of(kind)
        if kind is float:
            taken(1)
            return f"carray(pointer(at + {8 * (used - 1)}), 1, real)[0]"
        if not is_array(kind):
            return f"({''.join(f'{argument(one)}, ' for one in kind)})"
        name, (_, axes, contiguous) = dtype_of(kind[0]), kind
        at, shape = taken(1), taken(axes)
        if contiguous:
            return f"carray(pointer(({at})[0]), ({shape}), {name})"
        return f"strided(carray(pointer(({at})[0]), 1, {name}), ({shape}), ({taken(axes)}))"

    call = ", ".join(map(argument, kinds))
    names |= {"whole": np.dtype(np.int64), "real": np.dtype(np.float64)}
    text = f"def enter(at):\n p = carray(pointer(at), {used}, whole)\n return kernel({call})\n"
    exec(text, names)  # noqa: S102  numba takes functions, and these are as many as kinds
    return compiled(names["enter"])


def is_array(kind: Any) -> bool:
    """Whether an argument of a kind is an array: its type, its axes, whether it is contiguous."""
    return isinstance(kind, tuple) and len(kind) == 3 and isinstance(kind[0], str)


@intrinsic
def _pointer(typing_context, address):
    """Make a pointer of an address."""
    del typing_context, address

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _call(typing_context, function, result, arguments):
    """Call what `entry` makes, at an address; return 0 unless it failed."""
    del typing_context, function, result, arguments

    def generate(context, builder, signature, arguments):
        del context, signature
        function, result, at = arguments
        address = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(32), [address, address, address])
        error = builder.add(result, ir.Constant(address, 8))
        return builder.call(builder.inttoptr(function, kind.as_pointer()), [result, error, at])

    return types.int32(types.int64, types.int64, types.int64), generate


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


def _vector(context, dtype, lanes):
    """Return the type of some numbers of a type side by side."""
    return ir.VectorType(context.get_data_type(dtype), lanes)


@intrinsic
def _lanes(typing_context, dtype, fills):
    """Return how many numbers a vector has, if `_choose` moves them; else 0."""
    del typing_context
    lanes = 256 // dtype.dtype.bitwidth if dtype.dtype == fills.dtype else 0

    def generate(context, builder, signature, arguments):
        del builder, arguments
        return context.get_constant(signature.return_type, lanes)

    return types.int64(dtype, fills), generate


@intrinsic
def _choose(typing_context, target, source, count, fill, dtype):
    """Copy a vector of numbers; from `count` on, it is `fill`.

    Returns 0 if all that were copied are finite.
    """
    del typing_context, target, source, count
    lanes = 256 // dtype.dtype.bitwidth

    def generate(context, builder, signature, arguments):
        if signature.args[3] != dtype.dtype:
            return context.get_constant(types.int32, 0)
        to, start, number, other, _ = arguments
        vector = _vector(context, dtype.dtype, lanes)
        align = dtype.dtype.bitwidth // 8
        values = builder.load(builder.inttoptr(start, vector.as_pointer()), align=align)
        there = _before(builder, number, lanes)
        chosen = builder.select(there, values, _repeat(builder, other, lanes))
        builder.store(chosen, builder.inttoptr(to, vector.as_pointer()), align=align)
        if not isinstance(dtype.dtype, types.Float):
            return context.get_constant(types.int32, 0)
        difference = builder.fsub(values, values)
        unfit = builder.and_(there, builder.fcmp_unordered("uno", difference, difference))
        return builder.zext(builder.bitcast(unfit, ir.IntType(lanes)), ir.IntType(32))

    return types.int32(types.int64, types.int64, types.int64, fill, dtype), generate


@intrinsic
def _stamp(typing_context, target, count, value, behind, like):
    """Write a vector of the number at an address; from `count` on, of the one at another."""
    del typing_context, target, count, value, behind
    bits = _bits(like.dtype)
    lanes = 256 // bits

    def generate(context, builder, signature, arguments):
        del signature
        to, number, *sources, _ = arguments
        kind = ir.IntType(bits)
        inside, outside = (
            _repeat(builder, builder.load(builder.inttoptr(at, kind.as_pointer())), lanes)
            for at in sources
        )
        chosen = builder.select(_before(builder, number, lanes), inside, outside)
        vector = builder.inttoptr(to, chosen.type.as_pointer())
        builder.store(chosen, vector, align=bits // 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, like), generate


def _bits(dtype):
    """Return how many bits a number has in memory."""
    return 8 if dtype == types.boolean else dtype.bitwidth


def _before(builder, count, lanes):
    """Return which places of a vector are before one."""
    narrow = builder.trunc(count, ir.IntType(32))
    places = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(lanes)))
    return builder.icmp_signed("<", places, _repeat(builder, narrow, lanes))


def _repeat(builder, value, lanes):
    """Return a vector of one number."""
    vector = ir.VectorType(value.type, lanes)
    zero = ir.Constant(ir.IntType(32), 0)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, zero)
    return builder.shuffle_vector(
        first, first, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    )


@intrinsic
def _transpose(typing_context, target, step, source, stride, like):
    """Write a square of 4 x 4 numbers with its axes exchanged; strides are in bytes."""
    del typing_context, target, step, source, stride
    bits = _bits(like.dtype)

    def generate(context, builder, signature, arguments):
        del signature
        to, apart, begin, between, _ = arguments
        vector = ir.VectorType(ir.IntType(bits), 4)

        def line(start, distance, number):
            offset = builder.mul(distance, ir.Constant(distance.type, number))
            return builder.inttoptr(builder.add(start, offset), vector.as_pointer())

        def mixed(a, b, *places):
            return builder.shuffle_vector(
                a, b, ir.Constant(ir.VectorType(ir.IntType(32), 4), list(places))
            )

        a, b, c, d = (builder.load(line(begin, between, n), align=bits // 8) for n in range(4))
        low, high = [mixed(x, y, 0, 4, 1, 5) for x, y in ((a, b), (c, d))]
        low_rest, high_rest = [mixed(x, y, 2, 6, 3, 7) for x, y in ((a, b), (c, d))]
        each = (
            mixed(low, high, 0, 1, 4, 5),
            mixed(low, high, 2, 3, 6, 7),
            mixed(low_rest, high_rest, 0, 1, 4, 5),
            mixed(low_rest, high_rest, 2, 3, 6, 7),
        )
        for number, values in enumerate(each):
            builder.store(values, line(to, apart, number), align=bits // 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, like), generate


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
                _transpose(to, step * size, source + (j * length + k) * size, length * size, like)
        return
    from_ = carray(_pointer(source), lines * length, like.dtype)
    to = carray(_pointer(target), (length - 1) * step + lines, like.dtype)
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
            _stamp(line + k * like.itemsize, count - k, value, behind, like)
        return
    to = carray(_pointer(line), length, like.dtype)
    inside = carray(_pointer(value), 1, like.dtype)[0]
    outside = carray(_pointer(behind), 1, like.dtype)[0]
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

    Where the index is -1, there is what is `missing`, as it is. Behind the fields come lines of
    constants: `constants` is where those of the first row are, and `apart` how many bytes the next
    row's are away. The last ones, as many as are `repeated`, stand for padding, too, if elements
    do.

    A tensor is a `place`: where it begins; how many rows follow each other at the inner stride,
    before the outer one goes on; their length, and the stride of elements. Its lines are at
    `offsets`. Elements that do not follow each other are gathered in `scratch`, line by line, in
    the order of the lines in the tensor if these are next to each other, from the first one on.
    """
    base, per, outer, inner, length, step, first, scratch = place
    if transform is not None:
        numbers, replace, functions, table, bounds = transform
    lanes = _lanes(dtype, fills)
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
            to = carray(_pointer(line), length, fills.dtype)
            fill = fills[j]
            values = carray(_pointer(addresses[j]), size, dtype)
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
                for place_ in range(0, length, lanes):
                    k = min(place_, length - lanes)
                    wrong = _choose(line + k * width, source + k * width, count - k, fill, dtype)
                    unfit = np.int32(unfit | wrong)
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
                to = carray(_pointer(row + offsets[j] * width), length * step, fills.dtype)
                line = carray(_pointer(scratch + j * length * width), length, fills.dtype)
                for k in range(length):
                    to[k * step] = line[k]
        part += 1
        if part == per:
            begin, part = begin + outer * width, 0
        if bad < 0 and unfit != 0:
            bad = i
    return bad


@compiled
def in_turn(calls, count, step):
    """Make calls of kernels for `step` rows of `count` at a time: each once, before the next rows.

    Each of ``calls[n, 4]`` is a function's address, that of its arguments, of which the first two
    are a row and the one behind the last, that of its result; and the first result that is not
    negative. Returns the first call that failed, or -1.
    """
    for first in range(0, count, step):
        for n in range(len(calls)):
            function, arguments, result = calls[n, 0], calls[n, 1], calls[n, 2]
            rows_ = carray(_pointer(arguments), 2, calls.dtype)
            rows_[0] = first
            rows_[1] = min(first + step, count)
            if _call(function, result, arguments) != 0:
                return n
            if calls[n, 3] < 0:
                calls[n, 3] = carray(_pointer(result), 1, calls.dtype)[0]
    return -1


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
            value = carray(_pointer(addresses[j]), size, dtype)[at]
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
                if truncated and kept is not None:
                    for at in range(other, other + count):
                        kept[at] = True
            else:
                for k in range(count):
                    at = other + order[starts[i] + k] - starts[i]
                    _copy(target + at * size, begin + k * size, size)
                    if truncated and kept is not None:
                        kept[at] = True
    return -1
