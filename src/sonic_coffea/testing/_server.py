"""A KServe-v2 gRPC server for tests, with faults on demand."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from sonic_coffea.errors import ConfigError, ServerStartError, nearest
from sonic_coffea.testing._servicer import EXTENSIONS, Fault, Received, Servicer

if TYPE_CHECKING:
    from sonic_coffea.testing._model import FakeModel

# A server that was killed a moment ago may still have its port.
_PORT_WITHIN_S = 2.0


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
    typed_contents : bool
        Whether responses hold typed numbers instead of raw bytes, as some servers do.
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
        typed_contents: bool = False,
        threads: int = 32,
        port: int = 0,
    ) -> None:
        unknown = [name for name in extensions if name not in EXTENSIONS]
        if unknown:
            raise ConfigError(f"no extension {unknown[0]!r}; {nearest(unknown[0], EXTENSIONS)}")
        self.models = dict(models)
        self.headers = {key.lower(): value for key, value in (headers or {}).items()}
        self.extensions = tuple(extensions)
        self.typed_contents = typed_contents
        self.statistics: Counter[tuple[str, str]] = Counter()
        self._threads = threads
        self._port = port
        self._server: Any = None
        self.requests: list[Received] = []
        self.calls: list[tuple[str, dict[str, str]]] = []
        self._planned: list[Iterator[Fault | None]] = []
        self._planning = threading.Lock()
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
        with self._planning:
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

    def enter(self, method: str, headers: Mapping[str, str], context: Any) -> None:
        """Record a call, and end it if its method is refused."""
        self.calls.append((method, dict(headers)))
        if method in self._refused:
            self._refused[method](None, context)

    def receive(self, request: Received) -> Fault | None:
        """Record a request, wait while responses are held back, and return the oldest due fault."""
        self.requests.append(request)
        with self._planning:
            fault = next(filter(None, (next(turns, None) for turns in self._planned)), None)
        self._open.wait()
        return fault

    def serving(self, model: str, version: str) -> FakeModel | None:
        """Return a model that is loaded, if it has the version."""
        served = None if model in self._unloaded else self.models.get(model)
        return served if served is not None and version in ("", *served.versions) else None


def _status(code: Any, details: str) -> Fault:
    """Return the fault that ends a request with a ``grpc.StatusCode`` and the server's words."""
    return lambda _, context: context.abort(code, details)
