"""The compiled loop over the pairs of each row's elements."""

from __future__ import annotations

import numpy as np

from sonic_coffea.layouts_old._formulae import Operation
from sonic_coffea.layouts_old._loops._compiler import compiled


@compiled
def _number(operation, x, y):
    """Return what an operation makes of one or two numbers."""
    if operation == Operation.divide:
        return x / y
    if operation == Operation.power:
        return x**y
    if operation == Operation.arctan2:
        return np.arctan2(x, y)
    if operation == Operation.negative:
        return -x
    if operation == Operation.abs:
        return abs(x)
    if operation == Operation.log1p:
        return np.log1p(x)
    if operation == Operation.exp:
        return np.exp(x)
    if operation == Operation.tanh:
        return np.tanh(x)
    if operation == Operation.sin:
        return np.sin(x)
    if operation == Operation.cos:
        return np.cos(x)
    if operation == Operation.sinh:
        return np.sinh(x)
    return np.cosh(x)


@compiled
def _execute(program, constants, first, second, at, count, registers):
    """Execute a program for pairs of element `at` of `first` with some elements of `second`.

    Those are elements 0 to `count`. For elements alone, fields are those of `second`.

    Operations with a loop of their own become vector instructions.
    """
    for number in range(len(program)):
        operation, a, b = program[number, 0], program[number, 1], program[number, 2]
        to = registers[number]
        if operation == Operation.constant:
            to[:count] = constants[a]
        elif operation == Operation.first:
            to[:count] = first[a, at]
        elif operation in (Operation.field, Operation.second):
            for k in range(count):
                to[k] = second[a, k]
        elif operation == Operation.add:
            for k in range(count):
                to[k] = registers[a, k] + registers[b, k]
        elif operation == Operation.subtract:
            for k in range(count):
                to[k] = registers[a, k] - registers[b, k]
        elif operation == Operation.difference:
            for k in range(count):
                to[k] = abs(registers[a, k] - registers[b, k])
        elif operation == Operation.multiply:
            for k in range(count):
                to[k] = registers[a, k] * registers[b, k]
        elif operation == Operation.square:
            for k in range(count):
                to[k] = registers[a, k] * registers[a, k]
        elif operation in (Operation.min, Operation.max):
            sign = 1.0 if operation == Operation.min else -1.0
            for k in range(count):
                x, y = registers[a, k], registers[b, k]
                # A NaN of either stays one.
                to[k] = x if sign * x <= sign * y or np.isnan(x) else y
        elif operation == Operation.sqrt:
            for k in range(count):
                to[k] = np.sqrt(registers[a, k])
        elif operation == Operation.log:
            for k in range(count):
                to[k] = np.log(registers[a, k])
        elif operation == Operation.wrap:
            for k in range(count):
                x = registers[a, k]
                to[k] = x - 2.0 * np.pi * np.rint(x / (2.0 * np.pi))
        else:
            for k in range(count):
                to[k] = _number(operation, registers[a, k], registers[b, k])


@compiled
def _known(program, constants, fields, count, values, known):
    """Execute a program for the elements of a row, ``fields[F, L]``."""
    for f in range(fields.shape[0]):
        for k in range(count):
            values[f, k] = fields[f, k]
    _execute(program, constants, values, values, 0, count, known)


@compiled
def pairs(
    out,
    fields,
    counts,
    elements,
    other_fields,
    other_counts,
    other_elements,
    fills,
    program,
    constants,
    results,
    alike,
    symmetric,
    limit,
    values,
    known,
    other_known,
    registers,
):
    """Fill ``out[n, C, L, M]`` from ``fields[n, F, L]`` and ``other_fields[n, G, M]``.

    The rows have `counts` and `other_counts` elements; if these are `alike`, of one collection,
    `other_known` is `known`. A row's numbers are kept in `values` and `known`, those of one
    element's pairs in `registers`. Returns the first row, times `C`, plus the channel, of a number
    that cannot be sent; or -1.
    """
    rows, channels, length, other_length = out.shape
    bad = -1
    for n in range(rows):
        count, other_count = min(counts[n], length), min(other_counts[n], other_length)
        _known(elements, constants, fields[n], count, values, known)
        if not alike:
            _known(other_elements, constants, other_fields[n], other_count, values, other_known)
        for i in range(count):
            stop = i + 1 if symmetric else other_count
            _execute(program, constants, known, other_known, i, stop, registers)
            for c in range(channels):
                result = registers[results[c]]
                to = out[n, c, i]
                unfit = 0
                for k in range(stop):
                    to[k] = result[k]
                    unfit += not abs(result[k]) <= limit
                for k in range(other_count, other_length):
                    to[k] = fills[c]
                if bad < 0 and unfit > 0:
                    bad = n * channels + c
        if symmetric:
            for c in range(channels):
                for i in range(count):
                    for k in range(i + 1, count):
                        out[n, c, i, k] = out[n, c, k, i]
        for c in range(channels):
            for i in range(count, length):
                out[n, c, i, :] = fills[c]
    return bad
