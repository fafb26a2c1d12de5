"""What a fake server answers to each method of KServe v2 and of Triton's extensions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import compare_digest
from typing import TYPE_CHECKING, Any

import grpc
import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea._version import __version__
from sonic_coffea.transport import DATATYPES, STRINGS, from_wire, kserve_name, to_wire

if TYPE_CHECKING:
    from sonic_coffea.testing._model import FakeModel

EXTENSIONS = ("model_configuration", "statistics", "model_repository")

Fault = Callable[[Any, Any], None]
"""Changes a ``ModelInferResponse``, or ends the request through gRPC's context."""


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


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, server: Any) -> None:
        self._server = server
        self._counting = threading.Lock()

    def ServerLive(self, request: Any, context: Any) -> Any:
        self._enter("ServerLive", context)
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:
        self._enter("ServerReady", context)
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:
        self._enter("ModelReady", context)
        ready = self._server.serving(request.name, request.version) is not None
        return service_pb2.ModelReadyResponse(ready=ready)

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        self._enter("ServerMetadata", context)
        return service_pb2.ServerMetadataResponse(
            name="fake", version=__version__, extensions=self._server.extensions
        )

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        self._enter("ModelMetadata", context)
        model = self._model(request.name, request.version, context)
        answer = service_pb2.ModelMetadataResponse(
            name=request.name, versions=model.versions, platform="fake"
        )
        listed = (model.inputs, answer.inputs), (model.outputs, answer.outputs)
        for tensors, specs in listed if model.lists_tensors else ():
            for name, (datatype, shape) in model.described(tensors).items():
                specs.add(name=name, datatype=datatype, shape=shape)
        return answer

    def ModelConfig(self, request: Any, context: Any) -> Any:
        self._enter("ModelConfig", context, "model_configuration")
        model = self._model(request.name, request.version, context)
        answer = service_pb2.ModelConfigResponse()
        answer.config.name = request.name
        answer.config.max_batch_size = model.max_rows
        for version in model.versions if model.digest else ():
            answer.config.parameters[f"sha256.{version}"].string_value = model.digest
        return answer

    def ModelStatistics(self, request: Any, context: Any) -> Any:
        self._enter("ModelStatistics", context, "statistics")
        model = self._model(request.name, request.version, context)
        counts = self._server.statistics
        requests = counts[request.name, "requests"]
        answer = service_pb2.ModelStatisticsResponse()
        statistics = answer.model_stats.add(name=request.name, version=model.versions[-1])
        statistics.inference_count = counts[request.name, "rows"]
        statistics.execution_count = statistics.inference_stats.success.count = requests
        return answer

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        self._enter("RepositoryIndex", context, "model_repository")
        answer = service_pb2.RepositoryIndexResponse()
        for name, model in self._server.models.items():
            ready = self._server.serving(name, "") is not None
            for version in model.versions:
                state = "READY" if ready else "UNAVAILABLE"
                answer.models.add(name=name, version=version, state=state)
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:
        server = self._server
        self._enter("ModelInfer", context)
        model = self._model(request.model_name, request.model_version, context)
        inputs = self._inputs(request, model, context)
        received = Received(request.model_name, request.model_version, request.id, inputs)
        fault = server.receive(received)
        answer = self._answer(request, model, inputs, context)
        if fault is not None:
            fault(answer, context)
        with self._counting:
            server.statistics[request.model_name, "requests"] += 1
            server.statistics[request.model_name, "rows"] += received.rows
        return _typed(answer) if server.typed_contents else answer

    def _enter(self, method: str, context: Any, extension: str | None = None) -> None:
        headers = {key: value for key, value in context.invocation_metadata()}  # noqa: C416
        self._server.enter(method, headers, context)
        demanded = self._server.headers.items()
        if not all(compare_digest(headers.get(name, ""), value) for name, value in demanded):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "a header is missing or wrong")
        if extension is not None and extension not in self._server.extensions:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented")

    def _model(self, name: str, version: str, context: Any) -> FakeModel:
        model: FakeModel | None = self._server.serving(name, version)
        if model is None:
            requested = f"'{name}' version {version}" if version else f"'{name}'"
            message = f"Request for unknown model: {requested} is not found"
            context.abort(grpc.StatusCode.NOT_FOUND, message)
            raise AssertionError  # abort does not return
        return model

    def _inputs(self, request: Any, model: FakeModel, context: Any) -> dict[str, NDArray[Any]]:
        """Return the tensors of a request, which must be what the model takes."""
        inputs: dict[str, NDArray[Any]] = {}
        for spec, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            dtype = np.dtype(DATATYPES[spec.datatype])
            inputs[spec.name] = from_wire(raw, dtype, tuple(spec.shape))
        for name, (datatype, shape) in model.described(model.inputs).items():
            array = inputs.get(name)
            fits = (
                array is not None
                and (kserve_name(array.dtype), array.ndim) == (datatype, len(shape))
                and all(n in (-1, m) for n, m in zip(shape, array.shape, strict=True))
            )
            if not fits:
                got = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
                message = f"unexpected input '{name}': expected {datatype} {list(shape)}, got {got}"
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        rows = len(next(iter(inputs.values())))
        if model.max_rows and rows > model.max_rows:
            message = f"batch size {rows} is larger than max_batch_size {model.max_rows}"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        return inputs

    def _answer(
        self, request: Any, model: FakeModel, inputs: Mapping[str, NDArray[Any]], context: Any
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
            tensor = tensor.astype(STRINGS) if tensor.dtype.kind in "SU" else tensor
            answer.outputs.add(name=name, datatype=kserve_name(tensor.dtype), shape=tensor.shape)
            answer.raw_output_contents.append(to_wire(tensor).tobytes())
        return answer


def _typed(answer: Any) -> Any:
    """Put the numbers into the message one by one, in place of their bytes."""
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        numbers = from_wire(raw, np.dtype(DATATYPES[output.datatype]), (-1,))
        kind = output.datatype.lower()
        if not hasattr(output.contents, f"{kind}_contents"):  # short integers share a field
            kind = kind.rstrip("0123456789")
        getattr(output.contents, f"{kind}_contents").extend(numbers.tolist())
    del answer.raw_output_contents[:]
    return answer
