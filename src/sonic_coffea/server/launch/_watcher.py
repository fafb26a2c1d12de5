"""Starts a local server again that has ended by itself."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from sonic_coffea.errors import SonicError

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_FIRST_PAUSE_S = 0.5
_MOST = 5
# A server that has run for this time did not fail at its start.
_LASTED_S = 60.0


class _Watched(Protocol):
    @property
    def running(self) -> bool: ...
    @property
    def ended_on_request(self) -> bool: ...
    @property
    def how_it_ended(self) -> str: ...
    def start_again(self) -> None: ...


class Watcher:
    """A thread that looks after a server."""

    def __init__(self, server: _Watched) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sonic-server", daemon=True)
        self._thread.start()

    @property
    def watching(self) -> bool:
        """Whether it is looked after: until it is left, or has ended on request."""
        return self._thread.is_alive()

    def stop(self) -> None:
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        failures, started = 0, time.monotonic()
        while not self._over.wait(_LOOK_S):
            if self._server.running:
                continue
            if self._server.ended_on_request:
                logger.info("%s was stopped on request", self._server)
                return
            if time.monotonic() - started > _LASTED_S:
                failures = 0
            failures += 1
            if failures > _MOST:
                logger.error("%s has ended %d times in a row; it is left", self._server, _MOST)
                return
            logger.warning("%s %s; it is started again", self._server, self._server.how_it_ended)
            if self._over.wait(_FIRST_PAUSE_S * 2 ** (failures - 1)):
                return
            try:
                self._server.start_again()
            except SonicError as error:
                logger.warning("%s", error)
            started = time.monotonic()
