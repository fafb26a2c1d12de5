"""Dependencies point one way, and each foreign package has one home."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sonic_coffea

ROOT = Path(sonic_coffea.__file__).parent

# From the bottom up: a part may import those before it, and itself.
LAYERS = (
    "_version",
    "errors",
    "html",
    "local_state",
    "contract",
    "batching",
    "statistics",
    "cache",
    "provenance",
    "layouts",
    "lazy",
    "weaver",
    "nanoaod",
    "transport",
    "kserve",
    "server",
    "pool",
    "reuse",
    "pending",
    "model",
    "ml_tools",
    "checking",
    "advice",
    "drawing",
    "reporting",
    "testing",
    "shares",
    "simulation",
    "measuring",
    "planning",
    "dask",
    "connecting",
    "processor",
    "demo",
    "cli",
    "__main__",
)
# Each pair that must not meet, whatever the order.
STRANGERS = [("pool", "layouts"), ("transport", "layouts"), ("server", "pool"), ("dask", "model")]
HOMES = {
    "tritonclient": {"transport", "kserve"},
    "grpc": {"transport", "kserve"},
    "distributed": {"dask", "connecting", "demo"},
    "coffea": {"processor", "demo"},
    "numba": {"layouts"},
    "dask_awkward": {"lazy"},
}


def imports() -> list[tuple[str, str]]:
    """Pairs of a part and a module that it imports, at any depth, also lazily."""
    found = []
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [(part, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [(part, name) for name in names]
    return found


def test_every_part_has_its_place() -> None:
    parts = {p.name.removesuffix(".py") for p in ROOT.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert parts - {"__init__", "__pycache__", "py.typed"} == set(LAYERS)


def test_dependencies_point_down() -> None:
    wrong = []
    for part, module in imports():
        if part == "__init__" or not module.startswith("sonic_coffea."):
            continue
        other = module.split(".")[1]
        if other in LAYERS and LAYERS.index(other) > LAYERS.index(part):
            wrong.append((part, module))
    assert wrong == []


@pytest.mark.parametrize(("part", "stranger"), STRANGERS)
def test_strangers_do_not_meet(part: str, stranger: str) -> None:
    met = [m for p, m in imports() if p == part and m.startswith(f"sonic_coffea.{stranger}")]
    assert met == []


@pytest.mark.parametrize("package", HOMES)
def test_foreign_packages_have_one_home(package: str) -> None:
    users = {p for p, m in imports() if m.split(".")[0] == package}
    assert users <= HOMES[package]
