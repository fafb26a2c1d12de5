"""dask: a pool on every present and future worker of a cluster, and quotas of the servers."""

from __future__ import annotations

from sonic_coffea.dask._client import check_workers, cluster, register
from sonic_coffea.dask._scheduler import SonicSchedulerPlugin
