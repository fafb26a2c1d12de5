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
from sonic_coffea.pool._shares import current_share
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
"""Failures of servers, not of the rows: calls that mask have None for the rows."""


class RowSource(Protocol):
    """The rows of a call, each at a place; places that are neighbours may share a request.

    Several threads may pack at the same time.
    """

    @property
    def segments(self) -> Sequence[Segment]:
        """Ranges of places, and the bytes of their rows."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    def pack(self, start: int, stop: int, lend: Lend | None = None) -> Mapping[str, Tensor]:
        """Return the tensors of the rows at some places, by input.

        They may lie in the memory that `lend` returns for a shape and a type.
        """

    def selection(self, start: int, stop: int) -> Any:
        """Return which rows are at some places."""

    def events_of(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the first and one-past-last event of the rows at some places, if it is known."""


class Destination(Protocol):
    """Where the responses for an output go."""

    def place(self, selection: Any, rows: int, response: Mapping[str, Tensor]) -> None:
        """Put the response for some rows in its place, or raise a `ResponseError`."""


class Call:
    """The rows of one call: packed when there is room for them, put in order as they return.

    Once it is submitted, only the engine changes it; others wait for it, or abandon it.

    Parameters
    ----------
    contract : Contract
        The model's.
    inputs : RowSource
        The rows, and how they are packed.
    outputs : mapping of str to Destination
        What puts the responses together, by output.
    asked : sequence of str
        The outputs that requests ask for.
    version : str or None
        The version that was asked for.
    mask : bool
        Whether rows that servers lose are noted in `lost`, instead of failing the call.
    lost_with : callable, optional
        Returns all rows that are lost if some are: these, and those that are equal to them.
    """

    def __init__(
        self,
        contract: Contract,
        inputs: RowSource,
        outputs: Mapping[str, Destination],
        asked: Sequence[str],
        *,
        version: str | None,
        mask: bool = False,
        lost_with: Callable[[Any], Sized] | None = None,
    ) -> None:
        self.contract = contract
        self.inputs = inputs
        self.outputs = outputs
        self.asked = tuple(asked)
        self.version = version
        self.pin = VersionPin(contract.model, version)
        self.key = ModelKey(contract.model, version)
        self.share = current_share()
        self.statistics = Statistics(objects=len(inputs))
        self.failure: SonicError | None = None
        self.lost: list[Any] = []
        self.served_versions: set[str] = set()
        self._mask = mask
        self._lost_with = lost_with
        self._rows_left = 0
        self._abandon: Callable[[Call, SonicError], None] = Call.end
        self._complete = threading.Event()
        self._callbacks: list[Callable[[], Any]] = []

    def begin(self, rows: int, abandon: Callable[[Call, SonicError], None]) -> None:
        """Record how many rows are sent, and the function that ends the call early."""
        self._abandon = abandon
        self._rows_left = rows
        if rows == 0:
            self._set_over()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._complete.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; False if the time is over first."""
        try:
            return wait_for(self._complete, timeout_s)
        except BaseException:  # Ctrl-C: leave nothing running on the servers
            self.cancel()
            raise

    def on_end(self, callback: Callable[[], Any]) -> None:
        """Call a function when the call is over, on the thread that ends it; now, if it is."""
        self._callbacks.append(callback)
        if self.over:
            self._tell()

    def raise_failure(self) -> None:
        """Raise what went wrong, if something did."""
        if self.failure is not None:
            raise self.failure

    def abandon(self, error: SonicError) -> None:
        """End the call with an error, unless it is over; what is in flight is cancelled."""
        if not self.over:
            self._abandon(self, error)

    def cancel(self) -> None:
        """Abandon what is not answered yet."""
        self.abandon(CancelledError("the call was cancelled"))

    def _set_over(self) -> None:
        # Destinations refer to their call: a cycle would keep a chunk's rows until it is collected.
        self.outputs = {}
        self._complete.set()
        self._tell()

    def _tell(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:  # another thread does so at the same time
                return
            callback()

    # What its owner does

    def place(self, request: RequestSlice, response: Response) -> None:
        """Put a response in its place; raise `ResponseError` if it is not what was declared."""
        selection = self.inputs.selection(request.start, request.stop)
        for output in self.outputs.values():
            output.place(selection, request.rows, response.outputs)
        self.served_versions.add(response.version or self.contract.version)

    def finish(self, request: RequestSlice) -> bool:
        """Count a slice as over, and return whether it was the call's last one."""
        # Counted twice, a slice would stand for another, whose rows would have no scores.
        if not request.over:
            request.over = True
            self._rows_left -= request.rows
            if self._rows_left == 0:
                self._set_over()
        return self._rows_left == 0

    def fail(self, request: RequestSlice, error: SonicError) -> int:
        """Give up a slice: its rows are lost if they may be, else the call fails.

        Returns the number of rows that are lost while the call goes on.
        """
        if request.over or self.over:
            return 0
        error = self._located(error, request.start, request.stop, rows=True)
        if not (self._mask and isinstance(error, MASKABLE)):
            self.end(error)
            return 0
        level = logging.DEBUG if self.lost else logging.WARNING
        logger.log(level, "%s; these rows, and others that are lost, are None", error)
        lost, rows = self.inputs.selection(request.start, request.stop), request.rows
        if self._lost_with is not None:
            lost = self._lost_with(lost)
            rows = len(lost)
        self.lost.append(lost)
        self.statistics += Statistics(masked=rows)
        self.finish(request)
        return rows

    def end(self, error: SonicError) -> None:
        """Give up the whole call."""
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
