"""repository: model repositories as Triton reads them, built from files and functions."""

from __future__ import annotations

from sonic_coffea.server.repository._agents import check_agents, without_agents
from sonic_coffea.server.repository._build import build_repository
from sonic_coffea.server.repository._config import Ensemble
from sonic_coffea.server.repository._manifest import (
    ModelVersion,
    no_models,
    read_repository,
)
from sonic_coffea.server.repository.formats import Served

__all__ = [
    "Ensemble",
    "ModelVersion",
    "Served",
    "build_repository",
    "check_agents",
    "no_models",
    "read_repository",
    "without_agents",
]
