"""Files of users: their text and state, whether others can write them or hold them; new ones."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError

FileState = tuple[int, ...] | None


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Return the text of a file; errors call it `what`.

    Raises
    ------
    ConfigError
        Not from an `OSError`, which coffea would take for a broken file of events.
    """
    try:
        return Path(path).expanduser().read_text("utf-8")
    except OSError as error:
        problem = str(error.strerror)
    except UnicodeDecodeError:
        # Its own words quote the text, which may be a token.
        problem = "expected text, got bytes that are not UTF-8"
    raise unreadable(f"{what} {str(path)!r}", problem)


def read_json(path: str | os.PathLike[str], what: str) -> Mapping[str, Any]:
    """Return the object that a JSON file holds; errors call the file `what`."""
    text, content, problem = read_text(path, what), None, "holds no JSON object"
    try:
        content = json.loads(text)
    except ValueError as error:
        problem = f"is not JSON: {error}"
    if not isinstance(content, dict):
        raise ConfigError(f"{what} {str(path)!r} {problem}")
    return content


def unreadable(what: str, problem: object) -> ConfigError:
    """Return the error for a file that cannot be used; on a cluster, the machine matters."""
    return ConfigError(f"cannot read {what} on {socket.gethostname()}: {problem}")


def others_write(path: str | os.PathLike[str]) -> bool:
    """Whether users other than this one and root own a file or a folder, or can write it."""
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        return False
    if not hasattr(os, "getuid"):  # Windows has other rights
        return False
    return status.st_uid not in (os.getuid(), 0) or bool(status.st_mode & 0o022)


def state_of(path: Path) -> FileState:
    """Return a value that changes whenever a file does; None if it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    # A file that replaces another one may be as old as it; unpacked from an archive, it may have
    # its inode, too.
    return status.st_mtime_ns, status.st_ino, status.st_size, status.st_ctime_ns


def is_locked(folder: Path) -> bool:
    """Return whether a process holds a folder, as the supervisor of a local server does."""
    import fcntl  # not on Windows, where no local server runs

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Shared, as others may try it at the same time.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path for a new file, which replaces the target if it is written without an error.

    A link stays, and leads to the new file: the old one would be read where it leads to. A pipe or
    a device, such as ``/dev/stdout``, stays, too.

    Raises
    ------
    ConfigError
        If the file cannot be written. For an OSError, coffea's ``skipbadfiles`` would drop the
        chunk.
    """
    target = target.expanduser()
    is_stream = target.exists() and not (target.is_file() or target.is_dir())
    whole = target if is_stream else Path(os.path.realpath(target))
    # Others may write the same file at the same time. tempfile would hide it from the group.
    half = whole if is_stream else whole.with_name(f".{whole.name}.{secrets.token_hex(8)}.part")
    try:
        yield half
        if not is_stream:
            half.replace(whole)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            if not is_stream:
                half.unlink()
