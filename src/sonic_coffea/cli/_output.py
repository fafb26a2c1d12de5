"""Files that commands write: whether they can be is tried before anything is measured."""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING

from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
