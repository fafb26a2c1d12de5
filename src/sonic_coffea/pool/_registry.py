"""The pools of this process, one for each settings, and which of them scores a call.

A pickle of a pool has the pool's settings without secrets, and a pickle of a model or a processor
has its pool. So both are scored by the servers of the process that sent them, whatever else the
process that reads them is connected to. Pools stay open from chunk to chunk: processes of an
executor outlive runs. A forked child leaves connections and threads to its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import copyreg
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeGuard
from weakref import WeakSet

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._pool import Pool, blocks_around, enter, leave
from sonic_coffea.pool._process import hooks, keep_thread
from sonic_coffea.pool._settings import Settings
from sonic_coffea.reporting import Statistics

logger = logging.getLogger(__name__)

# Pools of pickles, and of `connect`, that stay open without a user, for the next chunk. If more
# settings alternate, some pools are opened again and again.
_KEPT = 4

_lock = threading.Lock()
_pools: WeakSet[Pool] = WeakSet()
_connected: list[Pool] = []
_opened: list[Pool] = []
_of_parents: list[Any] = []
# The servers in the pickles that this process has made.
_sent: set[tuple[str, ...]] = set()
# `pools` are those that a thread was connected to: others may connect to them later, or to more.
_of_thread = threading.local()

Pickled = Pool | ConfigError | None
"""What a pickle has brought: the pool, or the error of a thread that did not know which. Calls
raise it: dask's scheduler, which pickles too, would leave a task waiting for ever."""


def install(settings: Settings, *, claim: bool = True) -> Pool:
    """Return the pool of this process with these settings, as its default; open it if need be.

    Without a claim, it closes when the last ``with`` block that uses it ends, except in a task.
    """
    with _lock:
        pool = _known(settings)
        while pool is None or (claim and not pool.claim()):
            pool = _new(settings)
        if claim:
            _keep(_connected, pool)
        elif pool not in _connected:
            # First: a worker that joins later does not change which pool is the default.
            _connected.insert(0, pool)
    if claim:
        _keep(vars(_of_thread).setdefault("pools", []), pool)
    if blocks_around():
        enter(pool, entered=False)
    return pool


def opened(settings: Settings) -> Pool:
    """Return the pool of this process with these settings; open it if need be."""
    with _lock:
        pool = _known(settings)
        if pool is None or pool.settings.withheld:
            settings = _with_secrets(settings)
            pool = _known(settings) or _new(settings)
        _keep(_opened, pool)
    return pool


def uninstall(pool: Pool) -> None:
    """Take back an `install` without a claim. The pool stays open for calls that are under way."""
    with _lock:
        if pool in _connected and not pool.claimed:
            _connected.remove(pool)


def current(pool: Pickled = None) -> Pool:
    """Return the pool that scores a call; raise if no servers are named.

    It is that of the pickle that brought the model, of the ``with`` block around, of the client
    that sent the task, or the default of this process, in this order.

    Parameters
    ----------
    pool : Pool, ConfigError or None
        That of the pickle.
    """
    if isinstance(pool, ConfigError):
        raise pool
    if pool is None:
        pool = _named()
    elif pool.closed or pool.settings.withheld:
        pool = opened(pool.settings)
    if pool is None:
        raise ConfigError(
            "no servers: call sonic.connect('grpc://host:8001') first, or set DASK_SONIC__SERVERS"
        )
    if withheld := pool.settings.withheld:
        raise ConfigError(
            f"sonic.connect was given {' and '.join(f'{option}=' for option in withheld)} in "
            "another process, and secrets are not pickled; use token_file= with a path that this "
            "process can read, or name the servers in dask's configuration, with 'token: $VARIABLE'"
        )
    return pool


@contextlib.contextmanager
def using(pool: Pickled, *, of_processor: bool = False) -> Iterator[None]:
    """Have a pool score the calls of a block, maybe of a processor; None changes nothing."""
    block = None if pool is None else enter(current(pool), of_processor=of_processor)
    try:
        yield
    finally:
        if block is not None:
            leave(block)


def shared(settings: Settings, pool: Pickled) -> Pool:
    """Return the pool that would score a call if it has these servers, else one with the settings.

    ``pool`` is that of a pickle, if there is one.
    """
    pool = pool if isinstance(pool, Pool) else _named()
    if pool is not None and set(settings.servers) <= set(pool.settings.servers):
        return current(pool)
    return opened(settings)


class WithPool:
    """A base class, of models and processors, whose pickles have the pool that scores them."""

    pool_of_pickle: Pickled = None
    # Whether the process that has pickled it pickles it again, and is connected to other servers.
    is_stale: bool = False

    def __getstate__(self) -> dict[str, Any]:
        pool, named = self.pool_of_pickle, None
        # A thread that has named no servers, as that of dask's scheduler, only passes pickles on.
        names = bool(_own() or blocks_around())
        if pool is None or (names and _is_sent(pool)):
            try:
                named = _named()
            except ConfigError as error:
                # Others may read a file of servers, or know which client of dask sent their task.
                if pool is None and any(each.claimed for each in _open()):
                    pool = error
        is_stale = self.is_stale
        if named is not None:
            is_stale = pool is not None and not _same_servers(pool, named)
            if not is_stale:
                pool = named  # with the options of today
                _sent.add(named.settings.servers)
        return {**self.__dict__, "pool_of_pickle": pool, "is_stale": is_stale}

    def is_of_earlier_run(self) -> bool:
        """Return whether the process that pickled it is connected to other servers by now."""
        pool, named = self.pool_of_pickle, None
        if _is_sent(pool):
            with contextlib.suppress(ConfigError):
                named = _named()
        return self.is_stale if pool is None or named is None else not _same_servers(pool, named)

    def own_pool(self) -> Pool:
        """Return the pool that scores a call.

        Raises
        ------
        ConfigError
            If no servers are named, or if it is stale and the processor that calls it has others:
            a global model of a notebook, as an earlier run has pickled it.
        """
        pool = current(self.pool_of_pickle)
        around = blocks_around() if self.is_stale else []
        if around and around[-1].of_processor and not _same_servers(pool, around[-1].pool):
            own, its = pool.settings.servers, around[-1].pool.settings.servers
            raise ConfigError(
                f"this model was pickled with {', '.join(own)}, and the processor that calls "
                f"it with {', '.join(its)}: let acquire send it, as one of the class's models, "
                "or run the cell of a notebook that defines the class again"
            )
        return pool

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = copy.copy(self)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _is_sent(pool: Pickled) -> TypeGuard[Pool]:
    """Whether a model came back with servers that this process has pickled."""
    return isinstance(pool, Pool) and pool.settings.servers in _sent


def _same_servers(one: Pool | ConfigError, other: Pool) -> bool:
    return isinstance(one, Pool) and {*one.settings.servers} == {*other.settings.servers}


def forget() -> None:
    """Close all pools of this process."""
    with _lock:
        pools = list(_pools)
        _connected.clear()
        _opened.clear()
    for pool in pools:
        pool.close()


def _named() -> Pool | None:
    """Return the pool of a call whose model was not pickled; None if no servers are named."""
    if around := blocks_around():
        return around[-1].pool
    if (pool := hooks.pool_of_task() or _default()) is not None:
        return pool
    settings = Settings.from_config()
    return None if settings is None else opened(settings)


def in_turn() -> list[Pool]:
    """Return the pools that were connected, or entered by this thread; the one in use last."""
    return [*_open(), *_own(), *(block.pool for block in blocks_around())]


def entered_elsewhere() -> list[Pool]:
    """Return the pools in whose ``with`` blocks other threads, or asyncio tasks, are."""
    around = blocks_around()
    with _lock:
        return [pool for pool in _pools if pool.is_entered_elsewhere(around)]


def of_workers() -> list[Pool]:
    """Return the pools that workers of dask in this process have."""
    with _lock:
        return [pool for pool in _pools if pool.workers]


def _open() -> list[Pool]:
    with _lock:
        pools = [pool for pool in _connected if not pool.closed]
    return sorted(pools, key=lambda pool: pool.connected)


def _own() -> list[Pool]:
    """Return the pools that this thread was connected to, in this order."""
    pools: list[Pool] = vars(_of_thread).get("pools", [])
    pools = [pool for pool in pools if pool.connected_here and not pool.closed]
    return sorted(pools, key=lambda pool: pool.connected_here)


def _default() -> Pool | None:
    """Return the pool that this thread, or else any, was last connected to.

    Raise if another thread is in a ``with`` block, or connected to other servers, and so may mean
    another pool, or if these are the pools of several clients of dask, which nobody in this process
    claims.
    """
    if own := _own():
        return own[-1]
    connected = _open()
    entered = [pool for pool in entered_elsewhere() if not pool.closed]
    # Those of pickles, or before the last few, are entered without being connected any more. They
    # are no default, so servers that dask's configuration names stay in use.
    several = [pool for pool in entered if pool not in connected]
    if connected and not connected[-1].claimed:
        several += [pool for pool in of_workers() if pool.closed]  # whose next task opens it again
    apart = {thread for pool in connected for thread in pool.claimants - connected[-1].claimants}
    several += [pool for pool in connected if entered or apart or not pool.claimed]
    servers = {pool.settings.servers: ", ".join(pool.settings.servers) for pool in several}
    if connected and len(servers) > 1 and several[-1] is connected[-1]:
        raise ConfigError(
            "this thread is in no `with sonic.connect(...)` and no task of dask, and its process "
            f"is connected to {' and '.join(servers.values())}; pass pool=, or connect in this "
            "thread"
        )
    return connected[-1] if connected else None


def _known(settings: Settings) -> Pool | None:
    """Return an open pool with these settings; one that lacks their secrets only if need be."""
    identity = settings.identity()
    pools = [pool for pool in _pools if not pool.closed and pool.settings.identity() == identity]
    if not settings.withheld:
        pools = [pool for pool in pools if not pool.settings.withheld]
    return min(pools, key=lambda pool: len(pool.settings.withheld), default=None)


def _new(settings: Settings) -> Pool:
    pool = Pool(settings)
    _pools.add(pool)
    return pool


def _keep(kept: list[Pool], pool: Pool) -> None:
    """Keep a pool open, with the last few before it."""
    kept[:] = [*(other for other in kept if other is not pool and not other.closed), pool][-_KEPT:]


def _with_secrets(settings: Settings) -> Settings:
    """Return settings with the withheld secrets, if a profile here equals the rest of them."""
    for profile in (None, *Settings.profiles()) if settings.withheld else ():
        with contextlib.suppress(ConfigError):
            known = Settings.from_config(profile)
            # Each process has its own identifiers of secrets.
            public = known and replace(known.without_secrets(), secrets_id=settings.secrets_id)
            if known is not None and public == settings:
                return known
    return settings


def _before_fork() -> None:
    if any(pool.busy for pool in list(_pools)):
        logger.warning(
            "this process forks while requests are in flight, and the child may crash in gRPC's "
            "threads; fork before the first call, or start processes by spawn or forkserver"
        )


def _after_fork() -> None:
    """Leave threads and sockets to the parent: its engines are neither closed nor freed."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    hooks.wait = keep_thread  # the threads of dask are the parent's
    hooks.statistics = Statistics()
    _of_parents.extend(pool.begin_anew() for pool in list(_pools) if not pool.closed)


copyreg.pickle(Pool, lambda pool: (opened, (pool.settings.without_secrets(),)))
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
atexit.register(forget)
