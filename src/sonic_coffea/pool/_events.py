"""The events that the pool's core takes, and the instructions that it returns.

A response is both: the core returns the event `Answered` if this response is the one that counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.transport import Contract, Response


# Events


class Submitted(NamedTuple):
    """A call has slices to send."""

    slices: Sequence[RequestSlice]


class CallEnded(NamedTuple):
    """A call is over: its slices need not be sent."""

    call: Any


class Sent(NamedTuple):
    """The rows of an attempt are packed, and leave this process."""

    attempt: Attempt
    at: float


class Answered(NamedTuple):
    """A response has come; ``packing_at`` is when packing began."""

    attempt: Attempt
    response: Response
    packing_at: float
    sent_at: float
    received_at: float


class Failed(NamedTuple):
    """An attempt has failed; if it was not `sent`, no other endpoint helps.

    One that was answered fails, too, if its response does not fit the contract.
    """

    attempt: Attempt
    error: SonicError
    sent: bool = True


class Probed(NamedTuple):
    """A liveness probe has ended: with an error if the server does not live."""

    url: str
    error: SonicError | None


class Validated(NamedTuple):
    """A server has described a model, or has failed to."""

    url: str
    key: ModelKey
    outcome: Contract | SonicError


class ContractRequested(NamedTuple):
    """A caller asks for a contract; `anew`: from the servers, even if one is known.

    `caller` is what the engine knows it by, and `Resolve` names.
    """

    key: ModelKey
    caller: Any
    anew: bool = False


class ContractWithdrawn(NamedTuple):
    """A caller waits no longer for a contract: its deadline, which errors name, has passed."""

    key: ModelKey
    caller: Any
    timeout_s: float | None


class ServersChanged(NamedTuple):
    """These are the servers from now on."""

    servers: Sequence[str]


class SchedulerJoined(NamedTuple):
    """The scheduler bounds the start.

    Before ``starts_at``, no server is contacted. Until a model's quotas come, within
    ``quotas_within_s``, at most ``max_in_flight`` of its requests may be in flight.
    """

    starts_at: float
    max_in_flight: int
    quotas_within_s: float


class QuotasReceived(NamedTuple):
    """The scheduler allocates quotas, for the length of a lease."""

    quotas: Mapping[tuple[str, ModelKey], Quota]
    lease_s: float


class FallbackStarted(NamedTuple):
    """The fallback serves at a URL, or there is an error why it cannot be used."""

    url: str | None
    error: SonicError | None = None


CallEvent = Submitted | CallEnded | ContractRequested | ContractWithdrawn
AttemptEvent = Sent | Answered | Failed
ServerEvent = Probed | Validated | ServersChanged | FallbackStarted
Event = CallEvent | AttemptEvent | ServerEvent | SchedulerJoined | QuotasReceived
"""Anything that the core has to know."""


# Instructions


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
    """Give up a slice; ``url`` is the endpoint whose failure it was."""

    slice: RequestSlice
    error: SonicError
    url: str | None = None


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


AttemptInstruction = Send | Cancel | Answered | Count
ServerInstruction = Probe | Validate | Reconnect | Close | StartFallback
Instruction = AttemptInstruction | ServerInstruction | Fail | Resolve
"""Anything that the engine has to do for the core."""
