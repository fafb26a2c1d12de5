"""Ports that stay free until a test uses them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of loopback at which nobody listens, and that nobody else is given.

    It is bound, and so are servers beside it: both say SO_REUSEADDR, and only one listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
