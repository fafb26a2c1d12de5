"""The server from PyPI, in an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sonic_coffea.errors import ConfigError
from sonic_coffea.server import _install as install
from sonic_coffea.server.launch.runtimes._runtime import Launch, Options, Serving
from sonic_coffea.server.repository import without_agents

if TYPE_CHECKING:
    from sonic_coffea.server._install import ServerInstall


class Pip:
    """The server from PyPI, which is installed on first use."""

    def __init__(self, name: str, options: Options) -> None:
        del name
        self._given = options.installation

    @property
    def installation(self) -> ServerInstall:
        """The installation that runs, made if need be."""
        return self._given or install.ensure()

    @property
    def python(self) -> Path:
        return self.installation.python

    def reason_against(self) -> str | None:
        """Say why this machine cannot run it; None if it can, or has it."""
        return None if self._given or install.find() else install.reason_against()

    def prepare(self, tell: Callable[[str], None]) -> None:
        self._given = self._given or install.ensure(tell)

    def launch(self, serving: Serving) -> Launch:
        installation = self.installation
        # The wheel has no repository agents.
        links = without_agents(serving.repository)
        if links and "--model-control-mode=poll" in serving.arguments:
            raise ConfigError(
                "models that ask for repository agents are checked when the server starts, which "
                "model_control='poll' cannot do; leave it out"
            )
        argv = [
            str(installation.tritonserver),
            f"--model-repository={links or serving.repository}",
            *serving.arguments,
            f"--backend-directory={installation.backend_directory}",
            *(serving.shm_prefix(backend) for backend in ("python", *install.NATIVE)),
            f"--grpc-restricted-protocol={serving.protocols}:{serving.header}={serving.secret}",
        ]
        # Nothing of the analysis environment's Python may reach the server's.
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        env["VIRTUAL_ENV"] = str(installation.root)
        env["PATH"] = os.pathsep.join(
            [str(installation.python.parent), env.get("PATH", os.defpath)]
        )
        libraries = [*map(str, installation.library_path), env.get("LD_LIBRARY_PATH", "")]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        cleanup = ["rm", "-rf", str(links)] if links else None
        return Launch(argv=argv, env={**env, **serving.variables}, cleanup=cleanup)
