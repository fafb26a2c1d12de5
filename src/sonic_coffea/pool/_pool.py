"""The pool: the servers of one process, and all requests in flight to them."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sonic_coffea.errors import ConfigError, DeadlineError, ServerLostError, SonicError
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._batching import plan
from sonic_coffea.pool._check import Checks, HostCheck, check_here
from sonic_coffea.pool._deadline import NEVER, Deadline
from sonic_coffea.pool._engine import Engine
from sonic_coffea.pool._request import ModelKey, RequestSlice
from sonic_coffea.pool._settings import is_in_process, read_servers
from sonic_coffea.pool._wake import show_status, wake
from sonic_coffea.reporting import tables
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sonic_coffea.pool._call import Call
    from sonic_coffea.pool._endpoint import EndpointReport, ServerState
    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.reporting import Statistics
    from sonic_coffea.transport import Connection, ConnectionOptions, Contract, ModelStatistics

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class Block:
    """A ``with`` block in which a pool scores the calls.

    A `connect` that was not entered names the pool for the rest of the block around it. Event loops
    take a context with them, to other threads and past the end of a block. Neither counts.
    """

    pool: Pool
    entered: bool = True
    over: bool = False
    thread: int = field(default_factory=threading.get_ident)


_blocks: ContextVar[tuple[Block, ...]] = ContextVar("sonic_blocks", default=())


def blocks_around() -> list[Block]:
    """Return the blocks of this thread, or asyncio task, the innermost last."""
    thread = threading.get_ident()
    return [block for block in _blocks.get() if not block.over and block.thread == thread]


def enter(block: Block) -> None:
    _blocks.set((*blocks_around(), block))


def leave(block: Block) -> None:
    around = blocks_around()
    if block in around:  # else it was entered elsewhere
        for inner in around[around.index(block) :]:
            inner.over = True
    block.over = True
    _blocks.set(tuple(blocks_around()))


def open_transport(url: str, *, options: ConnectionOptions) -> Connection:
    """Return a way to a server, or to the models of a repository in this process."""
    if is_in_process(url):
        from sonic_coffea.server import InProcessTransport

        return cast("Connection", InProcessTransport(url))
    return connect_transport(url, options=options)


class Pool:
    """The connections of one process to its servers, and the requests in flight to them.

    :func:`sonic_coffea.connect` makes the pool. Threads and connections are made on first use. A
    pool is thread-safe. As a context manager, it is the pool of the models that this thread calls
    meanwhile. It closes when the last ``with`` block that uses it ends, or when nothing refers to
    it any more: no variable, and no scores that are on their way.

    A pickle of a pool has its settings without secrets, and becomes the pool with these settings
    in the process that reads it. A forked child has the pool with connections of its own.

    Parameters
    ----------
    settings : Settings
        The servers and the limits.
    connect : callable, optional
        Makes a connection, given a URL and ``options``; by default over gRPC.
    """

    def __init__(
        self, settings: Settings, *, connect: Callable[..., Connection] | None = None
    ) -> None:
        self._connect = connect or open_transport
        # Also called by `check`, for other hosts.
        self.check_elsewhere: Callable[..., list[HostCheck]] | None = None
        # Calls of `connect` whose pool was not entered, and the blocks that have entered it.
        self._claims, self._entered = 0, list[Block]()
        self.begin(settings)

    def begin(self, settings: Settings) -> Engine | None:
        """Begin with an engine that is not started; return the one before, a forked parent's."""
        before = getattr(self, "_engine", None)
        self._engine = Engine(settings, self._connect)
        self._counting = threading.Lock()
        self._ending = False
        # The collector of garbage may run anywhere, so that this must neither lock nor wait.
        weakref.finalize(self, self._engine.post, None).atexit = False
        return before

    def claim(self) -> bool:
        """Keep the pool open for one more user; False if it is closing."""
        with self._counting:
            if self.closed:
                return False
            self._claims += 1
            return True

    @property
    def claimed(self) -> bool:
        """Whether it is the pool of a `connect` or of a ``with`` block."""
        return bool(self._claims or self._entered)

    def __enter__(self) -> Pool:
        inner = [b for b in blocks_around()[-1:] if b.pool is self and not b.entered]
        block = inner[0] if inner else Block(self)
        block.entered = True
        with self._counting:
            self._claims = max(self._claims - 1, 0)
            self._entered.append(block)
        if not inner:
            enter(block)
        return self

    def __exit__(self, *_: object) -> None:
        around = blocks_around()
        with self._counting:
            mine = [block for block in self._entered if block in around] or self._entered
            block = mine[-1]
            self._entered.remove(block)
            self._ending = not self.claimed
        leave(block)
        if self._ending:
            self.close()

    def _repr_html_(self) -> str:
        header = ("server", "circuit", "in flight", "last error")
        rows = [(s.url, s.circuit, s.in_flight, s.last_error or "") for s in self.servers]
        rows = rows or [(url, "not used yet", 0, "") for url in self.settings.servers]
        total = self.statistics.total()
        note = (
            f"{total.rows:,} rows in {total.requests:,} requests, {total.retries:,} retries; "
            "sonic.report(pool) says more"
        )
        return tables.table("Pool", rows, header=header, notes=[note])

    def __repr__(self) -> str:
        state = "closed, " if self.closed else ""
        return f"<Pool {state}servers: {', '.join(self.settings.servers)}>"

    @property
    def settings(self) -> Settings:
        """The servers and the limits."""
        return self._engine.settings

    @property
    def closed(self) -> bool:
        """Whether the pool is closed."""
        return self._ending or self._engine.closing.is_set()

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return self._engine.busy

    @property
    def threads(self) -> frozenset[int]:
        """The threads that are in a ``with`` block of the pool."""
        return frozenset(block.thread for block in tuple(self._entered))

    @property
    def statistics(self) -> Statistics:
        """A snapshot of the statistics of all requests so far."""
        return self._engine.statistics.copy()

    @property
    def servers(self) -> list[ServerState]:
        """The state of each server."""
        engine = self._engine
        return engine.run_on_thread(
            lambda: engine.core.states(time.monotonic()) if engine.started else []
        )

    def set_servers(self, servers: Any) -> None:
        """Replace the servers, while calls are in flight.

        A new server gets rows after it has confirmed that it has the same model. A server that is
        no longer named is drained: it answers its requests, and gets no more.

        Parameters
        ----------
        servers : str or sequence of str
            All servers to use from now on.

        Raises
        ------
        ConfigError
            If a URL cannot be used.
        """
        self._engine.set_servers(self.settings.with_servers(servers).servers)

    def check(
        self,
        model: Any = None,
        version: str | None = None,
        declared: Sequence[Any] = (),
    ) -> Checks:
        """Try each server step by step, from its name to an inference, and say what helps.

        With the client of a dask cluster (``sonic.connect(..., client=client)``), one worker of
        each host tries the servers, too.

        Parameters
        ----------
        model : str, Model, Folds or Choice, optional
            The model to try, by its name, or by its declaration, which is compared, too; of several
            models, only the declarations are compared. By default, no inference is tried.
        version : str, optional
            The version to try; by default, the declared one, or the latest.
        declared : sequence of sonic_coffea.Model
            Declarations that are compared with the servers' models.

        Returns
        -------
        Checks
            A table: for each host, the servers that it reaches, the delays, and what is missing.

        Raises
        ------
        ConfigError
            If the dask client is closed, or asynchronous, or no worker comes within a minute; or
            something is no declaration.
        """
        if model is not None and not isinstance(model, str):
            own = _declarations(model)
            declared = [*own, *declared]
            model = own[0].name if len(own) == 1 else None
            version = version or (own[0].version if model else None)
        declared = [declaration for one in declared for declaration in _declarations(one)]
        tried = self.settings, model, version, declared
        elsewhere = self.check_elsewhere
        return Checks([check_here(*tried), *(elsewhere(*tried) if elsewhere else ())])

    def wake(self, *models: Any, timeout_s: float | None = 600.0, progress: bool = True) -> float:
        """Start a service that sleeps, and wait until a server is ready.

        A service without a running server starts one when a client asks for its list of models,
        which takes minutes. Calls of models ask, too, but wait only for ``retry_timeout_s``.

        Parameters
        ----------
        *models : str or sonic_coffea.Model
            The models that the server must have.
        timeout_s : float or None
            Longest time to wait.
        progress : bool
            Whether a terminal or notebook shows the time and the reason of the wait.

        Returns
        -------
        float
            The time of the wait, in seconds.

        Raises
        ------
        AccessError, ModelNotFoundError
            If waiting longer cannot help.
        CancelledError
            If the pool is closed meanwhile.
        ConfigError
            If `timeout_s` cannot be used.
        DeadlineError
            If no server was ready after `timeout_s`.
        """
        limit_s = Deadline.after(timeout_s).timeout_s
        limit_s = math.inf if limit_s is None else limit_s
        keys = []
        for model in models:
            if isinstance(model, str):
                keys.append(ModelKey(model, None))
            else:
                keys += [ModelKey(each.name, each.version) for each in _declarations(model)]
        with show_status(progress=progress) as show:
            return wake(self.connections(), keys, limit_s, self._engine.closing, show)

    def join_cluster(self, delay_s: float, max_in_flight: int, quotas_within_s: float) -> None:
        """Begin as one of many processes that may start at the same time.

        Parameters
        ----------
        delay_s : float
            Before it, no server is contacted.
        max_in_flight : int
            Requests of a model that may be in flight, over all servers, until its quotas come.
        quotas_within_s : float
            How long they may take.
        """
        event = e.SchedulerJoined(time.monotonic() + delay_s, max_in_flight, quotas_within_s)
        self._engine.post(event)

    def dump(self, path: str | Path) -> None:
        """Write the pool's last events and decisions as lines of JSON, for a bug report.

        They name servers, models, tensors and errors, and have no rows, scores, tokens or headers.

        Parameters
        ----------
        path : str or path
            The file to write; one that is there is replaced.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        lines = self._engine.run_on_thread(self._engine.core.lines)
        try:
            Path(path).write_text("\n".join([*lines, ""]), encoding="utf-8")
        except OSError as error:
            message = f"cannot write the dump {str(path)!r}: {error.strerror}"
        else:
            return
        raise ConfigError(message)  # none is raised from an OSError

    def telemetry(self) -> tuple[list[EndpointReport], dict[ModelKey, int]]:
        """Return what happened at each server since the last call, and the requests that wait.

        Models that run in this process are no other process's concern.
        """
        engine = self._engine
        return engine.run_on_thread(
            lambda: (
                [report for report in engine.core.report() if not is_in_process(report.url)],
                engine.core.waiting.counts(),
            )
        )

    def timings(self) -> dict[tuple[str, ModelKey], ModelStatistics]:
        """Return the servers' own statistics of the models in use, by server and model."""
        served = {(url, key): c for url, c, keys in self._engine.served() for key in keys}
        outcomes = _ask([partial(c.statistics, *key) for (_, key), c in served.items()])
        each = zip(served, outcomes, strict=True)
        return {which: given for which, given in each if not isinstance(given, SonicError)}

    def connections(self) -> list[Connection]:
        """Return a connection to each server."""
        self._open()
        return [connection for _, connection, _ in self._engine.served()]

    def set_quotas(
        self,
        quotas: Mapping[tuple[str, ModelKey], Quota],
        lease_s: float,
    ) -> None:
        """Take the quotas that the scheduler allocates to this process.

        Parameters
        ----------
        quotas : mapping
            What this process may have in flight, by server and model.
        lease_s : float
            For how long they are valid.
        """
        self._engine.post(e.QuotasReceived(quotas, lease_s))

    def contract(
        self,
        model: str,
        version: str | None,
        *,
        anew: bool = False,
        deadline: Deadline = NEVER,
    ) -> Contract:
        """Return a model's contract: the known one if it is recent, or a new one from a server.

        Raises
        ------
        ConfigError
            If the pool is closed.
        DeadlineError
            If the deadline passed.
        ModelNotFoundError
            If no server has the model.
        ServerLostError
            If no server could be reached.
        """
        key = ModelKey(model, version)
        known = None if anew or self.closed else self._engine.recent_contract(key)
        if known is not None:
            return known
        self._open()
        return self._engine.contract(key, deadline, anew=anew)

    def last_contract(self, model: str, version: str | None) -> tuple[Contract | None, float]:
        """Return the contract that servers gave last, and how many seconds ago they did.

        It is None if it is in doubt, as a server was lost since. No server is asked.
        """
        key = ModelKey(model, version)
        contract, received_at = self._engine.contracts.get(key, (None, -math.inf))
        return contract, time.monotonic() - received_at

    def digests(
        self, contract: Contract, servers: Sequence[str], times: int, timeout_s: float
    ) -> list[str | SonicError]:
        """Ask servers which digest a version has now.

        Parameters
        ----------
        times : int
            How often each server is asked, over all connections to it: there may be several servers
            behind a URL.
        timeout_s : float
            How long they may take.

        Returns
        -------
        list
            The answers, empty where a server tells no digest, or why there is none.
        """
        connections = self._engine.connections(servers)
        asked = [c for each in connections for c in islice(cycle(each), max(times, len(each)))]
        outcomes = _ask(
            [partial(c.digest, contract.model, contract.version) for c in asked], timeout_s
        )
        lost = ServerLostError("no connection to it is left", model=contract.model)
        return outcomes + [
            lost.at(server=url) for url, each in zip(servers, connections, strict=True) if not each
        ]

    def submit(self, call: Call) -> None:
        """Queue a call; its requests leave as soon as there is room for them.

        Raises
        ------
        ConfigError
            If the pool has been closed.
        """
        cuts = plan(
            call.inputs.segments,
            max_rows=call.contract.max_rows,
            preferred_rows=call.contract.preferred_rows,
            max_bytes=self.settings.max_request_bytes,
        )
        whole = any(segment.cuts is not None for segment in call.inputs.segments)
        slices = [RequestSlice(call, *cut, whole=whole) for cut in cuts]
        self._open()
        self._engine.submit(call, slices)

    def close(self) -> None:
        """Cancel the requests in flight, and close all connections. May be called again."""
        self._engine.close()

    def _open(self) -> None:
        """Start the engine, and watch the file of servers if there is one."""
        if self._engine.start() and (path := self.settings.servers_file) is not None:
            args = path, self.settings.servers, self._engine.set_servers, self._engine.closing
            # On a thread of its own, as a file system may hang.
            threading.Thread(
                target=watch_servers, args=args, name="sonic-servers", daemon=True
            ).start()


def _ask(questions: Sequence[Callable[[], Any]], timeout_s: float | None = None) -> list[Any]:
    """Ask servers at the same time, and return each answer, or why there is none."""

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except SonicError as error:
            return error

    threads = ThreadPoolExecutor(len(questions) or 1, thread_name_prefix="sonic-ask")
    futures = [threads.submit(ask, question) for question in questions]
    threads.shutdown(wait=False)
    done, _ = wait(futures, timeout_s)
    late = DeadlineError(f"the server has not answered within {timeout_s} s")
    return [future.result() if future in done else late for future in futures]


def _declarations(model: Any) -> Sequence[Any]:
    """Return a declaration, or those of `Folds` or a `Choice`."""
    declared = getattr(model, "models", (model,))
    for each in declared:
        if not hasattr(each, "compare"):
            raise ConfigError(
                f"expected the name of a model, or a Model, got {type(each).__name__}"
            )
    return tuple(declared)


def watch_servers(
    path: str,
    servers: Sequence[str],
    changed: Callable[[Sequence[str]], None],
    closing: threading.Event,
    interval_s: float = WATCH_INTERVAL_S,
) -> None:
    """Read a file of servers whenever it changes, until `closing` is set.

    `changed` takes the new servers; if it raises, it is called again with the same ones.
    """
    read_at, problem = 0, ""
    while True:
        try:
            changed_at = Path(path).stat().st_mtime_ns
            if changed_at != read_at:
                new = read_servers(path)
                if new != servers:
                    changed(new)
                    logger.warning("the servers are now %s", ", ".join(new))
                read_at, servers, problem = changed_at, new, ""
        except Exception as error:  # noqa: BLE001  a wrong file must not stop the servers in use
            # A missing file, such as a certificate, may come later; each problem is logged once.
            if str(error) != problem:
                problem = str(error)
                logger.warning("the servers stay as they are, %s: %s", path, problem)
        if closing.wait(interval_s):
            return
