"""Triton in docker or podman, which isolate the container's processes and files."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from sonic_coffea.server.launch.runtimes._container import FETCHING, Container
from sonic_coffea.server.launch.runtimes._runtime import Launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sonic_coffea.server.launch.runtimes._runtime import Serving


class Docker(Container):
    """An engine that runs what a daemon has fetched."""

    gpus = "--gpus=all"

    @property
    def user(self) -> list[str]:
        """The argument that makes the container's user that of the files."""
        return [f"--user={os.getuid()}:{os.getgid()}"]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Fetch the image, if this machine does not have it."""
        look = self.command("image", "inspect", self.image)
        if subprocess.run(look, capture_output=True, check=False).returncode != 0:
            tell(FETCHING.format(self.image))
            self.fetch("pull", self.image)

    def launch(self, serving: Serving) -> Launch:
        """Return the command line that serves a repository."""
        name = serving.name.rstrip("_")
        inside = self.environment(serving)
        argv = self.command("run", "--rm", "--init", f"--name={name}", "--pull=never")
        # On loopback of the machine, and with its shared memory, as the server from PyPI is.
        argv += ["--network=host", "--ipc=host", "--cap-drop=all"]
        argv += ["--security-opt=no-new-privileges", "--security-opt=label=disable", *self.user]
        if self.gpu:
            argv.append(self.gpus)
        if serving.threads is not None:
            argv.append(f"--cpus={serving.threads}")
        argv.append(f"--volume={serving.repository}:{serving.repository}:ro")
        argv += [f"--env={key}" for key in sorted(inside)]
        return Launch(
            argv=[*argv, self.image, *self.serve(serving)],
            env={**os.environ, **inside},
            cleanup=self.command("rm", "--force", name),
        )


class Podman(Docker):
    """As docker, without a daemon."""

    gpus = "--device=nvidia.com/gpu=all"

    @property
    def user(self) -> list[str]:
        """Nothing: without a daemon, the container's root is the user who runs it."""
        return []
