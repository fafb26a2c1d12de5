#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.5.1"]
# ///
"""Test the package with the lowest and the highest versions of what it needs, on each Python.

``make matrix`` runs every session whose Python is at hand, and names those that it skips. One of
them: ``nox -s lowest-3.10``; with other tests: ``nox -s highest-3.13 -- tests/layouts``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
# What the images of facilities had in June 2026: coffea with dask-awkward, and so an older dask.
IMAGE = ["coffea[dask]==2026.5.0", "dask<2025.4"]
IMAGE_DATE = "2026-06-15"
IMAGE_PYTHONS = PYTHONS[:-1]
# What public frameworks pin, and the oldest that the package takes. NanoEvents of these versions
# need a numba of their time.
FRAMEWORKS = {
    "3.10": ["coffea==2024.11.0", "awkward==2.6.7", "numpy<2", "numba<0.62", "dask<2025.4"],
    "3.11": ["coffea==2025.9.0", "awkward==2.8.9", "numba<0.62", "dask<2025.4"],
}
# What pages of the documentation need beside the package.
PAGES = {
    "export-a-network": ["torch", "onnxscript", "keras", "skl2onnx", "catboost"],  # some gigabytes
    "use-columnflow": ["columnflow", "law", "order"],
    "use-graphed": ["graphed==0.0.9"],
}
# The other tests are written for these.
TESTED = ["awkward>=2.8.11", "coffea>=2026.7", "uproot>=5.7"]
# Where other packages are called most; what computes for long on every version is left out.
TESTS = [
    "tests/cli",
    "tests/dask",
    "--ignore=tests/dask/test_quotas.py",
    "tests/layouts/test_columns.py",
    "tests/layouts/test_expressions.py",
    "tests/model",
    "tests/pool/test_pool.py",
    "tests/processor",
    "tests/reporting",
    "tests/reuse",
    "tests/test_errors.py",
    "tests/test_imports.py",
    "tests/test_provenance.py",
    "tests/testing",
    "tests/transport",
]
# Where an older coffea, dask and awkward are called; the allocator is arithmetic of our own.
IMAGE_TESTS = [
    "tests/dask",
    "--ignore=tests/dask/test_quotas.py",
    "tests/model/test_model.py",
    "tests/model/test_nanoaod.py",
    "tests/processor",
    "tests/reuse",
    "tests/test_imports.py",
]
LAZY = [
    "tests/lazy",
    "tests/docs/test_documentation.py::test_page_runs[docs/how-to/use-dask-awkward.md]",
]
# A package that has no wheel for a Python is not there for it.
WHEELS = ["--only-binary", ":all:", "--no-binary", "sonic-coffea"]

# With what its tests need.
PACKAGE = ["--editable", ".", "--group", "test"]

# Slow tests run with all others.
WITHOUT_SERVERS = ["-m", "not server and not slow and not benchmark"]
WITH_LAZY = ["-m", "lazy or not (server or slow or benchmark)"]
# Old versions warn of each other.
OLD = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = False

if shutil.which("pyenv"):  # its commands fail for every Python but the chosen ones
    installed = subprocess.run(
        ["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False
    )
    os.environ.setdefault("PYENV_VERSION", ":".join(installed.stdout.split()))


def _test(session: nox.Session, *arguments: str, tests: list[str]) -> None:
    processes = os.environ.get("PROCESSES", "3")
    session.run(
        "python", "-m", "pytest", "-p", "no:cacheprovider", "--quiet", "--numprocesses", processes,
        *arguments, *(session.posargs or tests),
    )  # fmt: skip


@nox.session(python=PYTHONS)
def lowest(session: nox.Session) -> None:
    """Test with the lowest version of each direct dependency that has a wheel."""
    pins = Path(session.virtualenv.location) / "lowest.txt"
    tested = pins.with_name("tested.txt")
    tested.write_text("\n".join(TESTED))
    session.run_install(
        "uv", "pip", "compile", "--quiet", "--python", f"{session.virtualenv.bin}/python",
        "--only-binary", ":all:", "--resolution", "lowest-direct", "--extra", "demo",
        "--constraint", str(tested), "--output-file", str(pins), "pyproject.toml",
        silent=True,
    )  # fmt: skip
    session.install(*WHEELS, "--constraint", str(pins), *PACKAGE)
    _test(session, *WITHOUT_SERVERS, *OLD, tests=TESTS)


@nox.session(python=PYTHONS)
def highest(session: nox.Session) -> None:
    """Test with the highest version of everything."""
    session.install(*WHEELS, "--upgrade", "--resolution", "highest", *PACKAGE)
    _test(session, *WITHOUT_SERVERS, tests=TESTS)


@nox.session(python=IMAGE_PYTHONS, reuse_venv=False)
def image(session: nox.Session) -> None:
    """Install into what a facility's image has, which must stay as it is, and test there.

    It has dask-awkward, so its tests are among these, against a real Triton.
    """
    session.install(*WHEELS, "--exclude-newer", IMAGE_DATE, *IMAGE)
    before = _installed(session)
    session.install(*WHEELS, "--editable", ".[lazy]")
    if changed := before - _installed(session):
        session.error(f"the image had other versions before: {', '.join(sorted(changed))}")
    session.install(*WHEELS, "--editable", ".[lazy]", "--group", "test")
    session.run("sonic-coffea", "server", "install")
    chosen = [] if session.posargs else WITH_LAZY
    # Nothing is compiled yet: each process that starts does so, for as long as the tests take.
    _test(session, "--numprocesses=2", *chosen, *OLD, tests=[*IMAGE_TESTS, *LAZY])


@nox.session(python=list(FRAMEWORKS))
def frameworks(session: nox.Session) -> None:
    """Test beside the coffea and awkward of public frameworks."""
    python = str(session.python)
    session.install(*WHEELS, *FRAMEWORKS[python], *PACKAGE)
    here = "--numprocesses=0"  # so few tests are done before other processes have started
    _test(session, here, *WITHOUT_SERVERS, *OLD, tests=["tests/processor/test_older_coffea.py"])


@nox.session(python="3.11")
@nox.parametrize("page", list(PAGES), ids=list(PAGES))
def pages(session: nox.Session, page: str) -> None:
    """Run a page that needs packages that nothing else here needs; columnflow has no wheel."""
    session.install(*PAGES[page], "--editable", ".[demo]", "--group", "test")
    path = f"docs/how-to/{page}.md"
    _test(session, tests=[f"tests/docs/test_documentation.py::test_page_runs[{path}]"])


@nox.session(python="3.11")
def torch(session: nox.Session) -> None:
    """Serve TorchScript; torch goes into a server's environment of this session's own."""
    session.install(*WHEELS, *PACKAGE)
    directory = str(Path(session.create_tmp()) / "server")
    session.env["SONIC_COFFEA_SERVER_DIR"] = str(Path(directory).absolute())
    session.run("sonic-coffea", "server", "install", "--with", "torch")
    _test(session, "-k", "torchscript", tests=["tests/server/test_formats.py"])


def _installed(session: nox.Session) -> set[str]:
    python = f"{session.virtualenv.bin}/python"
    listed = session.run_install("uv", "pip", "freeze", "--python", python, silent=True)
    return set(str(listed).split("\n"))


if __name__ == "__main__":
    nox.main()
