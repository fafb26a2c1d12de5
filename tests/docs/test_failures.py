"""The table of failures in the reference is that of the code."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from sonic_coffea.errors import (
    AccessError,
    DeadlineError,
    InferenceError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadError,
    RequestError,
    RequestTooLargeError,
    RouteTimeoutError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)
from sonic_coffea.transport._failures import FAILURES, SILENT, Failure

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


# What the pool does.
ACTIONS: dict[type[SonicError], str] = {
    AccessError: "raises the error",
    DeadlineError: "retries it if the URL answers other requests meanwhile; else raises the error",
    InferenceError: "retries it once, on another server if there is one; then raises the error",
    ModelNotFoundError: "tries other servers, and this server later",
    ModelNotReadyError: "tries other servers, and this server later",
    OverloadError: "lowers the in-flight limit, and retries after a back-off",
    RequestError: "raises the error",
    RequestTooLargeError: "splits it; retries a single row once, on another server if there is one",
    RouteTimeoutError: "lowers the in-flight limit, and splits the request",
    ServerLostError: "retries it on another server or the same one",
    TokenExpiredError: "reads the token again, for up to `retry_timeout_s`; a token that is a "
    "string raises the error",
}


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


def test_the_reference_has_the_table_of_failures() -> None:
    assert table() in REFERENCE.read_text(encoding="utf-8"), f"expected:\n{table()}"


def test_every_error_of_the_table_has_an_action() -> None:
    assert {row.error for row in FAILURES} == set(ACTIONS)
    assert all(issubclass(error, SonicError) for error in ACTIONS)
