"""The engine: one thread that owns the pool's core, and carries out its instructions.

Connections, senders and callers only post events to it; nobody else changes the core, so there is
nothing to lock. What may block runs on threads of its own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sonic_coffea._files import FileState, state_of
from sonic_coffea.errors import CancelledError, ConfigError, SonicError
from sonic_coffea.pool import _instructions as do
from sonic_coffea.pool._call import Call
from sonic_coffea.pool._core import Event, PoolCore
from sonic_coffea.pool._deadline import fulfil, run_in_thread
from sonic_coffea.pool._process import hooks, switch_as_before, switch_sooner
from sonic_coffea.pool._record import RecordedCore
from sonic_coffea.pool._request import RequestSlice
from sonic_coffea.pool._servers import Sender, outcome_of
from sonic_coffea.pool._settings import Settings, is_in_process, read_servers
from sonic_coffea.reporting import Statistics, Tally
from sonic_coffea.transport import Contract, Transport

logger = logging.getLogger(__name__)

Task = Callable[[], Event | None]

CLOSED = "the pool has been closed; call sonic.connect again"
# How often the file of servers is looked at.
WATCH_INTERVAL_S = 1.0

T = TypeVar("T")


class Engine:
    """The core, its thread, the connections, and the calls that are not over.

    The thread refers to the engine, and not to the pool.

    Attributes
    ----------
    settings : Settings
        The servers and the limits.
    inbox : SimpleQueue
        Takes tasks for the thread, which may return an event. None ends the thread.
    lock : RLock
        Guards whether the thread runs.
    closing : Event
        Set when no more tasks are taken.
    core : RecordedCore
        For the engine's thread; others look at it with `run_on_thread`, or ask for a valid
        contract.
    senders
        The sender of each URL; the engine's thread writes it, and others read it.
    statistics
        The tallies, to which any thread may add.
    calls, callers
        The calls that are not over, and those who wait for a contract.
    """

    def __init__(self, settings: Settings, connect: Callable[..., Transport]) -> None:
        self.settings = settings
        self._connect, self._first_servers = connect, settings.servers
        self.inbox: SimpleQueue[Task | None] = SimpleQueue()
        self.lock = threading.RLock()
        self.closing = threading.Event()
        self.core = RecordedCore(settings)
        self.senders: dict[str, Sender] = {}
        self.statistics = Statistics()
        self.calls: set[Call] = set()
        self.callers: set[Future[Contract | SonicError]] = set()
        self._sent: deque[Event] = deque()
        self._thread: threading.Thread | None = None

    # For other threads

    def start(self) -> None:
        """Start the thread, and watch the file of servers, unless this was done before.

        Raises
        ------
        ConfigError
            If the pool has been closed.
        """
        with self.lock:
            if self.closing.is_set():
                raise ConfigError(CLOSED)
            if self._thread is not None:
                return
            self._add_senders(self.settings.servers)
            thread = threading.Thread(target=self._run, name="sonic-pool", daemon=True)
            # If the system has no more threads, the next call tries again.
            thread.start()
            if (path := self.settings.servers_file) is not None:
                # On a thread of its own, as a file system may hang.
                watch = partial(self._watch, path)
                threading.Thread(target=watch, name="sonic-servers", daemon=True).start()
            self._thread = thread
            switch_sooner(thread)

    def post(self, task: Task) -> None:
        """Give the thread a task, unless the pool is closed."""
        with self.lock:
            self.start()
            self.inbox.put(task)

    def tell(self, event: Callable[..., None], **arguments: Any) -> None:
        """Give the core an event and its arguments, if the thread runs, or once it does."""
        self.inbox.put(lambda: partial(event, **arguments))

    def run_on_thread(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, or here if the thread does not run."""
        with self.lock:
            thread, ending = self._thread, self.closing.is_set()
            if thread is None or not thread.is_alive() or thread is threading.current_thread():
                return function()
            future: Future[T] = Future()
            if not ending:
                self.inbox.put(partial(fulfil, future, function))
        if ending:  # it would not take the function any more
            thread.join()
            return function()
        return future.result()

    def set_servers(self, servers: Any) -> None:
        """Replace the servers; `Pool.set_servers` describes it."""
        settings = self.settings.with_servers(servers)
        settings.check_tls()
        settings.read_certificates()
        if self.closing.is_set():
            raise ConfigError(CLOSED)

        def change() -> None:
            if self._thread is not None:
                self._add_senders(settings.servers)
            self.settings = settings
            self.tell(PoolCore.servers_changed, servers=settings.servers)

        self.run_on_thread(change)

    def abandon(self, call: Call, error: SonicError) -> None:
        """End a call from another thread, and return when it has ended."""

        def end() -> None:
            call.end(error)
            self._discard(call)

        self.run_on_thread(end)

    def close(self) -> None:
        """Cancel the requests in flight, and close all connections. May be called again."""
        with self.lock:
            self.closing.set()
            thread = self._thread
            self.inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # The engine's thread

    def _run(self) -> None:
        """Handle events until the pool is closed or freed."""
        with self.lock:  # while it starts
            if self._thread is not threading.current_thread():  # Ctrl-C, or no more threads
                return
        items: list[Task | None] = []
        while None not in items:
            wait_s = self._take(items)
            items.clear()
            with contextlib.suppress(Empty):
                items.append(self.inbox.get(timeout=None if wait_s == math.inf else wait_s))
                while True:
                    items.append(self.inbox.get_nowait())
        self._take(items)
        self.closing.set()
        self._fail_all(CancelledError("the pool was closed"), ConfigError(CLOSED))
        switch_as_before(self._thread)
        # At the same time, as each may block.
        close = partial(run_in_thread, "sonic-close", or_here=True)
        closing = [close(sender.close) for sender in self.senders.values()]
        concurrent.futures.wait(closing)

    def _take(self, items: Sequence[Task | None]) -> float:
        """Handle events and tasks; return the seconds until there is more to do."""
        try:
            # First: an answer that is among the tasks was sent before.
            events = [self._sent.popleft() for _ in range(len(self._sent))]
            outcomes = [task() for task in items if task is not None]
            events += [event for event in outcomes if event is not None]
            self._handle(*events)
        except Exception as error:
            with contextlib.suppress(Exception):  # of the user's log; the thread would end
                logger.exception("the pool has failed inside; it begins anew")
            self._fail_all(SonicError(f"the pool has failed inside: {error!r}"))
            self.core = RecordedCore(self.settings)
            self._add_senders(self.settings.servers)
        return max(0.0, self.core.wakes_at() - time.monotonic())

    def _handle(self, *events: Event) -> None:
        for instruction in self.core.handle(time.monotonic(), *events):
            self._execute(instruction)

    def _add_senders(self, urls: Sequence[str]) -> None:
        """Make a sender for each server that has none; it connects with its first request."""
        self.senders |= {url: self._sender(url) for url in urls if url not in self.senders}

    def _sender(self, url: str) -> Sender:
        connect = partial(self._connect, url, options=self.settings.connection_options())
        return Sender(url, connect, self.tell, self._sent.append)

    def _execute(self, instruction: do.Instruction) -> None:  # noqa: C901, PLR0912  a table
        match instruction:
            case do.Send(attempt):
                self.senders[attempt.url].send(attempt)
            case do.Answer():
                self._deliver(instruction)
            case do.Cancel(attempt):
                attempt.cancel()
            case do.Count(attempt, error, retried):
                logger.debug("%s; its rows are sent again, or are elsewhere", error)
                tally = Tally(retries=1) if retried else Tally(failures=1)
                self._record(attempt.slice.call, attempt.url, tally)
            case do.Fail(request, error):
                if error.server is not None:
                    self._record(request.call, error.server, Tally(failures=1))
                self._fail(request, error)
            case do.Resolve(caller, outcome):
                self.callers.remove(caller)
                caller.set_result(outcome)
            case do.Probe(url):
                self.senders[url].probe()
            case do.Validate(url, key):
                self.senders[url].validate(key)
            case do.StartFallback():
                run_in_thread("sonic-fallback", self._open_fallback).add_done_callback(
                    lambda opening: self.inbox.put(partial(self._fallback_opened, opening))
                )
            case do.Reconnect(url, channel):
                self.senders[url].renew(channel)
            case do.Close(url):
                if (sender := self.senders.pop(url, None)) is not None:  # else it is not used yet
                    run_in_thread("sonic-close", sender.close, or_here=True)
                self._add_senders(self.settings.servers)  # it may just have been named again

    def _open_fallback(self) -> tuple[str, Sender]:
        """Return the fallback's URL and its sender, on a thread of its own."""
        source = self.settings.fallback
        settings = self.settings.with_servers([source() if callable(source) else source])
        settings.read_certificates()
        (url,) = settings.servers
        sender = self._sender(url)
        sender.loads = not is_in_process(url)
        return url, sender

    def _fallback_opened(self, opening: Future[tuple[str, Sender]]) -> Event:
        """Take the fallback's sender; tell the core its URL, or why it cannot be opened."""
        outcome = outcome_of(opening, ConfigError)
        if not isinstance(outcome, SonicError):
            outcome, sender = outcome
            self.senders.setdefault(outcome, sender)
        return partial(PoolCore.fallback_started, outcome=outcome)

    def _deliver(self, answer: do.Answer) -> None:
        attempt, response = answer.attempt, answer.response
        request = attempt.slice
        call: Call = request.call
        rows = sum(stop - start for start, stop in call.missing(request))
        if rows == 0:  # the call is over
            return
        begun_at = time.monotonic()
        failure: SonicError | None = None
        try:
            call.place(request, response)
        except SonicError as error:  # such a response has scored nothing
            failure, rows = error.at(server=attempt.url), 0
        tally = Tally(
            requests=1,
            rows=rows,
            sent_bytes=response.sent_bytes,
            received_bytes=response.received_bytes,
            wait_s=answer.packing_at - request.queued_at,
            pack_s=answer.sent_at - answer.packing_at,
            unpack_s=time.monotonic() - begun_at,
        )
        tally.record_trip(answer.received_at - answer.sent_at)
        self._record(call, attempt.url, tally, response.version)
        if failure is not None:
            # First: who hears of it may ask for the contract at once.
            self._handle(partial(PoolCore.failed, attempt=attempt, error=failure))
            self._fail(request, failure)
            return
        call.finish(request)
        if call.over:
            self.calls.discard(call)

    def _record(self, call: Call, url: str, tally: Tally, version: str = "") -> None:
        version = call.version or version or call.contract.version
        for statistics in (call.statistics, self.statistics, hooks.statistics):
            statistics.record(url, call.key.name, version, tally)

    def _fail(self, request: RequestSlice, error: SonicError) -> None:
        call: Call = request.call
        self.statistics += Statistics(masked=call.fail(request, error))
        if call.over:
            self._discard(call)

    def _discard(self, call: Call) -> None:
        if call in self.calls:
            self.calls.remove(call)
            self.tell(PoolCore.call_ended, call=call)

    def _fail_all(self, error: SonicError, contract_error: SonicError | None = None) -> None:
        """End all calls and contract requests."""
        for endpoint in self.core.endpoints:
            for attempt in endpoint.attempts:
                attempt.slice.attempts.clear()  # a new core does not know it
                attempt.cancel()
        for call in self.calls:
            call.end(error)
        for caller in self.callers:
            caller.set_result(contract_error or error)
        for held in (self.calls, self.callers, self._sent):
            held.clear()

    def _watch(self, path: str) -> None:
        """Read the file of servers whenever it changes, until the pool is closed."""
        read: FileState = 0, 0, 0
        servers, problem = self._first_servers, ""
        while not self.closing.is_set():
            try:
                if (state := state_of(Path(path))) != read:
                    new = read_servers(path)
                    if new != servers:
                        self.set_servers(new)
                        logger.warning("the servers are now %s", ", ".join(new))
                    servers, read, problem = new, state, ""
            except Exception as error:  # noqa: BLE001  a wrong file must not stop those in use
                # A missing file, such as a certificate, may appear later: log it once.
                if str(error) != problem:
                    problem = str(error)
                    logger.warning("the servers stay as they are, %s: %s", path, problem)
            self.closing.wait(WATCH_INTERVAL_S)
