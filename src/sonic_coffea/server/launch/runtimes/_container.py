"""What container engines have in common: an executable, an image, and how it is fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server.launch.runtimes._runtime import shm_prefix, thread_variables

if TYPE_CHECKING:
    from sonic_coffea.server.launch.runtimes._runtime import Options, Serving

# NVIDIA's container of the same version as the server from PyPI.
IMAGE = "nvcr.io/nvidia/tritonserver:24.10-py3"
FETCHING = "fetching {} (several GB, once)"
_SECRET = "SONIC_SECRET"  # noqa: S105  the name of a variable
_SERVE = f'exec tritonserver "$@" --grpc-restricted-protocol="$PROTOCOLS=${_SECRET}"'
_PASSED_ON = "CUDA_VISIBLE_DEVICES"


class Container:
    """NVIDIA's server, or one made from it, in a container.

    Parameters
    ----------
    engine : str
        The name of the engine's executable.
    options : Options
        The image is a name in a registry; NVIDIA's own by default.
    """

    def __init__(self, engine: str, options: Options) -> None:
        self.engine = engine
        self.image = options.image or IMAGE
        self.gpu = options.gpu
        self.executable = shutil.which(engine)

    @property
    def python(self) -> Path:
        """An interpreter for the supervisor."""
        return Path(sys.executable)

    def reason_against(self) -> str | None:
        """Say why this machine cannot run it; None if it can."""
        return None if self.executable else f"there is no {self.engine} on this machine"

    def command(self, *arguments: str) -> list[str]:
        """Return a command line of the engine."""
        return [self.executable or self.engine, *arguments]

    def fetch(self, *arguments: str) -> None:
        """Run the engine to fetch the image.

        Raises
        ------
        sonic_coffea.errors.ServerStartError
            With the engine's last words.
        """
        done = subprocess.run(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            lines = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-8:])
            raise ServerStartError(
                f"{self.engine} could not fetch {self.image}; for one that this machine has, "
                f"pass image= or set sonic.local.image. The last lines:\n{lines}"
            )

    def environment(self, serving: Serving) -> dict[str, str]:
        """Return the variables inside the container, the secret among them."""
        inside = {
            **thread_variables(serving.threads),
            **serving.env,
            "PROTOCOLS": f"{serving.protocols}:{serving.header}",
            _SECRET: serving.secret,
        }
        if self.gpu and _PASSED_ON in os.environ:
            inside.setdefault(_PASSED_ON, os.environ[_PASSED_ON])
        return inside

    def serve(self, serving: Serving) -> list[str]:
        """Return what runs inside: the secret is in the environment, as command lines are seen."""
        python = shm_prefix("python", serving.name)
        return ["sh", "-c", _SERVE, "tritonserver", *serving.arguments, python]
