"""server: local Triton servers and the model repositories that they serve."""

from __future__ import annotations

from sonic_coffea.server._folders import local_servers
from sonic_coffea.server._in_process import InProcessTransport, contract_of
from sonic_coffea.server._install import ServerInstall, ensure
from sonic_coffea.server.launch._local import LocalServer
from sonic_coffea.server.repository._build import build_repository
from sonic_coffea.server.repository._config import Ensemble, read_repository
from sonic_coffea.server.repository._sources import Served

# What users import from here; the top of the package has the rest.
__all__ = ["Ensemble", "Served", "ensure", "local_servers", "read_repository"]
