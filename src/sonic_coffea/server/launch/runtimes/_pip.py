"""The server from PyPI, in an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sonic_coffea.server import _install as install
from sonic_coffea.server.launch.runtimes._runtime import Launch, Serving
from sonic_coffea.server.repository import without_agents


class Pip:
    """The server from PyPI, which is installed on first use."""

    def __init__(
        self, name: str, *, installation: install.ServerInstall | None = None, **_: object
    ) -> None:
        del name
        self._installation = installation

    @property
    def python(self) -> Path:
        return self._ensure().python

    def reason_against(self) -> str | None:
        installed = self._installation or install.find()
        return None if installed else install.reason_against()

    def prepare(self, tell: Callable[[str], None]) -> None:
        self._ensure(tell)

    def _ensure(self, tell: Callable[[str], None] | None = None) -> install.ServerInstall:
        self._installation = self._installation or install.ensure(tell)
        return self._installation

    def launch(self, serving: Serving) -> Launch:
        installation = self._ensure()
        # The wheel has no repository agents.
        polled = "--model-control-mode=poll" in serving.arguments
        links = without_agents(serving.repository, polled=polled)
        argv = [
            str(installation.tritonserver),
            f"--model-repository={links or serving.repository}",
            *serving.arguments,
            f"--backend-directory={installation.backend_directory}",
            *(serving.shm_prefix(backend) for backend in install.BACKENDS),
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
        return Launch(argv=argv, env={**env, **serving.variables}, cleanup=cleanup, mounts=True)
