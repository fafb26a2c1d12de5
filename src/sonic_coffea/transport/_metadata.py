"""Metadata of servers and models, read from their responses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One line of a server's repository index."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetadata:
    """Name, version and protocol extensions of a server, and its models, if they were asked for."""

    name: str
    version: str
    extensions: tuple[str, ...]
    models: tuple[ModelEntry, ...] = ()


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

    @property
    def work_s(self) -> float:
        """Time of the model's executions, with what goes in and out."""
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
