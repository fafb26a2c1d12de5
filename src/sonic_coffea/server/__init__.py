"""server: local Triton servers and the model repositories that they serve."""

from __future__ import annotations

from sonic_coffea.server._folders import ServerRecord, local_servers
from sonic_coffea.server._in_process import InProcessTransport, contract_of
from sonic_coffea.server._install import ServerInstall, ensure
from sonic_coffea.server.launch import LocalServer
from sonic_coffea.server.repository import (
    Ensemble,
    ModelVersion,
    Served,
    build_repository,
    read_repository,
)

__all__ = [
    "Ensemble",
    "InProcessTransport",
    "LocalServer",
    "ModelVersion",
    "Served",
    "ServerInstall",
    "ServerRecord",
    "build_repository",
    "contract_of",
    "ensure",
    "local_servers",
    "read_repository",
]
