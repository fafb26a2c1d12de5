"""The pool of this process: found by models and processors wherever they are unpickled.

Pickles carry the settings of a pool, without secrets, never a connection. A process in which
nobody has called `connect` opens its pool from these settings, and keeps it from chunk to chunk,
until a pickle of another `connect` arrives: processes of an executor outlive runs. A forked child
leaves the pool that it inherited to its parent, and opens its own.
"""

from __future__ import annotations

import atexit
import os
import threading
import uuid
from dataclasses import dataclass
from typing import Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._pool import Pool
from sonic_coffea.pool._settings import Settings

_lock = threading.Lock()
_pool: Pool | None = None
_settings: Settings | None = None
# Which `connect` the settings are of, and whether a pickle has brought them.
_connection = ""
_adopted = False
_others: list[Pool] = []
_of_parents: list[Pool | None] = []


def install(settings: Settings) -> Pool:
    """Make a pool the one of this process; the same settings keep the pool that is there."""
    return _install(settings, adopted=False)


def _install(settings: Settings, *, adopted: bool) -> Pool:
    global _pool, _settings, _connection, _adopted  # noqa: PLW0603
    with _lock:
        old, pool = _pool, _pool
        if pool is None or pool.closed or pool.settings != settings:
            pool = _pool = Pool(settings)
            _settings = settings
            if not adopted:
                _connection = uuid.uuid4().hex
        _adopted = adopted
    # Not under the lock: it waits for the pool's threads, which may ask for the pool themselves.
    if old is not None and old is not pool:
        old.close()
    return pool


def current() -> Pool:
    """Return the pool of this process; raise if no servers have been named in any way."""
    pool = _named()
    if pool is None:
        raise ConfigError(
            "no servers: call sonic.connect('grpc://host:8001') first, or set DASK_SONIC__SERVERS"
        )
    return pool


def _named() -> Pool | None:
    with _lock:
        settings, adopted = _settings, _adopted
        if _pool is not None and not _pool.closed:
            return _pool
        if _pool is not None:
            settings = None
    if settings is None:
        settings, adopted = Settings.from_config(), False
    if settings is None:
        return None
    if settings.withheld:
        options = " and ".join(f"{option}=" for option in settings.withheld)
        raise ConfigError(
            f"sonic.connect was given {options} in another process, where "
            f"{'they stay' if len(settings.withheld) > 1 else 'it stays'}: secrets are not "
            "pickled; use token_file= with a path that this process can read, or name the servers "
            "in dask's configuration, with 'token: $VARIABLE'"
        )
    return _install(settings, adopted=adopted)


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


@dataclass(frozen=True, slots=True)
class Luggage:
    """What a pickle takes along of the pool of its process, without secrets.

    The settings are the pool's, and those of the configuration of its process; the connection says
    which call of `connect` they are of.
    """

    settings: Settings
    configured: Settings | None
    connection: str


class Carrier:
    """A base class whose pickles take the pool's settings along: of models and processors."""

    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": self.__dict__, "luggage": carried()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["luggage"] is not None:
            _adopt(state["luggage"])
        self.__dict__.update(state["attributes"])


def carried() -> Luggage | None:
    """Return what a pickle takes along."""
    with _lock:
        closed = _pool is not None and _pool.closed
        settings, connection = _settings, _connection
    if closed or settings is None:
        return None
    return Luggage(settings.without_secrets(), _public(_configured()), connection)


def _adopt(luggage: Luggage) -> None:
    """Use settings that came with a pickle, unless this process has some of its own.

    Its own settings come from a `connect` in this process, or from a configuration that differs
    from that of the pickle's process, and so was written for this one.
    """
    global _pool, _settings, _connection, _adopted  # noqa: PLW0603
    with _lock:
        own = _settings is not None and not _adopted
        if own or _connection == luggage.connection:
            return
    configured = _configured()
    if configured is not None and _public(configured) != luggage.configured:
        return
    settings = _with_secrets(luggage.settings)
    with _lock:
        if _pool is not None and (_pool.closed or _pool.settings != settings):
            if not _pool.closed:
                _others.append(_pool)  # other threads may still wait for it
            _pool = None
        _settings, _connection, _adopted = settings, luggage.connection, True


def _with_secrets(settings: Settings) -> Settings:
    """Return settings with what was withheld, if a profile here is the same but for it."""
    if not settings.withheld:
        return settings
    for profile in (None, *Settings.profiles()):
        configured = _configured(profile)
        if configured is not None and _public(configured) == settings:
            return configured
    return settings


def _configured(profile: str | None = None) -> Settings | None:
    """Return what the configuration says; None also if it cannot be used, which `connect` tells."""
    try:
        return Settings.from_config(profile)
    except ConfigError:
        return None


def _public(settings: Settings | None) -> Settings | None:
    return None if settings is None else settings.without_secrets()


def forget(pool: Pool | None = None) -> None:
    """Close the pool of this process, or `pool` if that is the one, and its settings with it.

    Without `pool`, those that are shared by URL are closed, too.
    """
    global _pool, _settings, _connection, _adopted  # noqa: PLW0603
    with _lock:
        closing = [] if pool is not None else list(_others)
        if _pool is not None and pool in (None, _pool):
            closing.append(_pool)
            _pool = _settings = None
            _connection, _adopted = "", False
        _others[:] = [other for other in _others if other not in closing]
    for other in closing:
        other.close()


def _after_fork() -> None:
    """Leave a pool alone whose threads and sockets are the parent's: neither closed nor freed."""
    global _lock, _pool  # noqa: PLW0603
    _lock = threading.Lock()
    _of_parents.extend([_pool, *_others])
    _others.clear()
    _pool = None


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(forget)
