"""`connect`: name the servers once, for this process or for a whole dask cluster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from sonic_coffea.errors import ConfigError, expect
from sonic_coffea.pool import Pool, Settings, entered_elsewhere, install

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)


def connect(
    servers: Any = None, *, client: Client | None = None, profile: str | None = None, **options: Any
) -> Pool:
    """Name the servers, and return the pool of connections to them.

    No server is contacted, and no certificate read, before the first call of a model.

    Parameters
    ----------
    servers : str, LocalServer, or a sequence of them, optional
        URLs such as ``"grpc://triton.example:8001"``; ``grpcs://`` for TLS. A `pathlib.Path` is a
        file of URLs, which is read again when it changes. By default, servers and options are those
        of dask's configuration (``sonic.servers``, ``DASK_SONIC__SERVERS``); without servers in
        it, the load balancer of the job (``SONIC_LOCAL_BALANCER_HOST`` and ``_PORT``) is used.
    client : distributed.Client, optional
        Client of a dask cluster, of which every present and future worker is connected, too. With
        an asynchronous client, await the result.
    profile : str, optional
        A facility's servers and options, from ``sonic.profiles`` of dask's configuration.
    **options
        ``servers_file``, ``token``, ``token_file``, ``headers``, ``tls_root``, ``tls_cert``,
        ``tls_key``, ``proxy``, ``compression``, ``shared_memory``, ``channels``, ``max_in_flight``,
        ``max_in_flight_bytes``, ``max_request_bytes``, ``request_timeout_s``,
        ``metadata_timeout_s``, ``retry_timeout_s``, ``hedge_after_s``, ``balance``, ``fallback``,
        ``fallback_after_s``, ``cache``, ``cache_bytes``, ``cache_trusts_versions``,
        ``max_suspended_chunks``. `sonic_coffea.pool.Settings` describes them.

    Returns
    -------
    Pool
        The pool of these settings, and the process's default until the next `connect`. When it is
        closed, the default is the one before it, if that is open. As a context manager, it is the
        pool of the models that this thread calls. In a task of dask whose client is connected, it
        counts only as a context manager.

    Raises
    ------
    ConfigError
        If a URL or an option cannot be used, or no server is named at all.
    """
    if client is not None:
        is_client = hasattr(client, "register_plugin")  # a cluster has a status, too
        is_open = is_client and client.status not in ("closing", "closed")
        expect(is_open, "a distributed.Client that is open", client, "client")
    are_named = servers is not None or options.get("servers_file") is not None
    if are_named and profile is not None:
        raise ConfigError("expected servers or a profile, got both")
    if not are_named:
        settings = Settings.from_config(profile)
        if settings is None:
            raise ConfigError(
                "no servers named: pass one, such as sonic.connect('grpc://triton.example:8001'), "
                "or set sonic.servers in dask's configuration (DASK_SONIC__SERVERS)"
            )
        settings = settings.with_options(**options)
    else:
        settings = Settings.make(servers, **options)
    pool = install(settings)
    if client is None:
        if settings.secrets:
            logger.warning(
                "%s of connect stays in this process: processes that executors start do not get "
                "it; token_file= names a file that they can read, client= passes it to dask's "
                "workers",
                " and ".join(f"{option}=" for option in settings.secrets),
            )
        return pool
    from sonic_coffea.dask import register

    with _undone_on_error(pool):
        connected: Any = client.sync(register, client, pool, entered_elsewhere())
    if client.asynchronous:
        connected = _awaited(connected, pool)
    return cast("Pool", connected)


async def _awaited(registering: Any, pool: Pool) -> Any:
    with _undone_on_error(pool):
        return await registering


@contextlib.contextmanager
def _undone_on_error(pool: Pool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with pool:  # at its end, the default is the one before
            raise
