"""One call of a model: its rows on their way, and the scores as they come in."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
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
from sonic_coffea.pool._hooks import wait_for
from sonic_coffea.reporting import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Sized

    from sonic_coffea.pool._batching import Segment
    from sonic_coffea.pool._endpoint import Attempt
    from sonic_coffea.transport import Answer, Contract, Exchange

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
"""What may become of rows by no fault of who sent them."""


class Cargo(Protocol):
    """The rows of a call, each at a place; places that are neighbours may share a request."""

    @property
    def segments(self) -> Sequence[Segment]:
        """Ranges of places, and what their rows weigh."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    def pack(self, start: int, stop: int) -> Mapping[str, Tensor]:
        """Return the tensors of the rows at some places, by input."""

    def selection(self, start: int, stop: int) -> Any:
        """Return which rows are at some places."""

    def events_of(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the first and one-past-last event of the rows at some places, if it is known."""


class Destination(Protocol):
    """Where the answers for an output go."""

    def place(self, wanted: Any, rows: int, answer: Mapping[str, Tensor]) -> None:
        """Put the answer for some rows in its place, or raise a `ResponseError`."""


@dataclass(slots=True, eq=False)
class Piece:
    """A slice of a call's rows, which travels as one request."""

    call: Call
    start: int
    stop: int
    nbytes: int
    number: int
    order: int = 0
    attempts: int = 0
    queued_at: float = field(default_factory=time.monotonic)
    first_failed_at: float | None = None
    last_server: str | None = None
    answered: bool = False
    over: bool = False
    begun_at: float = 0.0
    attempts_out: list[Attempt] = field(default_factory=list)


class Call:
    """The rows of one call: packed when there is room for them, put in order as they return.

    Parameters
    ----------
    contract : Contract
        The model's.
    inputs : Cargo
        The rows, and how they are packed.
    outputs : mapping of str to Destination
        What puts the answers together, by output.
    asked : sequence of str
        The outputs that requests ask for.
    version : str or None
        The version that was asked for.
    mask : bool
        Whether rows that servers lose are noted in `lost`, instead of failing the call.
    lost_with : callable, optional
        Returns all rows that are lost with some: these, and those that they stand for.
    """

    def __init__(
        self,
        contract: Contract,
        inputs: Cargo,
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
        self.statistics = Statistics(objects=len(inputs))
        self.failure: SonicError | None = None
        self.lost: list[Any] = []
        self._mask = mask
        self._lost_with = lost_with
        self.served_versions: set[str] = set()
        self._left = 0
        self._lock = threading.Lock()
        self._placing = threading.Lock()
        self._complete = threading.Event()
        self._exchanges: dict[int, list[Exchange]] = {}
        self._callbacks: list[Callable[[], None]] = []

    def expect(self, pieces: int) -> None:
        """Say how many pieces there are."""
        self._left = pieces
        if pieces == 0:
            self._finish()

    @property
    def wanted(self) -> tuple[str, str | None]:
        """The model, and the version if one was asked for."""
        return self.contract.model, self.version

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._complete.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; False if the time was not enough."""
        try:
            return wait_for(self._complete, timeout_s)
        except BaseException:  # Ctrl-C: leave nothing running on the servers
            self.cancel()
            raise

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once it is over; at once, if it is."""
        with self._lock:
            if not self._complete.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def raise_failure(self) -> None:
        """Raise what went wrong, if something did."""
        if self.failure is not None:
            raise self.failure

    def sent(self, piece: Piece, exchange: Exchange) -> None:
        """Note a request that is out, so that it can be cancelled."""
        with self._lock:
            if not self._complete.is_set():
                self._exchanges.setdefault(piece.number, []).append(exchange)
                return
        exchange.cancel()

    def arrived(self, piece: Piece, answer: Answer) -> None:
        """Put an answer in its place.

        Raises
        ------
        ResponseError
            If it is not what the model declares.
        """
        if piece.over:
            return
        wanted = self.inputs.selection(piece.start, piece.stop)
        with self._placing:
            for output in self.outputs.values():
                output.place(wanted, piece.stop - piece.start, answer.outputs)
        with self._lock:
            self.served_versions.add(answer.version or self.contract.version)
        self._end(piece)

    def _end(self, piece: Piece, lost: Any = None, rows: int = 0) -> bool:
        """Count a piece as over, with the rows that are lost, and how many; False if it was."""
        with self._lock:
            # Counted twice, another one would be left out: its rows would have no scores.
            if piece.over:
                return False
            piece.over = True
            if rows:
                self.lost.append(lost)
                self.statistics += Statistics(masked=rows)
            self._exchanges.pop(piece.number, None)
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()
        return True

    def fail(self, error: SonicError, piece: Piece | None = None) -> int:
        """Give up a piece, and with it the call, unless it shall go on without; or all of it.

        Returns the number of rows that are lost while the call goes on.
        """
        start, stop = (0, len(self.inputs)) if piece is None else (piece.start, piece.stop)
        error = error.at(
            model=self.contract.model,
            version=self.version or self.contract.version,
            rows=None if piece is None else (start, stop),
            events=self.inputs.events_of(start, stop),
        )
        if piece is not None and self._mask and isinstance(error, MASKABLE):
            return self._lose(piece, error)
        with self._lock:
            if self._complete.is_set():
                return 0
            self.failure = error
            exchanges, self._exchanges = self._exchanges, {}
        self._finish()
        for exchange in itertools.chain.from_iterable(exchanges.values()):
            exchange.cancel()
        return 0

    def _lose(self, piece: Piece, error: SonicError) -> int:
        if piece.over:
            return 0
        level = logging.DEBUG if self.lost else logging.WARNING
        logger.log(level, "%s; these rows, and others that are lost, are None", error)
        lost = self.inputs.selection(piece.start, piece.stop)
        rows = piece.stop - piece.start
        if self._lost_with is not None:
            lost = self._lost_with(lost)
            rows = len(lost)
        return rows if self._end(piece, lost, rows) else 0

    def cancel(self) -> None:
        """Abandon what is not answered yet."""
        self.fail(CancelledError("the call was cancelled"))

    def _finish(self) -> None:
        with self._lock:
            self._complete.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
