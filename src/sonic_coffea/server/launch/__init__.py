"""launch: a real Triton on this machine: installed, started, minded and found again."""

from __future__ import annotations

from sonic_coffea.server.launch._fallback import serve_for_machine
from sonic_coffea.server.launch._install import ServerInstall, ensure
from sonic_coffea.server.launch._local import LocalServer
from sonic_coffea.server.launch._probe import ServerMetadata
from sonic_coffea.server.launch._ways import Way

__all__ = [
    "LocalServer",
    "ServerInstall",
    "ServerMetadata",
    "Way",
    "ensure",
    "serve_for_machine",
]
