"""The base of transports: five methods, questions with default answers, and what they return."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import Any, NamedTuple

from numpy.typing import NDArray

from sonic_coffea._version import __version__
from sonic_coffea.errors import ServerError, SonicError
from sonic_coffea.transport._contract import Contract, ModelEntry

# However busy it is, a live server answers a probe, refuses a handshake, or maps shared memory
# within this time.
PROMPT_S = 2.0


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


class Transport(ABC):
    """A connection to one server.

    A transport has `live`, `metadata`, `index`, `infer` and `close`; a server of which more can be
    asked overrides the other methods, too. Making a transport never blocks. Each method may block,
    such as while a token is fetched; only the function that `infer` returns never does.

    Attributes
    ----------
    address : Address or str
        The server, as messages name it.
    threads : int
        Requests that are packed and sent at the same time.
    """

    address: Any
    threads = 1

    @abstractmethod
    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Probe liveness; `done` is called once, with an error if the server is lost.

        Does not wait for the response. `done` may be called before this returns.
        """

    @abstractmethod
    def metadata(self, model: str, version: str | None) -> Contract:
        """Ask for inputs, outputs and limits of a model.

        Raises
        ------
        ModelNotReadyError
            If a server has the model, or is loading or replacing it.
        ModelNotFoundError
            If no server has the model, or the model cannot be loaded.
        """

    @abstractmethod
    def index(self) -> list[ModelEntry]:
        """Ask which models there are."""

    @abstractmethod
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

    @abstractmethod
    def close(self) -> None:
        """Cancel what is in flight, and close. May be called again."""

    def ready(self) -> bool:
        """Return whether the server is ready; False also if it does not respond."""
        return True

    def info(self) -> ServerMetadata:
        """Ask for the server's name, version and extensions; by default, those of this process."""
        return ServerMetadata("in-process", __version__, ())

    def labels(self, contract: Contract) -> dict[str, list[str]]:
        """Ask for the labels of outputs."""
        del contract
        return {}

    def load(self, model: str) -> None:
        """Ask the server to load a model that it lacks."""
        del model

    def digest(self, model: str, version: str) -> str:
        """Ask for a version's digest; empty if the server has none."""
        return self.metadata(model, version).digest

    def statistics(self, model: str, version: str | None) -> ModelStatistics:
        """Ask for the server's counts for a model, of all versions or one."""
        del version
        raise ServerError("the server counts no requests", server=str(self.address), model=model)

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
