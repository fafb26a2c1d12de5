"""Output of commands: literal names, tables of any width, files checked before the work."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sonic_coffea.errors import ConfigError, printable

# Where there is no terminal, as in a file or a pipe, no line is cut.
_ANY_WIDTH = 10_000


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
    return console if named else Console(width=_ANY_WIDTH)


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status on standard error; yield a function that changes its text."""
    with Console(stderr=True).status(text) as status:
        yield lambda text: status.update(literal(text))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
) -> None:
    """Print a table, or, on a terminal that is too narrow for it, each row as lines of its own.

    Without names of columns, there is no header. Columns in `right` hold numbers. Only cells that
    are a `Text` may have several lines.
    """
    console = stdout()
    texts = [[cell if isinstance(cell, Text) else literal(cell) for cell in row] for row in rows]
    table = Table(title=literal(title) if title else None, title_justify="left")
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    for row in texts:
        table.add_row(*row)
    unlimited = console.options.update(max_width=_ANY_WIDTH)
    if console.measure(table, options=unlimited).maximum <= console.width:
        console.print(table)
        return
    if title:
        console.print(literal(title), style="italic", soft_wrap=True)
    indent = 2 + max(map(len, columns))
    for name, *cells in texts:
        console.print(name, style="bold", soft_wrap=True)
        for column, cell in zip(columns[1:], cells, strict=False):
            for place, line in enumerate(cell.split()):
                label = f"  {column if place == 0 else '':<{indent}}"
                console.print(Text(label) + line, soft_wrap=True)


def literal(text: str, *, lines: bool = False) -> Text:
    """Return text that rich shows unchanged, even if there is markup in it."""
    return Text(printable(text, lines=lines))


def tensors(specs: Iterable[tuple[str, str, Sequence[int | str]]]) -> Text:
    """Return names, types and shapes of tensors, a line each; ``?`` is any length."""
    lines = (
        printable(f"{name} {dtype} [{', '.join('?' if n == -1 else str(n) for n in shape)}]")
        for name, dtype, shape in specs
    )
    return Text("\n".join(lines))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Replace an `OSError` with an error that names the file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def writable(path: Path | None) -> Path | None:
    """Make the folder of an option's file, and try whether the file can be written: it stays."""
    if path is not None:
        with usage(), writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=path.parent).close()
    return path
