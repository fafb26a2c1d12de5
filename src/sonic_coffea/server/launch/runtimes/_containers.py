"""Triton in a container: docker and podman, apptainer and singularity."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import _install as install
from sonic_coffea.server._folders import SHARED_MEMORY
from sonic_coffea.server.launch.runtimes._runtime import Launch, Serving

# NVIDIA's container of the same version as the server from PyPI.
IMAGE = "nvcr.io/nvidia/tritonserver:24.10-py3"


class Container:
    """NVIDIA's server, or one made from it, in a container.

    The image is a name in a registry; NVIDIA's own by default.
    """

    python = Path(sys.executable)

    def __init__(
        self, engine: str, *, image: str | None = None, gpu: bool = False, **_: object
    ) -> None:
        self.engine = engine
        self.image = image or IMAGE
        self.gpu = gpu
        self.executable = shutil.which(engine)

    def reason_against(self) -> str | None:
        return None if self.executable else f"there is no {self.engine} on this machine"

    def command(self, *arguments: str) -> list[str]:
        return [self.executable or self.engine, *arguments]

    def fetch(self, tell: Callable[[str], None], *arguments: str) -> None:
        """Run the engine to fetch the image."""
        tell(f"fetching {self.image} (several GB, once)")
        install.run_or_raise(
            self.command(*arguments),
            f"{self.engine} could not fetch {self.image}; for one that this machine has, "
            "pass image= or set sonic.local.image",
        )

    def environment(self, serving: Serving) -> dict[str, str]:
        """Return the variables inside the container."""
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {
            **({"CUDA_VISIBLE_DEVICES": devices} if self.gpu and devices is not None else {}),
            **serving.variables,
        }

    def serve(self, serving: Serving) -> list[str]:
        """Return the command inside the container."""
        repository = f"--model-repository={serving.repository}"
        return ["tritonserver", repository, *serving.arguments, serving.shm_prefix("python")]

    def folders(self, serving: Serving) -> list[str]:
        """Return what of the machine the container sees: its paths outside and inside."""
        return [
            f"{serving.repository}:{serving.repository}:ro",
            f"{serving.folder}:{serving.folder}",
            f"{SHARED_MEMORY / serving.shared_memory}:{SHARED_MEMORY}",
        ]


class Docker(Container):
    """docker, or podman, which takes the same command line."""

    def prepare(self, tell: Callable[[str], None]) -> None:
        look = self.command("image", "inspect", self.image)
        if subprocess.run(look, capture_output=True, check=False).returncode != 0:
            self.fetch(tell, "pull", self.image)

    def launch(self, serving: Serving) -> Launch:
        name = serving.shared_memory
        inside = self.environment(serving)
        argv = self.command("run", "--rm", "--init", f"--name={name}", "--pull=never")
        # Models use the machine's network, as those of the server from PyPI do.
        argv += ["--network=host", "--cap-drop=all"]
        argv += ["--security-opt=no-new-privileges", "--security-opt=label=disable"]
        is_docker = self.engine == "docker"
        if is_docker:  # its daemon runs containers as root; podman's root is the user
            argv.append(f"--user={os.getuid()}:{os.getgid()}")
        if self.gpu:
            argv.append("--gpus=all" if is_docker else "--device=nvidia.com/gpu=all")
        if serving.threads is not None:
            argv.append(f"--cpus={serving.threads}")
        argv += [f"--volume={folder}" for folder in self.folders(serving)]
        argv += [f"--env={key}" for key in sorted(inside)]
        return Launch(
            argv=[*argv, self.image, *self.serve(serving)],
            env={**os.environ, **inside},
            cleanup=self.command("rm", "--force", name),
        )


class Apptainer(Container):
    """An engine whose image may also be a ``.sif`` file or an unpacked directory, as on cvmfs."""

    def prepare(self, tell: Callable[[str], None]) -> None:
        if "://" in self.image or Path(self._place).exists():
            return
        if self.image.startswith(("/", ".", "~")):
            raise ConfigError(f"there is no image at {self.image}")
        target = self._pulled
        part = target.with_suffix(".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with install.locked(target.with_suffix(".lock"), tell):
                if not target.exists():
                    self.fetch(tell, "pull", "--force", str(part), f"docker://{self.image}")
                    part.replace(target)
        except OSError as error:
            raise ServerStartError(
                f"cannot keep the image in {target.parent}: {error}; set "
                f"{install.DIRECTORY_VARIABLE} to a directory with space that this user can write"
            ) from None
        finally:
            part.unlink(missing_ok=True)

    def launch(self, serving: Serving) -> Launch:
        binds = [part for folder in self.folders(serving) for part in ("--bind", folder)]
        gpu = ["--nv"] if self.gpu else []
        own = self.command("exec", "--cleanenv", "--no-home", *gpu, *binds, self._place)
        prefix = f"{self.engine.upper()}ENV_"
        inside = {f"{prefix}{key}": value for key, value in self.environment(serving).items()}
        return Launch(argv=[*own, *self.serve(serving)], env={**os.environ, **inside})

    @property
    def _place(self) -> str:
        """The image's name or path, as the engine takes it."""
        if "://" in self.image:
            return self.image
        path = Path(self.image).expanduser()
        return str(path.absolute()) if path.exists() else str(self._pulled)

    @property
    def _pulled(self) -> Path:
        digest = hashlib.sha256(self.image.encode()).hexdigest()[:16]
        return install.install_root() / "images" / f"{digest}.sif"
