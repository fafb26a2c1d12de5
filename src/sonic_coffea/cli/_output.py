"""Output of commands: results as JSON or text, and progress."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from sonic_coffea.errors import ConfigError, printable


class UsageError(ConfigError):
    """An argument or an option that cannot be used; the exit code is 2."""


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """Turn this package's errors about arguments and options into usage errors."""
    try:
        yield
    except ConfigError as error:
        raise UsageError(error.message) from None


def stdout() -> Console:
    """Return the console for results; without a terminal, it does not cut lines."""
    console = Console()
    named = console.file.isatty() or "COLUMNS" in os.environ
    return console if named else Console(width=100_000)


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status on standard error; yield a function that changes its text."""
    with Console(stderr=True).status(text) as status:
        yield lambda text: status.update(literal(text))


def show(plain: Any, *shown: Any, as_json: bool) -> None:
    """Print a result: as JSON and nothing else, or as texts and what rich shows."""
    if as_json:
        typer.echo(json.dumps(plain, default=str))
        return
    for part in shown:
        if isinstance(part, str):
            typer.echo(part)
        else:
            stdout().print(part)


def literal(text: str, *, lines: bool = False) -> Text:
    """Return text that rich shows unchanged, even if there is markup in it."""
    return Text(printable(text, lines=lines))


def tensors(specs: Iterable[tuple[str, str, Sequence[int | str]]]) -> list[str]:
    """Return names, types and shapes of tensors, a line each; ``?`` is any length."""
    return [
        f"{name} {dtype} [{', '.join('?' if n == -1 else str(n) for n in shape)}]"
        for name, dtype, shape in specs
    ]
