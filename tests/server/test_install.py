"""Installing the server: once, whole, and with words when it cannot be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import zipfile
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


def test_installations_are_used_again(installation):
    assert install.ensure(pytest.fail) == installation
    assert (installation.backend_directory / "python" / "triton_python_backend_stub").exists()


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
    (installing,) = (stage for stage in stages if stage.startswith("installing"))
    assert installing.startswith("installing Triton 2.51.0 and onnxruntime")
    assert install.find() == results[0]


@pytest.mark.parametrize("part", ["sonic-coffea.json", "bin/python3"])
def test_incomplete_installations_are_redone(index, part):
    installed = install.ensure()
    leftover = installed.root / "leftover"
    leftover.write_text("")
    (installed.root / part).unlink()
    assert install.find() is None
    assert install.ensure() == install.find() == installed
    assert not leftover.exists()


# Without the capability, root too may only write what the modes allow.
ORDINARY = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 1)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def test_shared_installations_serve_other_versions_of_the_package(index, monkeypatch, tmp_path):
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
def test_machines_that_cannot_run_the_binary_are_named(
    root, monkeypatch, system, processor, libc, reason
):
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
    with pytest.raises(ServerStartError, match=r'needs uv; .*pip install "\.\[server\]"'):
        install.ensure()
    assert not root.exists()


def test_without_a_network_the_error_says_what_helps(root, monkeypatch, tmp_path):
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


def test_unwritable_directories_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SONIC_COFFEA_SERVER_DIR", str(tmp_path / "file" / "servers"))
    with pytest.raises(ServerStartError, match="SONIC_COFFEA_SERVER_DIR") as caught:
        install.ensure()
    # Coffea takes an OSError in the chain of causes for a broken file and skips the chunk.
    assert caught.value.__cause__ is None


@pytest.mark.skipif(OWN not in install._PYTHONS, reason="the server cannot use this Python")
def test_the_python_in_use_comes_first(index):
    installed = install.ensure()
    assert installed.root.name.endswith(f"py{OWN.replace('.', '')}")
    assert installed.python.resolve() == Path(sys.executable).resolve()
    assert (installed.library_path[-1] / f"libpython{OWN}.so.1.0").exists()


def test_packages_for_models_are_added(index):
    stages = []
    installed = install.ensure(stages.append, extras=["xgboost", "scikit-learn>=1.5"])
    assert install.ensure(pytest.fail, extras=["xgboost"]) == install.find() == installed
    assert stages[-2:] == ["installing xgboost", "installing scikit-learn>=1.5"]
    # Neither brings another numpy, nor what the server does without.
    expected = {"xgboost_cpu-3.2.0", "scipy-1.15.3", "scikit_learn-1.6", "numpy-1.26.4"}
    assert {name for name in packages(installed) if "onnx" not in name} == {
        *expected,
        "nvidia_pytriton-0.7.0",
    }
