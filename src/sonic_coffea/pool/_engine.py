"""The engine: one thread that owns the pool's core, and carries out its instructions.

Connections, senders and callers only post events to it; nobody else touches the core, so there is
nothing to lock. What may block runs on threads of its own.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import math
import os
import platform
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar, cast

from sonic_coffea.errors import (
    CancelledError,
    ConfigError,
    RequestError,
    ResponseError,
    SonicError,
)
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._deadline import fulfil
from sonic_coffea.pool._process import memory_bytes, switch_as_before, switch_sooner
from sonic_coffea.pool._record import RecordedCore
from sonic_coffea.pool._servers import Servers, close_all, read_certificates
from sonic_coffea.pool._signature import QUIET_S
from sonic_coffea.reporting import Span, Statistics, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from sonic_coffea.pool._call import Call
    from sonic_coffea.pool._deadline import Deadline
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.pool._servers import Connect, Task
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.transport import Connection, Contract

logger = logging.getLogger(__name__)

CLOSED = "the pool has been closed; call sonic.connect again"

T = TypeVar("T")


class Engine:
    """The thread that owns the core, the connections, and the calls that are not over.

    Attributes
    ----------
    statistics : Statistics
        Rows, requests, failures and times since the start.
    core : RecordedCore
        For the engine's thread; other threads look at it with `run_on_thread`.
    contracts : dict
        The contracts that are not stale, and when they came: the engine's thread writes it, and all
        threads read it.
    post : callable
        Takes an event, or a task for the engine's thread that returns an event. None ends the
        thread.
    """

    def __init__(self, settings: Settings, connect: Connect) -> None:
        self.settings = settings
        self.statistics = Statistics()
        self.closing = threading.Event()
        self.core = RecordedCore(settings, memory_bytes())
        self.contracts: dict[ModelKey, tuple[Contract, float]] = {}
        self._delivered_at = -math.inf
        self._calls: set[Call] = set()
        self._futures: dict[e.ContractRequest, Future[Contract | SonicError]] = {}
        self._inbox: SimpleQueue[e.Event | Task | None] = SimpleQueue()
        self.post: Callable[[e.Event | Task | None], None] = self._inbox.put
        self._sent: deque[e.Sent] = deque()
        self._servers = Servers(connect, self.post, self._sent.append)
        self._events: list[e.Event] = []
        # Guards only whether the thread runs.
        self._life = threading.RLock()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:8]
        self._worker = f"{platform.node()}:{os.getpid()}"

    # For other threads

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return any(not call.over for call in tuple(self._calls))

    def start(self) -> bool:
        """Connect to the servers and start the thread; False if it was started before."""
        with self._life:
            if self.closing.is_set():
                raise ConfigError(CLOSED)
            if self._thread is not None:
                return False
            self._servers.add(self.settings.servers, self.settings)
            thread = threading.Thread(target=self._run, name="sonic-pool", daemon=True)
            # If the system has no more threads, the next call tries again.
            thread.start()
            self._thread = thread
            switch_sooner(self)
            return True

    def submit(self, call: Call, slices: Sequence[RequestSlice]) -> None:
        """Send the slices of a call, as soon as there is room for them."""

        def submitted() -> e.Event | None:
            if call.over:  # it was cancelled at once
                return None
            self._calls.add(call)
            self.statistics += call.statistics
            return e.Submitted(slices)

        call.begin(sum(request.rows for request in slices), self._abandon)
        if slices:
            self._post_open(submitted)

    def recent_contract(self, key: ModelKey) -> Contract | None:
        """Return a model's contract, unless it is in doubt."""
        contract, received_at = self.contracts.get(key, (None, -math.inf))
        quiet_s = time.monotonic() - max(received_at, self._delivered_at)
        return contract if self.busy or quiet_s < QUIET_S else None

    def contract(self, key: ModelKey, deadline: Deadline, *, anew: bool) -> Contract:
        """Return a model's contract; raise if no server gives it, or none in time."""
        request = e.ContractRequest(key, deadline.timeout_s)
        future: Future[Contract | SonicError] = Future()

        def requested() -> e.Event:
            self._futures[request] = future
            return e.ContractRequested(request, anew)

        self._post_open(requested)
        try:
            outcome = future.result(deadline.left_s)
        except BaseException as error:
            self.post(e.ContractWithdrawn(request))
            if not isinstance(error, concurrent.futures.TimeoutError):  # Ctrl-C
                raise
            outcome = future.result()
        if isinstance(outcome, SonicError):
            raise outcome.at()
        return outcome

    def set_servers(self, servers: Sequence[str]) -> None:
        """Change the servers: all, or none if one of them cannot be used."""
        read_certificates(servers, self.settings)

        def changed() -> None:
            if self.started:
                self._servers.add(servers, self.settings)
            self.settings = self.settings.with_servers(servers)
            self._events.append(e.ServersChanged(self.settings.servers))

        self.run_on_thread(changed)

    def run_on_thread(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, or here if the thread does not run."""
        future: Future[T] = Future()
        task = partial(fulfil, future, function)
        with self._life:
            thread = self._thread
            if thread is None or not thread.is_alive() or thread is threading.current_thread():
                task()
                self._handle_events()
                return future.result()
            closing = self.closing.is_set()
            if not closing:
                self._inbox.put(task)
        if closing:
            thread.join()
            task()
        return future.result()

    def close(self) -> None:
        """Cancel all requests, and close the connections; a second call changes nothing."""
        with self._life:
            if self.closing.is_set():
                return
            self.closing.set()
            self._inbox.put(None)
            thread = self._thread
            if thread is not None:
                switch_as_before(self)
        if thread is None:
            self._shut_down()
        elif thread is not threading.current_thread():
            thread.join()
        close_all(self._servers.senders.values())

    def served(self) -> list[tuple[str, Connection, list[ModelKey]]]:
        """Return each server's URL, a connection to it, and its models."""
        return self.run_on_thread(
            lambda: [
                (x.url, self._servers.connection(x.url), list(x.signatures.valid))
                for x in self.core.endpoints.active
                if x.url in self._servers.senders
            ]
        )

    def connections(self, urls: Collection[str]) -> list[list[Connection]]:
        """Return the connections to each server; none to one that is not used any more."""
        senders = self.run_on_thread(lambda: [self._servers.senders.get(url) for url in urls])
        return [[] if sender is None else list(sender.connections) for sender in senders]

    # The engine's thread

    def _post_open(self, task: Task) -> None:
        """Post a task, unless the pool is closed."""
        with self._life:
            if self.closing.is_set():
                raise ConfigError(CLOSED)
            self._inbox.put(task)

    def _run(self) -> None:
        with self._life:
            if self._thread is not threading.current_thread():  # Ctrl-C came while it started
                return
        ends = False
        while not ends:
            try:
                ends = self._run_once()
            except Exception as error:
                # Else callers would wait for ever, and later calls would find no thread.
                logger.exception("the pool has failed inside; it begins anew")
                self._restart(error)
        self._shut_down()
        self.close()  # which nobody has called if nothing refers to the pool any more

    def _run_once(self) -> bool:
        """Wait for an event, or until the core wakes, and handle it; True if the pool closes."""
        now = time.monotonic()
        wakes_at = self.core.wakes_at(now)
        items: list[e.Event | Task | None] = []
        try:
            timeout_s = None if wakes_at == math.inf else max(0.0, wakes_at - now)
            items.append(self._inbox.get(timeout=timeout_s))
            while True:
                items.append(self._inbox.get_nowait())
        except Empty:
            pass
        while self._sent:  # an answer that is among the items was sent before
            self._events.append(self._sent.popleft())
        for item in items:
            event = item() if callable(item) else item
            if event is not None:
                self._events.append(event)
        self._handle_events(at_least_once=True)
        return None in items

    def _handle_events(self, *, at_least_once: bool = False) -> None:
        """Have the core handle events until no others follow."""
        while self._events or at_least_once:
            at_least_once = False
            events, self._events = self._events, []
            for instruction in self.core.handle(time.monotonic(), *events):
                self._execute(instruction)

    def _execute(self, instruction: e.Instruction) -> None:  # noqa: C901, PLR0912  a table
        match instruction:
            case e.Send(attempt):
                self._send(attempt)
            case e.Deliver(answered):
                self._delivered_at = time.monotonic()
                self._deliver(answered)
            case e.Cancel(attempt):
                attempt.cancel()
            case e.Count(attempt, error, retried):
                logger.debug("%s; its rows are sent again, or are elsewhere", error)
                tally = Tally(retries=1) if retried else Tally(failures=1)
                self._record(_call(attempt.slice), attempt.url, tally)
            case e.Fail(request, error, url):
                if url is not None:
                    self._record(_call(request), url, Tally(failures=1))
                self._fail(request, error)
            case e.Resolve(request, outcome):
                self._futures.pop(request).set_result(outcome)
            case e.Publish(key, contract):
                self.contracts.pop(key, None)
                if contract is not None:
                    self.contracts[key] = contract, time.monotonic()
            case e.Probe(url):
                self._servers.probe(url)
            case e.Validate(url, key):
                self._servers.validate(url, key)
            case e.StartFallback():
                self._servers.start_fallback(self.settings, self.closing)
            case e.Reconnect(url, channel):
                self._servers.senders[url].renew(channel)
            case e.Close(url):
                self._servers.remove(url)

    def _send(self, attempt: Attempt) -> None:
        request_id = f"{self._name}-{next(self._numbers)}"
        try:
            self._servers.senders[attempt.url].send(_call(attempt.slice), attempt, request_id)
        except RuntimeError as error:  # no more threads
            failure = RequestError(f"the request could not be made: {error!r}")
            self._events.append(e.Failed(attempt, failure, sent=False))

    def _deliver(self, answered: e.Answered) -> None:
        attempt, response = answered.attempt, answered.response
        request, call = attempt.slice, _call(attempt.slice)
        if not (missing := call.missing(request)):  # the call is over
            return
        begun_at = time.monotonic()
        failure: SonicError | None = None
        try:
            call.place(request, response)
        except SonicError as error:
            failure = error.at(server=attempt.url)
        except Exception as error:
            logger.debug("a response could not be taken", exc_info=True)
            message = f"the response could not be taken: {error!r}"
            failure = ResponseError(message, server=attempt.url)
        rtt_s = answered.received_at - answered.sent_at
        span = Span(
            worker=self._worker,
            model=call.key.name,
            server=attempt.url,
            begun=time.time() - (time.monotonic() - answered.sent_at),
            seconds=rtt_s,
            rows=request.rows,
        )
        tally = Tally(
            requests=1,
            # A response that cannot be taken has scored nothing.
            rows=sum(stop - start for start, stop in missing) if failure is None else 0,
            sent_bytes=response.sent_bytes,
            received_bytes=response.received_bytes,
            wait_s=max(0.0, answered.packing_at - request.queued_at),
            pack_s=answered.sent_at - answered.packing_at,
            unpack_s=time.monotonic() - begun_at,
        )
        tally.record_trip(rtt_s)
        self._record(call, attempt.url, tally, span, response.version)
        if failure is not None:
            self.core.models.forget(call.key)
            self.contracts.pop(call.key, None)
            self._fail(request, failure)
            return
        call.finish(request)
        if call.over:
            self._calls.discard(call)

    def _record(
        self, call: Call, url: str, tally: Tally, span: Span | None = None, version: str = ""
    ) -> None:
        version = call.version or version or call.contract.version
        for statistics in (call.statistics, self.statistics):
            statistics.record(url, call.key.name, version, tally, span)

    def _fail(self, request: RequestSlice, error: SonicError) -> None:
        call = _call(request)
        self.statistics += Statistics(masked=call.fail(request, error))
        if call.over:
            self._discard(call)

    def _abandon(self, call: Call, error: SonicError) -> None:
        """End a call from another thread, and return when it has ended."""

        def end() -> None:
            call.end(error)
            self._discard(call)

        self.run_on_thread(end)

    def _discard(self, call: Call) -> None:
        if call in self._calls:
            self._calls.remove(call)
            self._events.append(e.CallEnded(call))

    def _restart(self, error: Exception) -> None:
        """Fail all calls, and go on with a new core."""
        self._fail_all(SonicError(f"the pool has failed inside: {error!r}"))
        self.core = RecordedCore(self.settings, memory_bytes())
        self._servers.add(self.settings.servers, self.settings)

    def _shut_down(self) -> None:
        self._fail_all(CancelledError("the pool was closed"), ConfigError(CLOSED))

    def _fail_all(self, error: SonicError, contract_error: SonicError | None = None) -> None:
        """End all calls and contract requests."""
        for endpoint in self.core.endpoints:
            for attempt in endpoint.in_flight.attempts:
                attempt.settled = True  # a new core does not know it
                attempt.cancel()
        for call in self._calls:
            call.end(error)
        for future in self._futures.values():
            future.set_result(contract_error or error)
        self._calls.clear()
        self._futures.clear()
        self._events.clear()
        self._sent.clear()
        self.contracts.clear()


def _call(request: RequestSlice) -> Call:
    return cast("Call", request.call)
