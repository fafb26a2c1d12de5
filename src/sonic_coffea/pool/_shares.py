"""Shares: whose rows a call has, and which of those that wait leave first."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from sonic_coffea.errors import ConfigError
from sonic_coffea.pool._options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator


class Share(NamedTuple):
    """Work that has a part of the servers for itself: of a user, an analysis, or a dataset."""

    name: str
    weight: float


DEFAULT = Share("", 1.0)

_current: ContextVar[Share] = ContextVar("sonic-share", default=DEFAULT)


def current_share() -> Share:
    """Return the share of the calls that are made here."""
    return _current.get()


@contextlib.contextmanager
def share(name: str, weight: float = 1.0) -> Iterator[None]:
    """Give the calls that are made within a share of the servers.

    Shares that have rows waiting get parts of the servers as their weights are, however many chunks
    or processes each has; in one process, and among the workers of a dask cluster. What one does
    not need is for the others. Calls outside of this belong to a share of weight 1 together.

    Parameters
    ----------
    name : str
        Calls of the same name belong together, also in other processes.
    weight : float
        More than 0, up to 10: one of weight 2 gets twice as much as one of weight 1.

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
    if (expected := OPTIONS["weight"].expects(weight)) is not None:
        raise ConfigError(f"weight of share {name!r}: expected {expected}, got {weight!r}")
    token = _current.set(Share(name, float(weight)))
    try:
        yield
    finally:
        _current.reset(token)


class FairOrder:
    """Which of several shares sends next: start-time fair queueing.

    A share pays for a slice when it is sent, so that slices that are cancelled cost nothing, and
    one that was idle has saved nothing. Goyal, Vin and Cheng (1997).
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}

    @property
    def shared(self) -> bool:
        """Whether there has been any share but the default."""
        return any(self._next)

    def place(self, share: Share) -> float:
        """Return the place of a share: that with the lowest one sends next."""
        return max(self._now, self._next.get(share.name, 0.0))

    def leave(self, share: Share) -> None:
        """Take note that a slice of a share is sent."""
        self._now = self.place(share)
        self._next[share.name] = self._now + 1.0 / share.weight
