"""The real Triton server, in a virtual environment of its own.

The wheel of NVIDIA's server wants its own numpy and has a dozen requirements that only its Python
client needs; none of that belongs in an analysis environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server import _interpreters

if TYPE_CHECKING:
    from sonic_coffea.server._interpreters import Interpreter

__all__ = [
    "ALTERNATIVES",
    "ServerInstall",
    "ensure",
    "find",
    "install_root",
    "locked",
    "reason_against",
]

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

TRITON_VERSION = "2.51.0"
DIRECTORY_VARIABLE = "SONIC_COFFEA_SERVER_DIR"
_WHEEL = "nvidia-pytriton==0.7.0"
# The server's Python backend speaks the binary interface of numpy 1, which stops at Python 3.12.
_PYTHONS = ("3.12", "3.11", "3.10")
_NUMPY = "numpy==1.26.4"
_GLIBC = (2, 35)
# What models may need beyond onnxruntime: together with the numpy above, and no more than that.
_SCIPY = "scipy==1.15.3"
_EXTRAS = {
    "xgboost": ("xgboost-cpu==3.2.0", _SCIPY),
    "lightgbm": ("lightgbm==4.6.0", _SCIPY),
}
_NEEDED_BYTES = 600_000_000
_MARKER = "sonic-coffea.json"
_BACKEND = Path(__file__).parent / "repository" / "_python_backend.py"
# What NVIDIA's container has native backends for, the Python backend runs here.
NATIVE = ("onnxruntime", "pytorch")
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
    """Return a complete installation, or None."""
    found = _find()
    return found if found is not None and _stub(found).exists() else None


def _find() -> ServerInstall | None:
    """Return an installation, which may lack the backends of this version of the package."""
    for tag in _preferred_tags():
        install = _layout(tag)
        try:
            marker = json.loads((install.root / _MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        needed = (
            # The interpreter and its library are links, and what they point to may be gone since.
            install.python,
            install.library_path[-1] / _libpython_name(tag),
            install.tritonserver,
        )
        if marker.get("requirements") == _requirements(tag) and all(p.exists() for p in needed):
            return dataclasses.replace(install, extras=tuple(marker.get("extras", ())))
    return None


def ensure(progress: Progress | None = None, *, extras: Sequence[str] = ()) -> ServerInstall:
    """Return the server's installation, making it first when there is none.

    Safe to call from several processes at once; needs no network once installed.

    Parameters
    ----------
    progress : callable, optional
        Called with a short text at each stage.
    extras : sequence of str
        Packages that models need, to be added to the server's environment: ``"xgboost"``,
        ``"lightgbm"``, or any that pip knows.

    Raises
    ------
    sonic_coffea.errors.ServerStartError
        If the platform has no such server, or the installation failed: with pip's last lines.
    """
    found = _find()
    if found is None or not set(extras) <= set(found.extras):
        found = _ensure(extras, progress)
    try:
        _add_backends(found)
    except OSError as error:
        folder = found.backend_directory
        raise ServerStartError(f"cannot put the server's backends in {folder}: {error}") from None
    return found


def _ensure(extras: Sequence[str], progress: Progress | None) -> ServerInstall:
    against = reason_against()
    if against is not None:
        raise ServerStartError(f"{against}; {ALTERNATIVES}")
    # Once on a machine, and long: a warning, which is shown unless asked otherwise.
    tell = progress if progress is not None else lambda text: logger.warning("%s", text)
    root = install_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".lock", tell):
            found = _find()
            if found is None:
                _check_space(root)
                interpreter = _interpreters.choose(_PYTHONS)
                try:
                    found = _install(interpreter, tell)
                except BaseException:
                    shutil.rmtree(_layout(interpreter.tag).root, ignore_errors=True)
                    raise
            for extra in extras:
                found = _add(found, extra, tell)
            return found
    except OSError as error:
        raise ServerStartError(
            f"cannot install the server in {root}: {error}; "
            f"set {DIRECTORY_VARIABLE} to a directory with space that this user can write"
        ) from None


def _install(interpreter: Interpreter, tell: Progress) -> ServerInstall:
    started = time.monotonic()
    install = _layout(interpreter.tag)
    root = install.root
    if root.exists():
        tell("removing an incomplete or outdated installation")
        shutil.rmtree(root)
    tell(f"making an environment of Python {interpreter.tag} for the server")
    # Without pip: an environment that is never upgraded needs none, and this takes 0.2 s, not 5.
    command = [interpreter.executable, "-I", "-m", "venv", "--without-pip", str(root)]
    _run(command, "making its environment")
    tell(f"installing Triton {TRITON_VERSION} and onnxruntime (about 100 MB to fetch, once)")
    # --no-deps: the wheel's requirements are those of its Python client, which is not used.
    arguments = ["install", "--no-deps", "--only-binary=:all:", *_requirements(interpreter.tag)]
    _run([*_installer(install.python), *arguments], "installing it")
    # A folder with this one library: a whole lib directory on LD_LIBRARY_PATH (conda's, say) would
    # replace the server's C++ runtime as well.
    library = install.library_path[-1]
    library.mkdir()
    (library / _libpython_name(interpreter.tag)).symlink_to(interpreter.library)
    check = "import numpy, onnxruntime; print(numpy.__version__, onnxruntime.__version__)"
    numpy, onnxruntime = _run([str(install.python), "-I", "-c", check], "checking it").split()[-2:]
    marker = {
        "triton": TRITON_VERSION,
        "numpy": numpy,
        "onnxruntime": onnxruntime,
        "requirements": _requirements(interpreter.tag),
    }
    _mark(root, marker)
    logger.info("installed Triton in %s in %.1f s", root, time.monotonic() - started)
    return install


def _add(install: ServerInstall, extra: str, tell: Progress) -> ServerInstall:
    """Add a package to the server's environment, which keeps its numpy."""
    if extra in install.extras:
        return install
    if extra.startswith("-"):
        raise ServerStartError(f"expected the name of a package to install, got {extra!r}")
    tell(f"installing {extra}")
    arguments = ["install", "--only-binary=:all:"]
    if extra in _EXTRAS:
        arguments += ["--no-deps", *_EXTRAS[extra]]
    else:
        arguments += [extra, _NUMPY]
    _run([*_installer(install.python), *arguments], f"adding {extra}")
    marker = json.loads((install.root / _MARKER).read_text(encoding="utf-8"))
    made = dataclasses.replace(install, extras=(*install.extras, extra))
    _mark(install.root, {**marker, "extras": made.extras})
    return made


def _mark(root: Path, marker: Mapping[str, object]) -> None:
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
        backend_directory=_backend_directory(root),
        library_path=(packages / "nvidia_pytriton.libs", root / "lib-python"),
    )


@functools.cache
def _digest() -> str:
    return hashlib.sha256(_BACKEND.read_bytes()).hexdigest()[:12]


def _backend_directory(root: Path) -> Path:
    here = root / f"backends-{_digest()}"
    if here.exists() or not root.exists() or os.access(root, os.W_OK):
        return here
    # An operator has installed it for all, and with another version of this package.
    return platformdirs.user_cache_path("sonic-coffea") / root.name / here.name


def _stub(install: ServerInstall) -> Path:
    return install.backend_directory / "python" / "triton_python_backend_stub"


def _add_backends(install: ServerInstall) -> None:
    """Make the folder of backends, if there is none: whole or not at all."""
    if _stub(install).exists():
        return
    bundle = install.tritonserver.parent.parent
    tag = install.root.name.rpartition("-py")[2]
    sources = (
        bundle / "backends" / "python" / "libtriton_python.so",
        bundle / "backends" / "python" / "triton_python_backend_utils.py",
        bundle / "python_backend_stubs" / f"{tag[0]}.{tag[1:]}" / "triton_python_backend_stub",
    )
    target = install.backend_directory
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=target.parent, prefix=".backends-"))
    try:
        (stage / "python").mkdir()
        for source in sources:
            if not source.exists():
                raise ServerStartError(
                    f"expected {source.name} in {_WHEEL}, found none at {source}"
                )
            # Copies: the server takes no links that lead out of the folder.
            copy = stage / "python" / source.name
            shutil.copyfile(source, copy)
            copy.chmod(0o755)
        for name in NATIVE:
            (stage / name).mkdir()
            shutil.copyfile(_BACKEND, stage / name / "model.py")
        stage.chmod(0o755)
        # Nothing is removed before this has failed: it may be what another process has just made.
        with contextlib.suppress(OSError):
            stage.rename(target)
        if not _stub(install).exists():
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError):
                stage.rename(target)
        if not _stub(install).exists():
            raise OSError("another process removes what this one makes")
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _requirements(tag: str) -> list[str]:
    return [_WHEEL, "onnxruntime==1.23.2" if tag == "3.10" else "onnxruntime==1.31.1", _NUMPY]


def _preferred_tags() -> list[str]:
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return sorted(_PYTHONS, key=lambda tag: tag != own)


def _libpython_name(tag: str) -> str:
    return f"libpython{tag}.so.1.0"


def _installer(python: Path) -> list[str]:
    quiet = ["--disable-pip-version-check", "--no-input"]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--python", str(python), *quiet]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "--python", str(python)]
    _run([str(python), "-I", "-m", "ensurepip"], "getting pip")
    return [str(python), "-I", "-m", "pip", *quiet]


def _run(command: Sequence[str], purpose: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode == 0:
        return done.stdout
    output = f"{done.stdout}\n{done.stderr}".strip()
    lines = [line for line in output.splitlines() if line.strip()]
    if "No space left on device" in output:
        advice = f"free some space, or set {DIRECTORY_VARIABLE} to a directory on another disk"
    elif "Could not find a version" in output or "connection" in output.lower():
        advice = (
            "the package index could not be reached or does not have it; check the network, the "
            "proxy (https_proxy) and pip's configuration, or install it once on a machine with "
            f"network in a shared directory and set {DIRECTORY_VARIABLE} to that"
        )
    else:
        advice = "correct the cause and try again"
    quoted = "\n".join(f"  {line}" for line in lines[-8:])
    raise ServerStartError(
        f"installing the local server failed while {purpose}; {advice}. The last lines:\n{quoted}"
    )


def reason_against() -> str | None:
    """Say why the server from PyPI cannot run on this machine; None if it can."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in {"x86_64", "AMD64"}:
        return f"the server from PyPI needs Linux on x86_64, got {system} on {machine}"
    name, version = _libc()
    if name != "glibc" or _numbers(version) < _GLIBC:
        return (
            f"the server from PyPI needs glibc {'.'.join(map(str, _GLIBC))} or newer (Debian 12, "
            f"Ubuntu 22.04, EL10), got {name} {version}"
        )
    return None


def _libc() -> tuple[str, str]:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        name, version = "", ""
    return name or "an unknown libc", version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise ServerStartError(
            f"the local server needs {_NEEDED_BYTES // 1_000_000} MB in {folder}, there are "
            f"{free // 1_000_000} MB; free some space, or set {DIRECTORY_VARIABLE} to a directory "
            "on another disk"
        )


@contextlib.contextmanager
def locked(path: Path, tell: Progress) -> Iterator[None]:
    """Hold a lock on a file, which is made; others wait, and are told so."""
    import fcntl

    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that is installing the server")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
