"""Local Triton servers and the model repositories that they serve."""

from __future__ import annotations

from sonic_coffea.server._probe import ServerMetadata
from sonic_coffea.server._served import Ensemble, Served
from sonic_coffea.server.catalog import ModelVersion, read_repository
from sonic_coffea.server.in_process import InProcessServer
from sonic_coffea.server.install import ServerInstall, ensure
from sonic_coffea.server.local import LocalServer
from sonic_coffea.server.repository import build_repository

__all__ = [
    "Ensemble",
    "InProcessServer",
    "LocalServer",
    "ModelVersion",
    "Served",
    "ServerInstall",
    "ServerMetadata",
    "build_repository",
    "ensure",
    "read_repository",
]
