"""Compiled kernels on disk, also when a thousand workers compile at the same time.

Each file is named by what it is for, says so itself, and is replaced whole. A disk that cannot be
used, or a file that was cut short, costs time only. Nothing is loaded from where others can write.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import xxhash

if TYPE_CHECKING:
    from sonic_coffea.layouts._machine_code import MachineCode

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent


class Files:
    """Files of what was compiled from the sources beside this one.

    Parameters
    ----------
    machine : object
        What else they are for: a processor, and a compiler.
    folders : sequence of Path, optional
        Where they may be: by default in NUMBA_CACHE_DIR, if it is set, or else the package's
        own and the user's.
    sources : str, optional
        A digest of the sources, by default of all that is compiled.
    """

    def __init__(
        self, machine: Any, folders: list[Path] | None = None, *, sources: str | None = None
    ) -> None:
        self._of = repr(machine), sources or _sources()
        self._folders = _default_folders() if folders is None else folders

    def load(self, key: Any) -> MachineCode | None:
        """Return what was compiled for a key; None if nothing was."""
        for folder in self._folders:
            path = folder / self._name(key)
            try:
                content = path.read_bytes() if _is_ours(folder) and _is_ours(path) else b""
            except OSError:
                continue
            digest, _, rest = content.partition(b"\n")
            if digest == _digest(rest):
                head, symbol, code = rest.split(b"\n", 2)
                if head == self._head(key):
                    return symbol.decode(), code
        return None

    def save(self, key: Any, code: MachineCode) -> bool:
        """Write what was compiled for a key, in the first folder that can be written, if any."""
        why = "no folder can be written by this user alone; NUMBA_CACHE_DIR names one"
        rest = b"\n".join([self._head(key), code[0].encode(), code[1]])
        for folder in self._folders:
            try:
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                if not _is_ours(folder):
                    continue
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                    try:
                        file.write(_digest(rest) + b"\n" + rest)
                        file.close()
                        Path(file.name).chmod(0o644)
                        Path(file.name).replace(folder / self._name(key))
                    except BaseException:
                        Path(file.name).unlink(missing_ok=True)
                        raise
            except (PermissionError, NotADirectoryError, FileExistsError):
                continue
            except OSError as error:
                why = error.strerror or str(error)
                continue
            return True
        _warn(why)
        return False

    def _head(self, key: Any) -> bytes:
        """Return what a file is for, in one line."""
        return repr((self._of, key)).encode()

    def _name(self, key: Any) -> str:
        number = xxhash.xxh3_64_hexdigest(self._head(key))
        return f"kernel-{number}.bin"


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(content).encode()


def _is_ours(path: Path) -> bool:
    """Whether nobody can write but this user, root, and the owner of this package."""
    status = path.stat()
    owners = {os.geteuid(), 0, _HERE.stat().st_uid}
    return status.st_uid in owners and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@cache
def _sources() -> str:
    """Return a digest of all that is compiled."""
    digest = xxhash.xxh3_128()
    for path in sorted(_HERE.glob("_loops/*.py")):
        digest.update(path.read_bytes())
    digest.update((_HERE / "_formulae.py").read_bytes())  # whose operations are compiled in
    return digest.hexdigest()


def _default_folders() -> list[Path]:
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        return [Path(named)]
    return [_HERE / "__pycache__", platformdirs.user_cache_path("sonic-coffea") / "kernels"]


@cache
def _warn(why: str) -> None:
    """Log a warning, once."""
    logger.warning("compiled kernels are not kept, so each process compiles its own: %s", why)
