"""The page of errors quotes messages as the package says them."""

from __future__ import annotations

import ast
import re

import pytest

from .support import ROOT

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
