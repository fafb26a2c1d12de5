"""Expressions of fields, such as ``"pf.pt / pt"``: a small part of Python, computed by numpy."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, InputError, nearest
from sonic_coffea.layouts_old._paths import path_of

Numbers = NDArray[Any]

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
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
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: np.invert,
}
_COMPARED: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def delta_phi(first: Any, second: Any) -> Any:
    """Return the difference of two angles, from -π up to π."""
    return np.mod(first - second + np.pi, 2 * np.pi) - np.pi


_NAMES = (
    "abs arccos arcsin arcsinh arctan arctan2 arctanh ceil clip cos cosh exp expm1 floor hypot "
    "isfinite log log10 log1p log2 maximum minimum round sign sin sinh sqrt tan tanh where"
)
CALLS: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in _NAMES.split()}
CALLS["delta_phi"] = delta_phi
"""Functions that an expression may call, also with ``np.`` before the name."""

_Node = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """An expression, ready to be computed from the fields at its paths."""

    text: str
    paths: tuple[str, ...]
    _node: _Node

    def __call__(self, values: Mapping[str, Numbers]) -> Any:
        """Return what it gives for the numbers of its fields.

        Raises
        ------
        InputError
            If numpy cannot compute it of these types.
        """
        with np.errstate(all="ignore"):
            try:
                return self._node({name: _exact(v) for name, v in values.items()})
            except (TypeError, ValueError, OverflowError) as error:
                raise InputError(f"expression {self.text!r}: {error}") from None


def _exact(values: Numbers) -> Numbers:
    """Return integers in a type whose differences do not wrap around."""
    if values.dtype.kind not in "iu":
        return values
    if values.dtype == np.uint64 and np.any(values > np.iinfo(np.int64).max):
        return values.astype(np.float64)
    return values.astype(np.int64, copy=False)


@lru_cache(maxsize=4096)
def expression_of(text: str) -> Expression:
    """Read an expression.

    Raises
    ------
    ConfigError
        If it is not an expression, or has a part that expressions cannot have.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ConfigError(f"expression {text!r} cannot be read: {error.msg}") from None
    paths: dict[str, None] = {}
    node = _Reader(text, paths).read(tree.body)
    return Expression(text, tuple(paths), node)


class _Reader:
    """Makes functions of the nodes of a syntax tree; nothing is evaluated as Python."""

    def __init__(self, text: str, paths: dict[str, None]) -> None:
        self._text, self._paths = text, paths

    def read(self, node: ast.expr) -> _Node:
        """Return a function that computes a node from the numbers of all fields."""
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _called(_BINARY[type(node.op)], self.read(node.left), self.read(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _called(_UNARY[type(node.op)], self.read(node.operand))
        if isinstance(node, ast.Compare) and all(type(op) in _COMPARED for op in node.ops):
            sides = [self.read(n) for n in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            each = [_called(_COMPARED[type(op)], left, right) for op, left, right in pairs]
            return _called(lambda *all_: reduce(operator.and_, all_), *each)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            value = node.value
            return lambda _: value
        return self._path(node)

    def _call(self, node: ast.Call) -> _Node:
        name = ast.unparse(node.func).removeprefix("np.").removeprefix("numpy.")
        if name not in CALLS:
            raise ConfigError(
                f"expression {self._text!r}: no function {name!r}; {nearest(name, CALLS)}"
            )
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            raise ConfigError(f"expression {self._text!r}: {name} takes its arguments by place")
        return _called(CALLS[name], *(self.read(a) for a in node.args))

    def _path(self, node: ast.expr) -> _Node:
        path = self._dotted(node)
        if path == "np.pi":
            return lambda _: np.pi
        path_of(path)
        self._paths[path] = None
        return operator.itemgetter(path)

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Subscript):
            return f"{self._dotted(node.value)}[{ast.unparse(node.slice)}]"
        hint = ""
        if isinstance(node, ast.BoolOp):
            hint = "; write & and | for and and or, with brackets around each side"
        if isinstance(node, ast.IfExp):
            hint = "; write where(condition, value, other)"
        raise ConfigError(
            f"expression {self._text!r}: {ast.unparse(node)!r} is no part of an expression: those "
            f"are fields, numbers, operators, comparisons and functions such as log{hint}"
        )


def _called(function: Callable[..., Any], *nodes: _Node) -> _Node:
    return lambda values: function(*(node(values) for node in nodes))
