"""What commands show and write: names as they are, and files that are tried before they matter."""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING

from rich.text import Text

from sonic_coffea.errors import ConfigError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


def literal(text: str, *, lines: bool = False) -> Text:
    """Return text that rich shows as it is, be there markup in it; with `lines`, of several."""
    return Text(printable(text, lines=lines))


def tensors(specs: Iterable[tuple[str, str, Sequence[int | str]]]) -> Text:
    """Return names, types and shapes of tensors, a line each; ``?`` is any length."""
    return Text(
        "\n".join(
            printable(f"{name} {dtype} [{', '.join('?' if n == -1 else str(n) for n in shape)}]")
            for name, dtype, shape in specs
        )
    )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say, in place of an `OSError`, which file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def make_place(path: Path) -> None:
    """Make the folder of a file, and try whether the file can be written; it stays as it is."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
