"""A file of servers, which is read again when it changes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sonic_coffea.pool._settings import read_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


class ServersFile:
    """Watches a file of servers on a thread of its own: a file system may hang.

    `changed` takes the new servers, and what it raises leaves them as they are.
    """

    def __init__(
        self,
        path: str,
        servers: Sequence[str],
        changed: Callable[[Sequence[str]], None],
        closing: threading.Event,
    ) -> None:
        self._path = path
        self._servers = tuple(servers)
        self._changed = changed
        self._closing = closing
        self._read_at: int | None = None
        self._problem = ""

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="sonic-servers", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:  # noqa: BLE001  whatever is in it, the servers go on
                self._warn(str(error))
            if self._closing.wait(INTERVAL_S):
                return

    def look(self) -> None:
        """Read the file if it has changed."""
        changed_at = Path(self._path).stat().st_mtime_ns
        if changed_at != self._read_at:
            servers = read_servers(self._path)
            if servers != self._servers:
                self._changed(servers)
                logger.warning("the servers are now %s", ", ".join(servers))
            self._read_at, self._servers, self._problem = changed_at, servers, ""

    def _warn(self, problem: str) -> None:
        # What is missing, such as a certificate, may come later: it is tried again, told once.
        if problem != self._problem:
            self._problem = problem
            logger.warning("the servers stay as they are, %s: %s", self._path, problem)
