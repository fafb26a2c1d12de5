"""The senders of a pool: one for each server, made for all new servers or for none."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from sonic_coffea.pool._apart import all_at_once, apart
from sonic_coffea.pool._sender import Sender
from sonic_coffea.transport import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from sonic_coffea.pool._events import Event
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.transport import Connection

    Connect = Callable[..., Connection]


class Senders:
    """Connects to servers; each has a sender, by its URL."""

    def __init__(self, connect: Connect, post: Callable[[Event], None]) -> None:
        self._connect = connect
        self._post = post
        self._senders: dict[str, Sender] = {}

    def __getitem__(self, url: str) -> Sender:
        return self._senders[url]

    def __iter__(self) -> Iterator[str]:
        return iter(self._senders)

    def connection(self, url: str) -> Connection:
        """Return the first connection to a server, for questions about it."""
        return self._senders[url].connections[0]

    def add(
        self,
        urls: Iterable[str],
        settings: Settings,
        connected: Mapping[str, Sender] = MappingProxyType({}),
    ) -> None:
        """Keep each server's sender, or take one from `connected`, or make one."""
        for url in urls:
            if url not in self._senders:
                self._senders[url] = connected.get(url) or self._new(url, settings)

    def connect(self, urls: Iterable[str], settings: Settings) -> list[Sender]:
        """Return senders for new servers: for all, or for none."""
        urls, senders = list(urls), []
        if any(Address.parse(url).tls for url in urls):
            # The connections read the certificates on first use; what is wrong is told now.
            settings.tls.read()
        try:
            for url in urls:
                senders.append(self._new(url, settings))  # noqa: PERF401  closed below
        except BaseException:
            all_at_once(sender.close for sender in senders)
            raise
        return senders

    def renew(self, url: str, channel: int) -> None:
        """Make a connection anew, and close the old one."""
        if (old := self._senders[url].renew(channel)) is not None:
            apart("sonic-close", old.close, lambda _: None)

    def remove(self, url: str) -> None:
        """Close the sender of a server, if it has one: none has before the pool is used."""
        if (sender := self._senders.pop(url, None)) is not None:
            apart("sonic-close", sender.close, lambda _: None)

    def close(self) -> None:
        """Close all, and return when they are closed."""
        all_at_once(sender.close for sender in self._senders.values())

    def _new(self, url: str, settings: Settings) -> Sender:
        connection = self._connect(url, options=settings.connection_options())
        return Sender(connection, self._post)
