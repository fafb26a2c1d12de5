"""A client of a cluster: its processes, its servers on all workers, and what each host lacks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from distributed import Client, LocalCluster, Security
from tornado.ioloop import PeriodicCallback

from sonic_coffea._extras import needed
from sonic_coffea.dask._scheduler import CONNECTED, TURN, SonicSchedulerPlugin
from sonic_coffea.dask._worker import SonicPlugin
from sonic_coffea.errors import ConfigError
from sonic_coffea.pool import HostCheck, Pool, Settings, check_here, entered_elsewhere, in_turn

logger = logging.getLogger(__name__)

# By client, the plugins that it has registered, by name; and that of its next tasks, "" if that is
# ambiguous.
_registered: WeakKeyDictionary[Client, dict[str, SonicPlugin]] = WeakKeyDictionary()
_next: WeakKeyDictionary[Client, str] = WeakKeyDictionary()


@contextlib.contextmanager
def cluster(workers: int, scheduler: str | None = None) -> Iterator[Any]:
    """Yield a client of the scheduler at an address, or of processes of this machine.

    Raises
    ------
    ConfigError
        If no scheduler answers at the address, or a package is missing.
    """
    with contextlib.ExitStack() as stack:
        if scheduler is not None:
            try:
                client = Client(scheduler, timeout=10)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"no dask scheduler answers at {scheduler!r}: {error}; expected an address "
                    "such as 'tcp://host:8786'"
                ) from None
        else:
            with needed("score", "a dask cluster of this machine"):
                importlib.import_module("cryptography")  # for `Security.temporary`
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sonic-dask-"))
            with _interrupts_held():
                local = LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    dashboard_address="127.0.0.1:0",
                    local_directory=scratch,
                    # What fails is raised here; a worker that is stopped in a heartbeat, or with
                    # work left, would log it.
                    silence_logs=logging.CRITICAL,
                    # Without certificates, any user of this machine could run code as this one.
                    security=Security.temporary(),
                )
                stack.enter_context(local)
            client = Client(local)
        yield stack.enter_context(client)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Take Ctrl-C at the end, and never in threads and processes that start meanwhile.

    A terminal sends it to all processes; that of the client stops the others in order.
    """
    if sys.platform == "win32":  # where nothing holds them
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its first start would let them through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def register(client: Client, pool: Pool, elsewhere: Collection[Pool] = ()) -> Pool:
    """Give every present and future worker a pool like that of this process.

    Other threads are in blocks of the pools `elsewhere`.
    """
    plugin = SonicPlugin(pool.settings)
    if client not in _registered:
        _registered[client] = {}
        _keep_registered(client)
    await _send(client, plugin)  # if it fails, nothing has changed
    _registered[client][plugin.name] = plugin
    _next[client] = _next_plugin(client, plugin.name, elsewhere)
    _announce(client, _next[client])
    pool.check_elsewhere = partial(check_workers, client)
    pool.plugin, pool.blocks_changed = plugin.name, _blocks_changed
    return pool


async def _send(client: Client, plugin: SonicPlugin) -> None:
    try:
        await client.register_plugin(SonicSchedulerPlugin())
        await getattr(client.scheduler, CONNECTED)(client=client.id, plugin=plugin.name)
        plugin.is_known = True
    except Exception as error:  # noqa: BLE001  whatever its environment lacks
        logger.warning(
            "the scheduler cannot load sonic-coffea (%s); each worker adapts its own limits", error
        )
    await client.register_plugin(plugin)


def _next_plugin(client: Client, plugin: str, elsewhere: Collection[Pool]) -> str:
    """Return a plugin for the next tasks of a client, or "" if other threads may mean another.

    The scheduler knows which client has sent a task, and not which thread.
    """
    others = {pool.plugin for pool in elsewhere} & _registered[client].keys()
    return "" if others - {plugin} else plugin


def _announce(client: Client, plugin: str) -> None:
    """Have a plugin be that of the client's next tasks, and of none that it has sent before."""
    is_known = any(each.is_known for each in _registered[client].values())
    comm = client.scheduler_comm
    if is_known and comm is not None and not comm.closed():  # a client that was closed keeps it
        comm.send({"op": TURN, "plugin": plugin})


def _blocks_changed(pool: Pool) -> None:
    """Have the next tasks of a pool's clients scored by the pool of the block around this."""
    turns, elsewhere = [other.plugin for other in in_turn()], entered_elsewhere()
    for client, plugins in list(_registered.items()):
        names = [name for name in turns if name in plugins]
        if pool.plugin in plugins and names:
            _next[client] = following = _next_plugin(client, names[-1], elsewhere)
            client.loop.add_callback(_announce, client, following)


def _keep_registered(client: Client) -> None:
    """Register again whenever the client has lost its connection, until it is closed.

    A scheduler forgets a client whose connection it loses, and one that is started again knows
    nothing of the one before.
    """
    connection = client.scheduler_comm

    async def look() -> None:
        nonlocal connection
        if client.status in ("closing", "closed"):
            callback.stop()
        elif client.scheduler_comm is not connection:
            lost, connection = connection, client.scheduler_comm
            if lost is not None:
                logger.warning(
                    "the client of the dask cluster has lost its scheduler; registering its "
                    "servers again when it is back; if it stays away, call "
                    "sonic.connect(..., client=client) again, with a client that is connected"
                )
            for plugin in list(_registered[client].values()) if connection is not None else ():
                await _send(client, plugin)
                _announce(client, _next[client])

    callback = PeriodicCallback(look, callback_time=100)
    callback.start()


def check_workers(
    client: Client, settings: Settings, *tried: Any, worker_timeout_s: float = 60.0
) -> list[HostCheck]:
    """Try the servers from one worker of each host.

    Parameters
    ----------
    client : distributed.Client
        The client of the cluster.
    settings : Settings
        The servers, and how they are connected.
    *tried
        Further arguments of `check_here`.
    worker_timeout_s : float
        How long to wait for a first worker. Jobs of a batch system may queue for longer; then wait
        for workers before this.

    Raises
    ------
    ConfigError
        If the client is closed or asynchronous, or no worker comes in time.
    """
    if client.asynchronous or client.status != "running":
        state = "asynchronous" if client.asynchronous else client.status
        raise ConfigError(
            f"check asks workers by a synchronous client that is running, got one that is {state}; "
            "connect with a client that is running, or try from this process alone, by "
            "`sonic-coffea check URL`"
        )
    # An adaptive cluster starts workers for tasks only.
    task = client.submit(int, pure=False)
    try:
        task.result(timeout=worker_timeout_s)
    except (TimeoutError, asyncio.TimeoutError):  # one and the same from Python 3.11 on
        raise ConfigError(
            f"the cluster has had no workers for {worker_timeout_s:g} s that could try the "
            "servers; start some first: cluster.scale(1), client.wait_for_workers(1)"
        ) from None
    finally:
        task.cancel()
    hosts = {urlsplit(address).hostname: address for address in reversed(list(client.nthreads()))}
    workers = list(hosts.values())
    replies = client.run(_check, settings, *tried, workers=workers, on_error="return")
    return [_outcome(host, address, replies[address]) for host, address in hosts.items()]


async def _check(settings: Settings, *tried: Any, dask_worker: Any) -> HostCheck:
    """Run on a worker, beside its event loop."""
    return await asyncio.to_thread(check_here, settings, *tried, process=dask_worker.address)


def _outcome(host: Any, address: str, reply: HostCheck | Exception) -> HostCheck:
    if isinstance(reply, HostCheck):
        return reply
    return HostCheck(host=str(host), process=address, error=f"{type(reply).__name__}: {reply}")
