"""A KServe-v2 gRPC server for tests, with faults on demand."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, NoReturn

import grpc
import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea._version import __version__
from sonic_coffea.errors import ConfigError, ServerStartError, expect, require
from sonic_coffea.testing._model import FakeModel
from sonic_coffea.transport import DATATYPES, STRINGS, from_wire, kserve_name, to_wire

# The methods of KServe v2 and of Triton's extensions, as gRPC calls them.
_METHODS = [m for m in vars(service_pb2_grpc.GRPCInferenceServiceServicer) if m[0] != "_"]
# Those of extensions that the server has.
_EXTENSION_OF = {
    "ModelConfig": "model_configuration",
    "ModelStatistics": "statistics",
    "RepositoryIndex": "model_repository",
}
EXTENSIONS = tuple(_EXTENSION_OF.values())

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


class Wrong:
    """Wrong answers, for `FakeServer.answer_wrongly`."""

    @staticmethod
    def shape(answer: Any) -> None:
        """Give one row less than the request has."""
        for output, raw in zip(answer.outputs, list(answer.raw_output_contents), strict=True):
            rows = output.shape[0]
            output.shape[0] = rows - 1
            del answer.raw_output_contents[0]
            answer.raw_output_contents.append(raw[: len(raw) // rows * (rows - 1)])

    @staticmethod
    def missing(answer: Any) -> None:
        """Leave the first output out."""
        del answer.outputs[0]
        del answer.raw_output_contents[0]

    @staticmethod
    def type(answer: Any) -> None:
        """Say that the first output is of integers, with the same bytes."""
        answer.outputs[0].datatype = "INT32"

    @staticmethod
    def cut(answer: Any) -> None:
        """Leave out the last byte of the first output."""
        answer.raw_output_contents[0] = answer.raw_output_contents[0][:-1]

    @staticmethod
    def without_data(answer: Any) -> None:
        """Leave all data out."""
        del answer.raw_output_contents[:]


class FakeServer:
    """A server that speaks KServe v2 over gRPC, in this process, for tests.

    `start`, or a ``with`` block, makes it listen on a free loopback port. `stop` breaks its
    connections, as if the server were killed.

    Parameters
    ----------
    models : mapping of str to FakeModel
        Names of models, each with its model.
    headers : mapping, optional
        Headers that every call must have; other calls are refused.
    extensions : sequence of str
        Triton's extensions that the server implements; a minimal server has none.
    threads : int
        Greatest number of requests that run at the same time.
    port : int
        Port; by default, a free one.

    Attributes
    ----------
    requests : list of Received
        The inference requests that arrived.
    calls : list of (str, dict)
        All calls: method, and headers.
    statistics : Counter
        Numbers of answered ``"rows"`` and ``"requests"``, by model.

    Examples
    --------
    >>> import awkward as ak
    >>> import sonic_coffea as sonic
    >>> from sonic_coffea.testing import FakeModel, FakeServer
    >>> model = sonic.Model("tagger", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
    >>> with FakeServer({"tagger": FakeModel.of(model)}) as server, sonic.connect(server.url):
    ...     model(ak.Array([[{"pt": 0.0}], []])).top.tolist()
    [[0.5], []]
    """

    def __init__(
        self,
        models: Mapping[str, FakeModel],
        *,
        headers: Mapping[str, str] | None = None,
        extensions: Sequence[str] = EXTENSIONS,
        threads: int = 32,
        port: int = 0,
    ) -> None:
        require(extensions, EXTENSIONS, "no extension")
        expect(isinstance(models, Mapping), "a dict of FakeModel by name", models)
        for name, model in models.items():
            is_fake = isinstance(model, FakeModel)
            expect(is_fake, "FakeModel.of(model)", model, f"model {name!r}")
        self.models = dict(models)
        self.headers = {key.lower(): value for key, value in (headers or {}).items()}
        self.extensions = tuple(extensions)
        self.statistics: Counter[tuple[str, str]] = Counter()
        self._answered: Counter[tuple[str, str, str]] = Counter()
        self._threads = threads
        self._port = port
        self._server: Any = None
        self.requests: list[Received] = []
        self.calls: list[tuple[str, dict[str, str]]] = []
        self._planned: list[Iterator[Fault | None]] = []
        self._locked = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._unloaded: set[str] = set()
        self._refused: dict[str, Fault] = {}

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        if not self._port:
            raise ConfigError("the server has not been started")
        return f"grpc://127.0.0.1:{self._port}"

    def start(self) -> FakeServer:
        """Listen; at the same port as before, if it was stopped.

        Raises
        ------
        sonic_coffea.errors.ServerStartError
            If another program has the port.
        """
        if self._server is None:
            options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
            server = grpc.server(ThreadPoolExecutor(self._threads), options=options)
            servicer = service_pb2_grpc.GRPCInferenceServiceServicer()
            for name in _METHODS:
                setattr(servicer, name, partial(self.answer, name))
            service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
            self._listen(server)
            server.start()
            self._server = server
        return self

    def _listen(self, server: Any) -> None:
        # A server that was killed a moment ago may still have its port.
        for _ in range(40):
            try:
                self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
            except RuntimeError:
                time.sleep(0.05)
            else:
                return
        raise ServerStartError(f"port {self._port} is in use; leave port out for a free one")

    def inject(self, fault: Fault, *, times: int = 1, every: int = 1) -> None:
        """Inject a fault into the next inference requests.

        Parameters
        ----------
        fault : callable
            A function of the response, a ``ModelInferResponse`` that it may change, and of gRPC's
            context, which can end the request by ``context.abort``.
        times : int
            Number of requests with the fault.
        every : int
            Only every n-th of the next requests has the fault; the others are answered.
        """
        turns = (*repeat(None, every - 1), fault)
        with self._locked:
            self._planned.append(chain.from_iterable(repeat(turns, times)))

    def fail(self, code: Any, details: str = "", *, times: int = 1, every: int = 1) -> None:
        """Make the next inference requests fail.

        Parameters
        ----------
        code : grpc.StatusCode
            The status.
        details : str
            The server's words; the status's name by default.
        times, every : int
            As for `inject`.
        """
        self.inject(_status(code, details or code.name.lower()), times=times, every=every)

    def answer_wrongly(self, how: Callable[[Any], None], *, times: int = 1, every: int = 1) -> None:
        """Change the next responses before they are sent.

        Parameters
        ----------
        how : callable
            One of `Wrong`, or a function that changes the message, a ``ModelInferResponse``.
        times, every : int
            As for `inject`.
        """
        self.inject(lambda answer, _: how(answer), times=times, every=every)

    def refuse(self, method: str, code: Any, details: str = "") -> None:
        """Refuse all calls of a method, such as ``"RepositoryIndex"``, until `accept`.

        Parameters
        ----------
        method : str
            One of KServe v2 or Triton's extensions.
        code : grpc.StatusCode
            The status.
        details : str
            The server's words; none by default.
        """
        require([method], _METHODS, "no method")
        self._refused[method] = _status(code, details)

    def accept(self, method: str) -> None:
        """Answer the calls of a method again."""
        self._refused.pop(method, None)

    def hold(self) -> None:
        """Hold all responses back, until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Send the responses that were held back."""
        self._open.set()

    def unload(self, model: str) -> None:
        """Unload a model: the server does not have it any more."""
        require([model], self.models, "no model")
        self._unloaded.add(model)

    def load(self, model: str) -> None:
        """Load a model again."""
        self._unloaded.discard(model)

    def stop(self) -> None:
        """Break all connections, and stop listening; requests that are held back end."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(grace=None).wait()
        self._open.set()

    def answer(self, method: str, request: Any, context: Any) -> Any:
        """Return the answer to a call, or end it by gRPC's context; for subclasses, too."""
        headers = dict(context.invocation_metadata())
        self.calls.append((method, headers))
        if method in self._refused:
            self._refused[method](None, context)
        if not self.headers.items() <= headers.items():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "a header is missing or wrong")
        write = getattr(self, f"_{method}", None)
        if write is None or _EXTENSION_OF.get(method) not in (None, *self.extensions):
            _abort(context, grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented")
        answer = getattr(service_pb2, f"{method}Response")()
        write(request, answer, context)
        return answer

    def _ServerLive(self, request: Any, answer: Any, context: Any) -> None:
        answer.live = True

    def _ServerReady(self, request: Any, answer: Any, context: Any) -> None:
        answer.ready = True

    def _ServerMetadata(self, request: Any, answer: Any, context: Any) -> None:
        answer.name, answer.version = "fake", __version__
        answer.extensions.extend(self.extensions)

    def _ModelReady(self, request: Any, answer: Any, context: Any) -> None:
        answer.ready = self._serving(request.name, request.version) is not None

    def _ModelMetadata(self, request: Any, answer: Any, context: Any) -> None:
        model = self._model(request.name, request.version, context)
        answer.name, answer.platform = request.name, "fake"
        answer.versions.extend(model.versions)
        listed = (model.inputs, answer.inputs), (model.outputs, answer.outputs)
        for tensors, specs in listed if model.lists_tensors else ():
            for name, (datatype, shape) in model.described(tensors).items():
                specs.add(name=name, datatype=datatype, shape=shape)

    def _ModelConfig(self, request: Any, answer: Any, context: Any) -> None:
        model = self._model(request.name, request.version, context)
        answer.config.name = request.name
        answer.config.max_batch_size = model.max_rows
        for version in model.versions if model.digest else ():
            answer.config.parameters[f"sha256.{version}"].string_value = model.digest

    def _ModelStatistics(self, request: Any, answer: Any, context: Any) -> None:
        model = self._model(request.name, request.version, context)
        for version in [request.version] if request.version else model.versions:
            statistics = answer.model_stats.add(name=request.name, version=version)
            statistics.inference_count = self._answered[request.name, version, "rows"]
            requests = self._answered[request.name, version, "requests"]
            statistics.execution_count = statistics.inference_stats.success.count = requests

    def _RepositoryIndex(self, request: Any, answer: Any, context: Any) -> None:
        for name, model in self.models.items():
            state = "UNAVAILABLE" if self._serving(name, "") is None else "READY"
            for version in model.versions:
                answer.models.add(name=name, version=version, state=state)

    def _ModelInfer(self, request: Any, answer: Any, context: Any) -> None:
        name, version = request.model_name, request.model_version
        model = self._model(name, version, context)
        received = Received(name, version, request.id, _inputs(request, model, context))
        self.requests.append(received)
        with self._locked:
            fault = next(filter(None, (next(turns, None) for turns in self._planned)), None)
        self._open.wait()
        try:
            given = model.function(received.inputs)
            named = [output.name for output in request.outputs] or list(given)
            outputs = {output: _output(output, given) for output in named}
        except BaseException as error:  # noqa: BLE001  such as pytest.fail; gRPC would never answer
            _abort(context, grpc.StatusCode.INTERNAL, f"the model failed: {error!r}")
        answer.model_name, answer.id = name, request.id
        answer.model_version = version or model.versions[-1]
        for output, tensor in outputs.items():
            answer.outputs.add(name=output, datatype=kserve_name(tensor.dtype), shape=tensor.shape)
            answer.raw_output_contents.append(to_wire(tensor).tobytes())
        if fault is not None:
            fault(answer, context)
        with self._locked:
            for what, more in (("requests", 1), ("rows", received.rows)):
                self.statistics[name, what] += more
                self._answered[name, answer.model_version, what] += more

    def _model(self, name: str, version: str, context: Any) -> FakeModel:
        model = self._serving(name, version)
        if model is None:
            requested = f"'{name}' version {version}" if version else f"'{name}'"
            message = f"Request for unknown model: {requested} is not found"
            _abort(context, grpc.StatusCode.NOT_FOUND, message)
        return model

    def _serving(self, model: str, version: str) -> FakeModel | None:
        """Return a model that is loaded, if it has the version."""
        served = None if model in self._unloaded else self.models.get(model)
        return served if served is not None and version in ("", *served.versions) else None


def _inputs(request: Any, model: FakeModel, context: Any) -> dict[str, NDArray[Any]]:
    """Return the tensors of a request, which must be what the model takes."""
    inputs: dict[str, NDArray[Any]] = {}
    for spec, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        dtype = np.dtype(DATATYPES[spec.datatype])
        inputs[spec.name] = from_wire(raw, dtype, tuple(spec.shape))
    problem = ""
    for name, (datatype, shape) in model.described(model.inputs).items():
        array = inputs.get(name)
        fits = (
            array is not None
            and (kserve_name(array.dtype), array.ndim) == (datatype, len(shape))
            and all(n in (-1, m) for n, m in zip(shape, array.shape, strict=True))
        )
        if not fits:
            got = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            problem = f"unexpected input '{name}': expected {datatype} {list(shape)}, got {got}"
    for name in inputs.keys() - model.inputs.keys():
        problem = f"unexpected inference input '{name}'; the model has {', '.join(model.inputs)}"
    rows = len(next(iter(inputs.values()), ()))
    if model.max_rows and rows > model.max_rows:
        problem = f"batch size {rows} is larger than max_batch_size {model.max_rows}"
    if problem:
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, problem)
    return inputs


def _output(name: str, given: Any) -> NDArray[Any]:
    """Return an output as it is sent, of what a model's function returned."""
    if not isinstance(given, Mapping) or name not in given:
        returned = list(given) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"output {name!r} is declared, but the model returned {returned}")
    if np.ma.is_masked(given[name]):
        raise ValueError(f"output {name!r} has masked values; expected an array without a mask")
    array = np.asarray(given[name])
    if array.dtype == STRINGS and not all(isinstance(text, str | bytes) for text in array.flat):
        raise TypeError(
            f"expected output {name!r} as numbers or strings, got {array.tolist()!r:.80}"
        )
    dtype = STRINGS if array.dtype.kind in "SU" else array.dtype.newbyteorder("=")
    return np.ascontiguousarray(array, dtype)


def _abort(context: Any, code: Any, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError  # abort does not return


def _status(code: Any, details: str) -> Fault:
    """Return the fault that ends a request with a ``grpc.StatusCode`` and the server's words."""
    return lambda _, context: context.abort(code, details)
