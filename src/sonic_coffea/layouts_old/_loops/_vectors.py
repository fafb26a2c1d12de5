"""Instructions on bytes and on vectors of numbers."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def copy_bytes(typing_context, target, source, size):
    """Copy bytes from one address to another, without a call if they fill a vector."""
    del typing_context, target, source, size
    vector = ir.VectorType(ir.IntType(8), 32)

    def generate(context, builder, signature, arguments):
        del signature
        to, start, count = arguments
        width = count.type(32)

        def move(place):
            values = builder.load(_line(builder, start, place, vector), align=1)
            builder.store(values, _line(builder, to, place, vector), align=1)

        with builder.if_else(builder.icmp_signed("<", count, width)) as (few, many):
            with few:
                pointers = [builder.inttoptr(a, cgutils.voidptr_t) for a in (to, start)]
                copy = builder.module.declare_intrinsic(
                    "llvm.memcpy", [cgutils.voidptr_t, cgutils.voidptr_t, cgutils.intp_t]
                )
                builder.call(copy, [*pointers, count, cgutils.false_bit])
            with many:
                _for_vectors(builder, count, width, move)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _for_vectors(builder, length, width, move):
    """Call `move` with where each vector begins; the last one overlaps the one before."""
    last = builder.sub(length, width)
    with cgutils.for_range_slice(builder, length.type(0), last, width) as (place, _):
        move(place)
    move(last)


def _line(builder, start, offset, kind):
    """Return a pointer to a value of a type, at an offset in bytes from an address."""
    return builder.inttoptr(builder.add(start, offset), kind.as_pointer())


def _vector(context, dtype, lanes):
    """Return the type of some numbers of a type side by side."""
    return ir.VectorType(context.get_data_type(dtype), lanes)


@intrinsic
def lanes_of(typing_context, dtype, fills):
    """Return how many numbers a vector has, if `choose_line` moves them; else 0."""
    del typing_context
    lanes = 256 // dtype.dtype.bitwidth if dtype.dtype == fills.dtype else 0

    def generate(context, builder, signature, arguments):
        del builder, arguments
        return context.get_constant(signature.return_type, lanes)

    return types.int64(dtype, fills), generate


@intrinsic
def choose_line(typing_context, target, source, count, length, fill, dtype):
    """Copy the numbers of a line, which has a vector of them at least; from `count` on, `fill`.

    Returns 0 if all that were copied are finite.
    """
    del typing_context, target, source, count, length
    lanes = 256 // dtype.dtype.bitwidth

    def generate(context, builder, signature, arguments):
        if signature.args[4] != dtype.dtype:
            return context.get_constant(types.int32, 0)
        to, start, stop, size, other, _ = arguments
        vector = _vector(context, dtype.dtype, lanes)
        align = dtype.dtype.bitwidth // 8
        fills = _repeat(builder, other, lanes)
        nothing = ir.Constant(ir.VectorType(ir.IntType(1), lanes), [0] * lanes)
        unfit = cgutils.alloca_once_value(builder, nothing)

        def move(place):
            offset = builder.mul(place, size.type(align))
            at, into = (_line(builder, begin, offset, vector) for begin in (start, to))
            values = builder.load(at, align=align)
            inside = _before(builder, builder.sub(stop, place), lanes)
            builder.store(builder.select(inside, values, fills), into, align=align)
            if isinstance(dtype.dtype, types.Float):
                difference = builder.fsub(values, values)
                wrong = builder.and_(inside, builder.fcmp_unordered("uno", difference, difference))
                builder.store(builder.or_(builder.load(unfit), wrong), unfit)

        _for_vectors(builder, size, size.type(lanes), move)
        bits = builder.bitcast(builder.load(unfit), ir.IntType(lanes))
        return builder.zext(bits, ir.IntType(32)) if lanes < 32 else bits

    at = types.int64
    return types.int32(at, at, at, at, fill, dtype), generate


@intrinsic
def stamp_vector(typing_context, target, count, value, behind, like):
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
def transpose_square(typing_context, target, step, source, stride, like):
    """Write a square of 4 x 4 numbers with its axes exchanged; strides are in bytes."""
    del typing_context, target, step, source, stride
    bits = _bits(like.dtype)

    def generate(context, builder, signature, arguments):
        del signature
        to, apart, begin, between, _ = arguments
        vector = ir.VectorType(ir.IntType(bits), 4)

        def line(start, distance, number):
            return _line(builder, start, builder.mul(distance, distance.type(number)), vector)

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
