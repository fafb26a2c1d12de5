"""The runtimes of servers: which one is taken, and what exactly is run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import LocalServer
from sonic_coffea.server import _install as install
from sonic_coffea.server.launch._runtimes import RUNTIMES, choose

from .support import is_gone, socket_folder

FOLDER = Path("/tmp/sonic-coffea-1/ab")  # noqa: S108
ENV = {"A": "b", "OMP_NUM_THREADS": "2"}
SERVING = (Path("/data/repository"), FOLDER, ["--grpc-port=4"], ENV)
SERVE = [
    "tritonserver",
    "--model-repository=/data/repository",
    "--grpc-port=4",
    "--backend-config=python,shm-region-prefix-name=sonic-coffea-ab_",
]
MOUNTS = [
    "/data/repository:/data/repository:ro",
    f"{FOLDER}:{FOLDER}",
    "/dev/shm/sonic-coffea-ab:/dev/shm",  # noqa: S108
]


@pytest.fixture
def old(monkeypatch):
    """A machine that the binary does not run on."""
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.28"))


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Return a function that puts engines on the PATH, which has no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("SONIC_COFFEA_SERVER_DIR", str(tmp_path / "servers"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def add(*names, script="exit 0\n"):
        for name in names:
            path = folder / name
            path.write_text(f"#!/bin/sh\n{script}")
            path.chmod(0o755)
        return folder

    return add


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that gives this machine GPUs, the second of which is chosen."""

    def set_gpus(*, present=True):
        monkeypatch.setattr(install, "_GPU_DEVICES", ["/dev/null" if present else "/dev/no"])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    return set_gpus


def launched(runtime, image=None):
    name = choose(runtime, image)
    return RUNTIMES[name](name, image, print)(*SERVING)


GPU_OPTIONS = {
    "apptainer": "--nv",
    "singularity": "--nv",
    "podman": "--device=nvidia.com/gpu=all",
    "docker": "--gpus=all",
}


@pytest.mark.parametrize("engine", GPU_OPTIONS)
@pytest.mark.parametrize("gpu", [False, True])
def test_engines_get_mounts_variables_and_gpus(engines, gpus, tmp_path, engine, gpu):
    engines(engine)
    gpus(present=gpu)
    job = launched(engine, str(tmp_path))
    assert job["argv"][0] == engine
    at = job["argv"].index(str(tmp_path))
    assert job["argv"][at + 1 :] == SERVE
    for mount in MOUNTS:
        assert any(argument.endswith(f"={mount}") for argument in job["argv"])
    assert (GPU_OPTIONS[engine] in job["argv"]) == gpu
    variables = {**ENV, **({"CUDA_VISIBLE_DEVICES": "1"} if gpu else {})}
    if GPU_OPTIONS[engine] == "--nv":
        variables = {f"{engine.upper()}ENV_{key}": value for key, value in variables.items()}
    else:
        assert {f"--env={key}" for key in variables} < set(job["argv"])
        assert {"--cpus=2", "--cap-drop=all", "--security-opt=no-new-privileges"} < set(job["argv"])
        assert (f"--user={os.getuid()}:{os.getgid()}" in job["argv"]) == (engine == "docker")
        assert job["cleanup"] == [engine, "rm", "--force", "sonic-coffea-ab"]
    assert variables.items() <= job["env"].items()


def test_empty_variables_hide_the_gpus(engines, gpus, monkeypatch):
    engines("docker")
    gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "--gpus=all" not in launched("docker", "site/triton:1")["argv"]


def test_the_binary_is_preferred_where_it_runs(engines, gpus, monkeypatch):
    engines("podman", "apptainer")
    image = "docker://site/triton"
    assert choose("auto") == choose("auto", image) == "pip"
    # Where there is a GPU, and somebody has said from which image, it is used.
    gpus()
    assert (choose("auto"), choose("auto", image)) == ("pip", "apptainer")


def test_containers_replace_a_binary_that_does_not_run(engines, old):
    engines("docker", "apptainer")
    assert choose("auto", "docker://site/triton") == "apptainer"
    with pytest.raises(ConfigError, match="no image at /cvmfs/site/triton"):
        launched("auto", "/cvmfs/site/triton")


def test_machines_without_any_runtime_are_reported(engines, old):
    with pytest.raises(
        ServerStartError, match=r"glibc 2.35 or newer .*, got glibc 2.28, and there"
    ):
        choose("auto")
    with pytest.raises(ServerStartError, match="there is no podman on this machine"):
        choose("podman")
    with pytest.raises(ServerStartError, match=r"2.28; use a server elsewhere"):
        choose("pip")
    with pytest.raises(ConfigError, match="no runtime 'dokcer'.*did you mean 'docker'"):
        choose("dokcer")


def test_images_are_fetched_before_the_server_starts(engines, tmp_path):
    log = tmp_path / "log"
    engines("apptainer", "docker", script=f'echo "$@" >> {log}\n[ $1 != image ]\n')
    job = launched("apptainer", "site/triton:1")
    launched("docker", "site/triton:1")
    assert log.read_text().splitlines() == [
        "exec docker://site/triton:1 true",
        "image inspect site/triton:1",
        "pull site/triton:1",
    ]
    assert "docker://site/triton:1" in job["argv"]
    engines("docker", script=f'echo "$@" >> {log}\n')
    launched("docker", "site/triton:1")
    assert log.read_text().splitlines()[3:] == ["image inspect site/triton:1"]


@pytest.mark.parametrize("engine", ["apptainer", "podman"])
def test_images_that_cannot_be_fetched_are_named(engines, engine):
    engines(engine, script='echo "no such manifest" >&2\nexit 1\n')
    with pytest.raises(
        ServerStartError, match=rf"(?s){engine} could not fetch .*site/none.*no such"
    ) as e:
        launched(engine, "site/none")
    assert "sonic.local.image" in str(e.value)


# What apptainer would do, without the container: its files are those of the binary.
_ENGINE = """#!{python}
import os, sys
at = sys.argv.index("tritonserver")
env = {{key.removeprefix("APPTAINERENV_"): value for key, value in os.environ.items()}}
env.update({env!r})
print("=== some vendor's banner ===", flush=True)
os.execve({server!r}, [*sys.argv[at:], {backends!r}], env)
"""


def test_apptainer_s_command_line_serves_with_a_stand_in(
    tmp_path, monkeypatch, installation, light
):
    """A real Triton, behind an executable that does with the command line what an engine does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "apptainer"
    script.write_text(
        _ENGINE.format(
            python=sys.executable,
            env={
                k: installation.environment()[k] for k in ("LD_LIBRARY_PATH", "VIRTUAL_ENV", "PATH")
            },
            server=str(installation.tritonserver),
            backends=f"--backend-directory={installation.backend_directory}",
        )
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    options = {"runtime": "apptainer", "image": str(tmp_path), "stop_timeout_s": 3.0}
    with LocalServer(light, **options) as server:
        assert "some vendor's banner" in server.logs
        assert [model.name for model in server.metadata.models] == ["echo"]
        pid = server.pid
    assert is_gone(pid)
    assert not socket_folder(server.url).exists()
