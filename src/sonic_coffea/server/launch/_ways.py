"""The ways of running a Triton on this machine, and the command line of each."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from sonic_coffea.errors import ConfigError, ServerStartError, nearest
from sonic_coffea.server import _install as install

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sonic_coffea.server._install import Progress, ServerInstall

__all__ = ["IMAGE", "Container", "Engine", "Installed", "Launch", "Way", "choose"]

logger = logging.getLogger(__name__)

Engine = Literal["apptainer", "singularity", "podman", "docker"]
Way = Literal["auto", "pip", "apptainer", "singularity", "podman", "docker"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

# NVIDIA's container of the same version as the server from PyPI.
IMAGE = "nvcr.io/nvidia/tritonserver:24.10-py3"
_SECRET = "SONIC_SECRET"  # noqa: S105  the name of a variable
_SERVE = f'exec tritonserver "$@" --grpc-restricted-protocol="$PROTOCOLS=${_SECRET}"'
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_PASSED_ON = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is run, and what removes the rest when it has ended."""

    argv: list[str]
    env: dict[str, str] = dataclasses.field(repr=False)
    cleanup: list[str] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Which protocols want which header."""

    protocols: str
    header: str
    value: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Installed:
    """The server from PyPI."""

    installation: ServerInstall

    @property
    def python(self) -> Path:
        """An interpreter for the guard."""
        return self.installation.python

    def prepare(self, tell: Progress) -> None:
        """Nothing is left to do."""

    def launch(
        self,
        arguments: Sequence[str],
        repository: Path,
        secret: Secret,
        *,
        name: str,
        threads: int | None,
        env: Mapping[str, str],
    ) -> Launch:
        """Return the command line that serves a repository."""
        del repository
        there = self.installation
        argv = [
            str(there.tritonserver),
            *arguments,
            f"--backend-directory={there.backend_directory}",
            *(_shm_prefix(backend, name) for backend in ("python", *install.NATIVE)),
            f"--grpc-restricted-protocol={secret.protocols}:{secret.header}={secret.value}",
        ]
        # Nothing of the analysis environment's Python may reach the server's.
        given = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        given["VIRTUAL_ENV"] = str(there.root)
        given["PATH"] = os.pathsep.join([str(there.python.parent), given.get("PATH", os.defpath)])
        libraries = [*map(str, there.library_path), given.get("LD_LIBRARY_PATH", "")]
        given["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return Launch(argv=argv, env={**given, **_thread_variables(threads), **env})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """NVIDIA's server, or one made from it, in a container.

    Parameters
    ----------
    engine : {"apptainer", "singularity", "podman", "docker"}
        What runs it.
    executable : str
        Where that is.
    image : str
        A name in a registry; for apptainer and singularity also a ``.sif`` file or an unpacked
        directory, such as on cvmfs.
    gpu : bool
        Whether it is given the machine's GPUs.
    """

    engine: Engine
    executable: str
    image: str
    gpu: bool

    @property
    def python(self) -> Path:
        """An interpreter for the guard."""
        return Path(sys.executable)

    @property
    def _unprivileged(self) -> bool:
        """Whether the container shares the user's processes and files rather than isolates them."""
        return self.engine in ("apptainer", "singularity")

    @property
    def _place(self) -> str:
        """What the engine is told to run."""
        if not self._unprivileged or "://" in self.image:
            return self.image
        path = Path(self.image).expanduser()
        return str(path.absolute()) if path.exists() else str(self._pulled)

    @property
    def _pulled(self) -> Path:
        digest = hashlib.sha256(self.image.encode()).hexdigest()[:16]
        return install.install_root() / "images" / f"{digest}.sif"

    def prepare(self, tell: Progress) -> None:
        """Fetch the image, if this machine does not have it.

        Raises
        ------
        sonic_coffea.errors.ConfigError
            If it is a path, and there is nothing.
        sonic_coffea.errors.ServerStartError
            With the engine's last words.
        """
        if self._unprivileged:
            if "://" in self.image or Path(self._place).exists():
                return
            if self.image.startswith(("/", ".", "~")):
                raise ConfigError(f"there is no image at {self.image}")
            self._pull_file(tell)
            return
        look = [self.executable, "image", "inspect", self.image]
        if subprocess.run(look, capture_output=True, check=False).returncode != 0:
            tell(f"fetching {self.image} (several GB, once)")
            self._run([self.executable, "pull", self.image])

    def _pull_file(self, tell: Progress) -> None:
        target = self._pulled
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with install.locked(target.with_suffix(".lock"), tell):
                if target.exists():
                    return
                part = target.with_suffix(".part")
                tell(f"fetching {self.image} (several GB, once)")
                try:
                    self._run(
                        [self.executable, "pull", "--force", str(part), f"docker://{self.image}"]
                    )
                    part.replace(target)
                finally:
                    part.unlink(missing_ok=True)
        except OSError as error:
            raise ServerStartError(
                f"cannot keep the image in {target.parent}: {error}; set "
                f"{install.DIRECTORY_VARIABLE} to a directory with space that this user can write"
            ) from None

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0:
            lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
            said = "\n".join(f"  {line}" for line in lines[-8:])
            raise ServerStartError(
                f"{self.engine} could not fetch {self.image}; for one that this machine has, "
                f"pass image= or set sonic.local.image. The last lines:\n{said}"
            )

    def launch(
        self,
        arguments: Sequence[str],
        repository: Path,
        secret: Secret,
        *,
        name: str,
        threads: int | None,
        env: Mapping[str, str],
    ) -> Launch:
        """Return the command line that serves a repository."""
        inside = {
            **_thread_variables(threads),
            **env,
            "PROTOCOLS": f"{secret.protocols}:{secret.header}",
            _SECRET: secret.value,
        }
        if self.gpu and _PASSED_ON in os.environ:
            inside.setdefault(_PASSED_ON, os.environ[_PASSED_ON])
        # The secret is in the environment, since other users may see command lines.
        serve = ["sh", "-c", _SERVE, "tritonserver", *arguments, _shm_prefix("python", name)]
        bind = f"{repository}:{repository}:ro"
        if self._unprivileged:
            gpu = ["--nv"] if self.gpu else []
            argv = [self.executable, "exec", "--cleanenv", "--no-home", *gpu, "--bind", bind]
            prefix = f"{self.engine.upper()}ENV_"
            given = {**os.environ, **{f"{prefix}{key}": value for key, value in inside.items()}}
            return Launch(argv=[*argv, self._place, *serve], env=given)
        argv = [
            self.executable,
            "run",
            "--rm",
            "--init",
            f"--name={name.rstrip('_')}",
            "--pull=never",
        ]
        # On loopback of the machine, and with its shared memory, as the server from PyPI is.
        argv += ["--network=host", "--ipc=host", "--cap-drop=all"]
        argv += ["--security-opt=no-new-privileges", "--security-opt=label=disable"]
        if self.engine == "docker":
            argv.append(f"--user={os.getuid()}:{os.getgid()}")
        if self.gpu:
            argv.append({"docker": "--gpus=all"}.get(self.engine, "--device=nvidia.com/gpu=all"))
        if threads is not None:
            argv.append(f"--cpus={threads}")
        argv += [f"--volume={bind}", *(f"--env={key}" for key in sorted(inside)), self.image]
        cleanup = [self.executable, "rm", "--force", name.rstrip("_")]
        return Launch(argv=[*argv, *serve], env={**os.environ, **inside}, cleanup=cleanup)


def choose(
    way: Way,
    *,
    image: str | None = None,
    gpu: bool | None = None,
    installation: ServerInstall | None = None,
    progress: Progress | None = None,
) -> Installed | Container:
    """Return how a server is to be run here.

    By itself, that is the server from PyPI where it can run, except that a machine with a GPU and
    an image of its own uses that; and else the first container engine that the machine has.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is no such way.
    sonic_coffea.errors.ServerStartError
        If the machine does not have what it needs.
    """
    against = reason_against(way)
    if installation is not None and way in ("auto", "pip"):
        against = None
    if against is not None:
        raise ServerStartError(f"{against}; {install.ALTERNATIVES}")
    tell = progress if progress is not None else lambda text: logger.warning("%s", text)
    gpu = has_gpu() if gpu is None else gpu
    engine = _engine(way)
    from_pypi = installation is not None or install.find() or install.reason_against() is None
    found: Installed | Container
    if engine is None or (way == "auto" and from_pypi and not (image is not None and gpu)):
        found = Installed(installation or install.ensure(progress))
    else:
        executable = shutil.which(engine) or engine
        found = Container(engine=engine, executable=executable, image=image or IMAGE, gpu=gpu)
        logger.info("Triton runs by %s, from %s", engine, found.image)
    found.prepare(tell)
    return found


def reason_against(way: Way) -> str | None:
    """Say why this machine has no such way of running a server; None if it has.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is no such way at all.
    """
    if way not in get_args(Way):
        raise ConfigError(f"no way {way!r} of running a server; {nearest(way, get_args(Way))}")
    if way in ENGINES:
        return None if _engine(way) else f"there is no {way} on this machine"
    against = None if install.find() else install.reason_against()
    if against is None or (way == "auto" and _engine(way)):
        return None
    return against if way == "pip" else f"{against}, and there is none of {', '.join(ENGINES)}"


def _engine(way: Way) -> Engine | None:
    """Return the container engine to use, if there is one."""
    wanted = [engine for engine in ENGINES if way in ("auto", engine)]
    return next((engine for engine in wanted if shutil.which(engine)), None)


def has_gpu() -> bool:
    """Whether there is one that a server could use."""
    return any(Path(path).exists() for path in _GPU_DEVICES)


def _shm_prefix(backend: str, name: str) -> str:
    return f"--backend-config={backend},shm-region-prefix-name={name}"


def _thread_variables(threads: int | None) -> dict[str, str]:
    return {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))
