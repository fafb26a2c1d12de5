"""Functions compiled for whatever they are called with, and entered with an address."""

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
    names: dict[str, Any] = {"kernel": kernel, "carray": carray, "pointer": pointer_to}
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
            return f"({''.join(f'{argument(inner)}, ' for inner in kind)})"
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
def pointer_to(typing_context, address):
    """Make a pointer of an address."""
    del typing_context, address

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def call_entry(typing_context, function, result, arguments):
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
