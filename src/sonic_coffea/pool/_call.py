"""One call of a model: its rows, their destinations, and its statistics."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from sonic_coffea.errors import (
    CancelledError,
    DeadlineError,
    ModelNotFoundError,
    OverloadError,
    RequestError,
    ResponseError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.pool._process import wait_for
from sonic_coffea.pool._request import ModelKey
from sonic_coffea.pool._signature import MAX_MISSES
from sonic_coffea.reporting import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Sized

    from sonic_coffea.pool._batching import Segment
    from sonic_coffea.pool._request import RequestSlice
    from sonic_coffea.transport import Contract, Lend, Response

logger = logging.getLogger(__name__)

Tensor = NDArray[Any]

MASKABLE = (
    DeadlineError,
    ModelNotFoundError,
    OverloadError,
    RequestError,
    ResponseError,
    ServerLostError,
)
"""Failures of servers, not of the rows: if a call masks, these rows are None."""


class RowSource(Protocol):
    """The rows of a call, each at a place; neighbouring places may share a request.

    Several threads may pack at the same time.
    """

    @property
    def segments(self) -> Sequence[Segment]:
        """Ranges of places, and the bytes of their rows."""

    def __len__(self) -> int: ...

    def pack(self, start: int, stop: int, lend: Lend | None = None) -> Mapping[str, Tensor]:
        """Return the tensors of the rows at some places, by input.

        They may lie in the memory that `lend` returns for a shape and a type.
        """

    def selection(self, start: int, stop: int) -> Any:
        """Return the rows at some places, as destinations take them."""

    def events_of(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the first event of some places, and one past the last; None if unknown."""


class Destination(Protocol):
    """Where the responses for an output go."""

    def place(self, selection: Any, rows: int, response: Mapping[str, Tensor]) -> None:
        """Put the response for some rows in its place, or raise a `ResponseError`."""


class Call:
    """The rows of one call of a model, and the destinations of their scores.

    Once it is submitted, only the engine changes it; other threads wait for it, or abandon it.

    Parameters
    ----------
    contract : Contract
        The model's contract.
    inputs : RowSource
        The rows, and how they are packed.
    outputs : mapping of str to Destination
        The destination of each output.
    requested : sequence of str
        The outputs that requests ask for.
    version : str or None
        The version that requests ask for; None for the latest.
    mask : bool
        Whether lost rows are masked: appended to `lost`, instead of failing the call.
    lost_with : callable, optional
        Returns all rows that are lost with some rows: these, and equal rows.
    """

    def __init__(
        self,
        contract: Contract,
        inputs: RowSource,
        outputs: Mapping[str, Destination],
        requested: Sequence[str],
        *,
        version: str | None,
        mask: bool = False,
        lost_with: Callable[[Any], Sized] | None = None,
    ) -> None:
        self.contract = contract
        self.inputs = inputs
        self.outputs = outputs
        self.requested = tuple(requested)
        self.version = version
        self.pin = VersionPin(contract.model, version)
        self.key = ModelKey(contract.model, version)
        self.statistics = Statistics(objects=len(inputs))
        self.failure: SonicError | None = None
        self.lost: list[Any] = []
        self.served_versions: set[str] = set()
        self._mask = mask
        self._lost_with = lost_with
        # Ranges of places whose rows are neither placed nor masked.
        self._missing: list[tuple[int, int]] = []
        self._abandon: Callable[[Call, SonicError], None] = Call.end
        self._complete = threading.Event()
        self._callbacks: list[Callable[[], Any]] = []

    def begin(self, rows: int, abandon: Callable[[Call, SonicError], None]) -> None:
        """Record how many rows are sent, and the function that ends the call early."""
        self._abandon = abandon
        self._missing = [(0, rows)]
        if rows == 0:
            self._set_over()

    @property
    def over(self) -> bool:
        """Whether all rows are scored or given up."""
        return self._complete.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; False if the timeout passes first."""
        try:
            return wait_for(self._complete, timeout_s)
        except BaseException:  # Ctrl-C: cancel its requests on the servers
            self.cancel()
            raise

    def on_end(self, callback: Callable[[], Any]) -> None:
        """Run a function when the call is over, on the thread that ends it; or now, if it is."""
        self._callbacks.append(callback)
        if self.over:
            self._run_callbacks()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def abandon(self, error: SonicError) -> None:
        """End the call with an error, unless it is over; its requests are cancelled."""
        if not self.over:
            self._abandon(self, error)

    def cancel(self) -> None:
        self.abandon(CancelledError("the call was cancelled"))

    def _set_over(self) -> None:
        # Destinations refer to their call: a cycle would keep a chunk's rows until it is collected.
        self.outputs = {}
        self._missing = []
        self._complete.set()
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:  # another thread runs them, too
                return
            callback()

    # For the engine

    def place(self, request: RequestSlice, response: Response) -> None:
        """Put a response in its place; raise `ResponseError` if it differs from the declaration."""
        selection = self.inputs.selection(request.start, request.stop)
        for output in self.outputs.values():
            output.place(selection, request.rows, response.outputs)
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
        if self.over:
            return
        before = [(a, min(b, request.start)) for a, b in self._missing]
        after = [(max(a, request.stop), b) for a, b in self._missing]
        self._missing = sorted((start, stop) for start, stop in before + after if start < stop)
        if not self._missing:
            self._set_over()

    def fail(self, request: RequestSlice, error: SonicError) -> int:
        """Mask the rows of a slice, or fail the call; return the number of masked rows."""
        if not (missing := self.missing(request)):
            return 0
        error = self._located(error, request.start, request.stop, rows=True)
        if not (self._mask and isinstance(error, MASKABLE)):
            self.end(error)
            return 0
        level = logging.DEBUG if self.lost else logging.WARNING
        logger.log(level, "%s; these rows, and others that are lost, are None", error)
        masked = 0
        for start, stop in missing:
            lost, rows = self.inputs.selection(start, stop), stop - start
            if self._lost_with is not None:
                lost = self._lost_with(lost)
                rows = len(lost)
            self.lost.append(lost)
            masked += rows
        self.statistics += Statistics(masked=masked)
        self.finish(request)
        return masked

    def end(self, error: SonicError) -> None:
        """Fail the whole call."""
        if not self.over:
            self.failure = self._located(error, 0, len(self.inputs), rows=False)
            self._set_over()

    def _located(self, error: SonicError, start: int, stop: int, *, rows: bool) -> SonicError:
        return error.at(
            model=self.contract.model,
            version=self.version or self.contract.version,
            rows=(start, stop) if rows else None,
            events=self.inputs.events_of(start, stop),
        )


class VersionPin:
    """The version that requests ask for: the caller's, or else that of the first response.

    The threads that send and receive use it.
    """

    def __init__(self, model: str, version: str | None) -> None:
        self._model, self._requested = model, version
        self._pinned: str | None = None
        self._misses = 0
        self._lock = threading.Lock()

    @property
    def version(self) -> str | None:
        """The version for the next request; None for the latest."""
        return self._requested or self._pinned

    def answered(self, version: str) -> SonicError | None:
        """Record a response; return an error if it is not of the version of the others."""
        if not version:
            return None
        if self._requested is not None:
            if version == self._requested:
                return None
            return ResponseError(
                f"version {version} answered, and version {self._requested} was asked for"
            )
        with self._lock:
            if self._pinned is None:
                self._pinned = version
            if version == self._pinned:
                self._misses = 0
                return None
            return ModelNotFoundError(
                f"version {version} answered, and version {self._pinned} answered earlier rows"
            )

    def missed(self, version: str | None) -> None:
        """Record that a server lacks a version; if all seem to, another version scores the rest."""
        with self._lock:
            if self._pinned is None or version != self._pinned:
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
