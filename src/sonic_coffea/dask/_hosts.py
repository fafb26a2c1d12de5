"""Tries the servers from one worker of each host of a cluster."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sonic_coffea.dask._cluster import cluster
from sonic_coffea.errors import ConfigError
from sonic_coffea.pool import Checks, HostCheck, Settings, check_here

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

# Batch systems may take longer; then the analyst waits for workers beforehand.
_FIRST_WORKER_TIMEOUT_S = 60.0


def check_workers(
    client: Client,
    settings: Settings,
    *tried: Any,
    worker_timeout_s: float = _FIRST_WORKER_TIMEOUT_S,
) -> list[HostCheck]:
    """Try the servers from one worker of each host.

    Parameters
    ----------
    client : distributed.Client
        The client of the cluster.
    settings : Settings
        The servers, and how they are connected.
    *tried
        Further arguments of `sonic_coffea.tools.check`.
    worker_timeout_s : float
        How long to wait for a first worker: those of a batch system may still be in its queue.

    Raises
    ------
    ConfigError
        If the client is closed or asynchronous, or no worker comes in time.
    """
    if client.asynchronous:
        raise ConfigError("check asks workers by a synchronous client, got an asynchronous one")
    if client.status != "running":
        raise ConfigError(
            f"check asks workers by a running client, got one that is {client.status}"
        )
    if not client.nthreads():
        logger.info("waiting %g s for a first worker of the cluster", worker_timeout_s)
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
    checks = []
    for host, address in hosts.items():
        reply = replies[address]
        if not isinstance(reply, HostCheck):  # an exception
            failed = f"{type(reply).__name__}: {reply}"
            reply = HostCheck(host=str(host), process=address, error=failed)
        checks.append(reply)
    return checks


def check_cluster(scheduler: str, settings: Settings, *tried: Any) -> Checks:
    """Try the servers from one worker of each host of the cluster of a scheduler.

    Parameters
    ----------
    scheduler : str
        Its address.
    settings, *tried
        As for `check_workers`.

    Raises
    ------
    ConfigError
        If no scheduler answers there, or no worker comes within a minute.
    """
    with cluster(0, scheduler) as client:
        return Checks(check_workers(client, settings, *tried))


async def _check(settings: Settings, *tried: Any, dask_worker: Any) -> HostCheck:
    """Run on a worker, beside its event loop."""
    work = partial(check_here, settings, *tried, process=dask_worker.address)
    return await asyncio.get_running_loop().run_in_executor(None, work)
