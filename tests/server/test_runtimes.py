"""The runtimes of servers: which one is taken, and what exactly is run."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from tests.waiting import until

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import LocalServer, build_repository
from sonic_coffea.server.launch.runtimes import Serving, choose
from sonic_coffea.server.launch.runtimes._containers import Container
from sonic_coffea.server.launch.runtimes._pip import Pip
from sonic_coffea.transport import connect_transport

from .support import is_gone, socket_folder

SERVING = Serving(
    arguments=["--grpc-port=4"],
    repository=Path("/data/repository"),
    folder=Path("/tmp/sonic-coffea-1/ab"),  # noqa: S108
    shared_memory="sonic-coffea-ab",
    threads=2,
    env={"A": "b"},
)
SERVE = [
    "tritonserver",
    "--model-repository=/data/repository",
    "--grpc-port=4",
    "--backend-config=python,shm-region-prefix-name=sonic-coffea-ab_",
]
BOX = [
    "--network=host",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--security-opt=label=disable",
]
BINDS = [
    "/data/repository:/data/repository:ro",
    "/tmp/sonic-coffea-1/ab:/tmp/sonic-coffea-1/ab",  # noqa: S108
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


def launched(runtime, **options):
    chosen = choose(runtime, **options)
    chosen.prepare(print)
    return chosen.launch(SERVING)


THREADS = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}


@pytest.mark.parametrize("engine", ["apptainer", "singularity"])
@pytest.mark.parametrize("gpu", [False, True])
def test_the_command_line_of_apptainer(engines, tmp_path, engine, gpu):
    image = tmp_path / "unpacked" / "triton"
    image.mkdir(parents=True)
    folder = engines(engine)
    launch = launched(engine, image=str(image), gpu=gpu)
    assert launch.argv == [
        str(folder / engine),
        "exec",
        "--cleanenv",
        "--no-home",
        *(["--nv"] if gpu else []),
        *(part for bind in BINDS for part in ("--bind", bind)),
        str(image),
        *SERVE,
    ]
    prefix = f"{engine.upper()}ENV_"
    inside = {k.removeprefix(prefix): v for k, v in launch.env.items() if k.startswith(prefix)}
    assert inside == {**THREADS, "A": "b"}
    assert launch.cleanup is None


@pytest.mark.parametrize(
    ("engine", "own"),
    [
        ("podman", ["--device=nvidia.com/gpu=all"]),
        ("docker", [f"--user={os.getuid()}:{os.getgid()}", "--gpus=all"]),
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_the_command_line_of_docker(engines, engine, own, gpu, monkeypatch):
    folder = engines(engine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    launch = launched(engine, image="site/triton:1", gpu=gpu)
    keys = sorted([*THREADS, "A", *(["CUDA_VISIBLE_DEVICES"] * gpu)])
    assert launch.argv == [
        str(folder / engine),
        "run",
        "--rm",
        "--init",
        "--name=sonic-coffea-ab",
        "--pull=never",
        *BOX,
        *(own if gpu else own[:-1]),
        "--cpus=2",
        *(f"--volume={bind}" for bind in BINDS),
        *(f"--env={key}" for key in keys),
        "site/triton:1",
        *SERVE,
    ]
    assert launch.cleanup == [str(folder / engine), "rm", "--force", "sonic-coffea-ab"]


def test_the_binary_is_taken_where_it_runs(engines, installation):
    engines("podman", "apptainer")
    assert isinstance(choose("auto", gpu=True), Pip)
    launch = launched("auto", gpu=True, installation=installation)
    assert launch.argv == [
        str(installation.tritonserver),
        "--model-repository=/data/repository",
        "--grpc-port=4",
        f"--backend-directory={installation.backend_directory}",
        "--backend-config=python,shm-region-prefix-name=sonic-coffea-ab_",
        "--backend-config=onnxruntime,shm-region-prefix-name=sonic-coffea-ab_",
        "--backend-config=pytorch,shm-region-prefix-name=sonic-coffea-ab_",
    ]
    assert launch.env["LD_LIBRARY_PATH"].startswith(str(installation.library_path[0]))
    # Where there is a GPU, and somebody has said from which image, it is used.
    image = "docker://site/triton"
    assert isinstance(choose("auto", image=image, gpu=True), Container)
    assert isinstance(choose("auto", image=image, gpu=False), Pip)


def test_an_installation_that_the_user_passes_runs_on_any_machine(engines, installation, old):
    assert isinstance(choose("pip", installation=installation), Pip)


def test_a_container_is_taken_where_the_binary_does_not_run(engines, old):
    engines("docker", "apptainer")
    chosen = choose("auto", image="docker://site/triton")
    assert (chosen.engine, chosen.image) == ("apptainer", "docker://site/triton")
    with pytest.raises(ConfigError, match="no image at /cvmfs/site/triton"):
        launched("auto", image="/cvmfs/site/triton")


def test_a_machine_with_nothing(engines, old):
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


def test_images_are_fetched_once(engines, tmp_path):
    log = tmp_path / "log"
    engines("apptainer", "docker", script=f'echo "$@" >> {log}\n[ $1 != pull ] || : > "$3"\n')
    for _ in range(2):
        launch = launched("apptainer", image="site/triton:1")
    (line,) = log.read_text().splitlines()
    assert line.startswith("pull --force ")
    assert line.endswith(".part docker://site/triton:1")
    (image,) = (tmp_path / "servers" / "images").glob("*.sif")
    assert str(image) in launch.argv
    assert list(image.parent.glob("*.part")) == []
    assert "docker://site/triton" in launched("apptainer", image="docker://site/triton").argv
    log.write_text("")
    engines("docker", script=f'echo "$@" >> {log}\n[ $1 != image ]\n')
    launched("docker", image="site/triton:1")
    assert log.read_text().splitlines() == ["image inspect site/triton:1", "pull site/triton:1"]


@pytest.mark.parametrize("engine", ["apptainer", "podman"])
def test_an_image_that_cannot_be_fetched(engines, tmp_path, engine):
    # What it leaves behind must not be taken for an image.
    engines(engine, script='[ -z "$3" ] || : > "$3"\necho "no such manifest" >&2\nexit 1\n')
    with pytest.raises(
        ServerStartError, match=rf"(?s){engine} could not fetch site/none.*no such"
    ) as e:
        launched(engine, image="site/none")
    assert "sonic.local.image" in str(e.value)
    assert list(tmp_path.glob("servers/images/*.part")) == []
    assert list(tmp_path.glob("servers/images/*.sif")) == []


# What a container engine would do, without the container: its files are those of the binary.
_ENGINE = """#!{python}
import os, signal, subprocess, sys
arguments = sys.argv[1:]
if arguments[0] == "rm":
    os.kill(int(open({state!r}).read()), signal.SIGKILL)
    sys.exit()
if arguments[0] != "exec" and arguments[0] != "run":
    sys.exit()
at = arguments.index("tritonserver")
env = {{key.removeprefix("APPTAINERENV_"): value for key, value in os.environ.items()}}
env.update({library!r}, PATH=os.pathsep.join({path!r}))
command = arguments[at:] + {more!r}
print("=== some vendor's banner ===", flush=True)
if arguments[0] == "exec":
    os.execvpe("tritonserver", command, env)
# As with docker, what runs is the child of a daemon.
child = subprocess.Popen(command, env=env, start_new_session=True)
open({state!r}, "w").write(str(child.pid))
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
sys.exit(child.wait())
"""


@pytest.mark.parametrize(("engine", "kill"), [("apptainer", False), ("docker", True)])
def test_a_server_in_a_stand_in_for_a_container(
    tmp_path, monkeypatch, installation, classifier, engine, kill
):
    """A real Triton, behind an executable that does with the command line what an engine does."""
    repository = build_repository(tmp_path / "repository", {"top": classifier})
    own = Pip("pip", installation=installation).launch(SERVING)
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / engine
    script.write_text(
        _ENGINE.format(
            python=sys.executable,
            state=str(tmp_path / "pid"),
            library={k: own.env[k] for k in ("LD_LIBRARY_PATH", "VIRTUAL_ENV")},
            path=[str(installation.tritonserver.parent), *own.env["PATH"].split(os.pathsep)],
            more=[f"--backend-directory={installation.backend_directory}"],
        )
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    with LocalServer(repository, runtime=engine, image=str(tmp_path), stop_timeout_s=3.0) as server:
        assert "some vendor's banner" in server.logs
        connection = connect_transport(server.url)
        assert connection.contract("top", None).inputs[0].name == "x"
        connection.close()
        pid = server.pid if engine == "apptainer" else int((tmp_path / "pid").read_text())
        if kill:
            os.kill(server.pid, 9)
            until(lambda: not server.running, what="the end")
    # What ran in a container belongs to no process that waits for it.
    until(lambda: is_gone(pid), what="the end of what ran in it")
    assert not socket_folder(server.url).exists()
