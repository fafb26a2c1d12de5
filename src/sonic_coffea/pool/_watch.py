"""A file of servers, which is read again when it changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sonic_coffea.pool._settings import read_servers

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


def watch(
    path: str,
    servers: Sequence[str],
    changed: Callable[[Sequence[str]], None],
    closing: threading.Event,
) -> None:
    """Read a file of servers whenever it changes, until `closing` is set; this blocks.

    `changed` takes the new servers, and what it raises leaves them as they are.
    """
    read_at, problem = 0, ""
    while True:
        try:
            changed_at = Path(path).stat().st_mtime_ns
            if changed_at != read_at:
                new = read_servers(path)
                if new != servers:
                    changed(new)
                    logger.warning("the servers are now %s", ", ".join(new))
                read_at, servers, problem = changed_at, new, ""
        except Exception as error:  # noqa: BLE001  whatever is in it, the servers go on
            # What is missing, such as a certificate, may come later: it is tried again, told once.
            if str(error) != problem:
                problem = str(error)
                logger.warning("the servers stay as they are, %s: %s", path, problem)
        if closing.wait(INTERVAL_S):
            return
