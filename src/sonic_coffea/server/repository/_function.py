"""Where the source of a Python function is, and whether it takes what is declared."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["check", "locate"]


def locate(source: str | Callable[..., Any]) -> tuple[Path, str]:
    """Return the file of a function, or of ``file.py:function``, and the function's name.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If it is not a function at the top of a file.
    """
    if isinstance(source, str):
        file, _, name = source.rpartition(":")
        return Path(file), name
    name = getattr(source, "__qualname__", repr(source))
    try:
        found = inspect.getsourcefile(inspect.unwrap(source))
    except TypeError:
        found = None
    if found is None or not Path(found).is_file() or not name.isidentifier():
        raise ConfigError(
            "expected a function that is defined at the top of a file, whose source can be copied, "
            f"got {name}; write it to a file and pass 'file.py:function'"
        )
    return Path(found), name


def check(path: Path, name: str, inputs: Sequence[str]) -> None:
    """Check, without running the file, that it has the function and that it takes the inputs.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If not.
    """
    if not path.is_file():
        raise ConfigError(f"expected a Python file, got {path}, which is not a file")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"expected Python source in {path}: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name in functions:
        _check_arguments(path, functions[name], inputs)
    elif name not in _bound(tree):
        raise ConfigError(f"no function {name!r} at the top of {path}; {nearest(name, functions)}")


def _check_arguments(path: Path, function: ast.FunctionDef, inputs: Sequence[str]) -> None:
    spec = function.args
    takes = [a.arg for a in (*spec.args, *spec.kwonlyargs)]
    n_needed = len(spec.args) - len(spec.defaults)
    needed = [a.arg for a in spec.args[:n_needed]]
    needed += [a.arg for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is None]
    fits = spec.kwarg is not None or set(inputs) <= set(takes)
    if not fits or not set(needed) <= set(inputs) or spec.posonlyargs:
        raise ConfigError(
            f"expected {function.name} in {path} to take the declared inputs "
            f"{', '.join(inputs)} by name, got {function.name}({ast.unparse(spec)})"
        )


def _bound(tree: ast.Module) -> set[str]:
    """Names that imports and assignments at the top of a file bind."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    return names
