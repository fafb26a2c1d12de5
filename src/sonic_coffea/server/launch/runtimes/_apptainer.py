"""Triton in apptainer or singularity, which share the user's processes and files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import _install as install
from sonic_coffea.server.launch.runtimes._container import FETCHING, Container
from sonic_coffea.server.launch.runtimes._runtime import Launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sonic_coffea.server.launch.runtimes._runtime import Serving


class Apptainer(Container):
    """An engine whose image may also be a ``.sif`` file or an unpacked directory, as on cvmfs."""

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Fetch the image, if this machine does not have it.

        Raises
        ------
        sonic_coffea.errors.ConfigError
            If it is a path, and there is nothing.
        """
        if "://" in self.image or Path(self._place).exists():
            return
        if self.image.startswith(("/", ".", "~")):
            raise ConfigError(f"there is no image at {self.image}")
        target = self._pulled
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with install.locked(target.with_suffix(".lock"), tell):
                if not target.exists():
                    self._pull(target, tell)
        except OSError as error:
            raise ServerStartError(
                f"cannot keep the image in {target.parent}: {error}; set "
                f"{install.DIRECTORY_VARIABLE} to a directory with space that this user can write"
            ) from None

    def launch(self, serving: Serving) -> Launch:
        """Return the command line that serves a repository."""
        bind = f"{serving.repository}:{serving.repository}:ro"
        gpu = ["--nv"] if self.gpu else []
        own = self.command("exec", "--cleanenv", "--no-home", *gpu, "--bind", bind, self._place)
        prefix = f"{self.engine.upper()}ENV_"
        inside = {f"{prefix}{key}": value for key, value in self.environment(serving).items()}
        return Launch(argv=[*own, *self.serve(serving)], env={**os.environ, **inside})

    @property
    def _place(self) -> str:
        """What the engine is told to run."""
        if "://" in self.image:
            return self.image
        path = Path(self.image).expanduser()
        return str(path.absolute()) if path.exists() else str(self._pulled)

    @property
    def _pulled(self) -> Path:
        digest = hashlib.sha256(self.image.encode()).hexdigest()[:16]
        return install.install_root() / "images" / f"{digest}.sif"

    def _pull(self, target: Path, tell: Callable[[str], None]) -> None:
        part = target.with_suffix(".part")
        tell(FETCHING.format(self.image))
        try:
            self.fetch("pull", "--force", str(part), f"docker://{self.image}")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
