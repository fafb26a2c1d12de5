"""Scores of five public analyses equal those by hand, in the lines that their page says."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "analyses"
LISTED = dict(
    re.findall(r"^\| \[(\w+)\.py\].*\| (\d+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.parametrize("name", LISTED)
def test_scores_equal_those_by_hand(name: str) -> None:
    for ours, direct in importlib.import_module(name).run().values():
        np.testing.assert_allclose(ours, direct, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LISTED)
def test_lines_are_those_of_the_page(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text().partition("# What follows")[0]
    tree = ast.parse(text)
    skipped = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skipped.append(first)
    without = {n for s in skipped for n in range(s.lineno, (s.end_lineno or 0) + 1)}
    lines = [line for n, line in enumerate(text.splitlines(), 1) if n not in without]
    assert len([line for line in lines if line.strip()]) == int(LISTED[name])


def test_all_five_are_short() -> None:
    assert len(LISTED) == 5
    assert sum(map(int, LISTED.values())) <= 120
