"""What a server says of itself and of its models: metadata, index, configuration, labels."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2

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
)
from sonic_coffea.transport._contents import classes_of, describe
from sonic_coffea.transport._link import NO_MESSAGE
from sonic_coffea.transport._metadata import (
    ModelEntry,
    ServerInfo,
    agree,
    contract_of,
    newest_of,
    not_found,
    statistics_of,
)

if TYPE_CHECKING:
    from sonic_coffea.transport._contract import Contract
    from sonic_coffea.transport._link import Link
    from sonic_coffea.transport._metadata import ModelStatistics

logger = logging.getLogger(__name__)

_TRIES = 3
# Servers behind a balancer that are asked for a model before the model counts as missing.
_SERVERS = 5


class ModelQueries:
    """Asks a server about itself and its models, on the link of a connection."""

    _link: Link

    def info(self) -> ServerInfo:
        """Ask the server for its metadata. Blocks for up to ``metadata_s``."""
        metadata = self._link.call("ServerMetadata", service_pb2.ServerMetadataRequest())
        return ServerInfo(
            name=metadata.name, version=metadata.version, extensions=tuple(metadata.extensions)
        )

    def models(self) -> list[ModelEntry]:
        """Ask for the repository index. Blocks for up to ``metadata_s``."""
        try:
            index = self._link.call("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        except ServerLostError as error:
            if not error.message.endswith((grpc.StatusCode.CANCELLED.name, NO_MESSAGE)):
                raise
            # The admission of SuperSONIC's proxy, which has no other way of saying so.
            raise OverloadError(
                "the server admits no new clients at the moment, as SuperSONIC does while it is "
                "saturated; it still answers inference requests",
                server=str(self._link.address),
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
        """Ask for a model's inputs, outputs and limits. Blocks for a few times ``metadata_s``.

        Raises
        ------
        ModelNotReadyError
            If a server has it, or is to have it soon.
        ModelNotFoundError
            If it has to be made, or mended, first.
        """
        tries = 0
        while True:
            tries += 1
            metadata = self._metadata(model, version)
            newest = version or newest_of(metadata.versions)
            try:
                config = self._config(model, newest or None)
            except ModelNotFoundError:
                if tries < _TRIES:
                    continue
                raise
            if config is None or agree(metadata, config):
                return contract_of(model, newest, metadata, config)
            # A balancer has asked two servers, of which one has been updated.
            if tries == _TRIES:
                message = "its metadata and its configuration do not fit; is it being replaced?"
                raise ModelNotReadyError(
                    message, server=str(self._link.address), model=model, version=version
                )

    def _metadata(self, model: str, version: str | None) -> Any:
        """Return the model's metadata."""
        request = service_pb2.ModelMetadataRequest(name=model, version=version or "")
        tries = 0
        while True:
            tries += 1
            try:
                return self._link.call("ModelMetadata", request, model=model, version=version)
            except ModelNotFoundError as error:
                # Another server behind a balancer may have it.
                if tries < _SERVERS:
                    continue
                try:
                    index = self.models()
                except SonicError:
                    raise error from None
                raise not_found(model, version, index, server=str(self._link.address)) from None

    def _config(self, model: str, version: str | None) -> Any:
        """Return the model's configuration, or None from a server that has none."""
        request = service_pb2.ModelConfigRequest(name=model, version=version or "")
        tries = 0
        while True:
            tries += 1
            try:
                return self._link.call("ModelConfig", request, model=model).config
            except (InferenceError, ModelNotFoundError, ServerLostError) as error:
                # A balancer may lead this call to another server than the one before, which is
                # dead, or does not have the model.
                if tries < _TRIES:
                    continue
                if not isinstance(error, InferenceError):
                    raise
                failure: SonicError = error
            except (AccessError, RequestError) as error:
                if isinstance(error, TokenExpiredError):
                    raise
                failure = error
            # Of any other failure, nothing follows: there may be one, with the size of its batches.
            logger.info("%s gives no configuration of %r: %s", self._link.address, model, failure)
            return None

    def labels(self, contract: Contract, version: str | None) -> dict[str, list[str]]:
        """Ask for the labels of outputs whose configuration names a file of them.

        No call returns them, but Triton sends them with the classes of a response: so a request of
        one row of zeros is made. Blocks for up to ``metadata_s`` a call.
        """
        config = self._config(contract.model, version or contract.version)
        named = (
            {} if config is None else {o.name: o.dims for o in config.output if o.label_filename}
        )
        if not named:
            return {}
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=version or "", id="labels"
        )
        inputs = contract.zeros(1)
        describe(request, inputs, ())
        request.raw_input_contents.extend(t.tobytes() for t in inputs.values())
        for name, dims in named.items():
            output = request.outputs.add(name=name)
            output.parameters["classification"].int64_param = max(1, math.prod(dims))
        response = self._link.call("ModelInfer", request, model=contract.model)
        return {
            output.name: classes_of(contents)
            for output, contents in zip(response.outputs, response.raw_output_contents, strict=True)
        }

    def statistics(self, model: str, version: str | None) -> ModelStatistics:
        """Ask for a model's statistics. Blocks for up to ``metadata_s``."""
        request = service_pb2.ModelStatisticsRequest(name=model, version=version or "")
        return statistics_of(
            self._link.call("ModelStatistics", request, model=model, version=version)
        )
