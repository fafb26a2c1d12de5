"""Compiled kernels on disk, also when a thousand workers compile at the same time.

Each file is named by what it is for, says so itself, and is replaced whole; and a disk that cannot
be used costs time only.
"""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
import xxhash

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

    def load(self, key: Any) -> Any:
        """Return what was compiled for a key; None if nothing was."""
        for folder in self._folders:
            try:
                of, saved, data = pickle.loads((folder / self._name(key)).read_bytes())  # noqa: S301
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                continue
            if (of, saved) == (self._of, key):
                return data
        return None

    def save(self, key: Any, data: Any) -> bool:
        """Write what was compiled for a key, in the first folder that can be written, if any."""
        why = "no folder can be written; NUMBA_CACHE_DIR names one"
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                    try:
                        pickle.dump((self._of, key, data), file)
                        file.close()
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

    def _name(self, key: Any) -> str:
        number = xxhash.xxh3_64_hexdigest(repr((self._of, key)).encode())
        return f"kernel-{number}.bin"


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
