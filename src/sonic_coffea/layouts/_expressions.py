"""Paths to fields, and expressions of them, such as ``"log(pf.pt / pt)"``, computed by numpy."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial, reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, InputError, require, shortened

Path = tuple[str | int, ...]
"""The names that lead to a field, and indices into lists on the way: ``("Jet", 0, "pt")``."""

Term = tuple[Path, str]
"""A field that an expression reads, and the function that makes one number of each list, or ''."""

_PATH = re.compile(r"[^.\[\]]+(\[-?\d+\])*(\.[^.\[\]]+(\[-?\d+\])*)*")
_STEP = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")
_SLICE = re.compile(r"(?P<lists>[^\[\]]+)\[:(?P<stop>\d+)\](?P<rest>(\.[^\[\]]+)?)")


@lru_cache(maxsize=4096)
def path_of(name: str | Path) -> Path:
    """Return the path that a name means: ``"Jet[0].pt"`` is ``("Jet", 0, "pt")``.

    Raises
    ------
    ConfigError
        If it has brackets that are no index.
    """
    if isinstance(name, tuple) and name and isinstance(name[0], str):
        return name
    if not isinstance(name, str) or not _PATH.fullmatch(name):
        hint = "; a slice is for the fields of a layout" if "[:" in str(name) else ""
        raise ConfigError(
            f"field {name!r}: expected a path that begins with a name, with indices where it goes "
            f"through lists, such as 'pf.pt' or 'Jet[0].pt'{hint}"
        )
    return tuple(int(index) if index else step for step, index in _STEP.findall(name))


def text_of(path: str | Path) -> str:
    """Return a path as messages have it."""
    if isinstance(path, str):
        return path
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def column_of(name: str | Path) -> str:
    """Return the column of the file that a name means: ``"Jet.pt"`` for ``"Jet[0].pt"``."""
    return ".".join(step for step in path_of(name) if isinstance(step, str))


def picks_of(name: str) -> tuple[str, ...]:
    """Return the names of the first objects: ``"Jet[:2].pt"`` has two."""
    match = _SLICE.fullmatch(name)
    if match is None:
        return (name,)
    return tuple(f"{match['lists']}[{i}]{match['rest']}" for i in range(int(match["stop"])))


def delta_phi(first: Any, second: Any) -> Any:
    """Return the difference of two angles, from -π to π."""
    difference = first - second
    return difference - 2 * np.pi * np.rint(difference / (2 * np.pi))


def _delta_r(eta: Any, phi: Any, other_eta: Any, other_phi: Any) -> Any:
    return np.hypot(eta - other_eta, delta_phi(phi, other_phi))


def _mass(*components: Any) -> Any:
    """Return the invariant mass of two objects: pt, eta, phi and mass of each.

    In float64, as it is a small difference of large squares.
    """
    numbers = np.stack(np.broadcast_arrays(*components)).astype(np.float64)
    pt, eta, phi, mass = (numbers[n::4] for n in range(4))
    px, py, pz = pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)
    energy = np.sqrt(px**2 + py**2 + pz**2 + mass**2)
    px, py, pz, energy = (component.sum(axis=0) for component in (px, py, pz, energy))
    return np.sqrt(np.maximum(energy**2 - px**2 - py**2 - pz**2, 0.0))


def _computed(name: str, operation: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return the result of an operation or a function, as of real numbers.

    It is NaN where an integer is divided by 0. Integers that wrapped around are refused: those are
    off by 2**64. So is a sum of two conditions: in numpy, that is no number, but whether any holds.
    Conditions are computed with as with integers, and not in float16.
    """
    result = operation(first, *others)
    dtype = np.asarray(result).dtype
    if dtype == np.float16:
        return operation(1 * first, *(1 * other for other in others))
    if dtype.kind == "b" and name == "Add":
        raise TypeError("write | for or, or 1 * (…) + (…) for how many conditions hold")
    if dtype.kind in "iu":
        if name in _WRAPPING:
            real = operation(np.asarray(first, np.float64), *others)
            is_wrong = abs(real - result) > 2.0**62
        else:  # numpy gives the least integer for one that is too large
            is_wrong = np.equal(result, _LEAST)
        if np.any(is_wrong):
            raise ArithmeticError("an integer is too large for int64; begin with 1.0 * …")
        is_zero = name in ("FloorDiv", "Mod") and np.equal(others[0], 0)
        if np.any(is_zero):
            result = np.where(is_zero, np.nan, result)
    return result


def _several(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *arguments: reduce(function, arguments)


_ONE = (
    "abs arccos arccosh arcsin arcsinh arctan arctanh ceil cos cosh exp expm1 floor isfinite log "
    "log10 log1p log2 sign sin sinh sqrt tan tanh"
)
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, float]] = {
    **{name: (getattr(np, name), 1, 1) for name in _ONE.split()},
    "sign_log": (lambda x: np.sign(x) * np.log1p(np.abs(x)), 1, 1),
    "round": (lambda x, decimals=0: np.round(x, operator.index(decimals)), 1, 2),
    "arctan2": (np.arctan2, 2, 2),
    "delta_phi": (delta_phi, 2, 2),
    "clip": (np.clip, 3, 3),
    "where": (np.where, 3, 3),
    "delta_r": (_delta_r, 2, 2),
    "mass": (_mass, 2, 2),
    **dict.fromkeys(("maximum", "max"), (_several(np.maximum), 2, math.inf)),
    **dict.fromkeys(("minimum", "min"), (_several(np.minimum), 2, math.inf)),
    "hypot": (_several(np.hypot), 2, math.inf),
}
"""Functions, also with ``np.`` before the name: what computes them, least and most arguments."""

REDUCTIONS = ("num", "sum", "mean", "any", "all", "metadata", "max", "min")
"""Functions that make one number of each list: ``num(Jet)``, ``sum(Jet.pt)``.

``max`` and ``min`` of several numbers are those in `FUNCTIONS`.

``metadata(year)`` is a constant of the events' metadata.
"""

VECTORS = {"delta_r": ("eta", "phi"), "mass": ("pt", "eta", "phi", "mass")}
"""Functions of two objects, such as ``mass(Jet[0], Jet[1])``, and the fields that they read."""

_NO_OPERATORS = (ast.MatMult, ast.LShift, ast.RShift, ast.Not, ast.Is, ast.IsNot, ast.In, ast.NotIn)

_BITS = ast.BitAnd, ast.BitOr, ast.BitXor

_OPERATORS = {
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Pow": operator.pow,
}
"""Operators whose results numpy does not check for integers."""

_WRAPPING = ("Add", "Sub", "Mult", "Pow")
_LEAST = np.iinfo(np.int64).min

Expression = tuple[tuple[Term, ...], Callable[[Mapping[Term, Any]], Any]]
"""The terms of an expression, and what computes it of their numbers."""


def exact(values: NDArray[Any]) -> NDArray[Any]:
    """Return integers in a type whose differences do not wrap around.

    Raises
    ------
    InputError
        If an integer is larger than this type holds.
    """
    if values.dtype.kind not in "iu":
        return values
    if values.dtype == np.uint64 and np.any(values > np.iinfo(np.int64).max):
        raise InputError(
            f"is {values.max()}, and integers in an expression are int64; compute the result with "
            "NumPy, as in fold=events.seed % 5"
        )
    return values.astype(np.int64, copy=False)


@lru_cache(maxsize=4096)
def expression_of(text: str, kind: str = "expression") -> Expression:
    """Read an expression, formula or discriminant: its terms, and what computes it of them.

    Only an expression may make one number of each list. Computing raises an `InputError` if numpy
    cannot compute it of their types.

    Raises
    ------
    ConfigError
        If it is not an expression, has a part that expressions cannot have, or calls a function
        with another number of arguments.
    """
    terms: dict[Term, str] = {}
    what = f"{kind} {text!r}"
    source = text.strip()
    try:
        tree = ast.parse(source, mode="eval")
        _check_brackets(tree, source, what)
        tree.body = _read(tree.body, terms, what)
        code = compile(ast.fix_missing_locations(tree), "<expression>", "eval")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{what} cannot be read: {getattr(error, 'msg', error)}") from None
    except (RecursionError, MemoryError):  # the latter: of Python's parser
        raise ConfigError(
            f"{shortened(what)} is too long or too deep; compute a part of it with awkward"
        ) from None
    for _, reduction in terms:
        if reduction and kind != "expression":
            raise ConfigError(f"{what}: {reduction} is of a list, which a {kind} does not read")
    # NumPy 1 imports the class of an error; `_read` lets no expression do so.
    known: dict[str, Any] = {"__builtins__": {"__import__": __import__}}
    operations = _OPERATORS | {name: function for name, (function, _, _) in FUNCTIONS.items()}
    known |= {name: partial(_computed, name, each) for name, each in operations.items()}

    def compute(values: Mapping[Term, Any]) -> Any:
        names = {name: values[term] for term, name in terms.items()}
        try:
            with np.errstate(all="ignore"):
                return eval(code, known, names)  # noqa: S307  it has what `_read` lets in
        except (TypeError, ValueError, ArithmeticError) as error:
            raise InputError(f"{what}: {error}") from None

    return tuple(terms), compute


def _check_brackets(tree: ast.AST, source: str, what: str) -> None:
    """Refuse `&`, `|` and `^` beside a comparison: ``a > 1 & b`` is ``a > (1 & b)`` in Python."""
    text = source.encode()  # in which ast counts, from the start of a line
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    for side in (side for node in compared for side in (node.left, *node.comparators)):
        if isinstance(side, ast.BinOp) and isinstance(side.op, _BITS):
            start = starts[side.lineno - 1] + side.col_offset
            stop = starts[(side.end_lineno or 1) - 1] + (side.end_col_offset or 0)
            if not (text[:start].rstrip().endswith(b"(") and text[stop:].lstrip().startswith(b")")):
                raise ConfigError(
                    f"{what}: &, | and ^ come before comparisons, as in {ast.unparse(side)!r}; "
                    "write brackets around each side, such as (pt > 30) & (num > 2), or around "
                    "bits, such as (flags & 4) != 0"
                )


def _read(node: ast.expr, terms: dict[Term, str], what: str) -> ast.expr:
    """Return what is evaluated: names of terms, numbers, operators and calls of `FUNCTIONS`."""
    read = partial(_read, terms=terms, what=what)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = ast.BinOp(ast.Constant(-1), ast.Mult(), node.operand)  # which is checked
    if isinstance(node, ast.BinOp) and not isinstance(node.op, _NO_OPERATORS):
        left, right, name = read(node.left), read(node.right), type(node.op).__name__
        call = ast.Call(ast.Name(name, ast.Load()), [left, right], [])
        return call if name in _OPERATORS else ast.BinOp(left, node.op, right)
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, _NO_OPERATORS):
        return ast.UnaryOp(node.op, read(node.operand))
    if isinstance(node, ast.Compare) and not any(isinstance(op, _NO_OPERATORS) for op in node.ops):
        sides = pairwise(map(read, (node.left, *node.comparators)))
        pairs = zip(node.ops, sides, strict=True)
        each: list[ast.expr] = [ast.Compare(left, [op], [right]) for op, (left, right) in pairs]
        return reduce(lambda all_, one: ast.BinOp(all_, ast.BitAnd(), one), each)
    if isinstance(node, ast.Call):
        return _call(node, terms, what)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node
    path = _path(node, what)
    return ast.Constant(np.pi) if path == ("np", "pi") else _term(terms, path)


def _call(node: ast.Call, terms: dict[Term, str], what: str) -> ast.expr:
    name = ast.unparse(node.func).removeprefix("np.").removeprefix("numpy.")
    require([name], [*FUNCTIONS, *REDUCTIONS], f"{what}: no function")
    _, least, most = FUNCTIONS.get(name, (None, 1, 1))
    least = 1 if name in REDUCTIONS else least
    if node.keywords or not least <= len(node.args) <= most:
        takes = " or ".join("more" if n == math.inf else str(n) for n in sorted({least, most}))
        raise ConfigError(f"{what}: {name} takes {takes} by place, got {len(node.args)}")
    if name in REDUCTIONS and (name not in FUNCTIONS or len(node.args) == 1):
        with suppress(ConfigError):
            return _term(terms, _path(node.args[0], what), name)
        example = "metadata(year)" if name == "metadata" else f"{name}(Jet.pt)"
        raise ConfigError(
            f"{what}: {name} takes a name alone, as in {example}, got "
            f"{ast.unparse(node.args[0])!r}; compute this with awkward before the call"
        )
    if name in VECTORS:
        paths = [(*_path(each, what), field) for each in node.args for field in VECTORS[name]]
        arguments = [_term(terms, path) for path in paths]
    else:
        arguments = [_read(each, terms, what) for each in node.args]
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])


def _term(terms: dict[Term, str], path: Path, reduction: str = "") -> ast.expr:
    name = terms.setdefault((path, reduction), f"term_{len(terms)}")
    return ast.Name(name, ast.Load())


def _path(node: ast.expr, what: str) -> Path:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (*_path(node.value, what), node.attr)
    if isinstance(node, ast.Subscript) and re.fullmatch(r"-?\d+", ast.unparse(node.slice)):
        return (*_path(node.value, what), int(ast.unparse(node.slice)))
    raise ConfigError(
        f"{what}: {ast.unparse(node)!r} is no part of an expression: those are fields, numbers, "
        "operators, comparisons and functions such as log; write & and | for and and or, with "
        "brackets around each side, and where(condition, value, other) for if"
    )
