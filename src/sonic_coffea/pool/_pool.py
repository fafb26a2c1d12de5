"""The pool: the servers of one process, and all requests in flight to them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from sonic_coffea import errors
from sonic_coffea._files import replacing
from sonic_coffea.errors import SonicError
from sonic_coffea.pool._batching import plan
from sonic_coffea.pool._call import Call
from sonic_coffea.pool._check import Checks, HostCheck, check_here
from sonic_coffea.pool._core import Event, PoolCore
from sonic_coffea.pool._deadline import NEVER, Deadline, run_in_thread
from sonic_coffea.pool._endpoint import ServerState, Telemetry
from sonic_coffea.pool._engine import Engine
from sonic_coffea.pool._limits import Quota
from sonic_coffea.pool._process import hooks
from sonic_coffea.pool._request import ModelKey, RequestSlice
from sonic_coffea.pool._servers import open_transport, outcome_of
from sonic_coffea.pool._settings import Settings, is_in_process
from sonic_coffea.reporting import Statistics, TallyKey, tables
from sonic_coffea.transport import Contract, ModelStatistics, Transport

# Of a `connect`: its number among all of this process, and its thread. A thread's own number may be
# that of a later thread.
Claim = tuple[int, threading.Thread]
_numbers = count(1)


@dataclass(slots=True, eq=False)
class Block:
    """A ``with`` block in which a pool scores the calls.

    A `connect` that was not entered names the pool for the rest of the block around it, or until
    that pool is closed. Event loops carry contexts into other threads, and past the end of a block,
    where it does not count.
    """

    pool: Pool
    entered: bool
    of_processor: bool = False
    over: bool = False
    claim: Claim | None = None
    thread: threading.Thread = field(default_factory=threading.current_thread)

    @property
    def counts(self) -> bool:
        """Whether its pool scores the calls of this thread."""
        is_named = self.entered or not self.pool.closed
        return is_named and not self.over and self.thread is threading.current_thread()


_blocks: ContextVar[tuple[Block, ...]] = ContextVar("sonic_blocks", default=())


def blocks_around() -> list[Block]:
    """Return the blocks of this thread, or asyncio task, the innermost last."""
    return [block for block in _blocks.get() if block.counts]


def enter(pool: Pool, *, entered: bool = True, of_processor: bool = False) -> Block:
    """Begin a block in which a pool scores the calls of this thread."""
    block = Block(pool, entered, of_processor)
    _blocks.set((*blocks_around(), block))
    return block


def leave(block: Block) -> None:
    """End a block, and those inside of it that were not entered, as these never end themselves."""
    around = blocks_around()
    inner = around[around.index(block) :] if block in around else []  # it was entered elsewhere
    for each in (block, *(each for each in inner if not each.entered)):
        each.over = True
    _blocks.set(tuple(blocks_around()))


class Pool:
    """The connections of one process to its servers, and the requests in flight to them.

    :func:`sonic_coffea.connect` makes the pool. Threads and connections are made on first use. A
    pool is thread-safe. As a context manager, it is the pool of the models that this thread calls
    meanwhile. It closes when the last ``with`` block that uses it ends, or when nothing refers to
    it any more: no variable, and no scores that are on their way. Blocks of dask's tasks leave the
    pools of clients open.

    A pickle of a pool has its settings without secrets, and becomes the pool with these settings
    in the process that loads it. A forked child has the pool with connections of its own.

    Parameters
    ----------
    settings : Settings
        The servers and the limits.
    connect : callable, optional
        Makes a connection, given a URL and ``options``; by default over gRPC.
    """

    def __init__(
        self, settings: Settings, *, connect: Callable[..., Transport] | None = None
    ) -> None:
        # `check` calls it for the other hosts of a cluster.
        self.check_elsewhere: Callable[..., list[HostCheck]] = lambda *_: []
        # Workers of dask in this process, in the order in which they came: blocks of their tasks
        # leave it open for other tasks.
        self.workers = dict[Any, None]()
        # The name of its plugin on dask's workers, and what is called when a block begins or ends.
        self.plugin: str | None = None
        self.blocks_changed: Callable[[Pool], None] = lambda _: None
        # Of `connect` calls whose pool was not entered, and the blocks that entered it.
        self._claims, self._entered = list[Claim](), list[Block]()
        self._connect = connect or open_transport
        self._begin(settings)

    def _begin(self, settings: Settings) -> None:
        self._engine = Engine(settings, self._connect)
        # The garbage collector may run anywhere, so this must neither lock nor wait.
        weakref.finalize(self, self._engine.inbox.put, None).atexit = False

    def begin_anew(self) -> Engine:
        """Begin with a new engine in a forked child, and return that of the parent."""
        old = self._engine
        self._begin(old.settings)
        return old

    @property
    def settings(self) -> Settings:
        """The servers and the limits."""
        return self._engine.settings

    @property
    def closed(self) -> bool:
        """Whether the pool is closed."""
        return self._engine.closing.is_set()

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return bool(self._engine.calls)

    def close(self) -> None:
        """Cancel the requests in flight, and close all connections. May be called again."""
        self._engine.close()
        self.blocks_changed(self)

    def claim(self) -> bool:
        """Keep the pool open for one more user; False if it is closing."""
        with self._engine.lock:
            if self.closed:
                return False
            self._claims.append((next(_numbers), threading.current_thread()))
            return True

    @property
    def claimed(self) -> bool:
        """Whether it is the pool of a `connect` or of a ``with`` block."""
        return bool(self._claims or self._entered)

    @property
    def claimants(self) -> set[threading.Thread]:
        """The threads with a `connect` whose pool was not entered, unless they have ended."""
        return {thread for _, thread in (*self._claims,) if thread.is_alive()}

    @property
    def connected(self) -> int:
        """The number of its last `connect`, without blocks that have ended; 0 if there is none."""
        entered = [block.claim for block in tuple(self._entered) if block.claim]
        return max((number for number, _ in (*self._claims, *entered)), default=0)

    @property
    def connected_here(self) -> int:
        """The number of the last `connect` of this thread whose pool was not entered, or 0."""
        here = threading.current_thread()
        return max((number for number, thread in (*self._claims,) if thread is here), default=0)

    def __enter__(self) -> Pool:
        named = [b for b in blocks_around()[-1:] if b.pool is self and not b.entered]
        block = named[0] if named else enter(self)
        block.entered = True
        with self._engine.lock:
            own = [claim for claim in self._claims if claim[1] is block.thread]
            self._entered.append(block)
            if claims := own or self._claims:
                block.claim = claims[-1]
                self._claims.remove(block.claim)
        self.blocks_changed(self)
        return self

    def __exit__(self, *_: object) -> None:
        around, in_task = blocks_around(), hooks.is_in_task()
        with self._engine.lock:
            mine = [block for block in self._entered if block in around] or self._entered
            block = mine[-1]
            self._entered.remove(block)
            if not (self.claimed or (self.workers and in_task)):
                self._engine.closing.set()
        leave(block)
        if self.closed:
            self._engine.close()
        self.blocks_changed(self)

    def _repr_html_(self) -> str:
        header = ("server", "circuit", "in flight", "last error")
        rows = [(s.url, s.circuit, s.in_flight, s.last_error or "") for s in self.servers]
        rows = rows or [(url, "not used yet", 0, "") for url in self.settings.servers]
        total = self.statistics.total()
        note = (
            f"{total.rows:,} rows in {total.requests:,} requests, {total.retries:,} retries; "
            "sonic.report(pool) says more"
        )
        return tables.html(tables.described("Pool", rows, header=header), notes=[note])

    def __repr__(self) -> str:
        state = "closed, " if self.closed else ""
        return f"<Pool {state}servers: {', '.join(self.settings.servers)}>"

    def is_entered_elsewhere(self, blocks: Sequence[Block]) -> bool:
        """Whether it has a ``with`` block that is none of these."""
        return any(block not in blocks for block in tuple(self._entered))

    @property
    def statistics(self) -> Statistics:
        """A snapshot of the statistics of all requests so far."""
        return self._engine.statistics.copy()

    def count(self, statistics: Statistics) -> None:
        """Add to the statistics, such as rows that are given up before they are sent."""
        self._engine.statistics += statistics

    @property
    def servers(self) -> list[ServerState]:
        """The state of each server."""
        return self._engine.run_on_thread(
            lambda: self._engine.core.states(time.monotonic()) if self._engine.senders else []
        )

    def set_servers(self, servers: Any) -> None:
        """Replace the servers, while calls are in flight.

        A new server gets rows after it has confirmed that it has the same model. A server that is
        no longer named is drained: it answers its requests, and gets no more.

        Parameters
        ----------
        servers : str or sequence of str
            All servers to use from now on; in place of a file of servers, until that changes.

        Raises
        ------
        ConfigError
            If a URL cannot be used, or the pool has been closed, or workers of dask have it.
        """
        if self.plugin is not None:
            raise errors.ConfigError(
                "set_servers changes this process, and the workers of the dask cluster have the "
                "servers, too; call sonic.connect(servers, client=client) for the new ones, or "
                "give it a file of servers, which is read again when it changes"
            )
        self._engine.set_servers(servers)

    def contract(
        self, model: str, version: str | None, *, anew: bool = False, deadline: Deadline = NEVER
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
        # Pools run a repository's functions on them, and Python any object's `__del__`.
        if threading.current_thread().name in ("sonic-pool", "sonic-send"):
            raise errors.ConfigError(
                "this thread of a pool would wait for itself; call the model in the analysis, and "
                "not in a function of a repository"
            )
        key = ModelKey(model, version)
        if not (anew or self.closed):
            # Without the engine's thread, which costs small calls a tenth of their time.
            known = self._engine.core.valid_contract(key, time.monotonic())
            if known is not None:
                return known
        future: Future[Contract | SonicError] = Future()

        def requested() -> Event:
            self._engine.callers.add(future)
            return partial(PoolCore.contract_requested, key=key, caller=future, anew=anew)

        self._engine.post(requested)
        try:
            outcome = future.result(deadline.left_s)
        except BaseException as error:
            timeout_s, withdrawn = deadline.timeout_s, PoolCore.contract_withdrawn
            self._engine.tell(withdrawn, key=key, caller=future, timeout_s=timeout_s)
            if not isinstance(error, concurrent.futures.TimeoutError):  # Ctrl-C
                raise
            outcome = future.result()
        if isinstance(outcome, SonicError):
            raise outcome.at()
        return outcome

    def submit(self, call: Call) -> None:
        """Queue a call; its requests leave as soon as there is room for them.

        Raises
        ------
        ConfigError
            If the pool has been closed.
        """
        segments = call.inputs.segments
        cuts = plan(
            segments,
            max_rows=call.contract.max_rows,
            preferred_rows=call.contract.preferred_rows,
            max_bytes=self.settings.max_request_bytes,
        )
        whole = any(segment.cuts is not None for segment in segments)
        slices = [RequestSlice(call, *cut, whole=whole) for cut in cuts]

        def submitted() -> Event | None:
            if call.over:  # it was cancelled at once
                return None
            self._engine.calls.add(call)
            return partial(PoolCore.submitted, slices=slices)

        rows = sum(request.rows for request in slices)
        call.begin(rows, self._engine.abandon, self.settings)
        self.count(call.statistics)
        if slices:
            self._engine.post(submitted)

    def check(
        self, model: Any = None, version: str | int | None = None, declared: Sequence[Any] = ()
    ) -> Checks:
        """Try each server step by step, from its name to an inference, and say what helps.

        With the client of a dask cluster (``sonic.connect(..., client=client)``), one worker of
        each host tries the servers, too.

        Parameters
        ----------
        model : str, Model, Folds or Choice, optional
            The model to try, by its name, or by its declaration, which is compared, too; of several
            models, only the declarations are compared. By default, no inference is tried.
        version : str or int, optional
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
            own = declarations_of(model)
            declared, model = [*own, *declared], own[0].name if len(own) == 1 else None
            version = version or (own[0].version if model else None)
        tried = self.settings, model, version, declarations_of(*declared)
        return Checks([check_here(*tried), *self.check_elsewhere(*tried)])

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
        self._engine.tell(
            PoolCore.scheduler_joined,
            starts_at=time.monotonic() + delay_s,
            max_in_flight=max_in_flight,
            quotas_within_s=quotas_within_s,
        )

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
        with replacing(Path(path)) as half:
            half.write_text("\n".join([*lines, ""]), encoding="utf-8")

    def telemetry(self) -> dict[tuple[str, ModelKey], Telemetry]:
        """Return what happened to requests since the last call, by server and model.

        Models that run in this process are no other process's concern.
        """
        telemetry = self._engine.run_on_thread(self._engine.core.telemetry)
        return {key: report for key, report in telemetry.items() if not is_in_process(key[0])}

    def versions(self, served: Collection[tuple[str, ModelKey]]) -> dict[Any, TallyKey]:
        """Return the versions of some models in use that requests ask for, by server and model."""
        return self._engine.run_on_thread(
            lambda: {
                (x.url, key): (x.url, key.name, contract.version)
                for x in self._engine.core.endpoints.active
                for key, contract in x.contracts.items()
                if (x.url, key) in served
            }
        )

    def timings(self, served: Iterable[TallyKey]) -> dict[TallyKey, ModelStatistics]:
        """Return servers' own statistics, by server, model and version, where they have them."""
        with contextlib.suppress(errors.ConfigError):  # it is closed
            self._engine.start()  # other processes may have sent all requests
        senders = self._engine.senders.copy()
        asked = [key for key in served if key[0] in senders]
        answers = _ask(
            [partial(senders[url].connections[0].statistics, *key) for url, *key in asked]
        )
        both = zip(asked, answers, strict=True)
        return {key: answer for key, answer in both if not isinstance(answer, SonicError)}

    def set_quotas(self, quotas: Mapping[tuple[str, ModelKey], Quota], lease_s: float) -> None:
        """Take the quotas that the scheduler allocates to this process.

        Parameters
        ----------
        quotas : mapping
            What this process may have in flight, by server and model.
        lease_s : float
            For how long they are valid.
        """
        self._engine.tell(PoolCore.quotas_received, quotas=quotas, lease_s=lease_s)

    def last_contract(self, model: str, version: str | None) -> tuple[float, Contract | None]:
        """Return how many seconds ago servers gave a contract, and the contract.

        It is None if it is in doubt, as a server was lost since. No server is asked.
        """
        return self._engine.core.last_contract(ModelKey(model, version), time.monotonic())

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
        senders = self._engine.senders.copy()
        connections = [list(senders[url].connections) for url in servers if url in senders]
        asked = [c for each in connections for c in islice(cycle(each), max(times, len(each)))]

        questions = [partial(each.digest, contract.model, contract.version) for each in asked]
        outcomes = _ask(questions, timeout_s)
        lost = errors.ServerLostError("no connection to it is left", model=contract.model)
        return outcomes + [lost.at(server=url) for url in servers if url not in senders]


def _ask(questions: Sequence[Callable[[], Any]], timeout_s: float | None = None) -> list[Any]:
    """Ask servers at the same time, and return each answer, or why there is none."""
    futures = [run_in_thread("sonic-ask", question) for question in questions]
    concurrent.futures.wait(futures, timeout_s)
    late = errors.DeadlineError(f"the server has not answered within {timeout_s} s")
    return [outcome_of(f, errors.RequestError) if f.done() else late for f in futures]


def declarations_of(*models: Any) -> list[Any]:
    """Return declarations, and those of `Folds` or a `Choice`."""
    declared = [each for model in models for each in getattr(model, "models", (model,))]
    for each in declared:
        if not hasattr(each, "compare"):
            raise errors.ConfigError(
                f"expected the name of a model, or a Model, got {type(each).__name__}"
            )
    return declared
