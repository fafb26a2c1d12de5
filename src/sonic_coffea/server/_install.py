"""The real Triton server, in a virtual environment of its own.

The wheel of NVIDIA's server wants its own numpy and has a dozen requirements that only its Python
client needs; none of that belongs in an analysis environment. ``uv`` makes the environment, and
fetches a Python for it where this machine has none that will do.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server.repository.formats import FORMATS, scripts_of

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
# The Python backend runs here what NVIDIA's container has native backends for.
_SCRIPTS = {f.native: scripts_of(name) for name, f in FORMATS.items() if f.native}
_SCRIPTS_DIGEST = hashlib.sha256(
    b"".join(path.read_bytes() for scripts in _SCRIPTS.values() for path in scripts.values())
).hexdigest()[:12]
BACKENDS = ("python", *_SCRIPTS)
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
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
    """Return the installation that this machine has; it may lack this version's backends."""
    for tag in sorted(_PYTHONS, key=lambda tag: tag != _OWN):
        install = _layout(tag)
        try:
            marker = json.loads((install.root / _MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        needed = (
            # The interpreter and its library are links, and their targets may be gone.
            install.python,
            install.library_path[-1] / f"libpython{tag}.so.1.0",
            install.tritonserver,
        )
        complete = all(os.access(path, os.R_OK) for path in needed)
        if complete and marker.get("requirements") == _requirements(install):
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
    root = install_root()
    try:
        install = find()
        if install is None or not set(extras) <= set(install.extras):
            reason = reason_against()
            if reason is not None:
                raise ServerStartError(f"{reason}; {ALTERNATIVES}")
            root.mkdir(parents=True, exist_ok=True)
            progress = progress or warn
            with locked(root / ".lock", progress):
                install = find() or _install(progress, _python_requests())
                for extra in extras:
                    install = _add(install, extra, progress)
        _add_backends(install)
    except OSError as error:
        raise ServerStartError(
            f"cannot install the server in {root}: {error}; "
            f"set {DIRECTORY_VARIABLE} to a directory with space that this user can write"
        ) from None
    return install


def warn(text: str) -> None:
    """Log a stage of an installation, which is long: the user sees why nothing else happens."""
    logger.warning("%s", text)


def _install(progress: Progress, requests: Iterable[Sequence[str]]) -> ServerInstall:
    install = _make_environment(progress, requests)
    try:
        progress(
            f"installing Triton {TRITON_VERSION} and onnxruntime (about 100 MB to fetch, once)"
        )
        # --no-deps: the wheel's requirements are those of its Python client, which is not used.
        _pip(install.python, "--no-deps", *_requirements(install), purpose="installing it")
        _mark(install)
    except BaseException:
        shutil.rmtree(install.root, ignore_errors=True)
        raise
    logger.info("installed Triton in %s", install.root)
    return install


def _python_requests() -> list[tuple[str, ...]]:
    """Return versions of Python with uv's arguments: those of this machine before a download."""
    own = [(_OWN, sys.executable)] if _OWN in _PYTHONS else []
    present = [*own, *((tag, tag) for tag in _PYTHONS)]
    download = (_PYTHONS[0], _PYTHONS[0], "--managed-python")
    return [*((*request, "--no-python-downloads") for request in present), download]


def _make_environment(progress: Progress, requests: Iterable[Sequence[str]]) -> ServerInstall:
    """Make an environment of the first of these Pythons that the server can use."""
    reason = ""
    for tag, *request in requests:
        install = _layout(tag)
        # An interrupted installation may be there, or one of an older choice of versions.
        shutil.rmtree(install.root, ignore_errors=True)
        try:
            _uv("venv", str(install.root), "--python", *request, purpose="finding a Python")
            _link_libpython(install)
        except ServerStartError as error:
            reason = error.message
            shutil.rmtree(install.root, ignore_errors=True)
            continue
        progress(f"made an environment of Python {tag} for the server")
        return install
    raise ServerStartError(
        f"the local server needs Python {', '.join(_PYTHONS)} with its shared library, which this "
        "machine lacks and uv could not fetch (Debian, Ubuntu: the package libpython3.11; the "
        f"Pythons of conda have it). {reason}"
    )


def _link_libpython(install: ServerInstall) -> None:
    """Link a Python's shared library, without which the server cannot run model code.

    The link has a folder of its own: a whole lib directory on ``LD_LIBRARY_PATH`` (conda's, say)
    would replace the server's C++ runtime as well.
    """
    code = (
        "import sys, sysconfig; print(sysconfig.get_config_var('LIBDIR')); print(sys.base_prefix)"
    )
    command = [str(install.python), "-I", "-c", code]
    folders = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    name = f"libpython{_tag(install)}.so.1.0"
    paths = [Path(folder, sub, name) for folder in folders.splitlines() for sub in ("", "lib")]
    library = next(filter(Path.is_file, paths), None)
    if library is None:
        raise ServerStartError(f"{install.python.resolve()} was built without {name}")
    install.library_path[-1].mkdir()
    (install.library_path[-1] / name).symlink_to(library.resolve())


def _add(install: ServerInstall, extra: str, progress: Progress) -> ServerInstall:
    """Add a package to the server's environment, which keeps its numpy."""
    if extra in install.extras:
        return install
    progress(f"installing {extra}")
    arguments = ["--no-deps", *_EXTRAS[extra]] if extra in _EXTRAS else [extra, _NUMPY]
    _pip(install.python, *arguments, purpose=f"adding {extra}")
    extended = dataclasses.replace(install, extras=(*install.extras, extra))
    _mark(extended)
    return extended


def _mark(install: ServerInstall) -> None:
    """Record that an installation is complete, and of which packages."""
    marker = {
        "triton": TRITON_VERSION,
        "requirements": _requirements(install),
        "extras": install.extras,
    }
    temporary = install.root / f"{_MARKER}.tmp"
    temporary.write_text(json.dumps(marker, indent=2), encoding="utf-8")
    temporary.replace(install.root / _MARKER)


def _add_backends(install: ServerInstall) -> None:
    """Add the files that the folder of backends lacks; running servers may use the others."""
    bundle, target = install.tritonserver.parent.parent, install.backend_directory
    parts = (
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
        f"python_backend_stubs/{_tag(install)}/triton_python_backend_stub",
    )
    files = {target / "python" / Path(part).name: bundle / part for part in parts}
    for backend, scripts in _SCRIPTS.items():
        files |= {target / backend / name: source for name, source in scripts.items()}
    for path, source in files.items():
        if path.exists():
            continue
        if not source.exists():
            raise ServerStartError(f"expected {source} in the server's wheel, got none")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Copies: the server takes no links that lead out of the folder.
        with tempfile.TemporaryDirectory(dir=target, prefix=".part-") as part:
            copy = Path(shutil.copyfile(source, Path(part, path.name)))
            copy.chmod(0o755)
            copy.replace(path)


def _layout(tag: str) -> ServerInstall:
    root = install_root() / f"triton-{TRITON_VERSION}-py{tag.replace('.', '')}"
    backends = root / f"backends-{_SCRIPTS_DIGEST}"
    if root.exists() and not backends.exists() and not os.access(root, os.W_OK):
        # An operator installed the server for all users, with another version of this package.
        backends = platformdirs.user_cache_path("sonic-coffea") / root.name / backends.name
    packages = root / "lib" / f"python{tag}" / "site-packages"
    return ServerInstall(
        root=root,
        python=root / "bin" / "python3",
        tritonserver=packages / "pytriton" / "tritonserver" / "bin" / "tritonserver",
        backend_directory=backends,
        library_path=(packages / "nvidia_pytriton.libs", root / "lib-python"),
    )


def _tag(install: ServerInstall) -> str:
    return install.tritonserver.parents[4].name.removeprefix("python")


def _requirements(install: ServerInstall) -> list[str]:
    onnxruntime = "1.23.2" if _tag(install) == "3.10" else "1.31.1"
    return [_WHEEL, f"onnxruntime=={onnxruntime}", _NUMPY]


def _pip(python: Path, *arguments: str, purpose: str) -> None:
    wheels = ("--python", str(python), "--only-binary", ":all:")
    _uv("pip", "install", *wheels, *arguments, purpose=purpose)


def _uv(*arguments: str, purpose: str) -> None:
    import uv

    run_or_raise(
        [uv.find_uv_bin(), *arguments],
        f"installing the local server failed while {purpose}. It needs 600 MB of disk, and the "
        "package index: check the network, the proxy (https_proxy) and uv's configuration "
        "(UV_DEFAULT_INDEX for another index), or install it once on a machine with network in a "
        f"shared directory, and set {DIRECTORY_VARIABLE} to that",
        # Not in the user's project, whose settings are for another environment.
        cwd=install_root(),
        # The machine's certificates include the site's own.
        env={"UV_SYSTEM_CERTS": "1", **os.environ, "UV_NO_PROGRESS": "1"},
    )


def run_or_raise(command: Sequence[str], failure: str, **options: Any) -> None:
    """Run a command; an error quotes the last lines that it wrote."""
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, text=True, check=False, **options)
    if done.returncode != 0:
        quoted = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-8:])
        raise ServerStartError(f"{failure}. The last lines:\n{quoted}")


def has_gpu() -> bool:
    """Whether this machine has a GPU that a container can use."""
    return any(Path(path).exists() for path in _GPU_DEVICES)


def reason_against() -> str | None:
    """Return why the server from PyPI cannot be installed on this machine; None if it can."""
    system, processor = platform.system(), platform.machine()
    if system != "Linux" or processor not in {"x86_64", "AMD64"}:
        return f"the server from PyPI needs Linux on x86_64, got {system} on {processor}"
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < _GLIBC:
        return (
            f"the server from PyPI needs glibc {'.'.join(map(str, _GLIBC))} or newer (Debian 12, "
            f"Ubuntu 22.04, EL10), got {name or 'an unknown libc'} {version}"
        )
    if importlib.util.find_spec("uv") is None:
        return 'installing the server from PyPI needs uv: pip install "sonic-coffea[server]"'
    return None


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock on a file, which is created; `progress` hears that another process has it."""
    import fcntl  # not on Windows, where no local server runs

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is installing the server")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
