"""A KServe-v2 gRPC server that does what a test tells it to."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sonic_coffea.server.in_process import EXTENSIONS, KServeServer, Received

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sonic_coffea.server.in_process import KServeModel


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
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._open = threading.Event()
        self._open.set()
        self._unloaded: set[str] = set()
        self._refused: dict[str, Callable[[Any], None]] = {}

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

    def refuse(self, method: str, code: Any, details: str = "") -> None:
        """Have all calls of a method be refused, such as ``"RepositoryIndex"``; until `accept`.

        Parameters
        ----------
        method : str
            One of KServe v2 or Triton's extensions.
        code : grpc.StatusCode
            With what.
        details : str
            The server's words; none by default.
        """
        self._refused[method] = lambda context: context.abort(code, details)

    def accept(self, method: str) -> None:
        """Answer the calls of a method again."""
        self._refused.pop(method, None)

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

    # What the server asks.

    def enter(self, method: str, headers: Mapping[str, str]) -> Callable[[Any], None] | None:
        """Keep the call, and return how it is refused."""
        self.calls.append((method, dict(headers)))
        return self._refused.get(method)

    def receive(self, request: Received) -> Callable[[Any, Any], None] | None:
        """Keep the request; wait while answers are held; return what goes wrong with it."""
        self.requests.append(request)
        fault = self._next_fault()
        self._open.wait()
        return fault

    def stopping(self) -> None:
        """Let go of requests that are held back."""
        self._open.set()

    def serving(self, model: str, version: str) -> KServeModel | None:
        """Return a model, if it is there in a version, and loaded."""
        return None if model in self._unloaded else super().serving(model, version)

    def _next_fault(self) -> Callable[[Any, Any], None] | None:
        """Return what happens to the request that has just come."""
        with self._lock:
            for fault in self._faults:
                fault.seen += 1
                if fault.times and fault.seen % fault.every == 0:
                    fault.times -= 1
                    return fault.change
            self._faults = [fault for fault in self._faults if fault.times]
            return None
