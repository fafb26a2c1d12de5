"""Pages of failures and errors quote the tables and the messages of the code."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from sonic_coffea.transport._failures import FAILURES, SILENT, Failure

from .support import ROOT

DOCS = Path(__file__).parents[2] / "docs"


def kin(row: Failure) -> Any:
    return row.codes, row.phase, row.error


def signs(row: Failure) -> list[str]:
    """Return how a row is known: by words, by a trailer, or by its status alone."""
    if row.trailer:
        return [f"trailer `{row.trailer}`"]
    return [{"": "others", SILENT: "none"}.get(words, f"`{words}`") for words in row.words]


def table() -> str:
    lines = ["| status | words | from | error |", "|---|---|---|---|"]
    for (codes, phase, error), rows in groupby(FAILURES, kin):
        status = ", ".join(code.name for code in codes) or "any"
        words = ", ".join(sign for row in rows for sign in signs(row))
        lines.append(f"| {status} | {words} | {phase} | `{error.__name__}` |")
    return "\n".join(lines)


def test_the_page_has_the_table_of_failures() -> None:
    page = (DOCS / "facilities" / "grpc-failures.md").read_text(encoding="utf-8")
    assert table() in page, f"expected:\n{table()}"


def test_every_error_of_the_table_says_what_the_pool_does() -> None:
    page = (DOCS / "how-to" / "handle-failures.md").read_text(encoding="utf-8")
    assert {row.error.__name__ for row in FAILURES} <= set(re.findall(r"`(\w+Error)`", page))


PAGE = ROOT / "docs" / "errors-by-message.md"
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return all texts of the package, where `…` stands for what is filled in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_are_listed() -> None:
    assert len(QUOTED) > 20


@pytest.mark.parametrize("message", QUOTED)
def test_message_is_what_the_package_says(message: str, texts: list[str]) -> None:
    pattern = ".*".join(map(re.escape, message.split("…")))
    assert any(re.search(pattern, text, re.DOTALL) for text in texts)
