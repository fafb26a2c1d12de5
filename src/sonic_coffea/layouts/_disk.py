"""Compiled kernels on disk, also when a thousand workers compile at the same time.

numba finds the files of a function through an index, which processes write over each other's: two
that compile for other types, or for other processors of a shared file system, can leave an entry
that leads to the code of the other. Here each file is named by what it is for, says so itself, and
is replaced whole; and a disk that cannot be used costs time only.
"""

from __future__ import annotations

import logging
import pickle
from functools import cache
from typing import Any

import xxhash
from numba.core.caching import FunctionCache, IndexDataCacheFile

logger = logging.getLogger(__name__)


class KernelFiles(IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function, one for each combination of types and processor."""

    def save(self, key: Any, data: Any) -> None:
        """Write what was compiled for a key."""
        self._save_data(self._name(key), (self._source_stamp, key, data))

    def load(self, key: Any) -> Any:
        """Return what was compiled for a key from this very source; None if nothing was."""
        try:
            stamp, saved, data = self._load_data(self._name(key))
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        return data if (stamp, saved) == (self._source_stamp, key) else None

    def flush(self) -> None:
        """Do nothing: what is out of date is not loaded, and written over."""

    def _name(self, key: Any) -> str:
        number = xxhash.xxh3_64_intdigest(repr((self._version, key)).encode())
        name: str = self._data_name(number)
        return name


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """What numba asks for compiled code, and tells what it has compiled."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        locator, name = self._impl.locator, self._impl.filename_base
        self._cache_file = KernelFiles(self._cache_path, name, locator.get_source_stamp())

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save what was compiled; a disk that is full is no reason not to use it."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(error.strerror or str(error))


def keep(kernel: Any, function: Any) -> None:
    """Keep on disk what is compiled of a function, if there is a folder to do so."""
    try:
        kernel._cache = _KernelCache(function)  # noqa: SLF001  numba offers nothing else
    except RuntimeError as error:
        if "no locator available" not in str(error):  # such as a setting of numba's that is wrong
            raise
        _warn("no folder can be written; NUMBA_CACHE_DIR names one")


@cache
def _warn(why: str) -> None:
    """Say it once."""
    logger.warning("compiled kernels are not kept, so each process compiles its own: %s", why)
