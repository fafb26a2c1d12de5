"""Servers that answer, hold back and fail as they are told, in place of connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.transport import Address, Contract, Response, TensorSpec, Transport

ONE, TWO = "grpc://s1:8001", "grpc://s2:8001"

Behaviour = Callable[[np.ndarray], Any]


class ScriptedServer(Transport):
    """A transport of five methods, and no more, that answers ``y = 2 x``, or as `behaviour` says.

    The method that `blocks` names blocks until `released` is set, and sets `blocked`.
    """

    by_url: ClassVar[dict[str, ScriptedServer]] = {}

    def __init__(self, url: str, *, max_rows: int | None = 4) -> None:
        self.by_url[url] = self
        self.address = Address.parse(url)
        self.max_rows = max_rows
        self.behaviour: Behaviour = lambda x: 2 * x
        self.gate = threading.Event()
        self.gate.set()
        self.blocks = ""
        self.blocked, self.released = threading.Event(), threading.Event()
        self.lacks = False
        self.requests: list[np.ndarray] = []
        self.answering: list[np.ndarray] = []
        self.cancelled: list[threading.Event] = []
        self.out = 0
        self.outputs: tuple[str, ...] = ("y",)
        self.closed = False
        self.described: list[str] = []
        self._lock = threading.Lock()

    def _block(self, method: str) -> None:
        if self.blocks == method:
            self.blocked.set()
            self.released.wait(60)

    def metadata(self, model: str, version: str | None) -> Contract:
        self.described.append(model)
        self._block("metadata")
        if self.lacks:
            raise errors.ModelNotFoundError("no such model", server=str(self.address))
        x = TensorSpec(name="x", datatype="FP32", shape=(1,))
        outputs = tuple(TensorSpec(name=name, datatype="FP32", shape=(1,)) for name in self.outputs)
        return Contract(
            model=model,
            version=version or "1",
            inputs=(x,),
            outputs=outputs,
            max_rows=self.max_rows,
        )

    def index(self) -> list[Any]:
        return []

    def infer(
        self, contract: Contract, inputs: Mapping[str, np.ndarray], outputs: Any, **options: Any
    ) -> Callable[[], None]:
        self._block("infer")
        x = inputs["x"].copy()
        cancelled = threading.Event()
        with self._lock:
            self.requests.append(x)
            self.answering.append(x)
            self.cancelled.append(cancelled)
            self.out += 1
        arguments = (x, cancelled, options["done"])
        threading.Thread(target=self._answer, args=arguments, daemon=True).start()
        return cancelled.set

    def _answer(self, x: np.ndarray, cancelled: threading.Event, done: Any) -> None:
        while not self.gate.wait(0.01):
            if cancelled.is_set():
                break
        ended = errors.CancelledError("cancelled") if cancelled.is_set() else None
        answer = ended or self.behaviour(x)
        with self._lock:
            self.out -= 1
        if isinstance(answer, errors.SonicError):
            done(answer.at(server=str(self.address)))
        else:
            outputs = answer if isinstance(answer, dict) else {"y": answer}
            done(Response(outputs=outputs, version="1", sent_bytes=x.nbytes, received_bytes=8))
        with self._lock:
            self.answering[:] = [other for other in self.answering if other is not x]

    def live(self, done: Any) -> None:
        self._block("live")
        threading.Thread(target=done, args=(None,), daemon=True).start()

    def close(self) -> None:
        self._block("close")
        self.closed = True


def connect(url: str, **_: Any) -> Any:
    return ScriptedServer.by_url[url]


def pool_of(*urls: str, **options: Any) -> Pool:
    return Pool(Settings.make(urls, **options), connect=connect)


LOST = errors.ServerLostError("the connection to the server was lost: gone")


def refuses(*rows: int) -> Behaviour:
    """Fail requests that hold one of these rows."""

    def behave(x: np.ndarray) -> Any:
        if set(x.ravel().astype(int)) & set(rows):
            return errors.RequestError("out of memory")
        return 2 * x

    return behave
