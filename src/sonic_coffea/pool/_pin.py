"""The version that scores the rows of a call: only one, even if servers are updated."""

from __future__ import annotations

import logging
import threading

from sonic_coffea.errors import ModelNotFoundError
from sonic_coffea.pool._signature import MAX_MISSES

logger = logging.getLogger(__name__)


class VersionPin:
    """The version that requests ask for: the caller's, or else the first answer's.

    The threads that send and receive use it.
    """

    def __init__(self, model: str, version: str | None) -> None:
        self._model, self._asked = model, version
        self._pinned: str | None = None
        self._misses = 0
        self._lock = threading.Lock()

    @property
    def wanted(self) -> str | None:
        """The version that a request asks for."""
        return self._asked or self._pinned

    def answered(self, version: str) -> ModelNotFoundError | None:
        """Record an answer; return an error if earlier ones have another version."""
        if self._asked is not None or not version:
            return None
        with self._lock:
            if self._pinned is None:
                self._pinned = version
            if version == self._pinned:
                self._misses = 0
                return None
            return ModelNotFoundError(
                f"version {version} answered, and version {self._pinned} answered earlier rows"
            )

    def missed(self, wanted: str | None) -> None:
        """Record that a server lacks the version that it was asked for.

        If no server seems to have it, another version scores the rows that are left.
        """
        with self._lock:
            if self._pinned is None or wanted != self._pinned:
                return
            self._misses += 1
            if self._misses < MAX_MISSES:
                return
            logger.warning(
                "no server has version %s of model %s any more, which has scored some rows of a "
                "call; another version scores the others, as its attributes say",
                self._pinned,
                self._model,
            )
            self._pinned, self._misses = None, 0
