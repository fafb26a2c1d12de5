"""Functions that numba compiles, called without numba.

What is compiled is kept on disk as machine code, and LLVM alone loads it: a process that finds all
it needs there does not wait for numba, which takes a second to get ready. The GIL is released while
it runs.
"""

from __future__ import annotations

import ctypes
import os
import platform
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sonic_coffea.layouts_old._disk import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kinds = tuple[Any, ...]
"""What the arguments of a call are: None, bool, int, float, a type of numbers; an array's type, its
axes and whether it is contiguous; or a tuple of these."""

MachineCode = tuple[str, bytes]
"""The name of a function, and the object file that has it."""

_lock = RLock()


class Call(NamedTuple):
    """A kernel with its arguments."""

    name: str
    function: Callable[..., int]
    where: int
    memory: array[int]
    arguments: tuple[Any, ...]

    def __call__(self) -> int:
        """Make it, and return what the kernel does."""
        at, end = self.addresses
        if self.function(end, end + 8, at):
            raise RuntimeError(f"the kernel {self.name!r} failed")
        return int(self.memory[-2])

    def holding(self, *arrays: Any) -> Call:
        """Return the same, with what it is given the addresses of."""
        return self._replace(arguments=(*self.arguments, *arrays))

    @property
    def addresses(self) -> tuple[int, int]:
        """Where its arguments are, and where it returns something."""
        at, _ = self.memory.buffer_info()
        return at, at + 8 * (len(self.memory) - 2)


class Kernel:
    """A function of another module, compiled for each kind of arguments that it is called with.

    A module of `_loops` has the function, which returns an integer or nothing. Its code is kept in
    files, by default those for this processor and for its family.

    Attributes
    ----------
    compiled, unsaved : int
        For how many kinds it was compiled in this process, as no file had the code, and for how
        many of them no file has it now.
    """

    def __init__(self, module: str, name: str, files: Sequence[Files] | None = None) -> None:
        self._module, self._name, self._kept = module, name, files
        self._ready: dict[Kinds, tuple[Callable[..., int], int]] = {}
        self.compiled = self.unsaved = 0

    def __len__(self) -> int:
        """Return for how many kinds it is there."""
        return len(self._ready)

    def __call__(self, *arguments: Any) -> int:
        """Call it; arrays may be of any type and any number of axes."""
        return self.call(*arguments)()

    def call(self, *arguments: Any) -> Call:
        """Return a call that can be made, as often as one likes."""
        values: list[Any] = []
        key = tuple([_take(argument, values) for argument in arguments])
        ready = self._ready.get(key)
        if ready is None:
            with _lock:
                ready = self._ready.get(key) or self._prepared(key)
                self._ready[key] = ready
        # Behind the arguments is where what it returns, and an error, are written.
        memory = array("q", [*values, 0, 0])
        return Call(self._name, *ready, memory, arguments)

    def _prepared(self, kinds: Kinds) -> tuple[Callable[..., int], int]:
        kept, key = self._kept or _files(), (self._name, repr(_named(kinds)))
        code = next((code for files in kept if (code := files.load(key)) is not None), None)
        if code is None:
            code = self._compile(_named(kinds))
            self.compiled += 1
            self.unsaved += not kept[0].save(key, code)
        where = _load(*code)
        return _PROTOTYPE(where), where

    def _compile(self, kinds: Kinds) -> MachineCode:
        from numba import types

        from sonic_coffea.layouts_old._loops._compiler import entry

        kernel = getattr(import_module(f"{__package__}._loops.{self._module}"), self._name)
        function: Any = entry(kernel, kinds)
        function.compile((types.int64,))
        (compiled,) = function.overloads.values()
        code = compiled.library._get_compiled_object()  # noqa: SLF001  numba offers nothing else
        return compiled.fndesc.llvm_func_name, bytes(code)


_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def address(values: NDArray[Any]) -> int:
    """Return where numbers lie; numpy would make a dict, or an object, to say so."""
    return _at(id(values) + _DATA).value or 0


# CPython's id is where an object lies, and numpy's arrays begin with their address behind what any
# object has. Neither is promised, but for numpy's C interface, to which `PyArrayObject_fields` is
# known: a numpy, or a Python, that changes it is found by test_addresses_are_those_of_numpy.
_DATA = object.__basicsize__
_at = ctypes.c_void_p.from_address


def _take(argument: Any, values: list[Any]) -> Any:
    """Return the kind of an argument, and add what an entry takes for it."""
    kind = type(argument)
    if kind is int:  # as most are
        values.append(argument)
    elif isinstance(argument, np.ndarray):
        contiguous = argument.flags.c_contiguous
        values.append(address(argument))
        values += argument.shape
        if not contiguous:
            values += argument.strides
        return argument.dtype.char, argument.ndim, contiguous
    elif kind is tuple:
        return tuple([_take(inner, values) for inner in argument])
    elif argument is None or kind is str:
        return argument
    elif isinstance(argument, (float, np.floating)):
        values.append(ctypes.c_int64.from_buffer(ctypes.c_double(float(argument))).value)
        return float
    else:
        values.append(int(argument))
        return bool if kind in (bool, np.bool_) else int
    return kind


def _named(kinds: Any) -> Any:
    """Return the same with the types of arrays as any platform names them."""
    if not isinstance(kinds, tuple):
        return np.dtype(kinds).str if isinstance(kinds, str) else kinds
    return tuple(map(_named, kinds))


@cache
def load() -> Any:
    """Have LLVM get ready; return the processor that code is made for."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    with suppress(RuntimeError):  # another system, whose programs have it anyway
        llvm.load_library_permanently("libm.so.6")
    # Of arrays that own memory, which kernels do not make: it is never called.
    destroy = "NRT_MemInfo_call_dtor"
    if llvm.address_of_symbol(destroy) is None:
        llvm.add_symbol(destroy, llvm.address_of_symbol("abort"))
    return llvm.Target.from_triple(llvm.get_process_triple())


# Families of processors, by the kind of machine, and what a processor must have.
_FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "x86_64": ("x86-64-v3", ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")),
    "aarch64": ("generic", ()),
}


@cache
def portable() -> str | None:
    """Return the family of this processor, as LLVM calls it; None if it is of none."""
    import llvmlite.binding as llvm

    family, needed = _FAMILIES.get(platform.machine(), (None, ()))
    features = llvm.get_host_cpu_features()
    return family if all(features.get(feature) for feature in needed) else None


def family_of_numba() -> str | None:
    """Return what numba compiles for, if the environment tells it; None: this processor."""
    named = os.environ.get("NUMBA_CPU_NAME")
    return named if os.environ.get("NUMBA_CPU_FEATURES") == "" else None


@cache
def _files() -> tuple[Files, ...]:
    """Return the code for this processor, where what is compiled is saved, and for its family."""
    import llvmlite
    import llvmlite.binding as llvm

    load()
    triple, features = llvm.get_process_triple(), llvm.get_host_cpu_features().flatten()
    own = Files((llvmlite.__version__, triple, llvm.get_host_cpu_name(), features))
    family = portable()
    if family is None:
        return (own,)
    # An object file needs nothing of the LLVM that made it.
    of_family = Files((triple, family))
    return (of_family,) if family_of_numba() == family else (own, of_family)


_engines: list[Any] = []


def _load(symbol: str, code: bytes) -> int:
    """Return the address of a function, which stays there."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), load().create_target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    where: int = engine.get_function_address(symbol)
    return where
