"""runtimes: the ways to run a Triton on this machine, one module each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from sonic_coffea.errors import ConfigError, ServerStartError, nearest
from sonic_coffea.server import _install as install
from sonic_coffea.server.launch.runtimes._containers import Apptainer, Docker
from sonic_coffea.server.launch.runtimes._pip import Pip
from sonic_coffea.server.launch.runtimes._runtime import Launch, Runtime, Serving

__all__ = ["AUTO", "RUNTIMES", "Launch", "Runtime", "Serving", "choose"]

logger = logging.getLogger(__name__)

AUTO = "auto"
# Where no runtime is named, the first that this machine has is taken.
RUNTIMES: Mapping[str, Callable[..., Runtime]] = {
    "pip": Pip,
    "apptainer": Apptainer,
    "singularity": Apptainer,
    "podman": Docker,
    "docker": Docker,
}


def choose(
    runtime: str,
    *,
    image: str | None = None,
    gpu: bool | None = None,
    installation: install.ServerInstall | None = None,
) -> Runtime:
    """Return a runtime that this machine has, not yet prepared.

    By itself, that is the server from PyPI where it can run, and else the first container engine;
    a machine with a GPU and an image of its own prefers the container. `image` and `gpu` are for
    containers, `installation` for the server from PyPI.
    """
    known = (AUTO, *RUNTIMES)
    if runtime not in known:
        raise ConfigError(f"no runtime {runtime!r} of servers; {nearest(runtime, known)}")
    gpu = install.has_gpu() if gpu is None else gpu
    names = list(RUNTIMES) if runtime == AUTO else [runtime]
    if image is not None and gpu:
        names.sort(key=lambda name: name == "pip")
    against = {}
    for name in names:
        chosen = RUNTIMES[name](name, image=image, gpu=gpu, installation=installation)
        reason = chosen.reason_against()
        if reason is None:
            logger.info("Triton runs by %s", name)
            return chosen
        against[name] = reason
    reason = against.pop("pip", None) or against[runtime]
    engines = f", and there is none of {', '.join(against)}" if runtime == AUTO else ""
    raise ServerStartError(f"{reason}{engines}; {install.ALTERNATIVES}")
