"""Output of commands: results as JSON or text, and progress."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from sonic_coffea.errors import printable

json_only: ContextVar[bool] = ContextVar("json_only", default=False)
"""Whether the command that runs prints its result as JSON, and nothing else."""


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status on standard error; yield a function that changes its text."""
    with Console(stderr=True).status(text) as status:
        yield lambda text: status.update(literal(text))


def show(plain: Any, *shown: Any) -> None:
    """Print a result: as JSON and nothing else, or as texts and what rich shows."""
    if json_only.get():
        typer.echo(json.dumps(plain, default=str))
        return
    console = Console()
    if not console.file.isatty() and "COLUMNS" not in os.environ:
        # A file has no width: it does not cut lines.
        console.width = 100_000
    for part in shown:
        if isinstance(part, str):
            typer.echo(part)
        else:
            console.print(part)


def literal(text: str, *, lines: bool = False) -> Text:
    """Return text that rich shows unchanged, even if there is markup in it."""
    return Text(printable(text, lines=lines))


def tensors(specs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return names, types and shapes of tensors, a line each; -1 is any length."""
    each = ({"datatype": spec.get("dtype"), **spec} for spec in specs)
    return [f"{t['name']} {t['datatype']} {list(t['shape'])}" for t in each]
