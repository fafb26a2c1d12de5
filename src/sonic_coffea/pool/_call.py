"""One call of a model: its rows, where their scores go, and its statistics."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from sonic_coffea import errors
from sonic_coffea.errors import ConfigError, SonicError
from sonic_coffea.pool._process import hooks
from sonic_coffea.pool._request import ModelKey, RequestSlice
from sonic_coffea.pool._settings import Settings
from sonic_coffea.reporting import Statistics
from sonic_coffea.transport import Contract, Response

logger = logging.getLogger(__name__)

Tensor = NDArray[Any]

MASKABLE = (
    errors.DeadlineError,
    errors.ModelNotFoundError,
    errors.OverloadError,
    errors.RequestError,
    errors.ResponseError,
    errors.ServerLostError,
)
"""Failures of servers, not of the rows: if a call masks, these rows are None."""


class RowSource(Protocol):
    """The rows of a call, each at a place; neighbouring places may share a request.

    Several threads may pack at the same time.
    """

    @property
    def segments(self) -> Sequence[Any]:
        """Ranges of places, and the bytes of their rows: the segments of `plan`."""

    def __len__(self) -> int: ...

    def pack(self, start: int, stop: int) -> Mapping[str, Tensor]:
        """Return the tensors of the rows at some places, by input."""

    def selection(self, start: int, stop: int) -> Any:
        """Return the rows at some places, as `Put` takes them."""

    def events_of(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the first event of some places, and one past the last; None if unknown."""


Put = Callable[[Any, int, Mapping[str, Tensor]], None]
"""Puts the response for some rows, and their number, in its place, or raises a `ResponseError`."""


@dataclass(eq=False)
class Call:
    """The rows of one call of a model, and where their scores go.

    Once it is submitted, only the engine changes it; other threads wait for it, or abandon it.

    Parameters
    ----------
    contract : Contract
        The model's contract.
    inputs : RowSource
        The rows, and how they are packed; gone once the call is over.
    put : Put
        What puts each response in its place.
    requested : sequence of str
        The outputs that requests ask for.
    version : str or None
        The version that requests ask for; None for the latest.
    mask : bool
        Whether lost rows are masked: appended to `lost`, instead of failing the call.
    lost_with : callable, optional
        Returns all rows that are lost with some rows: these, and equal rows.
    ended : callable
        Called when the call is over, on the thread that ends it, before others hear of it.
    """

    contract: Contract
    inputs: RowSource
    put: Put
    requested: Sequence[str]
    _: KW_ONLY
    version: str | None
    mask: bool = False
    lost_with: Callable[[Any], Sized] | None = None
    ended: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.key = ModelKey(self.contract.model, self.version)
        self.statistics = Statistics(objects=len(self.inputs))
        self.failure: SonicError | None = None
        self.lost: list[Any] = []
        self.served_versions: set[str] = set()
        # Ranges of places whose rows are neither placed nor masked.
        self._missing: list[tuple[int, int]] = []
        self._abandon: Callable[[Call, SonicError], None] = Call.end
        self._over = threading.Event()
        self._process = os.getpid()

    def begin(
        self, rows: int, abandon: Callable[[Call, SonicError], None], settings: Settings
    ) -> None:
        """Record how many rows are sent, what ends the call early, and the pool's settings."""
        self._abandon, self._settings = abandon, settings
        self._missing = [(0, rows)]
        if rows == 0:
            self._set_over()

    @property
    def over(self) -> bool:
        """Whether all rows are scored or given up."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; False if the timeout passes first.

        Raises
        ------
        ConfigError
            If this is a forked child of the process that began the call, and alone has its scores.
        """
        if not self.over and self._process != os.getpid():
            raise ConfigError(
                f"these scores arrive in process {self._process}, which began the call; this is "
                "a forked child of it: call the model here, or submit after the fork",
                model=self.contract.model,
            )
        try:
            return self.over or hooks.wait(self._over, timeout_s, self._settings)
        except BaseException:  # Ctrl-C: cancel its requests on the servers
            self.cancel()
            raise

    def raise_failure(self) -> None:
        """Raise its failure, if it failed: a copy, as a traceback refers to the call."""
        if self.failure is not None:
            raise self.failure.at()

    def abandon(self, error: SonicError) -> None:
        """End the call with an error, unless it is over; its requests are cancelled.

        A forked child has no part in its parent's requests.
        """
        if not self.over and self._process == os.getpid():
            self._abandon(self, error)

    def cancel(self) -> None:
        self.abandon(errors.CancelledError("the call was cancelled"))

    def _set_over(self) -> None:
        ended, self._missing = self.ended, []
        # Scores that nobody has asked for yet keep the call, but not the rows of a chunk. What
        # refers to the call would be a cycle, which is collected many chunks later.
        del self.inputs, self.put, self.ended, self.lost_with
        try:
            ended()
        finally:
            self._over.set()

    # For the engine

    def place(self, request: RequestSlice, response: Response) -> None:
        """Put a response in its place; raise `ResponseError` if it differs from the declaration."""
        selection = self.inputs.selection(request.start, request.stop)
        try:
            self.put(selection, request.rows, response.outputs)
        except SonicError:
            raise
        except Exception as error:
            logger.debug("a response could not be taken", exc_info=True)
            raise errors.ResponseError(f"the response could not be taken: {error!r}") from None
        self.served_versions.add(response.version or self.contract.version)

    def missing(self, request: RequestSlice) -> list[tuple[int, int]]:
        """Return the ranges of a slice whose rows are neither placed nor masked.

        Rows are never counted by number alone: a row that counted twice would stand for another,
        which would have no score.
        """
        ranges = [(max(a, request.start), min(b, request.stop)) for a, b in self._missing]
        return [(start, stop) for start, stop in ranges if start < stop]

    def finish(self, request: RequestSlice) -> None:
        """Count the rows of a slice as placed or masked; with the last ones, the call is over."""
        before = [(a, min(b, request.start)) for a, b in self._missing]
        after = [(max(a, request.stop), b) for a, b in self._missing]
        self._missing = [(start, stop) for start, stop in before + after if start < stop]
        if not self._missing:
            self._set_over()

    def fail(self, request: RequestSlice, error: SonicError) -> int:
        """Mask the rows of a slice, or fail the call; return the number of masked rows."""
        if not (missing := self.missing(request)):
            return 0
        rows = request.start, request.stop
        error = self._located(error.at(rows=rows), *rows)
        if not (self.mask and isinstance(error, MASKABLE)):
            self.end(error)
            return 0
        level = logging.DEBUG if self.lost else logging.WARNING
        logger.log(level, "%s; these rows, and others that are lost, are None", error)
        masked = 0
        for start, stop in missing:
            lost = self.inputs.selection(start, stop)
            if self.lost_with is not None:
                lost = self.lost_with(lost)
            self.lost.append(lost)
            masked += stop - start if self.lost_with is None else len(lost)
        self.statistics += Statistics(masked=masked)
        self.finish(request)
        return masked

    def end(self, error: SonicError) -> None:
        """Fail the whole call."""
        if not self.over:
            self.failure = self._located(error, 0, len(self.inputs))
            self._set_over()

    def _located(self, error: SonicError, start: int, stop: int) -> SonicError:
        return error.at(
            model=self.contract.model,
            version=self.version or self.contract.version,
            events=self.inputs.events_of(start, stop),
        )
