"""Formulae of pairs of elements, read from text and written as programs for a compiled loop.

A program is a list of instructions, each of which computes one number for every pair; its operands
are the results of earlier instructions. What two formulae have in common is computed once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, nearest

if TYPE_CHECKING:
    from numpy.typing import NDArray

Operation = IntEnum(
    "Operation",
    "constant field first second add subtract multiply divide power min max difference arctan2 "
    "square negative abs sqrt log log1p exp tanh sin cos sinh cosh wrap",
    start=0,
)
"""What an instruction may do."""

_NAMES = [operation.name for operation in Operation]
FUNCTIONS = {
    **dict.fromkeys(_NAMES[Operation["abs"] :], 1),
    **dict.fromkeys(("min", "max", "arctan2"), 2),
}
"""Functions of a formula, and how many arguments each takes."""

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.Pow: "power",
}
_COMMUTATIVE = ("add", "multiply", "min", "max", "difference")

VECTORS: dict[str, tuple[str, ...]] = {
    "px, py, pz, energy": ("px", "py", "pz", "energy"),
    "pt, eta, phi, mass": ("pt", "eta", "phi", "mass"),
    "pt, eta, phi, energy": ("pt", "eta", "phi", "energy"),
}
"""Fields that make a four-vector."""

ELEMENT = {
    "px": "pt * cos(phi)",
    "py": "pt * sin(phi)",
    "pz": "pt * sinh(eta)",
    "energy": "sqrt(px**2 + py**2 + pz**2 + mass**2)",
    "pt": "sqrt(px**2 + py**2)",
    "phi": "arctan2(py, px)",
    "rapidity": "0.5 * log(max(energy + pz, 1e-20) / max(energy - pz, 1e-20))",
}
"""Quantities of an element that follow from its four-vector."""

PAIR = {
    "delta_r": "sqrt((rapidity_i - rapidity_j)**2 + wrap(phi_i - phi_j)**2)",
    "kt": "min(pt_i, pt_j) * delta_r",
    "z": "min(pt_i, pt_j) / max(pt_i + pt_j, eps)",
    "m2": "(energy_i + energy_j)**2 - (px_i + px_j)**2 - (py_i + py_j)**2 - (pz_i + pz_j)**2",
    "ln_kt": "log(max(kt, eps))",
    "ln_z": "log(max(z, eps))",
    "ln_delta_r": "log(max(delta_r, eps))",
    "ln_m2": "log(max(m2, eps))",
}
"""Quantities of a pair."""

DEFAULT = ("ln_kt", "ln_z", "ln_delta_r", "ln_m2")

_ALIASES = {"e": "energy", "m": "mass"}


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Formulae as a compiled loop executes them.

    Attributes
    ----------
    elements, others, pairs : array of int64, shape ``[K, 3]``
        Instructions for each first element of pairs, for each second element, then for each pair:
        an operation and its operands. `others` is `elements` where both are of one collection.
    constants : array of float64
        The numbers in them.
    results : array of int64
        The instruction of `pairs` that computes each formula.
    symmetric : bool
        Whether every formula gives the same for (i, j) and (j, i).
    """

    elements: NDArray[np.int64]
    others: NDArray[np.int64]
    pairs: NDArray[np.int64]
    constants: NDArray[np.float64]
    results: NDArray[np.int64]
    symmetric: bool


def base_name(path: str) -> str:
    """Return how formulae call a field: the last part of its path."""
    return path.rpartition(".")[2]


def four_vector(names: Sequence[str]) -> dict[str, int] | None:
    """Return which of some fields are the components of a four-vector, or None."""
    lowered = [base_name(name).lower() for name in names]
    known: dict[str, int] = {}
    for place, name in enumerate(lowered):
        end = name.rpartition("_")[2]
        known.setdefault(_ALIASES.get(end, end), place)
    for components in VECTORS.values():
        if all(c in known for c in components):
            return {c: known[c] for c in components}
    return None


def compile_formulae(
    formulae: Sequence[str],
    names: Sequence[str],
    other_names: Sequence[str] | None = None,
    *,
    eps: float,
) -> Program:
    """Return the program of quantities of a pair, or of expressions such as ``"pt_i / pt_j"``.

    The second element of a pair has fields of `other_names`, if it is of another collection.

    Raises
    ------
    ConfigError
        If a formula cannot be read, or names an unknown quantity or field.
    """
    first = _Elements(names)
    second = first if other_names is None else _Elements(other_names)
    writer = _Writer(first, second, eps)
    results = [writer.pair_of(text, text) for text in formulae]
    symmetric = second is first and all(writer.swapped(node) == node for node in results)
    elements = _table(first)
    return Program(
        elements,
        elements if second is first else _table(second),
        _table(writer.pairs),
        np.asarray([*writer.constants, 0.0]),
        np.asarray(results, np.int64),
        symmetric,
    )


Node = tuple[int, int, int]


class _Nodes(dict[Node, int]):
    """Instructions, each at a place of its own."""

    def add(self, operation: str, a: int = 0, b: int = 0) -> int:
        if operation in _COMMUTATIVE and b < a:
            a, b = b, a
        return self.setdefault((int(Operation[operation]), a, b), len(self))


class _Elements(_Nodes):
    """Instructions for elements of a collection, and the fields that they begin with."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        vector = four_vector(names)
        self.is_vector = vector is not None
        self.fields = {
            **(vector or {}),
            **{base_name(name): place for place, name in enumerate(names)},
        }

    @property
    def known(self) -> list[str]:
        """What formulae may name."""
        return [*self.fields, *(ELEMENT if self.is_vector else ())]


class _Writer:
    """Reads formulae, and writes their instructions."""

    def __init__(self, first: _Elements, second: _Elements, eps: float) -> None:
        self.pairs = _Nodes()
        self.constants: dict[float, int] = {}
        self._eps = eps
        self._ends = {"i": first, "j": second}
        self._are_vectors = first.is_vector and second.is_vector

    def pair_of(self, text: str, formula: str) -> int:
        """Return the instruction of a formula of pairs."""
        return self._read(_parsed(text, formula), self.pairs, formula)

    def swapped(self, node: int) -> int:
        """Return the instruction that computes the same of (j, i)."""
        operation, a, b = list(self.pairs)[node]
        name = _NAMES[operation]
        if name in {"constant", "field"}:
            return node
        if name in {"first", "second"}:
            return self.pairs.add("second" if name == "first" else "first", a)
        if (name in FUNCTIONS and FUNCTIONS[name] == 1) or name in {"square", "negative"}:
            return self.pairs.add(name, self.swapped(a))
        return self.pairs.add(name, self.swapped(a), self.swapped(b))

    def _read(self, tree: ast.expr, nodes: _Nodes, formula: str) -> int:
        if isinstance(tree, ast.Name):
            return self._named(tree.id, nodes, formula)
        if isinstance(tree, ast.Constant) and isinstance(tree.value, (int, float)):
            return self._constant(float(tree.value), nodes)
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return nodes.add("negative", self._read(tree.operand, nodes, formula))
        if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
            name = _OPERATORS[type(tree.op)]
            a = self._read(tree.left, nodes, formula)
            if name == "power" and isinstance(tree.right, ast.Constant) and tree.right.value == 2:
                return nodes.add("square", _even(a, nodes))
            return nodes.add(name, a, self._read(tree.right, nodes, formula))
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
            return self._call(tree.func.id, tree.args, nodes, formula)
        raise ConfigError(
            f"formula {formula!r}: {ast.unparse(tree)!r} is no number, name, arithmetic or function"
        )

    def _call(self, name: str, arguments: list[ast.expr], nodes: _Nodes, formula: str) -> int:
        if name not in FUNCTIONS:
            raise ConfigError(
                f"formula {formula!r}: no function {name!r}; {nearest(name, FUNCTIONS)}"
            )
        if len(arguments) != FUNCTIONS[name]:
            raise ConfigError(
                f"formula {formula!r}: {name} takes {FUNCTIONS[name]}, got {len(arguments)}"
            )
        read = [self._read(argument, nodes, formula) for argument in arguments]
        if name == "abs" and _is(read[0], "subtract", nodes):
            return _even(read[0], nodes)
        return nodes.add(name, *read)

    def _constant(self, value: float, nodes: _Nodes) -> int:
        return nodes.add("constant", self.constants.setdefault(value, len(self.constants)))

    def _named(self, name: str, nodes: _Nodes, formula: str) -> int:
        if name == "eps":
            return self._constant(self._eps, nodes)
        if isinstance(nodes, _Elements):
            return self._element(name, nodes, formula)
        match = re.fullmatch(r"(.+)_([ij])", name)
        if match and match[1] in self._ends[match[2]].known:
            element = self._element(match[1], self._ends[match[2]], formula)
            return nodes.add("first" if match[2] == "i" else "second", element)
        if self._are_vectors and name in PAIR:
            return self.pair_of(PAIR[name], formula)
        raise self._unknown(name, formula)

    def _element(self, name: str, nodes: _Elements, formula: str) -> int:
        """Return the instruction of a field, or of what follows from the four-vector."""
        if name in nodes.fields:
            return nodes.add("field", nodes.fields[name])
        return self._read(_parsed(ELEMENT[name], formula), nodes, formula)

    def _unknown(self, name: str, formula: str) -> ConfigError:
        known = [f"{field}_{end}" for end, nodes in self._ends.items() for field in nodes.known]
        if self._are_vectors:
            known += PAIR
            return ConfigError(f"formula {formula!r}: no {name!r}; {nearest(name, known)}")
        vectors = " or ".join(f"({vector})" for vector in VECTORS)
        return ConfigError(
            f"formula {formula!r}: no {name!r}; {nearest(name, known)} Quantities such as "
            f"{DEFAULT[0]} need the fields of a four-vector, by name: {vectors}"
        )


def _even(node: int, nodes: _Nodes) -> int:
    """Return what has the same magnitude, and is the same for (j, i) if that is."""
    operation, a, b = list(nodes)[node]
    if _NAMES[operation] == "subtract":
        return nodes.add("difference", a, b)
    if _NAMES[operation] == "wrap" and _is(a, "subtract", nodes):
        return nodes.add("wrap", _even(a, nodes))
    return node


def _is(node: int, operation: str, nodes: _Nodes) -> bool:
    return _NAMES[list(nodes)[node][0]] == operation


def _parsed(text: str, formula: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"formula {formula!r} cannot be read: {error}") from None


def _table(nodes: Mapping[Node, Any]) -> NDArray[np.int64]:
    return np.asarray(list(nodes), np.int64).reshape(-1, 3)
