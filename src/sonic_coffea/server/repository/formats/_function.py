"""Python functions, whose file is copied as source; nothing is pickled."""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sonic_coffea.server.repository.formats import Contents, Runner, Served


def read(served: Served) -> Contents:
    """Locate a function and the files that go with it; whether it runs, the server says."""
    source = served.source
    path, name = _locate(source) if callable(source) else _split(str(source))
    files: dict[str, Path] = {}
    for file in (path, *map(Path, served.files)):
        if not file.is_file():
            raise ValueError(f"expected a file, got {file}, which is not a file")
        # In a folder of their own, where no name is taken.
        if files.setdefault(f"source/{file.name}", file) != file:
            raise ValueError(f"expected files of different names, got two called {file.name!r}")
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"expected Python source in {path}: {error}") from None
    if name not in code.co_names:
        raise ValueError(f"no function {name!r} at the top of {path}")
    return {"files": files, "manifest": {"function": name}}


def load(path: Path, manifest: dict[str, Any], threads: int) -> Runner:
    del threads
    function = getattr(_importer(path.parent)(path.stem), manifest["function"])
    # Users' code need not be safe for threads: a Triton runs it once at a time, too.
    one_at_a_time = threading.Lock()

    def run(feed: dict[str, Any], requested: tuple[str, ...]) -> dict[str, Any]:
        del requested
        with one_at_a_time:
            # Copies: a function may write to its inputs, which may be the user's own arrays.
            outputs = function(**{name: array.copy() for name, array in feed.items()})
            if not isinstance(outputs, dict):
                raise TypeError(
                    f"expected {manifest['function']} to return a dict of arrays, "
                    f"got {type(outputs).__name__}"
                )
            # The next call may write to the same arrays.
            return {name: _copied(name, values) for name, values in outputs.items()}

    return run


def _importer(folder: Path) -> Callable[..., Any]:
    """Return the ``__import__`` of a model's files, which finds these files before other modules.

    Other models of the process, and the process itself, may have modules of the same names.
    """
    loaded: dict[str, Any] = {}

    def load_or_import(name: str, *context: Any, **options: Any) -> Any:
        file = folder / f"{name}.py"
        if name in loaded or not file.is_file():
            return loaded.get(name) or builtins.__import__(name, *context, **options)
        unique = f"sonic_served_{id(loaded)}_{name}"
        spec = importlib.util.spec_from_file_location(unique, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"expected Python source, got {file}")
        loaded[name] = module = importlib.util.module_from_spec(spec)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": load_or_import}
        sys.modules[module.__name__] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del loaded[name]
            raise
        return module

    return load_or_import


def _copied(name: str, values: Any) -> Any:
    """Return a new array in the byte order of this machine, which has a value everywhere."""
    if np.ma.is_masked(values):
        raise ValueError(f"output {name!r} has masked values; expected an array without a mask")
    array = np.asarray(values)
    return array.astype(array.dtype.newbyteorder("="))


def _split(source: str) -> tuple[Path, str]:
    file, _, name = source.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"expected a function, got {source}; it is given as '{source}:function'")
    return Path(file), name


def _locate(function: Callable[..., Any]) -> tuple[Path, str]:
    name = getattr(function, "__qualname__", repr(function))
    inner = inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(inner)
    except TypeError:
        file = None
    # Else the file has another function by this name, such as the one that this one wraps.
    if getattr(inner, "__globals__", {}).get(name, function) is not function:
        raise ValueError(f"expected the function that is called {name!r} in {file}, got another")
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise ValueError(
            "expected a function that is defined at the top of a file, whose source can be copied, "
            f"got {name}; write it to a file and pass 'file.py:function'"
        )
    return Path(file), name
