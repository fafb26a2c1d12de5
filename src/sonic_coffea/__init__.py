"""Score jagged awkward arrays on shared inference servers from coffea and dask.

``import sonic_coffea as sonic`` is light: coffea, distributed, numba and grpc load on first use.
``__init__.pyi`` lists the names and their modules.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from sonic_coffea import errors
from sonic_coffea._version import __version__ as __version__

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: statement.module
    for statement in _STUB.body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}

# Public modules, which `from sonic_coffea import *` leaves out: it would load all, and hide dask.
_SUBMODULES = {name for name, module in _MODULES.items() if module == __name__} - {"errors"}

__all__ = sorted(_MODULES.keys() - _SUBMODULES)  # noqa: PLE0605  type checkers read the stub


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        known = errors.nearest(name, _MODULES)
        raise AttributeError(f"module 'sonic_coffea' has no attribute {name!r}; {known}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
