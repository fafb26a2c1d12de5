"""Limits of this process, as a batch system or a full disk sets them."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    """Set a limit of this process, and afterwards the one that it had."""
    before, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, most))


def without_room() -> contextlib.AbstractContextManager[None]:
    """Let no file have content: writing raises OSError, "File too large"."""
    return limited(resource.RLIMIT_FSIZE, 0)


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Let no thread start, as none has room for its stack: RuntimeError."""
    before = threading.stack_size(2**50)
    try:
        yield
    finally:
        threading.stack_size(before)
