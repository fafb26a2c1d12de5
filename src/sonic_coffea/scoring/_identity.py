"""What tells a function of the user from another: its code, and the values that it uses."""

from __future__ import annotations

import inspect
import marshal
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, ModuleType
from typing import Any

from dask.base import tokenize


def identity(function: Callable[..., Any]) -> str:
    """Return a text that differs between functions that may return different results.

    It covers the module of the function, the arguments of a `partial`, default values, the
    variables of enclosing functions, and the globals and modules that the function names; of
    functions of the same module, too. What other modules import is left out. A value that dask
    cannot hash reproducibly is different each time.
    """
    parts: list[str] = []
    todo: list[Any] = [function]
    read: set[int] = set()
    home = None
    while todo:
        value = todo.pop()
        if isinstance(value, partial):
            todo += [value.func, *value.args, *value.keywords.items()]
        elif inspect.ismethod(value):
            todo += [value.__func__, value.__self__]
        elif inspect.isroutine(value) or isinstance(value, (ModuleType, type)):
            if id(value) in read:
                continue
            read.add(id(value))
            parts.append(_source(value))
            home = home or getattr(value, "__module__", None)
            if inspect.isfunction(value) and value.__module__ == home:
                todo += _used(value)
        else:
            parts.append(tokenize(value))
            todo.append(type(value))
    return str(tokenize(parts))


def _used(function: Any) -> Iterator[Any]:
    """Yield the values that a function reads beside its arguments."""
    yield function.__defaults__
    yield function.__kwdefaults__
    yield getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in sorted(_names(function.__code__)):
        yield function.__globals__.get(name)


def _names(code: CodeType) -> set[str]:
    """Return the names in a function, and in those that are defined in it."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*inner)


def _source(value: Any) -> str:
    """Return the text of a value's module, or its own in a notebook."""
    for written in (inspect.getmodule(value), value):
        try:
            return inspect.getsource(written)  # type: ignore[arg-type]
        except (OSError, TypeError):
            continue
    code = getattr(value, "__code__", None)
    return repr(value) if code is None else marshal.dumps(code).hex()
