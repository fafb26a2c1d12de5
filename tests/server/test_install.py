"""Installing the server: once, whole, and with words when it cannot be."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server import _install as install

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
BUNDLE = "pytriton/tritonserver"
TRITON = [
    f"{BUNDLE}/bin/tritonserver",
    f"{BUNDLE}/backends/python/libtriton_python.so",
    f"{BUNDLE}/backends/python/triton_python_backend_utils.py",
    *(
        f"{BUNDLE}/python_backend_stubs/{tag}/triton_python_backend_stub"
        for tag in install._PYTHONS
    ),
]
# Name and version, what the wheel contains, and what it requires.
WHEELS = [
    ("nvidia_pytriton", "0.7.0", TRITON, ["package-that-no-index-has"]),
    ("onnxruntime", "1.23.2", [], []),
    ("onnxruntime", "1.31.1", [], []),
    ("numpy", "1.26.4", [], []),
    ("numpy", "2.0.0", [], []),
    ("xgboost_cpu", "3.2.0", [], ["package-that-no-index-has"]),
    ("scipy", "1.15.3", [], []),
    ("scikit_learn", "1.6", [], ["numpy>=1.0"]),
    ("scikit_learn", "1.7", [], ["numpy>=2.0"]),
]


def save_wheel(folder, name, version, files, requirements):
    info = f"{name}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requirements]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file in files:
            wheel.writestr(file, "")
        wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata]))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """The packages of a server, without what is large in them."""
    folder = tmp_path_factory.mktemp("wheels")
    for wheel in WHEELS:
        save_wheel(folder, *wheel)
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SONIC_COFFEA_SERVER_DIR", str(tmp_path / "servers"))
    return tmp_path / "servers"


@pytest.fixture
def index(root, wheels, tmp_path, monkeypatch) -> None:
    """Let uv find these packages, and no others."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))


def packages(installed) -> set[str]:
    return {path.stem for path in installed.root.glob("lib/python3*/site-packages/*.dist-info")}


def test_an_installation_is_used_again(installation):
    # Tests beside this one may have added extras.
    again = install.ensure(pytest.fail)
    assert replace(again, extras=()) == replace(installation, extras=())
    assert (installation.backend_directory / "python" / "triton_python_backend_stub").exists()
    marker = json.loads((installation.root / "sonic-coffea.json").read_text())
    assert marker["triton"] == "2.51.0"


def test_concurrent_callers_install_once(index):
    stages, results = [], []

    def work():
        results.append(install.ensure(stages.append))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(results) == 4
    assert len(set(results)) == 1
    assert [stage for stage in stages if stage.startswith("installing")] == [
        "installing Triton 2.51.0 and onnxruntime (about 100 MB to fetch, once)"
    ]
    assert install.find() == results[0]


HOLDER = """
import sys
import fcntl
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("holds it", flush=True)
    sys.stdin.read()
"""


def test_another_process_that_installs_is_waited_for(root, index):
    root.mkdir()
    command = [sys.executable, "-c", HOLDER, str(root / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"holds it\n"
        stages = []

        def progress(stage):
            # The other process goes on only when this one says that it waits.
            stages.append(stage)
            holder.stdin.close()

        assert install.ensure(progress) == install.find()
    assert stages[0] == "waiting for another process that is installing the server"


@pytest.mark.parametrize("part", ["sonic-coffea.json", "bin/python3"])
def test_an_installation_that_is_not_whole_is_redone(index, part):
    installed = install.ensure()
    leftover = installed.root / "leftover"
    leftover.write_text("")
    (installed.root / part).unlink()
    assert install.find() is None
    assert install.ensure() == install.find() == installed
    assert not leftover.exists()


def test_only_the_lost_parts_of_backends_are_added_again(index):
    """Servers may run the others."""
    installed = install.ensure()
    folder = installed.backend_directory
    before = {path: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
    assert {str(path.relative_to(folder)) for path in before} == {
        "python/libtriton_python.so",
        "python/triton_python_backend_utils.py",
        "python/triton_python_backend_stub",
        *(f"{b}/{s}" for b in ("onnxruntime", "pytorch") for s in ("model.py", "sonic_runner.py")),
    }
    lost = [folder / "python" / "triton_python_backend_stub", folder / "pytorch" / "model.py"]
    for path in lost:
        path.unlink()
    threads = [threading.Thread(target=install.ensure, args=[pytest.fail]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    after = {path: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
    assert after.keys() == before.keys()
    assert {path for path in before if before[path] != after[path]} <= set(lost)
    assert all(os.access(path, os.X_OK) for path in after)


# Without the capability, root too may only write what the modes allow.
ORDINARY = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 1)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def test_an_installation_for_all_by_another_version_of_the_package(index, monkeypatch, tmp_path):
    installed = install.ensure()
    # Another version has other scripts, and so another folder.
    installed.backend_directory.rename(installed.root / "backends-other")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of the user"))
    installed.root.chmod(0o555)
    try:
        code = "from sonic_coffea.server import ensure; print(ensure(exit).backend_directory)"
        command = [sys.executable, "-c", ORDINARY, code]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        installed.root.chmod(0o755)
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "of the user")
    assert sorted(p.name for p in (folder / "onnxruntime").iterdir()) == [
        "model.py",
        "sonic_runner.py",
    ]


@pytest.mark.parametrize(
    ("system", "processor", "libc", "reason"),
    [
        ("Darwin", "arm64", ("", ""), "needs Linux on x86_64, got Darwin on arm64"),
        ("Linux", "aarch64", ("glibc", "2.36"), "needs Linux on x86_64, got Linux on aarch64"),
        ("Windows", "AMD64", ("", ""), "needs Linux on x86_64, got Windows on AMD64"),
        ("Linux", "x86_64", ("glibc", "2.34"), "needs glibc 2.35 or newer .*, got glibc 2.34"),
        ("Linux", "x86_64", ("glibc", "2.9"), "needs glibc 2.35 or newer .*, got glibc 2.9"),
        ("Linux", "x86_64", ("", ""), "needs glibc 2.35 or newer .*, got an unknown libc"),
    ],
)
def test_a_machine_that_cannot_run_it_is_said(root, monkeypatch, system, processor, libc, reason):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    with pytest.raises(ServerStartError, match=f"{reason}.*; use a server elsewhere"):
        install.ensure()
    assert not root.exists()


def test_without_uv_the_error_names_the_extra(root, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uv" else find_spec(name)
    )
    with pytest.raises(ServerStartError, match=r'needs uv: pip install "sonic-coffea\[server\]"'):
        install.ensure()
    assert not root.exists()


def test_a_machine_without_network(root, monkeypatch, tmp_path):
    """With the real uv, and an index that nobody serves."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(ServerStartError, match="failed while installing it") as caught:
        install.ensure()
    assert "or install it once on a machine with network" in str(caught.value)
    # What uv says of it.
    assert "http://127.0.0.1:9/simple" in str(caught.value)
    assert install.find() is None
    assert [path.name for path in root.iterdir()] == [".lock"]


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SONIC_COFFEA_SERVER_DIR", str(tmp_path / "file" / "servers"))
    with pytest.raises(ServerStartError, match="SONIC_COFFEA_SERVER_DIR") as caught:
        install.ensure()
    # Coffea takes an OSError in the chain of causes for a broken file and skips the chunk.
    assert caught.value.__cause__ is None


@pytest.mark.skipif(OWN not in install._PYTHONS, reason="the server cannot use this Python")
def test_the_python_in_use_comes_first(index):
    stages = []
    installed = install.ensure(stages.append)
    assert installed.root.name.endswith(f"py{OWN.replace('.', '')}")
    assert installed.python.resolve() == Path(sys.executable).resolve()
    assert (installed.library_path[-1] / f"libpython{OWN}.so.1.0").exists()
    assert stages[0] == f"made an environment of Python {OWN} for the server"


# No machine has the shared library of the first; the second is no Python.
WITHOUT_LIBRARY = ("3.1", sys.executable)
ABSENT = ("3.12", "/no/python", "--no-python-downloads")


@pytest.mark.skipif(OWN not in install._PYTHONS, reason="the server cannot use this Python")
def test_pythons_that_the_server_cannot_use_are_passed_over(root, index):
    root.mkdir()
    own = (OWN, sys.executable, "--no-python-downloads")
    installed = install._install(print, [WITHOUT_LIBRARY, ABSENT, own])
    assert install.find() == installed
    assert [path.name for path in root.iterdir()] == [f"triton-2.51.0-py{OWN.replace('.', '')}"]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (WITHOUT_LIBRARY, r"built without libpython3\.1\.so"),
        (ABSENT, "while finding a Python(?s:.*)/no/python"),
    ],
)
def test_no_suitable_python(root, request_, reason):
    root.mkdir()
    with pytest.raises(ServerStartError, match=rf"needs Python 3\.12, .* {reason}"):
        install._install(pytest.fail, [request_])
    assert list(root.iterdir()) == []


def test_packages_for_models_are_added_once(index):
    stages = []
    assert install.ensure(stages.append).extras == ()
    assert install.ensure(stages.append, extras=["xgboost"]).extras == ("xgboost",)
    installed = install.ensure(stages.append, extras=["xgboost", "scikit-learn>=1.5"])
    assert installed.extras == ("xgboost", "scikit-learn>=1.5")
    assert install.ensure(pytest.fail) == install.find() == installed
    assert stages[-2:] == ["installing xgboost", "installing scikit-learn>=1.5"]
    # Neither brings another numpy, nor what the server does without.
    expected = {"xgboost_cpu-3.2.0", "scipy-1.15.3", "scikit_learn-1.6", "numpy-1.26.4"}
    assert {name for name in packages(installed) if "onnx" not in name} == {
        *expected,
        "nvidia_pytriton-0.7.0",
    }
