"""A KServe-v2 gRPC server that does what a test tells it to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from sonic_coffea.server.in_process import EXTENSIONS, KServeServer, Received
from sonic_coffea.testing._faults import FaultPlan, status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sonic_coffea.server.in_process import KServeModel
    from sonic_coffea.testing._faults import Fault


class FakeServer(KServeServer):
    """A server that speaks KServe v2 over gRPC, in this process, for tests.

    It listens on a free loopback port from `start`, or the beginning of the ``with`` block, on.
    When it is stopped, it breaks its connections as if it were killed.

    Parameters
    ----------
    models : mapping of str to FakeModel
        What it serves.
    headers, extensions, typed_contents
        As for `sonic_coffea.server.in_process.KServeServer`.

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
        models: Mapping[str, KServeModel],
        *,
        headers: Mapping[str, str] | None = None,
        extensions: Sequence[str] = EXTENSIONS,
        typed_contents: bool = False,
    ) -> None:
        super().__init__(
            models,
            name="fake",
            headers=headers,
            extensions=extensions,
            typed_contents=typed_contents,
        )
        self.requests: list[Received] = []
        self.calls: list[tuple[str, dict[str, str]]] = []
        self._faults = FaultPlan()
        self._open = threading.Event()
        self._open.set()
        self._unloaded: set[str] = set()
        self._refused: dict[str, Fault] = {}

    # What goes wrong.

    def inject(self, fault: Fault, *, times: int = 1, every: int = 1) -> None:
        """Have a fault happen to the next inference requests.

        Parameters
        ----------
        fault : callable
            Takes the answer, a ``ModelInferResponse``, to change it, and gRPC's context, to end the
            request by ``context.abort``.
        times : int
            How many requests have it.
        every : int
            Only every n-th of the next requests has it; the others are answered.
        """
        self._faults.add(fault, times, every)

    def fail(self, code: Any, details: str = "", *, times: int = 1, every: int = 1) -> None:
        """Have inference requests fail.

        Parameters
        ----------
        code : grpc.StatusCode
            The status.
        details : str
            The server's words; the status's name by default.
        times, every : int
            As for `inject`.
        """
        self.inject(status(code, details or code.name.lower()), times=times, every=every)

    def answer_wrongly(self, how: Callable[[Any], None], *, times: int = 1, every: int = 1) -> None:
        """Have answers be changed before they are sent.

        Parameters
        ----------
        how : callable
            One of `Wrong`, or a function that changes the message, a ``ModelInferResponse``.
        times, every : int
            As for `inject`.
        """
        self.inject(lambda answer, _: how(answer), times=times, every=every)

    def refuse(self, method: str, code: Any, details: str = "") -> None:
        """Have all calls of a method be refused, such as ``"RepositoryIndex"``; until `accept`.

        Parameters
        ----------
        method : str
            One of KServe v2 or Triton's extensions.
        code : grpc.StatusCode
            The status.
        details : str
            The server's words; none by default.
        """
        self._refused[method] = status(code, details)

    def accept(self, method: str) -> None:
        """Answer the calls of a method again."""
        self._refused.pop(method, None)

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

    # What the server asks.

    def enter(self, method: str, headers: Mapping[str, str], context: Any) -> None:
        """Keep the call, and end it if its method is refused."""
        self.calls.append((method, dict(headers)))
        if method in self._refused:
            self._refused[method](None, context)

    def receive(self, request: Received) -> Fault | None:
        """Keep the request; wait while answers are held; return what goes wrong with it."""
        self.requests.append(request)
        fault = self._faults.next()
        self._open.wait()
        return fault

    def stopping(self) -> None:
        """Let go of requests that are held back."""
        self._open.set()

    def serving(self, model: str, version: str) -> KServeModel | None:
        """Return a model, if it is there in a version, and loaded."""
        return None if model in self._unloaded else super().serving(model, version)
