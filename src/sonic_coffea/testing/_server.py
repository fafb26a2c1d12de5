"""A KServe-v2 gRPC server in this process, over a real socket."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.testing._servicer import EXTENSIONS, Received, Servicer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from sonic_coffea.testing._model import FakeModel

_THREADS = 32


class Wrong:
    """Ways of answering wrongly, for `FakeServer.answer_wrongly`."""

    @staticmethod
    def shape(answer: Any) -> None:
        """Give one row less than was asked for."""
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


@dataclass(slots=True)
class _Fault:
    """What happens to inference requests: to some of the next ones."""

    change: Callable[[Any, Any], None]
    times: int
    every: int
    seen: int = 0


class FakeServer:
    """A server that speaks KServe v2 over gRPC, in this process, for tests.

    It listens on a free loopback port from `start`, or the beginning of the ``with`` block, on.

    Parameters
    ----------
    models : mapping of str to FakeModel
        What it serves.
    headers : mapping, optional
        Headers that every call must have, or it is refused.
    extensions : sequence of str
        Which of Triton's extensions it has; what belongs to others is not implemented. A minimal
        server has none.
    typed_contents : bool
        Whether answers hold numbers rather than bytes, as some servers' do.

    Attributes
    ----------
    requests : list of Received
        The inference requests that arrived.
    calls : list of (str, dict)
        All calls: method, and headers.
    statistics : Counter
        By model, ``"rows"`` and ``"requests"`` that were answered.

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
    ) -> None:
        unknown = [name for name in extensions if name not in EXTENSIONS]
        if unknown:
            raise ConfigError(f"no extension {unknown[0]!r}; {nearest(unknown[0], EXTENSIONS)}")
        self.models = dict(models)
        self.headers = {name.lower(): value for name, value in (headers or {}).items()}
        self.extensions = tuple(extensions)
        self.typed_contents = typed_contents
        self.requests: list[Received] = []
        self.calls: list[tuple[str, dict[str, str]]] = []
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._open = threading.Event()
        self._open.set()
        self._unloaded: set[str] = set()
        self.statistics: Counter[tuple[str, str]] = Counter()
        self._port = 0
        self._server: Any = None

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        if not self._port:
            raise ConfigError("the server has not been started")
        return f"grpc://127.0.0.1:{self._port}"

    def start(self) -> FakeServer:
        """Listen; at the same port as before, if it was stopped."""
        if self._server is None:
            options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
            server = grpc.server(ThreadPoolExecutor(_THREADS), options=options)
            service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(self), server)
            self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
            server.start()
            self._server = server
        return self

    def stop(self) -> None:
        """Break all connections and listen no more, as if it were killed. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            stopped = server.stop(grace=None)
            self._open.set()
            stopped.wait()

    # What goes wrong.

    def fail(self, code: Any, details: str = "", *, times: int = 1, every: int = 1) -> None:
        """Have inference requests fail.

        Parameters
        ----------
        code : grpc.StatusCode
            With what.
        details : str
            The server's words.
        times : int
            How many requests.
        every : int
            Only each so manieth of the next ones; the others are answered.
        """

        def change(answer: Any, context: Any) -> None:
            del answer
            context.abort(code, details or code.name.lower())

        self._add(change, times, every)

    def answer_wrongly(self, how: Callable[[Any], None], *, times: int = 1, every: int = 1) -> None:
        """Have answers be changed before they are sent.

        Parameters
        ----------
        how : callable
            One of `Wrong`, or a function that changes the message, a ``ModelInferResponse``.
        times, every : int
            As for `fail`.
        """
        self._add(lambda answer, _: how(answer), times, every)

    def hold(self) -> None:
        """Hold all answers back, until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Send what was held back."""
        self._open.set()

    def unload(self, model: str) -> None:
        """Have no such model any more."""
        self._unloaded.add(model)

    def load(self, model: str) -> None:
        """Have it again."""
        self._unloaded.discard(model)

    def _add(self, change: Callable[[Any, Any], None], times: int, every: int) -> None:
        with self._lock:
            self._faults.append(_Fault(change, times, every))

    def next_fault(self) -> Callable[[Any, Any], None] | None:
        """Return what happens to the request that has just come."""
        with self._lock:
            for fault in self._faults:
                fault.seen += 1
                if fault.times and fault.seen % fault.every == 0:
                    fault.times -= 1
                    return fault.change
            self._faults = [fault for fault in self._faults if fault.times]
            return None

    def wait_while_held(self) -> None:
        """Return once answers are not held back."""
        self._open.wait()

    def serving(self, model: str, version: str) -> FakeModel | None:
        """Return a model, if it is there in a version."""
        found = self.models.get(model)
        if found is None or model in self._unloaded:
            return None
        return found if version in ("", *found.versions) else None
