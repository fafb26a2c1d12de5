"""The events that the pool's core takes, and the instructions that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._request import Attempt, ModelKey, Request, RequestSlice
    from sonic_coffea.transport import Contract, Response


class Event:
    """What the core is told."""

    __slots__ = ()


class Instruction:
    """What the core has its owner do."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class ContractRequest:
    """A caller that waits for a contract; an error names how long it waited."""

    key: ModelKey
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Submitted(Event):
    """A call has slices to send."""

    slices: Sequence[RequestSlice]


@dataclass(frozen=True, slots=True)
class CallEnded(Event):
    """Nobody waits for a call any more: its slices need not be sent."""

    call: Request


@dataclass(frozen=True, slots=True)
class Answered(Event):
    """A response has come.

    ``packing_at``, ``sent_at`` and ``received_at`` are when packing began, when the request left,
    and when the response came.
    """

    attempt: Attempt
    response: Response
    packing_at: float
    sent_at: float
    received_at: float


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A request has failed after it left."""

    attempt: Attempt
    error: SonicError


@dataclass(frozen=True, slots=True)
class Unsendable(Event):
    """A request could not be made; no other endpoint helps."""

    attempt: Attempt
    error: SonicError


@dataclass(frozen=True, slots=True)
class Probed(Event):
    """A liveness probe has ended: with an error if the server does not live."""

    url: str
    error: SonicError | None


@dataclass(frozen=True, slots=True)
class Validated(Event):
    """A server has given a model's contract, or has failed to.

    ``round_trip_s`` is how far the server is; 0 if that is not known.
    """

    url: str
    key: ModelKey
    outcome: Contract | SonicError
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ContractRequested(Event):
    """A caller asks for a contract; `anew`: one that is known is forgotten."""

    request: ContractRequest
    anew: bool = False


@dataclass(frozen=True, slots=True)
class ContractWithdrawn(Event):
    """The deadline of a caller that waits for a contract has passed."""

    request: ContractRequest


@dataclass(frozen=True, slots=True)
class ServersChanged(Event):
    """These are the servers from now on."""

    servers: Sequence[str]


@dataclass(frozen=True, slots=True)
class SchedulerJoined(Event):
    """The scheduler says how to begin.

    Before ``starts_at``, no server is contacted. Until a model's quotas come, within
    ``quotas_within_s``, at most ``max_in_flight`` of its requests may be in flight.
    """

    starts_at: float
    max_in_flight: int
    quotas_within_s: float


@dataclass(frozen=True, slots=True)
class QuotasReceived(Event):
    """The scheduler says what this process may have in flight.

    ``ejected`` are the servers that other clients have lost.
    """

    quotas: Mapping[tuple[str, ModelKey], Quota]
    ejected: Collection[str]
    lease_s: float


@dataclass(frozen=True, slots=True)
class FallbackStarted(Event):
    """The fallback serves at a URL, or cannot be used: then with an error."""

    url: str | None
    error: SonicError | None = None


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Pack the rows of an attempt, and send them."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Cancel(Instruction):
    """Cancel an attempt; what comes of it does not matter any more."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Deliver(Instruction):
    """Put a response in its place."""

    answered: Answered


@dataclass(frozen=True, slots=True)
class Count(Instruction):
    """Count an attempt that failed: as a retry if its rows were lost and are sent again."""

    attempt: Attempt
    error: SonicError
    retried: bool


@dataclass(frozen=True, slots=True)
class Split(Instruction):
    """Expect the parts of a slice, which is too large to be answered, in its place."""

    slice: RequestSlice
    parts: Sequence[RequestSlice]


@dataclass(frozen=True, slots=True)
class Fail(Instruction):
    """Give up a slice; ``url`` is the endpoint whose failure it was."""

    slice: RequestSlice
    error: SonicError
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Probe(Instruction):
    """Ask a server whether it lives."""

    url: str


@dataclass(frozen=True, slots=True)
class Validate(Instruction):
    """Ask a server for a model's contract."""

    url: str
    key: ModelKey


@dataclass(frozen=True, slots=True)
class Resolve(Instruction):
    """Give a caller a model's contract, or the error why it is not known."""

    request: ContractRequest
    outcome: Contract | SonicError


@dataclass(frozen=True, slots=True)
class StartFallback(Instruction):
    """Start the fallback, or look for the one of this machine."""


@dataclass(frozen=True, slots=True)
class Reconnect(Instruction):
    """Make a connection to a server anew; no requests are on it."""

    url: str
    channel: int


@dataclass(frozen=True, slots=True)
class Close(Instruction):
    """Close the connections to a server: it is drained."""

    url: str
