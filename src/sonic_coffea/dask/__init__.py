"""dask: a pool on every present and future worker of a cluster, and quotas of the servers."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sonic_coffea.dask._cluster import cluster
from sonic_coffea.dask._hosts import check_cluster, check_workers
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

__all__ = [
    "SonicPlugin",
    "SonicSchedulerPlugin",
    "check_cluster",
    "check_workers",
    "cluster",
    "register",
]

logger = logging.getLogger(__name__)


def _sockets(servers: Sequence[str]) -> list[str]:
    """Return those of some servers that are Unix sockets in folders of this machine."""
    paths = {url: Address.parse(url).path for url in servers if not is_in_process(url)}
    return [url for url, path in paths.items() if path and Path(path).parent.is_dir()]


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
    if sockets := _sockets(settings.servers):
        for worker, found in (await client.run(_sockets, sockets)).items():
            if missing := set(sockets) - set(found):
                raise ConfigError(
                    f"worker {worker} cannot reach {', '.join(missing)}, a Unix socket of this "
                    "machine; let the server listen at a port, as by LocalServer(..., port=0, "
                    "host='0.0.0.0') or `sonic-coffea serve --port 8001 --host 0.0.0.0`"
                )
    pool.check_also(partial(check_workers, client))
    return pool
