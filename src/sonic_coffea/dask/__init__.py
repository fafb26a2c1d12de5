"""dask: a pool on every present and future worker of a cluster, and quotas of the servers."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from sonic_coffea.dask._cluster import cluster
from sonic_coffea.dask._hosts import check_cluster, check_workers
from sonic_coffea.dask._messages import CONNECTED
from sonic_coffea.dask._scheduler import SonicSchedulerPlugin
from sonic_coffea.dask._worker import SonicPlugin
from sonic_coffea.pool import install

if TYPE_CHECKING:
    from distributed import Client

    from sonic_coffea.pool import Pool, Settings

__all__ = [
    "SonicPlugin",
    "SonicSchedulerPlugin",
    "check_cluster",
    "check_workers",
    "cluster",
    "register",
]

logger = logging.getLogger(__name__)


async def register(client: Client, settings: Settings) -> Pool:
    """Give this process and every present and future worker a pool, and the scheduler a plugin."""
    pool, plugin = install(settings), SonicPlugin(settings)
    try:
        await client.register_plugin(SonicSchedulerPlugin())
        await getattr(client.scheduler, CONNECTED)(client=client.id, plugin=plugin.name)
    except Exception as error:  # noqa: BLE001  whatever its environment lacks
        logger.warning(
            "the scheduler cannot load sonic-coffea (%s); each worker adapts its own limits", error
        )
    await client.register_plugin(plugin)
    pool.check_also(partial(check_workers, client))
    return pool
