"""What a server answers: KServe v2's methods, with gRPC's own names."""

from __future__ import annotations

from dataclasses import dataclass
from secrets import compare_digest
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea._version import __version__
from sonic_coffea.transport import DATATYPES, TYPED_CONTENTS, kserve_name

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from sonic_coffea.server.in_process._model import KServeModel

EXTENSIONS = ("model_configuration", "statistics", "model_repository")


@dataclass(frozen=True, slots=True)
class Received:
    """An inference request that arrived."""

    model: str
    version: str
    id: str
    inputs: Mapping[str, NDArray[Any]]

    @property
    def rows(self) -> int:
        """Rows of its first input."""
        return len(next(iter(self.inputs.values())))


class Host(Protocol):
    """The server on whose behalf a `Servicer` answers; its hooks are `KServeServer`'s."""

    name: str
    models: dict[str, KServeModel]
    headers: dict[str, str]
    extensions: tuple[str, ...]
    typed_contents: bool
    statistics: Counter[tuple[str, str]]

    def serving(self, model: str, version: str, /) -> KServeModel | None:
        """Return a model, if it is there in a version."""

    def count(self, request: Received, /) -> None:
        """Count a request that was answered."""

    def enter(self, method: str, headers: Mapping[str, str], context: Any, /) -> None:
        """Take notice of a call, which gRPC's context can end."""

    def receive(self, request: Received, /) -> Callable[[Any, Any], None] | None:
        """Take notice of an inference request; return what is to be done to its answer."""


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """What the server answers."""

    def __init__(self, server: Host) -> None:
        self._server = server

    def ServerLive(self, request: Any, context: Any) -> Any:
        """Say that it lives."""
        self._enter("ServerLive", context)
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:
        """Say that it is ready."""
        self._enter("ServerReady", context)
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:
        """Say whether a model is there."""
        self._enter("ModelReady", context)
        ready = self._server.serving(request.name, request.version) is not None
        return service_pb2.ModelReadyResponse(ready=ready)

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Say what it is."""
        self._enter("ServerMetadata", context)
        return service_pb2.ServerMetadataResponse(
            name=self._server.name, version=__version__, extensions=self._server.extensions
        )

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Describe a model."""
        self._enter("ModelMetadata", context)
        model = self._model(request.name, request.version, context)
        answer = service_pb2.ModelMetadataResponse(
            name=request.name, versions=model.versions, platform=self._server.name
        )
        for tensors, specs in ((model.inputs, answer.inputs), (model.outputs, answer.outputs)):
            for name, (datatype, shape) in model.described(tensors).items():
                specs.add(name=name, datatype=datatype, shape=shape)
        return answer

    def ModelConfig(self, request: Any, context: Any) -> Any:
        """Say how a model is served."""
        self._enter("ModelConfig", context, "model_configuration")
        model = self._model(request.name, request.version, context)
        answer = service_pb2.ModelConfigResponse()
        answer.config.name = request.name
        answer.config.max_batch_size = model.max_rows
        for version in model.versions if model.digest else ():
            answer.config.parameters[f"sha256.{version}"].string_value = model.digest
        return answer

    def ModelStatistics(self, request: Any, context: Any) -> Any:
        """Count."""
        self._enter("ModelStatistics", context, "statistics")
        model = self._model(request.name, request.version, context)
        counts = self._server.statistics
        requests = counts[request.name, "requests"]
        answer = service_pb2.ModelStatisticsResponse()
        statistics = answer.model_stats.add(
            name=request.name,
            version=model.versions[-1],
            inference_count=counts[request.name, "rows"],
            execution_count=requests,
        )
        statistics.inference_stats.success.count = requests
        return answer

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """List the models."""
        self._enter("RepositoryIndex", context, "model_repository")
        answer = service_pb2.RepositoryIndexResponse()
        for name, model in self._server.models.items():
            ready = self._server.serving(name, "") is not None
            for version in model.versions:
                state = "READY" if ready else "UNAVAILABLE"
                answer.models.add(name=name, version=version, state=state)
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:
        """Answer."""
        server = self._server
        self._enter("ModelInfer", context)
        model = self._model(request.model_name, request.model_version, context)
        inputs = self._inputs(request, model, context)
        received = Received(request.model_name, request.model_version, request.id, inputs)
        fault = server.receive(received)
        answer = self._answer(request, model, inputs, context)
        if fault is not None:
            fault(answer, context)
        server.count(received)
        return _typed(answer) if server.typed_contents else answer

    def _enter(self, method: str, context: Any, extension: str | None = None) -> None:
        headers = {key: value for key, value in context.invocation_metadata()}  # noqa: C416
        self._server.enter(method, headers, context)
        demanded = self._server.headers.items()
        if not all(compare_digest(headers.get(name, ""), value) for name, value in demanded):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "a header is missing or wrong")
        if extension is not None and extension not in self._server.extensions:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented")

    def _model(self, name: str, version: str, context: Any) -> KServeModel:
        model = self._server.serving(name, version)
        if model is None:
            requested = f"'{name}' version {version}" if version else f"'{name}'"
            message = f"Request for unknown model: {requested} is not found"
            context.abort(grpc.StatusCode.NOT_FOUND, message)
            raise AssertionError  # abort does not return
        return model

    def _inputs(self, request: Any, model: KServeModel, context: Any) -> dict[str, NDArray[Any]]:
        """Return the tensors of a request, which must be what the model takes."""
        inputs: dict[str, NDArray[Any]] = {}
        for spec, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            tensor = np.frombuffer(raw, np.dtype(DATATYPES[spec.datatype]))
            inputs[spec.name] = tensor.reshape(tuple(spec.shape))
        expected = model.described(model.inputs)
        for name, (datatype, shape) in expected.items():
            array = inputs.get(name)
            if array is None or not _fits(array, datatype, shape):
                got = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
                message = f"unexpected input '{name}': expected {datatype} {list(shape)}, got {got}"
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        rows = len(next(iter(inputs.values())))
        if model.max_rows and rows > model.max_rows:
            message = f"batch size {rows} is larger than max_batch_size {model.max_rows}"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        return inputs

    def _answer(
        self, request: Any, model: KServeModel, inputs: Mapping[str, NDArray[Any]], context: Any
    ) -> Any:
        try:
            outputs = model.function(inputs)
        except Exception as error:
            context.abort(grpc.StatusCode.INTERNAL, f"the model failed: {error!r}")
            raise AssertionError from error  # abort does not return
        answer = service_pb2.ModelInferResponse(
            model_name=request.model_name,
            model_version=request.model_version or model.versions[-1],
            id=request.id,
        )
        for name in [output.name for output in request.outputs] or list(outputs):
            tensor = np.ascontiguousarray(outputs[name])
            answer.outputs.add(name=name, datatype=kserve_name(tensor.dtype), shape=tensor.shape)
            answer.raw_output_contents.append(tensor.tobytes())
        return answer


def _fits(tensor: NDArray[Any], datatype: str, shape: tuple[int, ...]) -> bool:
    same = len(shape) == tensor.ndim and kserve_name(tensor.dtype) == datatype
    return same and all(n < 0 or n == have for n, have in zip(shape, tensor.shape, strict=True))


def _typed(answer: Any) -> Any:
    """Put the numbers into the message one by one, in place of their bytes."""
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        numbers = np.frombuffer(raw, np.dtype(DATATYPES[output.datatype]))
        getattr(output.contents, TYPED_CONTENTS[output.datatype]).extend(numbers.tolist())
    del answer.raw_output_contents[:]
    return answer
