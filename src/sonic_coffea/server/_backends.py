"""The backends of an installed server: its Python backend, and ours in place of native ones."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import platformdirs

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server.repository.formats import FORMATS, MODEL, RUNNER, runner_of

__all__ = ["NATIVE", "add", "directory", "stub"]

# What NVIDIA's container has native backends for, the Python backend runs here.
_SCRIPTS = {
    model_format.NATIVE: {MODEL.name: MODEL.path, RUNNER: runner_of(name)}
    for name, model_format in FORMATS.items()
    if model_format.NATIVE
}
NATIVE = tuple(_SCRIPTS)


def directory(root: Path) -> Path:
    """Return what ``--backend-directory`` takes: each version of this package has its own."""
    here = root / f"backends-{_digest()}"
    if here.exists() or not root.exists() or os.access(root, os.W_OK):
        return here
    # An operator has installed it for all, and with another version of this package.
    return platformdirs.user_cache_path("sonic-coffea") / root.name / here.name


def stub(target: Path) -> Path:
    """Return the program that is there once a folder of backends is."""
    return target / "python" / "triton_python_backend_stub"


def add(target: Path, bundle: Path, tag: str) -> None:
    """Make the folder of backends, if there is none: whole or not at all.

    Parameters
    ----------
    target, bundle : Path
        The folder, and that of the server in the wheel.
    tag : str
        The version of Python, such as ``"3.11"``.
    """
    if stub(target).exists():
        return
    sources = (
        bundle / "backends" / "python" / "libtriton_python.so",
        bundle / "backends" / "python" / "triton_python_backend_utils.py",
        bundle / "python_backend_stubs" / tag / "triton_python_backend_stub",
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=target.parent, prefix=".backends-"))
    try:
        (stage / "python").mkdir()
        for source in sources:
            if not source.exists():
                raise ServerStartError(
                    f"expected {source.name} in the server's wheel, got none at {source}"
                )
            # Copies: the server takes no links that lead out of the folder.
            copy = stage / "python" / source.name
            shutil.copyfile(source, copy)
            copy.chmod(0o755)
        for name, scripts in _SCRIPTS.items():
            (stage / name).mkdir()
            for script, source in scripts.items():
                shutil.copyfile(source, stage / name / script)
        stage.chmod(0o755)
        # Nothing is removed before this has failed: it may be what another process has just made.
        with contextlib.suppress(OSError):
            stage.rename(target)
        if not stub(target).exists():
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError):
                stage.rename(target)
        if not stub(target).exists():
            raise OSError("another process removes what this one makes")
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@functools.cache
def _digest() -> str:
    files = [path for scripts in _SCRIPTS.values() for path in scripts.values()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
