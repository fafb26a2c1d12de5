"""The table of failures in the reference is that of the code."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from sonic_coffea.errors import SonicError
from sonic_coffea.transport._failures import ACTIONS, FAILURES, SILENT, Failure

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


def kin(row: Failure) -> Any:
    return row.codes, row.phase, row.error


def sign(row: Failure) -> str:
    """Return how a row is known: by words, by a trailer, or by its status alone."""
    if row.trailer:
        return f"trailer `{row.trailer}`"
    return {"": "others", SILENT: "none"}.get(row.words, f"`{row.words}`")


def table() -> str:
    lines = ["| status | words | from | error | what the pool does |", "|---|---|---|---|---|"]
    for (codes, phase, error), rows in groupby(FAILURES, kin):
        status = ", ".join(code.name for code in codes) or "any"
        words = ", ".join(sign(row) for row in rows)
        lines.append(f"| {status} | {words} | {phase} | `{error.__name__}` | {ACTIONS[error]} |")
    return "\n".join(lines)


def test_the_reference_has_the_table() -> None:
    assert table() in REFERENCE.read_text(encoding="utf-8"), f"expected:\n{table()}"


def test_every_error_of_the_table_has_an_action() -> None:
    assert {row.error for row in FAILURES} == set(ACTIONS)
    assert all(issubclass(error, SonicError) for error in ACTIONS)
