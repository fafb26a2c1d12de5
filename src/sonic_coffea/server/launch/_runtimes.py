"""The ways to run Triton on this machine: the server from PyPI, and containers.

A runtime takes its own name, an image, and a function that it calls with a short text at each
stage. It fetches what this machine lacks, and returns a function that takes a repository, a
server's folder, and the arguments and environment variables of ``tritonserver``. That function
returns the supervisor's job: ``argv`` and ``env`` of the process that serves; if need be
``cleanup``, the command line that removes what is left when the process has ended, and ``mounts``,
whether the supervisor has to mount a /dev/shm of the server's own.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, ServerStartError, require
from sonic_coffea.server import _install as install
from sonic_coffea.server._folders import SHARED_MEMORY, shared_memory
from sonic_coffea.server.repository._config import link_models

logger = logging.getLogger(__name__)

Env = Mapping[str, str]
Launch = Callable[[Path, Path, list[str], Env], dict[str, Any]]

# NVIDIA's container of the same version as the server from PyPI.
IMAGE = "nvcr.io/nvidia/tritonserver:24.10-py3"


def pip(name: str, image: str | None, progress: install.Progress) -> Launch:
    """Run the server from PyPI, in an environment of its own."""
    del name, image
    installation = install.ensure(progress)

    def launch(repository: Path, folder: Path, arguments: list[str], env: Env) -> dict[str, Any]:
        # Triton starts models by bash, to which other paths may be more than one word.
        models, backends = folder / "models", folder / "backends"
        backends.symlink_to(installation.backend_directory)
        link_models(repository, models, arguments)
        argv = [str(installation.tritonserver), f"--backend-directory={backends}"]
        argv += _serve(models, folder, arguments, *install.BACKENDS)
        return {"argv": argv, "env": {**installation.environment(), **env}, "mounts": True}

    return launch


def docker(name: str, image: str | None, progress: install.Progress) -> Launch:
    """Run an image by its name, with docker or with podman, which takes the same arguments."""
    image = image or IMAGE
    is_docker = name == "docker"
    look = [name, "image", "inspect", image]
    if subprocess.run(look, capture_output=True, check=False).returncode != 0:
        _fetch([name, "pull", image], image, progress)

    def launch(repository: Path, folder: Path, arguments: list[str], env: Env) -> dict[str, Any]:
        container, inside = shared_memory(folder), {**_devices(), **env}
        argv = [name, "run", "--rm", "--init", f"--name={container}", "--pull=never"]
        # Models use the machine's network, as those of the server from PyPI do.
        argv += ["--network=host", "--cap-drop=all"]
        argv += ["--security-opt=no-new-privileges", "--security-opt=label=disable"]
        if is_docker:  # its daemon runs containers as root; podman's root is the user
            argv.append(f"--user={os.getuid()}:{os.getgid()}")
        if install.has_gpu():
            argv.append("--gpus=all" if is_docker else "--device=nvidia.com/gpu=all")
        if (threads := env.get("OMP_NUM_THREADS", "")).isdecimal():
            # Native backends have threads of their own.
            argv.append(f"--cpus={threads}")
        argv += _mounts("--volume", repository, folder)
        argv += [f"--env={key}" for key in sorted(inside)]
        argv += [image, "tritonserver", *_serve(repository, folder, arguments)]
        cleanup = [name, "rm", "--force", container]
        return {"argv": argv, "env": {**os.environ, **inside}, "cleanup": cleanup}

    return launch


def apptainer(name: str, image: str | None, progress: install.Progress) -> Launch:
    """Run an image by its name, a ``.sif`` file or an unpacked directory, as on cvmfs."""
    image = image or IMAGE
    path = Path(image).expanduser()
    if path.exists():
        image = str(path.absolute())
    elif image.startswith(("/", ".", "~")):
        raise ConfigError(f"there is no image at {image}")
    else:
        image = image if "://" in image else f"docker://{image}"
        _fetch([name, "exec", image, "true"], image, progress)

    def launch(repository: Path, folder: Path, arguments: list[str], env: Env) -> dict[str, Any]:
        gpu = ["--nv"] if install.has_gpu() else []
        argv = [name, "exec", "--cleanenv", "--no-home", *gpu]
        argv += [*_mounts("--bind", repository, folder), image]
        argv += ["tritonserver", *_serve(repository, folder, arguments)]
        prefix = f"{name.upper()}ENV_"
        inside = {f"{prefix}{key}": value for key, value in {**_devices(), **env}.items()}
        return {"argv": argv, "env": {**os.environ, **inside}}

    return launch


# `choose` tries them in this order.
RUNTIMES: dict[str, Callable[[str, str | None, install.Progress], Launch]] = {
    "pip": pip,
    "apptainer": apptainer,
    "singularity": apptainer,
    "podman": docker,
    "docker": docker,
}


def choose(runtime: str, image: str | None = None) -> str:
    """Return the name of a runtime that this machine has.

    ``"auto"`` chooses the server from PyPI if it can run here, and otherwise the first container
    engine. On a machine with a GPU and a configured image, container engines come first.
    """
    require([runtime], ("auto", *RUNTIMES), "no runtime")
    names = list(RUNTIMES) if runtime == "auto" else [runtime]
    if image is not None and install.has_gpu():
        names.sort(key=lambda name: name == "pip")
    against = {}
    for name in names:
        reason = f"there is no {name} on this machine" if shutil.which(name) is None else None
        if name == "pip":
            reason = None if install.find() else install.reason_against()
        if reason is None:
            logger.info("Triton runs by %s", name)
            return name
        against[name] = reason
    reason = against.pop("pip", None) or against[runtime]
    engines = f", and there is none of {', '.join(against)}" if runtime == "auto" else ""
    raise ServerStartError(f"{reason}{engines}; {install.ALTERNATIVES}")


def _serve(repository: Path, folder: Path, arguments: list[str], *backends: str) -> list[str]:
    """Return the arguments of ``tritonserver``; the prefix is for servers that share /dev/shm."""
    prefix = f"shm-region-prefix-name={shared_memory(folder)}_"
    named = [f"--backend-config={backend},{prefix}" for backend in ("python", *backends)]
    return [f"--model-repository={repository}", *arguments, *named]


def _fetch(command: Sequence[str], image: str, progress: install.Progress) -> None:
    """Run an engine to fetch an image."""
    progress(f"fetching {image}, unless it is here (several GB, once)")
    install.run_or_raise(
        command,
        f"{command[0]} could not fetch {image}; for one that this machine has, "
        "pass image= or set sonic.local.image",
    )


def _mounts(option: str, repository: Path, folder: Path) -> list[str]:
    """Return the arguments that mount the repository, and the server's folder and memory."""
    return [
        f"{option}={repository}:{repository}:ro",
        f"{option}={folder}:{folder}",
        f"{option}={SHARED_MEMORY / shared_memory(folder)}:{SHARED_MEMORY}",
    ]


def _devices() -> dict[str, str]:
    """Return the variable that chooses GPUs, if the machine has any."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": devices} if devices and install.has_gpu() else {}
