"""What a connection offers, whatever it speaks: the seam between the pool and a protocol."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.errors import SonicError
    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._contract import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines of calls.

    Parameters
    ----------
    request_s : float
        Of one inference request.
    metadata_s : float
        Of a call that carries no tensors.
    """

    request_s: float = 120.0
    metadata_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files for ``grpcs``.

    Parameters
    ----------
    root : str or None
        The certificate authority to trust; by default those of gRPC.
    cert, key : str or None
        The certificate and its key that the client shows (mutual TLS).
    """

    root: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """How to connect.

    Parameters
    ----------
    token : str, callable or None
        Bearer token, or what returns one; it goes with every call. Never shown.
    headers : mapping
        More headers for every call. Never shown.
    tls : Tls
        PEM files, for servers with TLS.
    compression : {"gzip", "deflate"} or None
        How requests with tensors are compressed on their way.
    shared_memory : bool or "auto"
        Whether large tensors are read by the server where they are, if it is on this machine: if
        it can, or as a demand.
    timeouts : Timeouts
        Deadlines of calls.
    """

    token: str | Callable[[], str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: Tls = field(default_factory=Tls)
    compression: str | None = None
    shared_memory: bool | str = "auto"
    timeouts: Timeouts = field(default_factory=Timeouts)

    def with_headers(self, headers: Mapping[str, str]) -> ConnectionOptions:
        """Return the options with more headers."""
        return replace(self, headers={**self.headers, **headers})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One line of a server's repository index."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """A model's own account of its work since it was loaded, over all of its clients."""

    rows: int = 0
    requests: int = 0
    executions: int = 0
    failures: int = 0
    queue_s: float = 0.0
    input_s: float = 0.0
    compute_s: float = 0.0
    output_s: float = 0.0

    def __add__(self, other: Timings) -> Timings:
        return Timings(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The tensors that came back, and from which version of the model."""

    outputs: Mapping[str, NDArray[Any]]
    version: str
    sent_bytes: int
    received_bytes: int


class Exchange(Protocol):
    """A request that is out."""

    def cancel(self) -> None:
        """Abandon it, here and on the server."""


class Connection(Protocol):
    """One server."""

    @property
    def address(self) -> Address:
        """Where the server is."""

    def ready(self) -> bool:
        """Whether the server answers that it can serve; False also if it does not answer."""

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Ask whether the server lives; `done` is called once, with an error if it does not."""

    def info(self) -> ServerInfo:
        """Ask the server for its name, version and extensions."""

    def models(self) -> list[ModelEntry]:
        """Ask for the repository index."""

    def contract(self, model: str, version: str | None) -> Contract:
        """Ask what a model takes and gives."""

    def timings(self, model: str, version: str | None) -> Timings:
        """Ask for a model's statistics."""

    def infer(
        self,
        contract: Contract,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        *,
        version: str | None,
        request_id: str,
        done: Callable[[Answer | SonicError], None],
    ) -> Exchange:
        """Send a request; `done` is called once, on a thread of the connection."""

    def close(self) -> None:
        """Let go of the connection; what is out is cancelled. May be called again."""


def as_tensor(raw: bytes, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return a read-only view of an answer's bytes."""
    return np.frombuffer(raw, np.dtype(dtype)).reshape(tuple(shape))
