"""Paths to fields, and expressions of them, such as ``"log(pf.pt / pt)"``, computed by numpy."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, InputError, nearest

Path = tuple[str | int, ...]
"""The names that lead to a field, and indices into lists on the way: ``("Jet", 0, "pt")``."""

Term = tuple[Path, str]
"""A field that an expression reads, and the function that makes one number of each list, or ''."""

_STEP = re.compile(r"([^\[\]]+)((?:\[-?\d+\])*)")
_SLICE = re.compile(r"(?P<lists>[^\[\]]+)\[:(?P<stop>\d+)\](?P<rest>(\.[^\[\]]+)?)")


@lru_cache(maxsize=4096)
def path_of(name: str | Path) -> Path:
    """Return the path that a name means: ``"Jet[0].pt"`` is ``("Jet", 0, "pt")``.

    Raises
    ------
    ConfigError
        If it has brackets that are no index.
    """
    if isinstance(name, tuple):
        if not name or not isinstance(name[0], str):
            raise ConfigError(f"field {name!r}: expected a path that begins with a name")
        return name
    steps: list[str | int] = []
    for part in name.split("."):
        match = _STEP.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"field {name!r}: expected a path, with indices where it goes through lists, such "
                "as 'pf.pt' or 'Jet[0].pt'"
            )
        steps += [match[1], *map(int, re.findall(r"-?\d+", match[2]))]
    return tuple(steps)


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
    """Return the difference of two angles, from -π up to π."""
    return np.mod(first - second + np.pi, 2 * np.pi) - np.pi


def wrap(angle: Any) -> Any:
    """Return an angle between -π and π."""
    return angle - 2 * np.pi * np.rint(angle / (2 * np.pi))


def _delta_r(eta: Any, phi: Any, other_eta: Any, other_phi: Any) -> Any:
    return np.hypot(eta - other_eta, delta_phi(phi, other_phi))


def _mass(*components: Any) -> Any:
    """Return the invariant mass of two objects: pt, eta, phi and mass of each.

    In float64, as it is a small difference of large squares.
    """
    components = tuple(np.asarray(c, np.float64) for c in components)
    total: Any = 0.0, 0.0, 0.0, 0.0
    for pt, eta, phi, mass in (components[:4], components[4:]):
        px, py, pz = pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)
        energy = np.sqrt(px**2 + py**2 + pz**2 + mass**2)
        total = tuple(map(operator.add, total, (px, py, pz, energy)))
    px, py, pz, energy = total
    return np.sqrt(np.maximum(energy**2 - px**2 - py**2 - pz**2, 0.0))


def _several(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *arguments: reduce(function, arguments)


_ANY = 64
_ONE = (
    "abs arccos arccosh arcsin arcsinh arctan arctanh ceil cos cosh exp expm1 floor isfinite log "
    "log10 log1p log2 sign sin sinh sqrt tan tanh"
)
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    **{name: (getattr(np, name), 1, 1) for name in _ONE.split()},
    "sign_log": (lambda x: np.sign(x) * np.log1p(np.abs(x)), 1, 1),
    "wrap": (wrap, 1, 1),
    "round": (lambda x, decimals=0: np.round(x, operator.index(decimals)), 1, 2),
    "arctan2": (np.arctan2, 2, 2),
    "delta_phi": (delta_phi, 2, 2),
    "clip": (np.clip, 3, 3),
    "where": (np.where, 3, 3),
    **dict.fromkeys(("maximum", "max"), (_several(np.maximum), 2, _ANY)),
    **dict.fromkeys(("minimum", "min"), (_several(np.minimum), 2, _ANY)),
    "hypot": (_several(np.hypot), 2, _ANY),
}
"""Functions, also with ``np.`` before the name: what computes them, least and most arguments."""

REDUCTIONS = ("num", "sum", "mean", "any", "all")
"""Functions that make one number of each list: ``num(Jet)``, ``sum(Jet.pt)``."""

VECTORS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "delta_r": (_delta_r, ("eta", "phi")),
    "mass": (_mass, ("pt", "eta", "phi", "mass")),
}
"""Functions of two objects, such as ``mass(Jet[0], Jet[1])``, and the fields that they read."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: np.invert,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}

_Node = Callable[[Mapping[Term, Any]], Any]


Expression = tuple[tuple[Term, ...], _Node]
"""The terms of an expression, and what computes it of their numbers."""


def exact(values: NDArray[Any]) -> NDArray[Any]:
    """Return integers in a type whose differences do not wrap around."""
    if values.dtype.kind not in "iu":
        return values
    if values.dtype == np.uint64 and np.any(values > np.iinfo(np.int64).max):
        return values.astype(np.float64)
    return values.astype(np.int64, copy=False)


@lru_cache(maxsize=4096)
def expression_of(text: str, what: str = "expression") -> Expression:
    """Read an expression, which messages call `what`: its terms, and what computes it of them.

    Computing raises an `InputError` if numpy cannot compute it of their types.

    Raises
    ------
    ConfigError
        If it is not an expression, has a part that expressions cannot have, or calls a function
        with another number of arguments.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        problem = getattr(error, "msg", error)
        raise ConfigError(f"{what} {text!r} cannot be read: {problem}") from None
    terms: dict[Term, None] = {}
    node = _read(tree.body, terms, f"{what} {text!r}")

    def compute(values: Mapping[Term, Any]) -> Any:
        try:
            return node(values)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise InputError(f"{what} {text!r}: {error}") from None

    return tuple(terms), compute


def _read(node: ast.expr, terms: dict[Term, None], what: str) -> _Node:
    """Return a function that computes a node of a syntax tree; nothing is evaluated as Python."""
    read = partial(_read, terms=terms, what=what)
    if isinstance(node, (ast.BinOp, ast.UnaryOp)) and type(node.op) in _OPERATORS:
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
        return _called(_OPERATORS[type(node.op)], *map(read, sides))
    if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
        compared = [read(n) for n in (node.left, *node.comparators)]
        pairs = zip(node.ops, compared, compared[1:], strict=False)
        each = [_called(_OPERATORS[type(op)], left, right) for op, left, right in pairs]
        return _called(lambda *all_: reduce(operator.and_, all_), *each)
    if isinstance(node, ast.Call):
        return _call(node, terms, what)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        value = node.value
        return lambda _: value
    path = _path(node, what)
    if path == ("np", "pi"):
        return lambda _: np.pi
    return _term(terms, path)


def _call(node: ast.Call, terms: dict[Term, None], what: str) -> _Node:
    name = ast.unparse(node.func).removeprefix("np.").removeprefix("numpy.")
    known = [*FUNCTIONS, *REDUCTIONS, *VECTORS]
    if name not in known:
        raise ConfigError(f"{what}: no function {name!r}; {nearest(name, known)}")
    if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
        raise ConfigError(f"{what}: {name} takes its arguments by place")
    function, least, most = FUNCTIONS.get(
        name, (None, 1 + (name in VECTORS), 1 + (name in VECTORS))
    )
    if not least <= len(node.args) <= most:
        takes = f"{least} or more" if most == _ANY else least if least == most else "1 or 2"
        raise ConfigError(f"{what}: {name} takes {takes}, got {len(node.args)}")
    if name in REDUCTIONS:
        return _term(terms, _path(node.args[0], what), name)
    if name in VECTORS:
        function, fields = VECTORS[name]
        paths = [(*_path(argument, what), field) for argument in node.args for field in fields]
        return _called(function, *(_term(terms, path) for path in paths))
    assert function is not None  # noqa: S101
    return _called(function, *(_read(argument, terms, what) for argument in node.args))


def _term(terms: dict[Term, None], path: Path, reduction: str = "") -> _Node:
    terms[path, reduction] = None
    return operator.itemgetter((path, reduction))


def _path(node: ast.expr, what: str) -> Path:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (*_path(node.value, what), node.attr)
    if isinstance(node, ast.Subscript):
        index = ast.unparse(node.slice)
        if re.fullmatch(r"-?\d+", index):
            return (*_path(node.value, what), int(index))
    hint = ""
    if isinstance(node, ast.BoolOp):
        hint = "; write & and | for and and or, with brackets around each side"
    if isinstance(node, ast.IfExp):
        hint = "; write where(condition, value, other)"
    raise ConfigError(
        f"{what}: {ast.unparse(node)!r} is no part of an expression: those "
        f"are fields, numbers, operators, comparisons and functions such as log{hint}"
    )


def _called(function: Callable[..., Any], *nodes: _Node) -> _Node:
    return lambda values: function(*(node(values) for node in nodes))
