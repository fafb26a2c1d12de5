"""The backends of an installed server: Python's, and replacements of native ones."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import filelock
import platformdirs

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server.repository.formats import FORMATS, scripts_of

# What NVIDIA's container has native backends for, the Python backend runs here.
_SCRIPTS = {f.native: scripts_of(name) for name, f in FORMATS.items() if f.native}
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
    """Make the folder of backends, if there is none, for a Python: whole or not at all."""
    if stub(target).exists():
        return
    parts = (
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
        f"python_backend_stubs/{tag}/triton_python_backend_stub",
    )
    files = {Path("python", Path(part).name): bundle / part for part in parts}
    for backend, scripts in _SCRIPTS.items():
        files |= {Path(backend, script): source for script, source in scripts.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(target.with_suffix(".lock")):
        if stub(target).exists():
            return
        shutil.rmtree(target, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(dir=target.parent, prefix=".backends-"))
        try:
            for name, source in files.items():
                if not source.exists():
                    raise ServerStartError(f"expected {name} in the server's wheel, got none")
                (stage / name).parent.mkdir(exist_ok=True)
                # Copies: the server takes no links that lead out of the folder.
                shutil.copyfile(source, stage / name)
                (stage / name).chmod(0o755)
            stage.chmod(0o755)
            stage.rename(target)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


@functools.cache
def _digest() -> str:
    files = [path for scripts in _SCRIPTS.values() for path in scripts.values()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
