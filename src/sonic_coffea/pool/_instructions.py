"""The instructions of the pool's core: anything that the engine has to do for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sonic_coffea.errors import SonicError
from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
from sonic_coffea.transport import Contract, Response


class Answer(NamedTuple):
    """A response that has come; as an instruction, put its scores in their places.

    ``packing_at`` is when packing began.
    """

    attempt: Attempt
    response: Response
    packing_at: float
    sent_at: float
    received_at: float


class Send(NamedTuple):
    """Pack the rows of an attempt, and send them."""

    attempt: Attempt


class Cancel(NamedTuple):
    """Cancel an attempt, whose outcome does not matter any more."""

    attempt: Attempt


class Count(NamedTuple):
    """Count a failed attempt: as a retry if its rows are sent again."""

    attempt: Attempt
    error: SonicError
    retried: bool


class Fail(NamedTuple):
    """Give up a slice; the error names the endpoint whose failure it was, if it was one's."""

    slice: RequestSlice
    error: SonicError


class Probe(NamedTuple):
    """Ask a server whether it lives."""

    url: str


class Validate(NamedTuple):
    """Ask a server for a model's contract."""

    url: str
    key: ModelKey


class Resolve(NamedTuple):
    """Give a caller a model's contract, or an error."""

    caller: Any
    outcome: Contract | SonicError


class StartFallback(NamedTuple):
    """Start the fallback, or use the one that runs on this machine."""


class Reconnect(NamedTuple):
    """Replace a connection to a server; it carries no requests."""

    url: str
    channel: int


class Close(NamedTuple):
    """Close the connections to a drained server."""

    url: str


AttemptInstruction = Send | Cancel | Answer | Count
ServerInstruction = Probe | Validate | Reconnect | Close | StartFallback
Instruction = AttemptInstruction | ServerInstruction | Fail | Resolve
