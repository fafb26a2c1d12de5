"""Files that settings name, with an error for a file that only another host has."""

from __future__ import annotations

import socket
from pathlib import Path

from sonic_coffea.errors import ConfigError


def unreadable(role: str, path: str | Path, problem: str) -> ConfigError:
    """Return the error of a file that cannot be used; it names the machine, one of many."""
    return ConfigError(f"cannot read the {role} {str(path)!r} on {socket.gethostname()}: {problem}")
