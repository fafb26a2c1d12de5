"""What a server says of itself and of its models: metadata, index, configuration, labels."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2

from sonic_coffea.errors import (
    AccessError,
    InferenceError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadError,
    RequestError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
    nearest,
)
from sonic_coffea.transport._contract import Contract, TensorSpec
from sonic_coffea.transport._link import NO_MESSAGE, Link
from sonic_coffea.transport._metadata import ModelEntry, ModelStatistics, ServerMetadata
from sonic_coffea.transport._tensors import classes_of, describe, with_contents

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

# States in the index of a version that a server serves, or will serve again.
_TRANSIENT = ("READY", "LOADING", "UNLOADING")
_UNLOADED = "unloaded"

_TRIES = 3
# Calls to servers behind a balancer before a model counts as missing.
_SERVERS = 5


class ModelQueries(Link):
    """Asks a server about itself and its models."""

    def info(self) -> ServerMetadata:
        """Ask the server for its metadata. Blocks for up to ``metadata_timeout_s``."""
        metadata = self._call("ServerMetadata", service_pb2.ServerMetadataRequest())
        return ServerMetadata(
            name=metadata.name, version=metadata.version, extensions=tuple(metadata.extensions)
        )

    def models(self) -> list[ModelEntry]:
        """Ask for the repository index. Blocks for up to ``metadata_timeout_s``."""
        try:
            index = self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        except ServerLostError as error:
            if not error.message.endswith((grpc.StatusCode.CANCELLED.name, NO_MESSAGE)):
                raise
            # The admission of SuperSONIC's proxy, which has no other way of saying so.
            raise OverloadError(
                "the server admits no new clients at the moment, as SuperSONIC does while it is "
                "saturated; it still answers inference requests",
                server=str(self.address),
            ) from None
        return [
            ModelEntry(
                name=m.name,
                version=m.version,
                # MLServer says "State.READY".
                state=m.state.rpartition(".")[2],
                reason=m.reason,
            )
            for m in index.models
        ]

    def contract(self, model: str, version: str | None) -> Contract:
        """Ask for inputs, outputs and limits. Blocks for a few times ``metadata_timeout_s``.

        Raises
        ------
        ModelNotReadyError
            If a server has the model, or is loading or replacing it.
        ModelNotFoundError
            If no server has the model, or the model cannot be loaded.
        """
        for left in reversed(range(_TRIES)):
            metadata = self._metadata(model, version)
            newest = version or newest_of(metadata.versions)
            try:
                config = self._config(model, newest or None)
            except ModelNotFoundError:
                if left:
                    continue
                raise
            if agree(metadata, config):
                return contract_of(model, newest, metadata, config)
        # A balancer has asked two servers, of which one has been updated.
        raise ModelNotReadyError(
            "its metadata and its configuration do not fit; is it being replaced?",
            server=str(self.address),
            model=model,
            version=version,
        )

    def _metadata(self, model: str, version: str | None) -> Any:
        """Return the model's metadata."""
        request = service_pb2.ModelMetadataRequest(name=model, version=version or "")
        # Another server behind a balancer may have it.
        for _ in range(_SERVERS):
            try:
                return self._call("ModelMetadata", request, model=model, version=version)
            except ModelNotFoundError as error:
                missing = error
        try:
            index = self.models()
        except SonicError:
            raise missing from None
        raise not_found(model, version, index, server=str(self.address))

    def _config(self, model: str, version: str | None) -> Any:
        """Return the model's configuration; an empty one from a server that has none."""
        request = service_pb2.ModelConfigRequest(name=model, version=version or "")
        for left in reversed(range(_TRIES)):
            try:
                return self._call("ModelConfig", request, model=model).config
            except (InferenceError, ModelNotFoundError, ServerLostError) as error:
                # A balancer may lead this call to another server than the one before, which is
                # dead, or does not have the model.
                if not left and not isinstance(error, InferenceError):
                    raise
                failure: SonicError = error
            except (AccessError, RequestError) as error:
                if isinstance(error, TokenExpiredError):
                    raise
                failure = error
                break
        # Any other failure means nothing: there may be a configuration, with a batch size.
        logger.info("%s gives no configuration of %r: %s", self.address, model, failure)
        return model_config_pb2.ModelConfig()

    def digest(self, model: str, version: str) -> str:
        """Ask for a version's digest; empty if the server tells none.

        Blocks for up to ``metadata_timeout_s``.
        """
        request = service_pb2.ModelConfigRequest(name=model, version=version)
        response = self._call("ModelConfig", request, model=model, version=version or None)
        return _digest(response.config, version)

    def labels(self, contract: Contract, version: str | None) -> dict[str, list[str]]:
        """Ask for the labels of outputs whose configuration names a file of them.

        No call returns them, but Triton sends them with the classes of a response: so a request of
        one row of zeros is made. Blocks for up to ``metadata_timeout_s`` a call.
        """
        config = self._config(contract.model, version or contract.version)
        labelled = [output for output in config.output if output.label_filename]
        if not labelled:
            return {}
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=version or "", id="labels"
        )
        names = [output.name for output in labelled]
        inputs = describe(request, contract.zeros(1), names)
        for output, tensor in zip(labelled, request.outputs, strict=True):
            classes = max(1, math.prod(output.dims))
            tensor.parameters["classification"].int64_param = classes
        message = with_contents(request, inputs.values())
        response = self._call("ModelInfer", message, model=contract.model)
        return {
            output.name: classes_of(contents)
            for output, contents in zip(response.outputs, response.raw_output_contents, strict=True)
        }

    def statistics(self, model: str, version: str | None) -> ModelStatistics:
        """Ask for statistics, of all versions or one. Blocks for up to ``metadata_timeout_s``."""
        request = service_pb2.ModelStatisticsRequest(name=model, version=version or "")
        response = self._call("ModelStatistics", request, model=model, version=version)
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


def newest_of(versions: Sequence[str]) -> str:
    """Return the newest of some versions; an empty string if there are none."""
    return max(versions, key=lambda v: (int(v) if v.isdigit() else -1, v), default="")


def agree(metadata: Any, config: Any) -> bool:
    """Whether metadata and configuration are of the same model."""
    rows = [-1] if config.max_batch_size > 0 else []

    def datatype(kind: int) -> str:
        name: str = model_config_pb2.DataType.Name(kind)
        return "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")

    return all(
        {t.name: (t.datatype, list(t.shape)) for t in listed}
        == {t.name: (datatype(t.data_type), rows + list(t.dims)) for t in configured}
        for listed, configured in (
            (metadata.inputs, config.input),
            (metadata.outputs, config.output),
        )
        if configured
    )


def contract_of(model: str, version: str, metadata: Any, config: Any) -> Contract:
    """Return the contract in a ModelMetadataResponse and a ModelConfig, which may be empty."""
    batches = config.max_batch_size > 0
    free = all(t.shape and t.shape[0] < 0 for t in metadata.inputs)
    unlimited = None if free else 1
    return Contract(
        model=model,
        version=version,
        inputs=tuple(_tensor_spec(t) for t in metadata.inputs),
        outputs=tuple(_tensor_spec(t) for t in metadata.outputs),
        max_rows=config.max_batch_size if batches else unlimited,
        preferred_rows=tuple(config.dynamic_batching.preferred_batch_size),
        digest=_digest(config, version),
        features=_features(config.parameters[f"features.{version}"].string_value),
        unsupported=_unsupported(config),
        stacks=batches,
    )


def _digest(config: Any, version: str) -> str:
    return str(config.parameters[f"sha256.{version}"].string_value)


def _features(listed: str) -> tuple[str, ...]:
    """Return the names in a parameter of a configuration, which anybody may have written."""
    with contextlib.suppress(ValueError, TypeError):
        return tuple(map(str, json.loads(listed or "[]")))
    return ()


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


def not_found(
    model: str, version: str | None, index: Sequence[ModelEntry], *, server: str
) -> ModelNotFoundError:
    """Return the error for a model that a server does not have, with what it has instead."""
    entries = [entry for entry in index if entry.name == model]
    matching = [entry for entry in entries if version in (None, entry.version)]
    kind = ModelNotFoundError
    if not entries:
        hint = nearest(model, {entry.name for entry in index})
    elif any(entry.state in _TRANSIENT or entry.reason == _UNLOADED for entry in matching):
        kind = ModelNotReadyError
        hint = "it is listed, so another server has it, or it is being loaded or replaced"
    elif version is not None and not matching:
        versions = sorted({entry.version for entry in entries if entry.state == "READY"})
        hint = f"it has version {', '.join(versions) or '(none)'}"
    else:
        reasons = {entry.reason for entry in matching if entry.reason}
        hint = f"it is there but not ready: {'; '.join(sorted(reasons)) or 'no reason given'}"
    wanted = f"model {model!r}" + (f" version {version}" if version else "")
    message = f"the server does not have {wanted}; {hint}"
    return kind(message, server=server, model=model, version=version)
