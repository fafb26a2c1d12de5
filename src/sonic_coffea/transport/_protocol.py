"""What a connection offers, whatever it speaks: the seam between the pool and a protocol."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.errors import SonicError
    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._contract import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server's metadata."""

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
class ModelStatistics:
    """What a server counted of a model since it was loaded, over all clients."""

    rows: int = 0
    requests: int = 0
    executions: int = 0
    failures: int = 0
    queue_s: float = 0.0
    input_s: float = 0.0
    compute_s: float = 0.0
    output_s: float = 0.0

    def __add__(self, other: ModelStatistics) -> ModelStatistics:
        return ModelStatistics(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The output tensors of a request, and the version of the model that computed them."""

    outputs: Mapping[str, NDArray[Any]]
    version: str
    sent_bytes: int
    received_bytes: int


class RpcHandle(Protocol):
    """An inference request in flight."""

    def cancel(self) -> object:
        """Cancel the request, here and on the server. Never blocks."""


class Connection(Protocol):
    """One server.

    A connection is made without blocking. Its first call reads certificates and opens the channel,
    on the thread that calls; every call may block in the function or file of a token. So nothing
    but `address` and `RpcHandle.cancel` is for a thread that must not block.
    """

    @property
    def address(self) -> Address:
        """Where the server is. Never blocks."""

    def ready(self) -> bool:
        """Whether the server is ready; False also if it does not respond.

        Blocks for up to ``metadata_s``.
        """

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Probe liveness; `done` is called once, with an error if the server is lost.

        Does not wait for the response. `done` may be called before this returns.
        """

    def info(self) -> ServerInfo:
        """Ask the server for its metadata. Blocks for up to ``metadata_s``."""

    def models(self) -> list[ModelEntry]:
        """Ask for the repository index. Blocks for up to ``metadata_s``."""

    def contract(self, model: str, version: str | None) -> Contract:
        """Ask for a model's inputs, outputs and limits. Blocks for a few times ``metadata_s``."""

    def statistics(self, model: str, version: str | None) -> ModelStatistics:
        """Ask for a model's statistics. Blocks for up to ``metadata_s``."""

    def infer(
        self,
        contract: Contract,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        *,
        version: str | None,
        request_id: str,
        done: Callable[[Response | SonicError], None],
    ) -> RpcHandle:
        """Send a request; `done` is called once, on a thread of the connection.

        Does not wait for the response, but may block while a new region of shared memory is
        registered with the server, for a few seconds.
        """

    def close(self) -> None:
        """Cancel what is in flight, and close the channel. May be called again.

        May block for a moment while the server unregisters shared memory.
        """
