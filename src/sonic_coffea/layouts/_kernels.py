"""Compiled loops from awkward's buffers into a request's buffer.

Each kernel handles one field of a tensor: gather, transform, cast, truncate and pad in one pass. It
releases the GIL, is cached on disk, and returns the first row with a NaN or infinity, or -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

Kernel = Callable[..., Any]


def _compiled(function: Kernel) -> Kernel:
    kernel: Kernel = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return kernel


@_compiled
def _at(values, index, position):
    if index is None:
        return values[position]
    return values[index[position]]


@_compiled
def _affine(value, shift, scale, lower, upper, replace, nonfinite):
    if replace and not np.isfinite(value):
        value = nonfinite
    value = (value - shift) * scale
    # Written so that a NaN stays one.
    value = max(value, lower)
    value = min(value, upper)
    return value


@_compiled
def row_copy(out, f, values, index, ids):
    """Fill ``out[:, f]`` unchanged."""
    bad = -1
    for i in range(out.shape[0]):
        value = _at(values, index, ids[i])
        if bad < 0 and not np.isfinite(value):
            bad = i
        out[i, f] = value
    return bad


@_compiled
def row_affine(out, f, values, index, ids, shift, scale, lower, upper, replace, nonfinite):
    """Fill ``out[:, f]``, transformed."""
    bad = -1
    for i in range(out.shape[0]):
        value = _at(values, index, ids[i])
        if bad < 0 and not replace and not np.isfinite(value):
            bad = i
        out[i, f] = _affine(value, shift, scale, lower, upper, replace, nonfinite)
    return bad


@_compiled
def padded_copy(out, f, values, index, starts, stops, fill):
    """Fill ``out[:, f, :]`` unchanged, padding with `fill`."""
    length = out.shape[2]
    bad = -1
    for i in range(out.shape[0]):
        start = starts[i]
        count = min(stops[i] - start, length)
        finite = True
        for k in range(count):
            value = _at(values, index, start + k)
            finite &= np.isfinite(value)
            out[i, f, k] = value
        for k in range(count, length):
            out[i, f, k] = fill
        if bad < 0 and not finite:
            bad = i
    return bad


@_compiled
def padded_affine(
    out, f, values, index, starts, stops, fill, shift, scale, lower, upper, replace, nonfinite
):
    """Fill ``out[:, f, :]``, transformed, padding with `fill` as it is."""
    length = out.shape[2]
    bad = -1
    for i in range(out.shape[0]):
        start = starts[i]
        count = min(stops[i] - start, length)
        finite = True
        for k in range(count):
            value = _at(values, index, start + k)
            finite &= replace or np.isfinite(value)
            out[i, f, k] = _affine(value, shift, scale, lower, upper, replace, nonfinite)
        for k in range(count, length):
            out[i, f, k] = fill
        if bad < 0 and not finite:
            bad = i
    return bad


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
