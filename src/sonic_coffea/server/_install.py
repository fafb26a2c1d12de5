"""The real Triton server, in a virtual environment of its own.

The wheel of NVIDIA's server wants its own numpy and has a dozen requirements that only its Python
client needs; none of that belongs in an analysis environment. ``uv`` makes the environment, and
fetches a Python for it where this machine has none that will do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import filelock
import platformdirs
import uv

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server import _backends

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

TRITON_VERSION = "2.51.0"
DIRECTORY_VARIABLE = "SONIC_COFFEA_SERVER_DIR"
_WHEEL = "nvidia-pytriton==0.7.0"
# The server's Python backend speaks the binary interface of numpy 1, which stops at Python 3.12.
_PYTHONS = ("3.12", "3.11", "3.10")
_OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
_NUMPY = "numpy==1.26.4"
_GLIBC = (2, 35)
# What models may need beyond onnxruntime: together with the numpy above, and no more than that.
_SCIPY = "scipy==1.15.3"
_EXTRAS = {
    "xgboost": ("xgboost-cpu==3.2.0", _SCIPY),
    "lightgbm": ("lightgbm==4.6.0", _SCIPY),
}
_MARKER = "sonic-coffea.json"
NATIVE = _backends.NATIVE
ALTERNATIVES = "use a server elsewhere, or another machine or container for the local one"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerInstall:
    """Where the parts of an installed server are.

    Parameters
    ----------
    root : Path
        The virtual environment.
    python, tritonserver : Path
        The interpreter that runs model code, and the server.
    backend_directory : Path
        What ``tritonserver --backend-directory`` takes. Each version of this package has its own.
    library_path : tuple of Path
        What has to be on ``LD_LIBRARY_PATH``.
    version : str
        Version of the server.
    extras : tuple of str
        Packages that were added for models.
    """

    root: Path
    python: Path
    tritonserver: Path
    backend_directory: Path
    library_path: tuple[Path, ...]
    version: str = TRITON_VERSION
    extras: tuple[str, ...] = ()


def install_root() -> Path:
    """Return the directory that installations are in; it need not exist."""
    override = os.environ.get(DIRECTORY_VARIABLE)
    return Path(override).absolute() if override else platformdirs.user_data_path("sonic-coffea")


def find() -> ServerInstall | None:
    install = _find()
    return install if install and _backends.stub(install.backend_directory).exists() else None


def _find() -> ServerInstall | None:
    """Return an installation, which may lack the backends of this version of the package."""
    for tag in sorted(_PYTHONS, key=lambda tag: tag != _OWN):
        install = _layout(tag)
        try:
            marker = json.loads((install.root / _MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        needed = (
            # The interpreter and its library are links, and what they point to may be gone since.
            install.python,
            install.library_path[-1] / f"libpython{tag}.so.1.0",
            install.tritonserver,
        )
        if marker.get("requirements") == _requirements(tag) and all(p.exists() for p in needed):
            return dataclasses.replace(install, extras=tuple(marker.get("extras", ())))
    return None


def ensure(progress: Progress | None = None, *, extras: Sequence[str] = ()) -> ServerInstall:
    """Return the installation of Triton, and install Triton first if it is not there.

    Safe to call from several processes at once; needs no network once installed.

    Parameters
    ----------
    progress : callable, optional
        Called with a short text at each stage.
    extras : sequence of str
        Packages that models need, to be added to the server's environment: ``"xgboost"``,
        ``"lightgbm"``, or any that uv can install.

    Raises
    ------
    sonic_coffea.errors.ServerStartError
        If Triton does not run on this platform, or the installation failed; with uv's last lines.
    """
    install = _find()
    if install is None or not set(extras) <= set(install.extras):
        install = _ensure(extras, progress or warn)
    target = install.backend_directory
    try:
        _backends.add(target, install.tritonserver.parent.parent, _tag(install))
    except OSError as error:
        raise ServerStartError(f"cannot put the server's backends in {target}: {error}") from None
    return install


def warn(text: str) -> None:
    """Tell a stage of an installation: it is long, so its user is to see why nothing happens."""
    logger.warning("%s", text)


def _ensure(extras: Sequence[str], tell: Progress) -> ServerInstall:
    against = reason_against()
    if against is not None:
        raise ServerStartError(f"{against}; {ALTERNATIVES}")
    root = install_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".lock", tell):
            install = _find()
            if install is None:
                install = _install(tell)
            for extra in extras:
                install = _add(install, extra, tell)
            return install
    except OSError as error:
        raise ServerStartError(
            f"cannot install the server in {root}: {error}; "
            f"set {DIRECTORY_VARIABLE} to a directory with space that this user can write"
        ) from None


def _install(tell: Progress) -> ServerInstall:
    tag = _make_environment(tell)
    install = _layout(tag)
    requirements = _requirements(tag)
    try:
        tell(f"installing Triton {TRITON_VERSION} and onnxruntime (about 100 MB to fetch, once)")
        # --no-deps: the wheel's requirements are those of its Python client, which is not used.
        _pip(install.python, "--no-deps", *requirements, purpose="installing it")
        _mark(install.root, requirements, ())
    except BaseException:
        shutil.rmtree(install.root, ignore_errors=True)
        raise
    logger.info("installed Triton in %s", install.root)
    return install


def _make_environment(tell: Progress) -> str:
    """Make an environment of a Python that the server can use, and return its version.

    The Python in use comes first, then others on this machine, then one that uv fetches.
    """
    own = [(_OWN, sys.executable)] if _OWN in _PYTHONS else []
    here = [(*way, "--no-python-downloads") for way in (*own, *((t, t) for t in _PYTHONS))]
    reason = ""
    for tag, *request in (*here, (_PYTHONS[0], _PYTHONS[0], "--managed-python")):
        install = _layout(tag)
        # What an installation that was interrupted has left, or an older choice of versions.
        shutil.rmtree(install.root, ignore_errors=True)
        try:
            _uv("venv", str(install.root), "--python", *request, purpose="finding a Python")
            _link_libpython(install, tag)
        except ServerStartError as error:
            reason = error.message
            shutil.rmtree(install.root, ignore_errors=True)
            continue
        tell(f"made an environment of Python {tag} for the server")
        return tag
    raise ServerStartError(
        f"the local server needs Python {', '.join(_PYTHONS)} with its shared library, which this "
        "machine lacks and uv could not fetch (Debian, Ubuntu: the package libpython3.11; the "
        f"Pythons of conda have it). {reason}"
    )


def _link_libpython(install: ServerInstall, tag: str) -> None:
    """Link a Python's shared library, without which the server cannot run model code.

    It comes into a folder of its own: a whole lib directory on ``LD_LIBRARY_PATH`` (conda's, say)
    would replace the server's C++ runtime as well.
    """
    code = (
        "import sys, sysconfig; print(sysconfig.get_config_var('LIBDIR')); print(sys.base_prefix)"
    )
    ask = [str(install.python), "-I", "-c", code]
    done = subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=False)
    name = f"libpython{tag}.so.1.0"
    paths = [Path(folder, sub, name) for folder in done.stdout.splitlines() for sub in ("", "lib")]
    library = next(filter(Path.is_file, paths), None)
    if library is None:
        raise ServerStartError(f"{install.python.resolve()} was built without {name}")
    install.library_path[-1].mkdir()
    (install.library_path[-1] / name).symlink_to(library.resolve())


def _add(install: ServerInstall, extra: str, tell: Progress) -> ServerInstall:
    """Add a package to the server's environment, which keeps its numpy."""
    if extra in install.extras:
        return install
    tell(f"installing {extra}")
    arguments = ["--no-deps", *_EXTRAS[extra]] if extra in _EXTRAS else [extra, _NUMPY]
    _pip(install.python, *arguments, purpose=f"adding {extra}")
    extended = dataclasses.replace(install, extras=(*install.extras, extra))
    _mark(install.root, _requirements(_tag(install)), extended.extras)
    return extended


def _mark(root: Path, requirements: Sequence[str], extras: Sequence[str]) -> None:
    marker = {"triton": TRITON_VERSION, "requirements": requirements, "extras": extras}
    temporary = root / f"{_MARKER}.tmp"
    temporary.write_text(json.dumps(marker, indent=2), encoding="utf-8")
    temporary.replace(root / _MARKER)


def _layout(tag: str) -> ServerInstall:
    root = install_root() / f"triton-{TRITON_VERSION}-py{tag.replace('.', '')}"
    packages = root / "lib" / f"python{tag}" / "site-packages"
    return ServerInstall(
        root=root,
        python=root / "bin" / "python3",
        tritonserver=packages / "pytriton" / "tritonserver" / "bin" / "tritonserver",
        backend_directory=_backends.directory(root),
        library_path=(packages / "nvidia_pytriton.libs", root / "lib-python"),
    )


def _tag(install: ServerInstall) -> str:
    return install.tritonserver.parents[4].name.removeprefix("python")


def _requirements(tag: str) -> list[str]:
    return [_WHEEL, "onnxruntime==1.23.2" if tag == "3.10" else "onnxruntime==1.31.1", _NUMPY]


def _pip(python: Path, *arguments: str, purpose: str) -> None:
    wheels = ("--python", str(python), "--only-binary", ":all:")
    _uv("pip", "install", *wheels, *arguments, purpose=purpose)


def _uv(*arguments: str, purpose: str) -> None:
    run_or_raise(
        [uv.find_uv_bin(), *arguments],
        f"installing the local server failed while {purpose}. It needs 600 MB of disk, and the "
        "package index: check the network, the proxy (https_proxy) and uv's configuration "
        "(UV_DEFAULT_INDEX for another index), or install it once on a machine with network in a "
        f"shared directory, and set {DIRECTORY_VARIABLE} to that",
        # Not in the user's project, whose settings are for another environment.
        cwd=install_root(),
        # A site's own certificates are those of its machines.
        env={"UV_SYSTEM_CERTS": "1", **os.environ, "UV_NO_PROGRESS": "1"},
    )


def run_or_raise(command: Sequence[str], failure: str, **options: Any) -> None:
    """Run a command; an error quotes the last lines that it wrote."""
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, text=True, check=False, **options)
    if done.returncode != 0:
        quoted = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-8:])
        raise ServerStartError(f"{failure}. The last lines:\n{quoted}")


def reason_against() -> str | None:
    """Say why the server from PyPI cannot run on this machine; None if it can."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in {"x86_64", "AMD64"}:
        return f"the server from PyPI needs Linux on x86_64, got {system} on {machine}"
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < _GLIBC:
        return (
            f"the server from PyPI needs glibc {'.'.join(map(str, _GLIBC))} or newer (Debian 12, "
            f"Ubuntu 22.04, EL10), got {name or 'an unknown libc'} {version}"
        )
    return None


def locked(path: Path, tell: Progress) -> contextlib.AbstractContextManager[object]:
    """Hold a lock on a file, which is made; others wait, and are told so."""
    lock = filelock.FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        tell("waiting for another process that is installing the server")
        return lock.acquire()
