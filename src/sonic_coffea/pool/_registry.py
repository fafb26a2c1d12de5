"""The pool of this process, which models and processors use wherever they are unpickled.

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
from dataclasses import dataclass, replace
from typing import Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._pool import Pool
from sonic_coffea.pool._settings import Settings


@dataclass(slots=True)
class _Here:
    """The pool of this process, its settings, and their `connect`; adopted from a pickle or not."""

    pool: Pool | None = None
    settings: Settings | None = None
    connection: str = ""
    adopted: bool = False


_lock = threading.Lock()
_here = _Here()
_others: list[Pool] = []
_of_parents: list[Pool | None] = []


def install(settings: Settings, *, adopted: bool = False) -> Pool:
    """Open the pool of this process, or keep a pool with the same settings."""
    with _lock:
        old = pool = _here.pool
        if pool is None or pool.closed or pool.settings != settings:
            pool = _here.pool = Pool(settings)
            _here.settings = settings
            if not adopted:
                _here.connection = uuid.uuid4().hex
        _here.adopted = adopted
    # Not under the lock: closing waits for the pool's threads, which may call `current`.
    if old is not None and old is not pool:
        old.close()
    return pool


def current() -> Pool:
    """Return the pool of this process; raise if no servers are named."""
    pool = _named()
    if pool is None:
        raise ConfigError(
            "no servers: call sonic.connect('grpc://host:8001') first, or set DASK_SONIC__SERVERS"
        )
    return pool


def _named() -> Pool | None:
    with _lock:
        pool, adopted = _here.pool, _here.adopted
        settings = _here.settings if pool is None else None
    if pool is not None and not pool.closed:
        return pool
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
    return install(settings, adopted=adopted)


def shared(settings: Settings) -> Pool:
    """Return the pool of this process if it has these servers, else one that callers share."""
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
    """The settings in a pickle, without secrets: the pool's, and those of the configuration.

    The connection identifies the call of `connect` that made the pool.
    """

    settings: Settings
    configured: Settings | None
    connection: str


class Carrier:
    """A base class, of models and processors, whose pickles carry the pool's settings."""

    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": self.__dict__, "luggage": carried()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["luggage"] is not None:
            _adopt(state["luggage"])
        self.__dict__.update(state["attributes"])


def carried() -> Luggage | None:
    with _lock:
        here = replace(_here)
    if here.settings is None or (here.pool is not None and here.pool.closed):
        return None
    return Luggage(here.settings.without_secrets(), _public_configuration(), here.connection)


def _adopt(luggage: Luggage) -> None:
    """Use the settings of a pickle, unless this process has its own.

    Its own settings come from `connect`, or from a configuration that differs from that of the
    pickle's process, and so was written for this one.
    """
    with _lock:
        own = _here.settings is not None and not _here.adopted
        if own or _here.connection == luggage.connection:
            return
    configured = _public_configuration()
    if configured is not None and configured != luggage.configured:
        return
    settings = _with_secrets(luggage.settings)
    with _lock:
        pool = _here.pool
        if pool is not None and (pool.closed or pool.settings != settings):
            if not pool.closed:
                _others.append(pool)  # other threads may still wait for it
            _here.pool = None
        _here.settings, _here.connection, _here.adopted = settings, luggage.connection, True


def _with_secrets(settings: Settings) -> Settings:
    """Return settings with the withheld secrets, if a profile here equals the rest of them."""
    if not settings.withheld:
        return settings
    for profile in (None, *Settings.profiles()):
        configured = _configured(profile)
        if configured is not None and configured.without_secrets() == settings:
            return configured
    return settings


def _configured(profile: str | None = None) -> Settings | None:
    """Return the settings of the configuration; None if it is empty or invalid."""
    try:
        return Settings.from_config(profile)
    except ConfigError:
        return None


def _public_configuration() -> Settings | None:
    configured = _configured()
    return None if configured is None else configured.without_secrets()


def forget(pool: Pool | None = None) -> None:
    """Close the pool of this process and drop its settings, unless it differs from `pool`.

    Without `pool`, pools that are shared by URL are closed, too.
    """
    global _here  # noqa: PLW0603
    with _lock:
        closing = [] if pool is not None else list(_others)
        if _here.pool is not None and pool in (None, _here.pool):
            closing.append(_here.pool)
            _here = _Here()
        _others[:] = [other for other in _others if other not in closing]
    for other in closing:
        other.close()


def _after_fork() -> None:
    """Neither close nor free a pool whose threads and sockets are the parent's."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _of_parents.extend([_here.pool, *_others])
    _others.clear()
    _here.pool = None


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(forget)
