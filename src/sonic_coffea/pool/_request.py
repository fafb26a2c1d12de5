"""Slices of a call that travel as one request, and the attempts to send them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple


class ModelKey(NamedTuple):
    """A model, and its version; None for the latest."""

    name: str
    version: str | None


@dataclass(slots=True, eq=False)
class RequestSlice:
    """Rows of a call that travel as one request.

    It waits, is in flight, or both; once it is answered, given up or split, it is neither.

    Attributes
    ----------
    call : Call
        Of it, the core reads the `key`, and the `contract` that rows are packed for.
    start, stop, nbytes : int
        Places of the rows in the call, and the bytes of their tensors.
    order : tuple
        Slices leave in this order: the number of the slice, its first row.
    queued_at, first_failed_at : float
        When its call was submitted, and when an attempt first failed; infinity before that.
    retries, losses : int
        How often it was queued again, and how often it was lost when a server may have had it.
    retry_at : float
        When its back-off ends.
    inference_failures : int
        How often a server failed on these rows, and they were sent again.
    splits : int
        How often slices were split until this part.
    whole : bool
        Whether its rows belong together, so that it is not split.
    last_url : str or None
        The endpoint that failed it last, or was late.
    queued : bool
        Whether it waits to be sent, perhaps until its back-off ends.
    attempts : list of Attempt
        Its attempts that have not ended.
    """

    call: Any
    start: int
    stop: int
    nbytes: int
    order: tuple[int, int] = (0, 0)
    queued_at: float = 0.0
    retries: int = 0
    losses: int = 0
    retry_at: float = 0.0
    inference_failures: int = 0
    splits: int = 0
    whole: bool = False
    first_failed_at: float = math.inf
    last_url: str | None = None
    queued: bool = False
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def halves(self) -> tuple[RequestSlice, RequestSlice]:
        """Return its rows as two slices, with its place in the order."""
        middle = (self.start + self.stop) // 2
        nbytes = self.nbytes * (middle - self.start) // self.rows
        half, order = partial(replace, self, splits=self.splits + 1), (self.order[0], middle)
        rest = half(start=middle, nbytes=self.nbytes - nbytes, order=order, attempts=[])
        return half(stop=middle, nbytes=nbytes, attempts=[]), rest

    @property
    def key(self) -> ModelKey:
        key: ModelKey = self.call.key
        return key


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to have a slice answered by an endpoint.

    The core leaves the RPC to the engine.

    Attributes
    ----------
    in_flight : int
        Requests for the model that are in flight to the endpoint, itself included.
    sent_at : float
        When it left this process; infinity until then, as packing takes seconds while its code is
        compiled.
    late : bool
        Whether its rows were sent again, as its server seems to hang.
    """

    slice: RequestSlice
    url: str
    channel: int
    begun_at: float
    in_flight: int
    sent_at: float = math.inf
    late: bool = False
    cancelled: bool = False
    _cancel_rpc: Callable[[], object] | None = None

    @property
    def key(self) -> ModelKey:
        return self.slice.key

    # `sent` sets the RPC, then reads `cancelled`; `cancel` sets `cancelled`, then reads the RPC. So
    # at least one of them cancels the RPC, without a lock.

    def sent(self, cancel_rpc: Callable[[], object]) -> None:
        self._cancel_rpc = cancel_rpc
        if self.cancelled:
            cancel_rpc()

    def cancel(self) -> None:
        """Cancel it, now or as soon as it is sent."""
        self.cancelled = True
        if self._cancel_rpc is not None:
            self._cancel_rpc()
