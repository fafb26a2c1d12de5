"""The sender of each server: its connections, and the requests to it that may block."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from sonic_coffea import errors
from sonic_coffea.errors import SonicError
from sonic_coffea.pool._call import Call
from sonic_coffea.pool._core import Event, PoolCore
from sonic_coffea.pool._deadline import run_in_thread
from sonic_coffea.pool._instructions import Answer
from sonic_coffea.pool._request import Attempt, ModelKey
from sonic_coffea.pool._settings import is_in_process
from sonic_coffea.pool._tuning import MAX_RETRIES
from sonic_coffea.transport import ConnectionOptions, Response, Transport, connect_transport

logger = logging.getLogger(__name__)


def open_transport(url: str, *, options: ConnectionOptions) -> Transport:
    """Return a transport to a server, or to what makes the scores in this process."""
    if is_in_process(url):
        from sonic_coffea.server import InProcessTransport

        return InProcessTransport(url)
    return connect_transport(url, options=options)


@dataclass(eq=False)
class Sender:
    """The connections to an endpoint, and the threads that pack and send requests.

    Sending may block: a token is read, shared memory is registered, a connection is made. On
    threads of its own, a slow endpoint delays neither the others nor the engine. One is enough for
    a server; a transport that runs the models itself has `threads`.

    A balancer that leads each connection to another server, or a distant server, has several
    connections. Each is made for its first request.

    Attributes
    ----------
    loads : bool
        Whether the server is asked to load a model that it lacks, as a fallback is.

    Parameters
    ----------
    connect : callable
        Returns one more connection to the server.
    tell : callable
        Gives the engine an event and its arguments.
    sent : callable
        Gives it the time of sending with the next event, and does not wake it.
    """

    url: str
    _connect: Callable[[], Transport]
    _tell: Callable[..., None]
    _sent: Callable[[Event], None]

    def __post_init__(self) -> None:
        self.connections = [self._connect()]
        self._inbox: SimpleQueue[Attempt | None] = SimpleQueue()
        self._threads: list[Future[None]] = []
        self._woken_at = -math.inf
        self.loads = False
        self._name, self._numbers = uuid.uuid4().hex[:8], itertools.count()

    def send(self, attempt: Attempt) -> None:
        """Queue an attempt to be packed and sent."""
        if len(self._threads) < self.connections[0].threads:
            thread = run_in_thread("sonic-send", self._run)
            if not thread.done():
                self._threads.append(thread)
            elif not self._threads:  # no more threads
                self._failed(attempt, outcome_of(thread, errors.RequestError))
                return
        self._inbox.put(attempt)

    def renew(self, channel: int) -> None:
        """Replace a connection, and close the old one."""
        if channel < len(self.connections):  # else it was never used
            old = self.connections[channel]
            self.connections[channel] = self._connect()
            run_in_thread("sonic-close", old.close, or_here=True)

    def probe(self) -> None:
        """Ask whether the server lives."""
        connection = self.connections[0]

        def ask() -> SonicError | None:
            # One of several servers behind the URL may hang: it is live if one probe is answered.
            outcomes: SimpleQueue[SonicError | None] = SimpleQueue()
            for _ in range(MAX_RETRIES):
                connection.live(outcomes.put)
            error = outcomes.get()
            for _ in range(MAX_RETRIES - 1):
                error = error and outcomes.get()
            return error

        self._ask(ask, errors.ServerLostError, PoolCore.probed)

    def validate(self, key: ModelKey) -> None:
        """Ask for a model's contract; wake a server that is lost, as it may sleep."""
        connection = self.connections[0]

        def ask() -> Any:
            try:
                return connection.metadata(*key)
            except errors.ServerLostError:
                now = time.monotonic()
                if now >= self._woken_at + 5.0:  # autoscalers look at the rate of 30 s or more
                    self._woken_at = now
                    run_in_thread("sonic-wake", connection.index)
                raise
            except errors.ModelNotFoundError:
                if not self.loads:
                    raise
                with contextlib.suppress(SonicError):
                    connection.load(key.name)
                return connection.metadata(*key)

        self._ask(ask, errors.RequestError, partial(PoolCore.validated, key=key))

    def _ask(self, ask: Callable[[], Any], kind: type[SonicError], event: Any) -> None:
        """Ask something that may block, and tell the core the outcome."""
        run_in_thread("sonic-ask", ask).add_done_callback(
            lambda future: self._tell(event, url=self.url, outcome=outcome_of(future, kind))
        )

    def close(self) -> None:
        """Send nothing more, and close the connections; this may block."""
        self._inbox.put(None)
        for connection in self.connections:
            connection.close()

    def _run(self) -> None:
        while (attempt := self._inbox.get()) is not None:
            self._transmit(attempt)
            # Otherwise the name would keep the tensors until the next request.
            del attempt
        self._inbox.put(None)  # for the other threads

    def _transmit(self, attempt: Attempt) -> None:
        if attempt.cancelled or attempt.slice.call.over:
            return  # the core has ended it, or is told that its call is over
        try:
            attempt.sent(self._send(attempt))
        except BaseException as problem:  # noqa: BLE001  else its rows would wait for ever
            self._failed(attempt, problem)

    def _failed(self, attempt: Attempt, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # of the user's log; the thread would end
            logger.debug("a request could not be made", exc_info=error)
        ours = as_ours(error, errors.RequestError)
        self._tell(PoolCore.failed, attempt=attempt, error=ours, sent=False)

    def _send(self, attempt: Attempt) -> Callable[[], object]:
        request = attempt.slice
        call: Call = request.call
        # The version that the contract named, so that one version scores a call.
        version = call.version or call.contract.version or None
        packing_at = time.monotonic()
        inputs = call.inputs.pack(request.start, request.stop)
        sent_at = time.monotonic()
        self._sent(partial(PoolCore.sent, attempt=attempt, at=sent_at))

        def done(outcome: Response | SonicError) -> None:
            if isinstance(outcome, SonicError):
                self._tell(PoolCore.failed, attempt=attempt, error=outcome)
            elif version and outcome.version not in ("", version):
                what = f"version {outcome.version} answered, and version {version} was asked for"
                error = errors.ResponseError(what, server=attempt.url)
                self._tell(PoolCore.failed, attempt=attempt, error=error)
            else:
                answer = Answer(attempt, outcome, packing_at, sent_at, time.monotonic())
                self._tell(PoolCore.answered, answer=answer)

        while attempt.channel >= len(self.connections):
            self.connections.append(self._connect())
        return self.connections[attempt.channel].infer(
            call.contract,
            inputs,
            call.requested,
            version=version,
            request_id=f"{self._name}-{next(self._numbers)}",
            done=done,
        )


def outcome_of(future: Future[Any], kind: type[SonicError]) -> Any:
    """Return the result of a future that is done, or its error as one of this package."""
    error = future.exception()
    return future.result() if error is None else as_ours(error, kind)


def as_ours(error: BaseException, kind: type[SonicError]) -> SonicError:
    """Return an error as one of this package."""
    if isinstance(error, SonicError):
        return error
    return kind(f"an error in this process: {error!r}")
