"""The interpreter's switch interval: threads take turns faster while a pool is in use.

A request that is answered, and the next that leaves, take turns on four threads. Beside Python code
that computes, each thread waits until the interpreter interrupts that code, after 5 ms by default:
a server would wait for the client much of its time.
"""

from __future__ import annotations

import sys

_DEFAULT_S, _SOON_S = 0.005, 0.0005

# No lock: a child that is forked meanwhile would find it taken for ever.
_users: set[object] = set()


def sooner(user: object) -> None:
    """Have threads take turns sooner, unless somebody has set when; undone by `as_before`."""
    _users.add(user)
    if sys.getswitchinterval() == _DEFAULT_S:
        sys.setswitchinterval(_SOON_S)


def as_before(user: object) -> None:
    """Undo it for the last one, unless somebody has set something else meanwhile."""
    _users.discard(user)
    if not _users and sys.getswitchinterval() == _SOON_S:
        sys.setswitchinterval(_DEFAULT_S)
