"""formats: the kinds of files that models come from, one module each.

A module of a format is read on both sides: `read` runs here, and `load` in the server's own
environment, where the module is copied beside the model. So it imports nothing of this package.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sonic_coffea.server.repository.formats import (
    _function,
    _lightgbm,
    _onnx,
    _torchscript,
    _xgboost,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from sonic_coffea.server.repository.formats._format import Format

__all__ = ["FORMATS", "MODEL", "PLATFORMS", "RUNNER", "format_of", "runner_of"]

FORMATS: Mapping[str, Format] = {
    "onnx": _onnx,
    "torchscript": _torchscript,
    "xgboost": _xgboost,
    "lightgbm": _lightgbm,
    "function": _function,
}
PLATFORMS = ("python", *(f.NATIVE for f in FORMATS.values() if f.NATIVE))


class _Script(NamedTuple):
    name: str
    path: Path


# What Triton's Python backend runs, and the module of the format, which that imports.
MODEL = _Script("model.py", Path(__file__).parents[1] / "_python_backend.py")
RUNNER = "sonic_runner.py"


def format_of(source: str | os.PathLike[str] | Callable[..., Any]) -> str | None:
    """Return the name of the format of a source, by the end of its name; None if there is none."""
    if callable(source):
        return "function"
    # A function is given as file.py:function.
    suffix = Path(source).suffix.lower().partition(":")[0]
    return next((name for name, f in FORMATS.items() if suffix in f.SUFFIXES), None)


def runner_of(name: str) -> Path:
    """Return the file that runs models of a format in the server."""
    return Path(__file__).with_name(f"_{name}.py")
