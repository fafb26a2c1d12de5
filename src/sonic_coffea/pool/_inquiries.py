"""Inquiries: probes of servers, questions about models, and the start of the fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonic_coffea.errors import ConfigError, RequestError, ServerLostError, SonicError
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._apart import apart
from sonic_coffea.pool._wake import Alarm
from sonic_coffea.transport import Address

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.pool._sender import Sender
    from sonic_coffea.pool._senders import Senders
    from sonic_coffea.pool._settings import Settings

    Task = Callable[[], e.Event | None]

# Behind a URL, one of several servers may hang: the URL lives if one of these probes is answered.
PROBES = 4


class Inquiries:
    """Runs inquiries, each on a thread of its own.

    ``enter`` has a task run on the engine's thread; the core takes the event that it returns.
    """

    def __init__(self, senders: Senders, enter: Callable[[Task], None]) -> None:
        self._senders = senders
        self._enter = enter
        self._alarm = Alarm()

    def probe(self, url: str) -> None:
        """Ask a server whether it lives."""
        connection = self._senders.connection(url)
        awaited = PROBES

        def ended(error: SonicError | None) -> e.Event | None:
            nonlocal awaited
            was_awaited, awaited = awaited, awaited - 1 if error else 0
            return e.Probed(url, error) if was_awaited and not awaited else None

        def answered(error: SonicError | None) -> None:
            self._enter(lambda: ended(error))

        def failed(error: Exception) -> None:
            answered(ServerLostError(f"the server cannot be probed: {error!r}", server=url))

        for _ in range(PROBES):
            apart("sonic-probe", lambda: connection.live(answered), failed)

    def validate(self, url: str, key: ModelKey) -> None:
        """Ask a server for a model's contract."""
        connection = self._senders.connection(url)

        def failed(error: Exception) -> None:
            if not isinstance(error, SonicError):
                error = RequestError(f"the server cannot be asked: {error!r}")
            outcome = error
            self._enter(lambda: e.Validated(url, key, outcome))
            if isinstance(error, ServerLostError):
                self._alarm.ring(url, connection)

        def ask() -> None:
            contract, round_trip_s = connection.contract(*key), connection.round_trip_s
            self._enter(lambda: e.Validated(url, key, contract, round_trip_s))

        apart("sonic-contract", ask, failed)

    def start_fallback(self, settings: Settings, closing: threading.Event) -> None:
        """Start the fallback, or have a user's function do so, and connect to it."""
        source = settings.fallback.source

        def start() -> None:
            try:
                if callable(source):
                    url = source()
                else:
                    from sonic_coffea.server.launch import serve_for_machine

                    url = serve_for_machine(str(source))
                url = Address.parse(url).url
                (sender,) = self._senders.connect([url], settings)
            except SystemExit as error:  # a user's function, and rows that wait for it
                failed(ConfigError(repr(error)))
            else:
                self._enter(lambda: started(url, sender))
                if closing.is_set():
                    sender.close()

        def started(url: str, sender: Sender) -> e.Event:
            self._senders.add([url], settings, {url: sender})
            return e.FallbackStarted(url)

        def failed(error: Exception) -> None:
            failure = error if isinstance(error, SonicError) else ConfigError(repr(error))
            self._enter(lambda: e.FallbackStarted(None, failure))

        apart("sonic-fallback", start, failed)
