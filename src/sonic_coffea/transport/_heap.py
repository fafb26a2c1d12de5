"""Reuse of the memory of large messages: a new page costs more than a copy into it.

A message, and gRPC's copy of it, are new memory each time. The C library takes large blocks from
the system and gives them back; in dask's workers all of them, because dask sets
MALLOC_TRIM_THRESHOLD_. Writing to new pages takes longer than making and sending a message.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

LARGE_BYTES = 100_000
"""Smaller messages lie in memory that the C library keeps anyway."""

# glibc's numbers of two parameters, and the largest values that it takes: from which size a block
# comes straight from the system, and how much freed memory is kept.
_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 * 2**20
_TRIM_THRESHOLD, _KEPT_BYTES = -1, 64 * 2**20
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_DASK_DEFAULT = "65536"


@cache
def keep_memory() -> bool:
    """Have the C library keep up to 64 MiB of freed memory; return whether it does.

    Nothing changes without glibc, or if the user has set how much is kept.
    """
    if any(os.environ.get(name, _DASK_DEFAULT) != _DASK_DEFAULT for name in _CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
