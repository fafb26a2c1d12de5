"""Folders show the flow, dependencies point one way, and each foreign package has one home."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import sonic_coffea

ROOT = Path(sonic_coffea.__file__).parent

# From the bottom up: a part may import those before it, and itself.
LAYERS = (
    *("_version", "errors", "_extras", "_files", "provenance", "layouts", "transport", "reporting"),
    *("server", "pool", "reuse", "model", "ml_tools", "dask", "_connect", "processor", "tools"),
    *("testing", "_pytest_plugin", "scoring", "demo", "cli", "__main__"),
)
# Each pair that must not meet, whatever the order.
STRANGERS = [("pool", "layouts"), ("transport", "layouts"), ("dask", "model")]
HOMES = {
    "tritonclient": {"transport", "testing"},
    "grpc": {"transport", "testing"},
    "distributed": {"dask", "_connect", "demo"},
    "coffea": {"processor"},
    "numba": {"layouts"},
    "dask_awkward": {"layouts"},
    "bokeh": {"dask"},
    "matplotlib": {"reporting", "demo"},
    "typer": {"cli"},
}
# What users import beside the top of the package.
PUBLIC = {
    *("errors", "ml_tools", "provenance"),
    *(f"demo.{name}" for name in ("analysis", "features", "plots", "samples", "workflow")),
}

MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def imports(module: str) -> frozenset[str]:
    """Modules that a module imports: at its top, inside of functions, and for types only."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in MODULES else node.module for name in names}
    return frozenset(imported)


@cache
def own_imports(module: str) -> frozenset[str]:
    """Modules of this package that an import of a module runs, with their parent packages."""
    imported = {name for name in imports(module) if name in MODULES and name != module}
    parents = {name.rsplit(".", depth)[0] for name in imported for depth in range(name.count("."))}
    own_parents = {module.rsplit(".", depth)[0] for depth in range(1, module.count("."))}
    return frozenset((imported | parents) & MODULES.keys() - own_parents) - {module, "sonic_coffea"}


def test_dependencies_point_down() -> None:
    assert {part_of(module) for module in MODULES} - {""} == set(LAYERS)
    wrong = [
        (module, other)
        for module in MODULES
        if part_of(module)
        for other in own_imports(module)
        if part_of(other) and LAYERS.index(part_of(other)) > LAYERS.index(part_of(module))
    ]
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    # Its top imports everything on first use, and those that show the package import the top.
    graph = {module: own_imports(module) for module in MODULES if module != "sonic_coffea"}
    TopologicalSorter(graph).prepare()


def test_packages_are_imported_as_a_whole() -> None:
    """What another package needs of a package, its ``__init__`` names."""
    wrong = []
    for module in MODULES:
        for other in own_imports(module):
            inner = other.split(".")[2:]
            private = [name for name in inner if name.startswith("_")]
            if private and part_of(other) != part_of(module) and module != "sonic_coffea":
                wrong.append((module, other))
    assert wrong == []


def test_modules_are_private_unless_users_import_them() -> None:
    packages = {module.rpartition(".")[0] for module in MODULES}
    inner = {
        module.removeprefix("sonic_coffea.")
        for module in MODULES
        if module not in packages and not module.rpartition(".")[2].startswith("_")
    }
    packaged = {m for m in inner if MODULES[f"sonic_coffea.{m}"].name == "__init__.py"}
    assert inner - packaged == PUBLIC


def test_no_module_is_named_as_a_well_known_one() -> None:
    foreign = (set(sys.stdlib_module_names) | set(packages_distributions())) - {"sonic_coffea"}
    names = {module.rpartition(".")[2] for module in MODULES}
    # The parts' own names say what they connect to.
    assert names & foreign <= {"dask", "errors", "server", "__main__"}


@pytest.mark.parametrize(("part", "stranger"), STRANGERS)
def test_strangers_do_not_meet(part: str, stranger: str) -> None:
    inside = [module for module in MODULES if part_of(module) == part]
    met = {(module, other) for module in inside for other in own_imports(module)}
    assert [pair for pair in met if part_of(pair[1]) == stranger] == []


@pytest.mark.parametrize("package", HOMES)
def test_foreign_packages_have_one_home(package: str) -> None:
    users = {
        part_of(module)
        for module in MODULES
        if any(name.split(".")[0] == package for name in imports(module))
    }
    assert users <= HOMES[package]
