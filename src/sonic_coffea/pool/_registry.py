"""The pool of this process: found by models and processors wherever they are unpickled.

Pickles carry the settings of a pool, without secrets, never a connection. A process that has no
pool when the first of them arrives opens one from these settings; a forked child leaves the pool
that it inherited to its parent, and opens its own.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._pool import Pool
from sonic_coffea.pool._settings import Settings

_lock = threading.Lock()
_pool: Pool | None = None
_settings: Settings | None = None
_others: list[Pool] = []
_of_parents: list[Pool | None] = []


def install(settings: Settings) -> Pool:
    """Make a pool the one of this process; the same settings keep the pool that is there."""
    global _pool, _settings  # noqa: PLW0603
    with _lock:
        old, pool = _pool, _pool
        if pool is None or pool.closed or pool.settings != settings:
            pool = _pool = Pool(settings)
            _settings = settings
    # Not under the lock: it waits for the pool's threads, which may ask for the pool themselves.
    if old is not None and old is not pool:
        old.close()
    return pool


def current() -> Pool:
    """Return the pool of this process.

    Raises
    ------
    ConfigError
        If no servers have been named, in any of the ways there are.
    """
    pool = _named()
    if pool is None:
        raise ConfigError(
            "no servers: call sonic.connect('grpc://host:8001') first, or set DASK_SONIC__SERVERS"
        )
    return pool


def _named() -> Pool | None:
    with _lock:
        settings = _settings
        if _pool is not None and not _pool.closed:
            return _pool
    settings = settings if _pool is None else None
    settings = settings or Settings.from_config()
    return None if settings is None else install(settings)


def shared(settings: Settings) -> Pool:
    """Return the pool of this process if it has these servers, else one for all who ask for it."""
    pool = _named()
    if pool is not None and set(settings.servers) <= set(pool.settings.servers):
        return pool
    with _lock:
        for other in _others:
            if other.settings == settings and not other.closed:
                return other
        _others.append(Pool(settings))
        return _others[-1]


class Carrier:
    """What takes the settings of the pool along when it is pickled: models and processors."""

    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": self.__dict__, "settings": carried()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _adopt(state["settings"])
        self.__dict__.update(state["attributes"])


def carried() -> Settings | None:
    """Return what a pickle takes along: no secrets."""
    with _lock:
        closed = _pool is not None and _pool.closed
        return None if closed or _settings is None else _settings.without_secrets()


def _adopt(settings: Settings | None) -> None:
    """Use settings that came with a pickle, if this process has none of its own."""
    global _settings  # noqa: PLW0603
    with _lock:
        if settings is not None and _settings is None and Settings.from_config() is None:
            _settings = settings


def forget(pool: Pool | None = None) -> None:
    """Close the pool of this process, or `pool` if that is the one, and its settings with it.

    Without `pool`, those that are shared by URL are closed, too.
    """
    global _pool, _settings  # noqa: PLW0603
    with _lock:
        closing = [] if pool is not None else list(_others)
        if _pool is not None and pool in (None, _pool):
            closing.append(_pool)
            _pool = _settings = None
        _others[:] = [other for other in _others if other not in closing]
    for one in closing:
        one.close()


def _after_fork() -> None:
    """Leave a pool alone whose threads and sockets are the parent's: neither closed nor freed."""
    global _lock, _pool  # noqa: PLW0603
    _lock = threading.Lock()
    _of_parents.extend([_pool, *_others])
    _others.clear()
    _pool = None


os.register_at_fork(after_in_child=_after_fork)
atexit.register(forget)
