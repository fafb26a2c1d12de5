"""A KServe-v2 gRPC server in this process, over a real socket."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from sonic_coffea.errors import ConfigError, ServerStartError, nearest
from sonic_coffea.server.in_process._servicer import EXTENSIONS, Received, Servicer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from sonic_coffea.server.in_process._model import KServeModel


class KServeServer:
    """A server that speaks KServe v2 over gRPC, in this process, for whatever a function computes.

    It listens on a free loopback port from `start`, or the beginning of the ``with`` block, on.

    Parameters
    ----------
    models : mapping of str to KServeModel
        What it serves.
    name : str
        What it calls itself.
    headers : mapping, optional
        Headers that every call must have, or it is refused.
    extensions : sequence of str
        Which of Triton's extensions it has; what belongs to others is not implemented. A minimal
        server has none.
    typed_contents : bool
        Whether answers hold numbers rather than bytes, as some servers' do.
    threads : int
        How many requests may be worked on at the same time.
    port : int, optional
        Where it listens; by default at a free one.

    Attributes
    ----------
    statistics : Counter
        By model, ``"rows"`` and ``"requests"`` that were answered.
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
        self._counting = threading.Lock()
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
            try:
                self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
            except RuntimeError:
                raise ServerStartError(
                    f"port {self._port} is in use by another program; leave port out for a free one"
                ) from None
            server.start()
            self._server = server
        return self

    def stop(self) -> None:
        """Break all connections and listen no more. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            stopped = server.stop(grace=None)
            self.stopping()
            stopped.wait()

    def serving(self, model: str, version: str) -> KServeModel | None:
        """Return a model, if it is there in a version."""
        served = self.models.get(model)
        return served if served is not None and version in ("", *served.versions) else None

    def count(self, request: Received) -> None:
        """Count a request that was answered."""
        with self._counting:
            self.statistics[request.model, "requests"] += 1
            self.statistics[request.model, "rows"] += request.rows

    # Hooks of a server for tests.

    def enter(self, method: str, headers: Mapping[str, str], context: Any) -> None:
        """Take notice of a call, which gRPC's context can end."""

    def receive(self, request: Received) -> Callable[[Any, Any], None] | None:
        """Take notice of an inference request; return what happens to its answer and call."""

    def stopping(self) -> None:
        """Let go of requests that are held back."""
