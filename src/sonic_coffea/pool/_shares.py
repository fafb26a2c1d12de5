"""Shares of the servers: the share that a call counts for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._options import OPTIONS


class Share(NamedTuple):
    """The work of a user, an analysis or a dataset, which gets a part of the servers."""

    name: str
    weight: float


DEFAULT = Share("", 1.0)

_current: ContextVar[Share] = ContextVar("sonic-share", default=DEFAULT)


def current_share() -> Share:
    """Return the share of the calls that are made here."""
    return _current.get()


@contextlib.contextmanager
def share(name: str, weight: float = 1.0) -> Iterator[None]:
    """Put the calls inside the ``with`` block into a share of the servers.

    Shares with waiting rows divide the servers in proportion to their weights, within a process and
    among the workers of a dask cluster. The number of chunks or processes of a share plays no part.
    The others use what a share does not need. All calls outside of such a block form one share of
    weight 1.

    Parameters
    ----------
    name : str
        Name of the share. Calls with the same name belong to one share, in all processes.
    weight : float
        More than 0, at most 10. Weight 2 gets twice as much as weight 1.

    Raises
    ------
    ConfigError
        If the weight cannot be used.

    Examples
    --------
    >>> import sonic_coffea as sonic
    >>> with sonic.share("signal", weight=3.0):
    ...     pass  # scores = model(jets)
    """
    if not isinstance(name, str):
        raise ConfigError(f"name of a share: expected a str, got {name!r}")
    if (expected := OPTIONS["weight"].expects(weight)) is not None:
        raise ConfigError(f"weight of share {name!r}: expected {expected}, got {weight!r}")
    token = _current.set(Share(name, float(weight)))
    try:
        yield
    finally:
        _current.reset(token)
