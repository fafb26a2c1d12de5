"""The pool: the shared servers of one process, and all that is out on them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from sonic_coffea.pool._batching import plan
from sonic_coffea.pool._call import Piece
from sonic_coffea.pool._deadline import NEVER, Deadline
from sonic_coffea.pool._dispatcher import Dispatcher
from sonic_coffea.pool._fleet import EndpointReport, Fleet, ServerState
from sonic_coffea.reporting import tables

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from types import TracebackType

    from sonic_coffea.pool._call import Call
    from sonic_coffea.pool._endpoint import ModelKey
    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.reporting import Statistics
    from sonic_coffea.transport import Connection, Contract, Timings


class Pool:
    """The shared servers of one process.

    Made by :func:`sonic_coffea.connect`; one is enough for a process. Threads and connections are
    made on first use. Thread-safe; a context manager that closes it.
    """

    def __init__(self, settings: Settings) -> None:
        self._lock = threading.Condition()
        self._fleet = Fleet(settings, self._lock)
        self._dispatcher = Dispatcher(self._fleet, self._lock)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _repr_html_(self) -> str:
        header = ("server", "state", "requests out", "last error")
        rows: list[tuple[str, str, int, str]] = [
            (one.url, "usable" if one.usable else "away", one.in_flight, one.last_error or "")
            for one in self.servers
        ]
        rows = rows or [(url, "not used yet", 0, "") for url in self.settings.servers]
        total = self.statistics.total()
        notes = [
            (
                f"{total.rows:,} rows in {total.requests:,} requests, {total.retries:,} again; "
                "sonic.report(pool) says more"
            )
        ]
        return tables.table("Pool", rows, header=header, notes=notes)

    def __repr__(self) -> str:
        state = "closed, " if self.closed else ""
        return f"<Pool {state}servers: {', '.join(self.settings.servers)}>"

    @property
    def settings(self) -> Settings:
        """The servers and the limits."""
        return self._fleet.settings

    @property
    def closed(self) -> bool:
        """Whether the pool has been closed."""
        return self._dispatcher.closed

    @property
    def statistics(self) -> Statistics:
        """What has been scored so far, and how long it took: a snapshot."""
        return self._dispatcher.statistics.copy()

    @property
    def servers(self) -> list[ServerState]:
        """What is known of each server."""
        return self._fleet.states()

    def set_servers(self, servers: Any) -> None:
        """Change the servers, while calls go on.

        New ones get rows once they have said that they have the same model. Those that are not
        named any more answer what they have, and get nothing else.

        Parameters
        ----------
        servers : str or sequence of str
            All servers that are to be used from now on.

        Raises
        ------
        ConfigError
            If a URL cannot be used.
        """
        self._fleet.set_servers(self.settings.with_servers(servers))

    def delay_start(self, delay_s: float) -> None:
        """Contact no server for some time: many processes may start at the same moment."""
        self._fleet.first_at = time.monotonic() + delay_s

    def telemetry(self) -> tuple[list[EndpointReport], dict[ModelKey, int]]:
        """Return what was seen of each server since the last call, and how many requests wait."""
        with self._lock:
            return self._fleet.observe(), self._dispatcher.waiting()

    def timings(self) -> dict[tuple[str, ModelKey], Timings]:
        """Return the servers' own account of the models in use, by server and model."""
        return self._fleet.timings()

    def set_quotas(
        self,
        quotas: Mapping[tuple[str, ModelKey], Quota],
        ejected: Collection[str],
        lease_s: float,
    ) -> None:
        """Take the quotas of this process from who sees all clients of the servers.

        Parameters
        ----------
        quotas : mapping
            By server and model.
        ejected : collection of str
            Servers whose circuit is open elsewhere.
        lease_s : float
            For how long those are left alone.
        """
        self._fleet.allow(quotas, ejected, lease_s)

    def connections(self) -> list[Connection]:
        """Return a connection for each server."""
        return [e.connections[0] for e in self._fleet.open()]

    def contract(
        self,
        model: str,
        version: str | None,
        *,
        anew: bool = False,
        deadline: Deadline = NEVER,
    ) -> Contract:
        """Return what a model takes and gives, asked once per process, or anew.

        Raises
        ------
        DeadlineError
            If the time was not enough.
        ModelNotFoundError
            If no server has it.
        ServerLostError
            If no server could be reached.
        """
        if anew:
            self._fleet.forget((model, version))
        return self._fleet.contract((model, version), deadline)

    def submit(self, call: Call) -> None:
        """Queue a call; it leaves as soon as there is room."""
        cuts = plan(
            call.inputs.segments,
            max_rows=call.contract.max_rows,
            preferred_rows=call.contract.preferred_rows,
            max_bytes=self.settings.max_request_bytes,
        )
        pieces = [Piece(call, *cut, number) for number, cut in enumerate(cuts)]
        self._fleet.open()
        call.expect(len(pieces))
        self._dispatcher.submit(call, pieces)

    def close(self) -> None:
        """Cancel what is out and let go of all servers. May be called again."""
        if self._dispatcher.stop():
            self._fleet.close()
            self._dispatcher.join()
