"""Registers a client's settings with its cluster, and again with a scheduler that forgot them."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tornado.ioloop import PeriodicCallback

from sonic_coffea.dask._hosts import check_workers
from sonic_coffea.dask._messages import CONNECTED
from sonic_coffea.dask._scheduler import SonicSchedulerPlugin
from sonic_coffea.dask._worker import SonicPlugin
from sonic_coffea.errors import ConfigError
from sonic_coffea.pool import install, is_in_process
from sonic_coffea.transport import Address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Client

    from sonic_coffea.pool import Pool, Settings

logger = logging.getLogger(__name__)

_LOOK_MS = 100.0

# By client, the plugins that it has registered; the last is that of its next tasks.
_registered: WeakKeyDictionary[Client, list[SonicPlugin]] = WeakKeyDictionary()


async def register(client: Client, settings: Settings) -> Pool:
    """Give this process and every present and future worker a pool, and the scheduler a plugin."""
    pool, plugin = install(settings), SonicPlugin(settings)
    if client not in _registered:
        _keep_registered(client)
    others = [p for p in _registered.get(client, []) if p.name != plugin.name]
    _registered[client] = [*others, plugin]
    await _send(client, plugin)
    await _check_sockets(client, settings.servers)
    pool.check_elsewhere = partial(check_workers, client)
    return pool


async def _check_sockets(client: Client, servers: Sequence[str]) -> None:
    """Raise if a worker cannot reach a Unix socket of this machine."""
    if sockets := _sockets(servers):
        for worker, present in (await client.run(_sockets, sockets)).items():
            if missing := set(sockets) - set(present):
                raise ConfigError(
                    f"worker {worker} cannot reach {', '.join(missing)}, a Unix socket of this "
                    "machine; let the server listen at a port, as by LocalServer(..., port=0, "
                    "host='0.0.0.0') or `sonic-coffea serve --port 8001 --host 0.0.0.0`"
                )


def _sockets(servers: Sequence[str]) -> list[str]:
    """Return those of some servers that are Unix sockets in folders of this machine."""
    paths = {url: Address.parse(url).path for url in servers if not is_in_process(url)}
    return [url for url, path in paths.items() if path and Path(path).parent.is_dir()]


async def _send(client: Client, plugin: SonicPlugin) -> None:
    try:
        await client.register_plugin(SonicSchedulerPlugin())
        await getattr(client.scheduler, CONNECTED)(client=client.id, plugin=plugin.name)
    except Exception as error:  # noqa: BLE001  whatever its environment lacks
        logger.warning(
            "the scheduler cannot load sonic-coffea (%s); each worker adapts its own limits", error
        )
    await client.register_plugin(plugin)


def _keep_registered(client: Client) -> None:
    """Register again whenever the client has lost its connection, until it is closed.

    A scheduler forgets a client whose connection it loses, and one that is started again knows
    nothing of the one before.
    """
    connection, was_lost = client.scheduler_comm, False

    async def look() -> None:
        nonlocal connection, was_lost
        if client.status == "connecting":
            was_lost = True
        elif client.status == "running" and client.scheduler_comm is not connection:
            connection, was_lost = client.scheduler_comm, False
            logger.warning(
                "the client of the dask cluster had lost its scheduler; registering its servers "
                "again"
            )
            try:
                for plugin in _registered[client]:
                    await _send(client, plugin)
            except Exception as error:  # noqa: BLE001  whatever its environment lacks
                logger.warning(
                    "registering again failed (%r); call sonic.connect(..., client=client) again",
                    error,
                )
        elif client.status == "closed":
            callback.stop()
            if was_lost:
                logger.warning(
                    "the client of the dask cluster has lost its scheduler and is closed; call "
                    "sonic.connect(..., client=client) again with a new client"
                )

    callback = PeriodicCallback(look, _LOOK_MS)
    callback.start()
