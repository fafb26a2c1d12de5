"""The servers of a pool: a sender for each, and the requests beside inference.

Each job that may block runs on its own thread, and posts its outcome to the engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import (
    CancelledError,
    ConfigError,
    ModelNotFoundError,
    RequestError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.pool import _events as e
from sonic_coffea.pool import _wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from sonic_coffea.pool._call import Call
    from sonic_coffea.pool._request import Attempt, ModelKey
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.transport import Connection, Lend, Response, RpcHandle

    Connect = Callable[..., Connection]
    Task = Callable[[], e.Event | None]
    Post = Callable[[e.Event | Task], None]

logger = logging.getLogger(__name__)

# Behind a URL, one of several servers may hang: the URL is live if one of these probes is answered.
PROBES = 4


class Sender:
    """The connections to an endpoint, and the thread that packs and sends requests.

    Sending may block: a token is read, shared memory is registered, a connection is made. On its
    own thread, a slow endpoint delays neither the others nor the engine.

    There are several connections to a balancer that leads each to another server, and to a server
    that is far away. Each is made for its first request.
    """

    def __init__(self, connection: Connection, post: Post, sent: Callable[[e.Sent], None]) -> None:
        self.connections = [connection]
        self._sent = sent
        self._post = post
        self._inbox: SimpleQueue[tuple[Call, Attempt, str] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, call: Call, attempt: Attempt, request_id: str) -> None:
        """Queue an attempt to be packed and sent; RuntimeError if there are no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="sonic-send", daemon=True)
            thread.start()
            self._thread = thread
        self._inbox.put((call, attempt, request_id))

    def renew(self, channel: int) -> None:
        """Replace a connection, and close the old one."""
        if channel < len(self.connections):  # else it was never used
            old = self.connections[channel]
            self.connections[channel] = old.another()
            _run_apart("sonic-close", old.close, lambda _: None)

    def close(self) -> None:
        """Send nothing more, and close the connections; this may block."""
        self._inbox.put(None)
        for connection in self.connections:
            connection.close()

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            self._transmit(*work)
            # The name would keep the tensors until the next request.
            del work

    def _transmit(self, call: Call, attempt: Attempt, request_id: str) -> None:
        if attempt.cancelled or call.over:
            self._post(e.Failed(attempt, CancelledError("cancelled before it was sent")))
            return
        try:
            attempt.sent(self._send(call, attempt, request_id))
        except ServerLostError as error:
            self._post(e.Failed(attempt, error))
        except BaseException as error:
            logger.debug("a request could not be made", exc_info=True)
            if not isinstance(error, SonicError):
                error = RequestError(f"the request could not be made: {error!r}")
            self._post(e.Failed(attempt, error, sent=False))

    def _send(self, call: Call, attempt: Attempt, request_id: str) -> RpcHandle:
        request = attempt.slice
        version = call.pin.version
        packing_at = sent_at = math.inf

        def pack(lend: Lend | None) -> Mapping[str, NDArray[Any]]:
            nonlocal packing_at, sent_at
            packing_at = time.monotonic()
            inputs = call.inputs.pack(request.start, request.stop, lend)
            sent_at = time.monotonic()
            self._sent(e.Sent(attempt, sent_at))
            return inputs

        def done(outcome: Response | SonicError) -> None:
            if not isinstance(outcome, SonicError):
                wrong = call.pin.answered(outcome.version)
                outcome = outcome if wrong is None else wrong.at(server=attempt.url)
            if isinstance(outcome, ModelNotFoundError):
                call.pin.missed(version)
            if isinstance(outcome, SonicError):
                self._post(e.Failed(attempt, outcome))
            else:
                received_at = time.monotonic()
                self._post(e.Answered(attempt, outcome, packing_at, sent_at, received_at))

        while attempt.channel >= len(self.connections):
            self.connections.append(self.connections[0].another())
        return self.connections[attempt.channel].infer(
            call.contract,
            pack,
            call.requested,
            nbytes=request.nbytes,
            version=version,
            request_id=request_id,
            done=done,
        )


class Servers:
    """Connects to servers, probes and validates them; `senders` has the sender of each URL.

    ``post`` gives the engine an event, or a task for its thread that may return one. ``sent`` gives
    it the time of sending with the next event, and does not wake it.
    """

    def __init__(self, connect: Connect, post: Post, sent: Callable[[e.Sent], None]) -> None:
        self._connect = connect
        self._post = post
        self._sent = sent
        self.senders: dict[str, Sender] = {}
        self._woken_at: dict[str, float] = {}

    def connection(self, url: str) -> Connection:
        """Return the connection to a server for metadata and probes."""
        return self.senders[url].connections[0]

    def add(self, urls: Iterable[str], settings: Settings) -> None:
        """Make the senders of servers that have none."""
        self.senders = self.connect(urls, settings) | self.senders

    def connect(self, urls: Iterable[str], settings: Settings) -> dict[str, Sender]:
        """Return senders of servers that have none; they connect by their first call."""
        options = settings.connection_options()
        return {
            url: Sender(self._connect(url, options=options), self._post, self._sent)
            for url in urls
            if url not in self.senders
        }

    def remove(self, url: str) -> None:
        """Close the sender of a server; before the pool is used, there is none."""
        if (sender := self.senders.pop(url, None)) is not None:
            _run_apart("sonic-close", sender.close, lambda _: None)

    def probe(self, url: str) -> None:
        connection = self.connection(url)
        awaited = PROBES

        def count(error: SonicError | None) -> e.Event | None:
            nonlocal awaited
            was_awaited, awaited = awaited, awaited - 1 if error else 0
            return e.Probed(url, error) if was_awaited and not awaited else None

        def done(error: BaseException | None) -> None:
            if not isinstance(error, SonicError | None):
                error = ServerLostError(f"the server cannot be probed: {error!r}", server=url)
            self._post(partial(count, error))

        for _ in range(PROBES):
            _run_apart("sonic-probe", lambda: connection.live(done), done)

    def validate(self, url: str, key: ModelKey) -> None:
        """Ask a server for a model's contract; wake a server that is lost, as it may sleep."""
        connection = self.connection(url)

        def request() -> None:
            contract, round_trip_s = connection.contract(*key), connection.round_trip_s
            self._post(e.Validated(url, key, contract, round_trip_s))

        def failed(error: BaseException) -> None:
            if not isinstance(error, SonicError):
                error = RequestError(f"the server cannot be asked: {error!r}")
            self._post(e.Validated(url, key, error))
            now = time.monotonic()
            asleep = isinstance(error, ServerLostError)
            if asleep and now - self._woken_at.get(url, -math.inf) >= _wake.INTERVAL_S:
                self._woken_at[url] = now
                with contextlib.suppress(SonicError):
                    connection.models()

        _run_apart("sonic-contract", request, failed)

    def start_fallback(self, settings: Settings, closing: threading.Event) -> None:
        source = settings.fallback

        def start() -> None:
            (url,) = settings.with_servers(source() if callable(source) else str(source)).servers
            read_certificates([url], settings)
            connected = self.connect([url], settings)

            def started() -> e.Event:
                self.senders = connected | self.senders
                return e.FallbackStarted(url)

            self._post(started)
            if closing.is_set():
                close_all(connected.values())

        def failed(error: BaseException) -> None:
            failure = error if isinstance(error, SonicError) else ConfigError(repr(error))
            self._post(e.FallbackStarted(None, failure))

        _run_apart("sonic-fallback", start, failed)


def _run_apart(name: str, work: Callable[[], Any], failed: Callable[[BaseException], Any]) -> None:
    """Run work that may block on a new thread; `failed` takes its error."""

    def run() -> None:
        try:
            work()
        except (Exception, SystemExit) as error:  # noqa: BLE001  else rows would wait for ever
            failed(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:  # no more threads
        failed(error)


def read_certificates(urls: Iterable[str], settings: Settings) -> None:
    """Raise if certificates cannot be used, which connections read on first use; this may block."""
    if any(url.startswith("grpcs://") for url in urls):
        settings.connection_options().tls.read()


def close_all(senders: Iterable[Sender]) -> None:
    """Close senders at the same time, as each may block, and wait for all."""
    threads = [threading.Thread(target=sender.close, name="sonic-close") for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
