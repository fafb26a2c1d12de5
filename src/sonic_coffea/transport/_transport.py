"""The five methods of a transport, and what they return."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from sonic_coffea.errors import SonicError
from sonic_coffea.transport._contract import Contract, ModelEntry


class ServerMetadata(NamedTuple):
    """Name, version and protocol extensions of a server, and its models, if they were asked for."""

    name: str
    version: str
    extensions: tuple[str, ...]
    models: tuple[ModelEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """A server's counts for a model since it was loaded, over all clients."""

    rows: int = 0
    requests: int = 0
    executions: int = 0
    failures: int = 0
    queue_s: float = 0.0
    input_s: float = 0.0
    compute_s: float = 0.0
    output_s: float = 0.0

    @property
    def work_s(self) -> float:
        """Time of the model's executions, including that of copying tensors in and out."""
        return self.input_s + self.compute_s + self.output_s

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


class Transport(Protocol):
    """A connection to one server; any object with these methods is one.

    Making it never blocks. Each method may block, such as while a token is fetched; only the
    function that `infer` returns never does.
    """

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Probe liveness; `done` is called once, with an error if the server is lost.

        Does not wait for the response. `done` may be called before this returns.
        """

    def metadata(self, model: str, version: str | None) -> Contract:
        """Ask for inputs, outputs and limits of a model.

        Raises
        ------
        ModelNotReadyError
            If a server has the model, or is loading or replacing it.
        ModelNotFoundError
            If no server has the model, or the model cannot be loaded.
        """

    def index(self) -> list[ModelEntry]:
        """Ask which models there are."""

    def infer(
        self,
        contract: Contract,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        *,
        version: str | None,
        request_id: str,
        done: Callable[[Response | SonicError], None],
    ) -> Callable[[], object]:
        """Send a request, and return what cancels it, here and on the server.

        `done` is called once, on any thread, also before this returns.
        """

    def close(self) -> None:
        """Cancel what is in flight, and close. May be called again."""


def time_requests(
    transport: Transport,
    contract: Contract,
    version: str | None,
    tensors: Mapping[str, NDArray[Any]],
    *,
    requests: int = 1,
    in_flight: int = 1,
) -> tuple[Response, float]:
    """Send requests, `in_flight` at a time; return the last response and the total time."""
    outputs = [spec.name for spec in contract.outputs]
    outcomes: SimpleQueue[Response | SonicError] = SimpleQueue()
    begun = time.perf_counter()
    for number in range(in_flight + requests):
        if number >= in_flight:
            outcome = outcomes.get()
            if isinstance(outcome, SonicError):
                raise outcome
            response = outcome
        if number < requests:
            transport.infer(
                contract,
                tensors,
                outputs,
                version=version,
                request_id=f"zeros-{number}",
                done=outcomes.put,
            )
    return response, time.perf_counter() - begun
