"""dask: a pool on every present and future worker of a cluster, and quotas of the servers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sonic_coffea.dask._scheduler import SonicSchedulerPlugin
from sonic_coffea.dask._worker import SonicPlugin

if TYPE_CHECKING:
    from distributed import Client

    from sonic_coffea.pool import Settings

__all__ = ["SonicPlugin", "SonicSchedulerPlugin", "register"]

logger = logging.getLogger(__name__)


def register(client: Client, settings: Settings) -> None:
    """Give every present and future worker of a cluster its pool, and the scheduler its view."""
    try:
        client.register_plugin(SonicSchedulerPlugin())
    except Exception as error:  # noqa: BLE001  whatever its environment lacks
        logger.warning(
            "the scheduler cannot load sonic-coffea (%s); each worker adapts its own limits", error
        )
    client.register_plugin(SonicPlugin(settings))
