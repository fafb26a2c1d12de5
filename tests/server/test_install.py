"""Installing the server: once, whole, and with words when it cannot be."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server import _backends
from sonic_coffea.server import _install as install


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SONIC_COFFEA_SERVER_DIR", str(tmp_path / "servers"))
    return tmp_path / "servers"


@pytest.fixture
def fake_uv(monkeypatch):
    """Stand in for the slow step: what uv would put in place."""
    calls = []

    def run(*arguments, purpose):
        calls.append(purpose)
        if purpose.startswith("adding"):
            return
        if purpose != "installing it":
            real(*arguments, purpose=purpose)
            return
        environment = Path(arguments[arguments.index("--python") + 1]).parent.parent
        packages = next((environment / "lib").glob("python3*")) / "site-packages"
        bundle = packages / "pytriton" / "tritonserver"
        tag = packages.parent.name.removeprefix("python")
        for name in (
            "bin/tritonserver",
            "backends/python/libtriton_python.so",
            "backends/python/triton_python_backend_utils.py",
            f"python_backend_stubs/{tag}/triton_python_backend_stub",
        ):
            (bundle / name).parent.mkdir(parents=True, exist_ok=True)
            (bundle / name).write_text("")

    real = install._uv
    monkeypatch.setattr(install, "_uv", run)
    return calls


def test_an_installation_is_used_again(installation):
    # Tests beside this one may have added extras.
    again = install.ensure(pytest.fail)
    assert replace(again, extras=()) == replace(installation, extras=())
    assert (installation.backend_directory / "python" / "triton_python_backend_stub").exists()
    marker = json.loads((installation.root / "sonic-coffea.json").read_text())
    assert marker["triton"] == "2.51.0"


def test_made_once_by_concurrent_callers(root, fake_uv):
    told, results = [], []

    def work():
        results.append(install.ensure(told.append))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(results) == 4
    assert len(set(results)) == 1
    assert fake_uv.count("installing it") == 1
    assert install.find() == results[0]


def test_a_half_made_installation_is_redone(root, fake_uv):
    made = install.ensure()
    leftover = made.root / "leftover"
    leftover.write_text("")
    (made.root / "sonic-coffea.json").unlink()
    assert install.find() is None
    assert install.ensure() == made
    assert not leftover.exists()


def test_an_installation_that_lost_a_part_is_redone(root, fake_uv):
    made = install.ensure()
    made.python.unlink()
    assert install.find() is None
    assert install.ensure() == made
    assert install.find() == made
    assert fake_uv.count("installing it") == 2


def test_backends_that_lost_a_part_are_redone(root, fake_uv):
    made = install.ensure()
    (made.backend_directory / "python" / "triton_python_backend_stub").unlink()
    assert install.find() is None
    assert install.ensure() == made
    assert install.find() == made
    assert fake_uv.count("installing it") == 1


def test_backends_that_another_process_makes_meanwhile_are_not_removed(root, fake_uv, monkeypatch):
    made = install.ensure()
    moved = made.root / "moved"
    made.backend_directory.rename(moved)
    # Another process has the lock first, and makes them.
    monkeypatch.setattr(
        _backends.filelock.FileLock, "__enter__", lambda _: moved.rename(made.backend_directory)
    )
    monkeypatch.setattr(_backends.shutil, "rmtree", pytest.fail)
    assert install.ensure() == made
    assert install.find() == made


def test_an_installation_for_all_by_another_version_of_the_package(
    root, fake_uv, monkeypatch, tmp_path
):
    made = install.ensure()
    monkeypatch.setattr(_backends, "_digest", lambda: "other")
    monkeypatch.setattr(_backends.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    again = install.ensure(pytest.fail)
    assert again.root == made.root
    assert again.backend_directory.is_relative_to(tmp_path / "cache")
    assert sorted(p.name for p in (again.backend_directory / "onnxruntime").iterdir()) == [
        "model.py",
        "sonic_runner.py",
    ]


def test_an_older_choice_of_versions_is_redone(root, fake_uv):
    made = install.ensure()
    marker = made.root / "sonic-coffea.json"
    marker.write_text(json.dumps({"requirements": ["nvidia-pytriton==0.1"]}))
    assert install.find() is None


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64"), ("Windows", "AMD64")]
)
def test_other_platforms(root, monkeypatch, system, machine):
    monkeypatch.setattr(install.platform, "system", lambda: system)
    monkeypatch.setattr(install.platform, "machine", lambda: machine)
    with pytest.raises(ServerStartError, match=f"Linux on x86_64, got {system} on {machine}"):
        install.ensure()
    assert not root.exists()


@pytest.mark.parametrize("libc", [("glibc", "2.34"), ("glibc", "2.9"), ("", "")])
def test_an_old_libc(root, monkeypatch, libc):
    monkeypatch.setattr(install.platform, "libc_ver", lambda: libc)
    with pytest.raises(ServerStartError, match=r"needs glibc 2\.35 or newer .* got"):
        install.ensure()


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


OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.skipif(OWN not in install._PYTHONS, reason="the server cannot use this Python")
def test_the_python_in_use_comes_first(root, fake_uv):
    made = install.ensure()
    assert made.root.name.endswith(f"py{OWN.replace('.', '')}")
    assert made.python.resolve() == Path(sys.executable).resolve()
    assert (made.library_path[-1] / f"libpython{OWN}.so.1.0").exists()
    assert fake_uv == ["finding a Python", "installing it"]


def test_a_python_without_its_library_is_passed_over(root, fake_uv, monkeypatch):
    link, asked = install._link_libpython, []

    def none_at_first(made, tag):
        asked.append(tag)
        if len(asked) == 1:
            raise ServerStartError("built without it")
        link(made, tag)

    monkeypatch.setattr(install, "_link_libpython", none_at_first)
    made = install.ensure()
    assert len(asked) == 2
    assert install.find() == made


def test_no_suitable_python(root, monkeypatch):
    requests = []

    def none(*arguments, purpose):
        requests.append(arguments[3:])
        raise ServerStartError("uv: no download")

    monkeypatch.setattr(install, "_uv", none)
    with pytest.raises(ServerStartError, match=r"needs Python 3\.12, .* uv: no download"):
        install.ensure()
    # What the machine has first, and one from elsewhere only then.
    assert requests[-1] == ("3.12", "--managed-python")
    assert all(option == "--no-python-downloads" for _, option in requests[:-1])
    assert {request for request, _ in requests} >= set(install._PYTHONS)
    assert [path.name for path in root.iterdir()] == [".lock"]


def test_packages_for_models_are_added_once(root, fake_uv, monkeypatch):
    commands = []
    real = install._pip

    def pip(python, *arguments, purpose):
        commands.append(arguments)
        real(python, *arguments, purpose=purpose)

    monkeypatch.setattr(install, "_pip", pip)
    assert install.ensure().extras == ()
    assert install.ensure(extras=["xgboost"]).extras == ("xgboost",)
    made = install.ensure(extras=["xgboost", "scikit-learn>=1.5"])
    assert made.extras == ("xgboost", "scikit-learn>=1.5")
    assert install.ensure() == install.find() == made
    assert fake_uv.count("installing it") == 1
    _, first, second = commands
    # Neither may bring another numpy.
    assert {"--no-deps", "xgboost-cpu==3.2.0"} <= set(first)
    assert second == ("scikit-learn>=1.5", "numpy==1.26.4")
