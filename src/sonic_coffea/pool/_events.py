"""The events that the pool's core takes, and the instructions that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._request import Attempt, ModelKey, Request, RequestSlice
    from sonic_coffea.transport import Contract, Response


class Event:
    """Anything that the core has to know."""

    __slots__ = ()


class Instruction:
    """Anything that the engine has to do for the core."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class ContractRequest:
    """A caller that waits for a contract; errors name its timeout."""

    key: ModelKey
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Submitted(Event):
    """A call has slices to send."""

    slices: Sequence[RequestSlice]


@dataclass(frozen=True, slots=True)
class CallEnded(Event):
    """A call is over: its slices need not be sent."""

    call: Request


@dataclass(frozen=True, slots=True)
class Sent(Event):
    """The rows of an attempt are packed, and leave this process."""

    attempt: Attempt
    at: float


@dataclass(frozen=True, slots=True)
class Answered(Event):
    """A response has come; ``packing_at`` is when packing began."""

    attempt: Attempt
    response: Response
    packing_at: float
    sent_at: float
    received_at: float


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A request has failed: `sent`, or before it left, so that no other endpoint helps."""

    attempt: Attempt
    error: SonicError
    sent: bool = True


@dataclass(frozen=True, slots=True)
class Probed(Event):
    """A liveness probe has ended: with an error if the server does not live."""

    url: str
    error: SonicError | None


@dataclass(frozen=True, slots=True)
class Validated(Event):
    """A server has given a model's contract, or has failed to.

    ``round_trip_s`` is the time to the server and back; 0 if that is not known.
    """

    url: str
    key: ModelKey
    outcome: Contract | SonicError
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ContractRequested(Event):
    """A caller asks for a contract; `anew`: from the servers, even if one is known."""

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
    """The scheduler bounds the start.

    Before ``starts_at``, no server is contacted. Until a model's quotas come, within
    ``quotas_within_s``, at most ``max_in_flight`` of its requests may be in flight.
    """

    starts_at: float
    max_in_flight: int
    quotas_within_s: float


@dataclass(frozen=True, slots=True)
class QuotasReceived(Event):
    """The scheduler allocates quotas, for the length of a lease."""

    quotas: Mapping[tuple[str, ModelKey], Quota]
    lease_s: float


@dataclass(frozen=True, slots=True)
class FallbackStarted(Event):
    """The fallback serves at a URL, or there is an error why it cannot be used."""

    url: str | None
    error: SonicError | None = None


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Pack the rows of an attempt, and send them."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Cancel(Instruction):
    """Cancel an attempt, whose outcome does not matter any more."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Deliver(Instruction):
    """Put a response in its place."""

    answered: Answered


@dataclass(frozen=True, slots=True)
class Count(Instruction):
    """Count a failed attempt: as a retry if its rows are sent again."""

    attempt: Attempt
    error: SonicError
    retried: bool


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
    """Give a caller a model's contract, or an error."""

    request: ContractRequest
    outcome: Contract | SonicError


@dataclass(frozen=True, slots=True)
class Publish(Instruction):
    """Keep a model's contract for callers on other threads; None: drop it."""

    key: ModelKey
    contract: Contract | None


@dataclass(frozen=True, slots=True)
class StartFallback(Instruction):
    """Start the fallback, or use the one that runs on this machine."""


@dataclass(frozen=True, slots=True)
class Reconnect(Instruction):
    """Replace a connection to a server; it carries no requests."""

    url: str
    channel: int


@dataclass(frozen=True, slots=True)
class Close(Instruction):
    """Close the connections to a drained server."""

    url: str
