"""Metadata of servers and models, read from their responses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ModelNotFoundError, ModelNotReadyError, nearest
from sonic_coffea.transport._contract import Contract, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

# What the index says of a version that a server has, or will have again.
_PASSING = ("READY", "LOADING", "UNLOADING")
_UNLOADED = "unloaded"


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


def newest_of(versions: Sequence[str]) -> str:
    """Return the newest of some versions; an empty string if there are none."""
    return max(versions, key=_numeric, default="")


def agree(metadata: Any, config: Any) -> bool:
    """Whether metadata and configuration are of the same model."""
    from tritonclient.grpc import model_config_pb2

    rows = [-1] if config.max_batch_size > 0 else []
    kinds = model_config_pb2.DataType.Name
    return all(
        {t.name: (t.datatype, list(t.shape)) for t in said}
        == {t.name: (_kserve(kinds(t.data_type)), rows + list(t.dims)) for t in configured}
        for said, configured in ((metadata.inputs, config.input), (metadata.outputs, config.output))
        if configured
    )


def _kserve(kind: str) -> str:
    return "BYTES" if kind == "TYPE_STRING" else kind.removeprefix("TYPE_")


def contract_of(model: str, version: str, metadata: Any, config: Any) -> Contract:
    """Return a model's contract.

    Parameters
    ----------
    model, version : str
        What was asked for, or the newest version.
    metadata : ModelMetadataResponse
        Its inputs, outputs and versions.
    config : ModelConfig or None
        Its configuration; None from a server that has none.
    """
    free = all(t.shape and t.shape[0] < 0 for t in metadata.inputs)
    max_rows = None if free else 1
    digest, preferred_rows, unsupported = "", (), ""
    if config is not None:
        unsupported = _unsupported(config)
        max_rows = config.max_batch_size if config.max_batch_size > 0 else max_rows
        digest = config.parameters[f"sha256.{version}"].string_value
        preferred_rows = tuple(config.dynamic_batching.preferred_batch_size)
    return Contract(
        model=model,
        version=version,
        digest=digest,
        inputs=tuple(_tensor_spec(t) for t in metadata.inputs),
        outputs=tuple(_tensor_spec(t) for t in metadata.outputs),
        max_rows=max_rows,
        preferred_rows=preferred_rows,
        platform=metadata.platform,
        stacks=config is not None and config.max_batch_size > 0,
        unsupported=unsupported,
    )


def _unsupported(config: Any) -> str:
    """Return why a model cannot score rows; an empty string if it can."""
    if config.model_transaction_policy.decoupled:
        return (
            "the model is decoupled: it gives any number of responses to a request, and a row has "
            "one; serve it without model_transaction_policy { decoupled: true }"
        )
    if config.WhichOneof("scheduling_choice") == "sequence_batching":
        return (
            "the model has a sequence batcher: its requests belong together by a correlation id, "
            "and rows are scored each by itself, in any order and on any server; serve it with "
            "dynamic_batching"
        )
    return ""


def _tensor_spec(tensor: Any) -> TensorSpec:
    shape = tuple(int(n) for n in tensor.shape)
    rows = shape[0] if shape else -1
    return TensorSpec(name=tensor.name, datatype=tensor.datatype, shape=shape[1:], rows=rows)


def _numeric(version: str) -> tuple[int, str]:
    return (int(version), version) if version.isdigit() else (-1, version)


def statistics_of(response: Any) -> ModelStatistics:
    """Return the sum over the versions in a ModelStatisticsResponse."""
    total = ModelStatistics()
    for stats in response.model_stats:
        inference = stats.inference_stats
        total += ModelStatistics(
            rows=stats.inference_count,
            executions=stats.execution_count,
            requests=inference.success.count,
            failures=inference.fail.count,
            queue_s=inference.queue.ns * 1e-9,
            input_s=inference.compute_input.ns * 1e-9,
            compute_s=inference.compute_infer.ns * 1e-9,
            output_s=inference.compute_output.ns * 1e-9,
        )
    return total


def not_found(
    model: str, version: str | None, index: Sequence[ModelEntry], *, server: str
) -> ModelNotFoundError:
    """Return the error for a model that a server does not have, with what it has instead."""
    entries = [entry for entry in index if entry.name == model]
    matching = [entry for entry in entries if version in (None, entry.version)]
    kind = ModelNotFoundError
    if not entries:
        hint = nearest(model, {entry.name for entry in index})
    elif any(entry.state in _PASSING or entry.reason == _UNLOADED for entry in matching):
        kind = ModelNotReadyError
        hint = "it is listed, so another server has it, or it is being loaded or replaced"
    elif version is not None and not matching:
        versions = sorted({entry.version for entry in entries if entry.state == "READY"})
        hint = f"it has version {', '.join(versions) or '(none)'}"
    else:
        reasons = {entry.reason for entry in matching if entry.reason}
        hint = f"it is there but not ready: {'; '.join(sorted(reasons)) or 'no reason given'}"
    asked = f"model {model!r}" + (f" version {version}" if version else "")
    message = f"the server does not have {asked}; {hint}"
    return kind(message, server=server, model=model, version=version)
