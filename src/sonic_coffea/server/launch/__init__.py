"""launch: starts, watches and finds a real Triton on this machine."""

from __future__ import annotations

from sonic_coffea.server.launch._local import LocalServer

__all__ = ["LocalServer"]
