"""A KServe-v2 gRPC server in this process, over a real socket."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import compare_digest
from typing import TYPE_CHECKING, Any

import grpc
import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea._version import __version__
from sonic_coffea.errors import ConfigError, ServerStartError, nearest
from sonic_coffea.transport import DATATYPES, STRINGS, from_wire, kserve_name, to_wire

if TYPE_CHECKING:
    from typing import Self

# A server that was killed a moment ago may still have its port.
_PORT_WITHIN_S = 2.0

EXTENSIONS = ("model_configuration", "statistics", "model_repository")

Tensors = Mapping[str, NDArray[Any]]
Function = Callable[[Tensors], Tensors]
Fault = Callable[[Any, Any], None]
"""Changes a ``ModelInferResponse``, or ends the request through gRPC's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KServeModel:
    """A model of a `KServeServer`.

    Parameters
    ----------
    inputs, outputs : mapping
        Names, each with the dtype and the shape of one row; -1 is any length. Strings have the
        dtype object, and each string is of type bytes.
    function : callable
        Makes the outputs from the inputs, both mappings of name to array, rows first. Its
        exceptions become errors of the model.
    max_rows : int
        Greatest number of rows of a request; 0 for a model without batching, whose shapes have all
        axes.
    versions : tuple of str
        Versions of the model; a request without a version gets the last.
    digest : str
        Checksum of the model's file, if there is one.
    lists_tensors : bool
        Whether the metadata lists inputs and outputs; some runtimes of other servers do not.
    """

    inputs: Mapping[str, tuple[Any, tuple[int, ...]]]
    outputs: Mapping[str, tuple[Any, tuple[int, ...]]]
    function: Function
    max_rows: int = 64
    versions: tuple[str, ...] = ("1",)
    digest: str = ""
    lists_tensors: bool = True

    def described(self, tensors: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return KServe's datatype and the shape of some tensors, as a server says them."""
        rows = (-1,) if self.max_rows else ()
        return {
            name: (kserve_name(np.dtype(dtype)), (*rows, *shape))
            for name, (dtype, shape) in tensors.items()
        }


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
    def __init__(self, server: KServeServer) -> None:
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
            name=self._server.name, version=__version__, extensions=self._server.extensions
        )

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        self._enter("ModelMetadata", context)
        model = self._model(request.name, request.version, context)
        answer = service_pb2.ModelMetadataResponse(
            name=request.name, versions=model.versions, platform=self._server.name
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
            tensor = tensor.astype(STRINGS) if tensor.dtype.kind in "SU" else tensor
            answer.outputs.add(name=name, datatype=kserve_name(tensor.dtype), shape=tensor.shape)
            answer.raw_output_contents.append(to_wire(tensor).tobytes())
        return answer


class KServeServer:
    """A server that speaks KServe v2 over gRPC, in this process, for Python functions.

    `start`, or a ``with`` block, makes it listen on a free loopback port.

    Parameters
    ----------
    models : mapping of str to KServeModel
        Names of models, each with its model.
    name : str
        Name of the server in its metadata.
    headers : mapping, optional
        Headers that every call must have; other calls are refused.
    extensions : sequence of str
        Triton's extensions that the server implements; a minimal server has none.
    typed_contents : bool
        Whether responses hold typed numbers instead of raw bytes, as some servers do.
    threads : int
        Greatest number of requests that run at the same time.
    port : int, optional
        Port; by default, a free one.

    Attributes
    ----------
    statistics : Counter
        Numbers of answered ``"rows"`` and ``"requests"``, by model.
    """

    def __init__(
        self,
        models: Mapping[str, KServeModel],
        *,
        name: str = "sonic-coffea",
        headers: Mapping[str, str] | None = None,
        extensions: Sequence[str] = EXTENSIONS,
        typed_contents: bool = False,
        threads: int = 32,
        port: int | None = None,
    ) -> None:
        unknown = [name for name in extensions if name not in EXTENSIONS]
        if unknown:
            raise ConfigError(f"no extension {unknown[0]!r}; {nearest(unknown[0], EXTENSIONS)}")
        self.models = dict(models)
        self.name = name
        self.headers = {key.lower(): value for key, value in (headers or {}).items()}
        self.extensions = tuple(extensions)
        self.typed_contents = typed_contents
        self.statistics: Counter[tuple[str, str]] = Counter()
        self._threads = threads
        self._port = port or 0
        self._server: Any = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        if not self._port:
            raise ConfigError("the server has not been started")
        return f"grpc://127.0.0.1:{self._port}"

    def start(self) -> Self:
        """Listen; at the same port as before, if it was stopped.

        Raises
        ------
        sonic_coffea.errors.ServerStartError
            If another program has the port.
        """
        if self._server is None:
            options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
            server = grpc.server(ThreadPoolExecutor(self._threads), options=options)
            service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(self), server)
            self._listen(server)
            server.start()
            self._server = server
        return self

    def _listen(self, server: Any) -> None:
        until = time.monotonic() + _PORT_WITHIN_S
        while True:
            try:
                self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
            except RuntimeError:
                if time.monotonic() > until:
                    raise ServerStartError(
                        f"port {self._port} is in use; leave port out for a free one"
                    ) from None
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Break all connections, and stop listening. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(grace=None).wait()

    def serving(self, model: str, version: str) -> KServeModel | None:
        """Return a model, if it is there in a version."""
        served = self.models.get(model)
        return served if served is not None and version in ("", *served.versions) else None

    def enter(self, method: str, headers: Mapping[str, str], context: Any) -> None:
        """Notice a call, which gRPC's context can end; a hook of servers for tests."""

    def receive(self, request: Received) -> Fault | None:
        """Notice a request; return the fault of its response, if it has one."""


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
