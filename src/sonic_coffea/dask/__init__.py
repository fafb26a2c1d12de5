"""dask: a pool on every present and future worker of a cluster, and quotas of the servers."""

from __future__ import annotations

from sonic_coffea.dask._cluster import cluster
from sonic_coffea.dask._hosts import check_cluster, check_workers
from sonic_coffea.dask._register import register
from sonic_coffea.dask._scheduler import SonicSchedulerPlugin
from sonic_coffea.dask._worker import SonicPlugin

__all__ = [
    "SonicPlugin",
    "SonicSchedulerPlugin",
    "check_cluster",
    "check_workers",
    "cluster",
    "register",
]
