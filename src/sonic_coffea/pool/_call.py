"""One call of a model: its rows on their way, and the scores as they come in."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import CancelledError, ResponseError, SonicError
from sonic_coffea.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sonic_coffea.contract import Contract
    from sonic_coffea.transport import Answer, Exchange

Tensor = NDArray[Any]


@dataclass(slots=True, eq=False)
class Piece:
    """A slice of a call's rows, which travels as one request."""

    call: Call
    start: int
    stop: int
    nbytes: int
    number: int
    attempts: int = 0
    queued_at: float = field(default_factory=time.monotonic)
    first_failed_at: float | None = None
    last_server: str | None = None


class Call:
    """The rows of one call: packed when there is room for them, put in order as they return.

    Parameters
    ----------
    contract : Contract
        The model's.
    rows : int
        Number of rows.
    pack : callable
        Returns the tensors of rows `start` to `stop`, by input.
    outputs : sequence of str
        Which outputs are wanted.
    version : str or None
        The version that was asked for.
    events_of : callable
        Returns the first and one-past-last event of a range of rows, for messages.
    """

    def __init__(
        self,
        contract: Contract,
        rows: int,
        pack: Callable[[int, int], Mapping[str, Tensor]],
        outputs: Sequence[str],
        *,
        version: str | None,
        events_of: Callable[[int, int], tuple[int, int]],
    ) -> None:
        self.contract = contract
        self.rows = rows
        self.pack = pack
        self.outputs = tuple(outputs)
        self.version = version
        self.events_of = events_of
        self.statistics = Statistics(objects=rows)
        self.failure: SonicError | None = None
        self.served_version = contract.version
        self._arrays: dict[str, Tensor] = {}
        self._left = 0
        self._lock = threading.Lock()
        self._complete = threading.Event()
        self._exchanges: dict[int, Exchange] = {}
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
        return self._complete.wait(timeout_s)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once it is over; at once, if it is."""
        with self._lock:
            if not self._complete.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def arrays(self) -> dict[str, Tensor]:
        """Return the outputs, one row per row that was sent.

        Raises
        ------
        SonicError
            What went wrong.
        """
        if self.failure is not None:
            raise self.failure
        return self._arrays

    def sent(self, piece: Piece, exchange: Exchange) -> None:
        """Note a request that is out, so that it can be cancelled."""
        with self._lock:
            if not self._complete.is_set():
                self._exchanges[piece.number] = exchange
                return
        exchange.cancel()

    def arrived(self, piece: Piece, answer: Answer) -> None:
        """Put an answer in its place.

        Raises
        ------
        ResponseError
            If it is not what the model declares.
        """
        for name in self.outputs:
            self._place(name, piece, answer)
        with self._lock:
            self._exchanges.pop(piece.number, None)
            self.served_version = answer.version or self.served_version
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def fail(self, error: SonicError, piece: Piece | None = None) -> None:
        """Give up; what is out is cancelled."""
        if piece is not None:
            error = error.at(
                model=self.contract.model,
                version=self.version or self.contract.version,
                rows=(piece.start, piece.stop),
                events=self.events_of(piece.start, piece.stop),
            )
        with self._lock:
            if self._complete.is_set():
                return
            self.failure = error
            exchanges, self._exchanges = self._exchanges, {}
        self._finish()
        for exchange in exchanges.values():
            exchange.cancel()

    def cancel(self) -> None:
        """Abandon what is not answered yet."""
        self.fail(CancelledError("the call was cancelled", model=self.contract.model))

    def _finish(self) -> None:
        with self._lock:
            self._complete.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _place(self, name: str, piece: Piece, answer: Answer) -> None:
        rows = piece.stop - piece.start
        tensor = answer.outputs.get(name)
        if tensor is None:
            raise ResponseError(
                f"the answer lacks output {name!r}; it has {', '.join(answer.outputs) or 'none'}"
            )
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise ResponseError(
                f"output {name!r} came back with shape {list(tensor.shape)} for {rows} rows"
            )
        with self._lock:
            whole = self._arrays.get(name)
            if whole is None:
                whole = np.empty((self.rows, *tensor.shape[1:]), tensor.dtype)
                self._arrays[name] = whole
        if whole.shape[1:] != tensor.shape[1:] or whole.dtype != tensor.dtype:
            raise ResponseError(
                f"output {name!r} came back as {tensor.dtype} {list(tensor.shape[1:])} a row, "
                f"before as {whole.dtype} {list(whole.shape[1:])}"
            )
        whole[piece.start : piece.stop] = tensor
