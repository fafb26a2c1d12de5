"""The runtimes of servers: which is taken, how it is installed, and what exactly is run."""

from __future__ import annotations

import importlib.util
import os
import pwd
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask.config
import pytest
from tests.scripts import python

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import LocalServer
from sonic_coffea.server import _install as install
from sonic_coffea.server.launch._runtimes import RUNTIMES, choose

from .support import is_gone, socket_folder

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
    ("xgboost_cpu", "3.2.0", [], ["numpy", "scipy"]),
    ("scipy", "1.15.3", [], ["numpy<2"]),
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
    # Otherwise other tests would take backends of theirs from these installations.
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "servers"


@pytest.fixture
def index(root, wheels, tmp_path, monkeypatch) -> None:
    """Let uv find these packages, and no others, beside a project with settings of its own."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "uv.toml").write_text("settings = 'of another environment'\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))


def packages(installed) -> set[str]:
    return {path.stem for path in installed.root.glob("lib/python3*/site-packages/*.dist-info")}


def test_installations_are_used_again(installation):
    assert install.ensure(pytest.fail) == installation
    assert (installation.backend_directory / "python" / "triton_python_backend_stub").exists()


def test_concurrent_callers_install_once(index, monkeypatch):
    stages = []
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(install.ensure, [stages.append] * 4))
    assert len(set(results)) == 1
    (installing,) = (stage for stage in stages if stage.startswith("installing"))
    assert installing.startswith("installing Triton 2.51.0 and onnxruntime")
    assert install.find() == results[0]
    # What is there is used, whether or not it could be installed again.
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert choose("pip") == "pip"


@pytest.mark.parametrize(
    "part",
    ["sonic-coffea.json", "bin/python3", "lib-python/libpython*", f"lib/*/*/{BUNDLE}/bin/*"],
)
def test_incomplete_installations_are_redone(index, part):
    installed = install.ensure()
    leftover = installed.root / "leftover"
    leftover.write_text("")
    (path,) = installed.root.glob(part)
    path.unlink()
    assert install.find() is None
    assert install.ensure() == install.find() == installed
    assert not leftover.exists()
    for marker in ("", '{"requirements": []}'):
        (installed.root / "sonic-coffea.json").write_text(marker)
        assert install.find() is None


# Without the capability, root too may only write what the modes allow.
ORDINARY = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 1)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def test_shared_installations_serve_with_backends_of_each_user(index, monkeypatch, tmp_path):
    """Triton changes the mode of a backend's files as it starts, which only their owner may."""
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "of the operator"))
    installed = install.ensure()
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "of the user"))
    installed.root.chmod(0o555)
    try:
        code = "from sonic_coffea.server import ensure; print(ensure(exit).backend_directory)"
        done = python("-c", ORDINARY, code)
    finally:
        installed.root.chmod(0o755)
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "of the user")
    assert (folder / "python" / "triton_python_backend_stub").stat().st_uid == os.geteuid()
    scripts = sorted(path.name for path in (folder / "onnxruntime").iterdir())
    assert scripts == ["model.py"]


def without_home(monkeypatch):
    def getpwuid(_):
        raise KeyError

    for name in ("HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "SONIC_COFFEA_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)


def test_users_without_a_home_name_a_directory(monkeypatch):
    without_home(monkeypatch)
    monkeypatch.delenv("SONIC_COFFEA_SERVER_DIR", raising=False)
    with pytest.raises(ServerStartError, match="home directory .* SONIC_COFFEA_SERVER_DIR"):
        install.ensure()


@pytest.mark.server
def test_users_without_a_home_have_logs(engines, light, tmp_path, monkeypatch):
    without_home(monkeypatch)
    engines("apptainer", script="echo begun; exit 3\n")
    server = LocalServer(light, runtime="apptainer", image=str(tmp_path))
    with pytest.raises(ServerStartError, match="begun"):
        server.start()
    assert server.log_path.is_relative_to(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("system", "processor", "libc", "reason"),
    [
        ("Darwin", "arm64", ("", ""), "needs Linux on x86_64, got Darwin on arm64"),
        ("Linux", "aarch64", ("glibc", "2.36"), "needs Linux on x86_64, got Linux on aarch64"),
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


@pytest.mark.skipif(OWN not in install._PYTHONS, reason="the server cannot use this Python")
def test_pythons_that_cannot_be_used_are_passed_over(index, tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / f"python{OWN}").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    assert install.ensure() == install.find()


def test_packages_for_models_are_added(index):
    stages = []
    installed = install.ensure(stages.append, extras=["xgboost", "scikit-learn>=1.5"])
    assert install.ensure(pytest.fail, extras=["xgboost"]) == install.find() == installed
    assert stages[-1] == "installing xgboost-cpu, scikit-learn>=1.5"
    # Neither brings another numpy.
    expected = {"xgboost_cpu-3.2.0", "scipy-1.15.3", "scikit_learn-1.6", "numpy-1.26.4"}
    assert {name for name in packages(installed) if "onnx" not in name} == {
        *expected,
        "nvidia_pytriton-0.7.0",
    }


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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    job = launched("docker", "site/triton:1")
    assert "--gpus=all" in job["argv"]
    assert "CUDA_VISIBLE_DEVICES" not in job["env"]


def test_the_binary_is_preferred_where_it_runs(engines, gpus, monkeypatch):
    engines("podman", "apptainer")
    image = "docker://site/triton"
    assert choose("auto") == choose("auto", image) == "pip"
    # Where there is a GPU, and somebody has said from which image, it is used.
    gpus()
    assert (choose("auto"), choose("auto", image)) == ("pip", "apptainer")


def test_containers_replace_a_binary_that_does_not_run(engines, old, tmp_path, monkeypatch):
    engines("docker", "apptainer")
    assert choose("auto", "docker://site/triton") == "apptainer"
    monkeypatch.setenv("HOME", str(tmp_path))
    for image in ("/cvmfs/site/triton", "./triton.sif", "~/triton.sif"):
        with pytest.raises(ConfigError, match=f"no image at {image}"):
            launched("auto", image)
    (tmp_path / "triton.sif").touch()
    assert str(tmp_path / "triton.sif") in launched("auto", "~/triton.sif")["argv"]


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


@pytest.mark.server
def test_containers_that_crash_as_they_start_are_tried_again(engines, tmp_path, light, caplog):
    tried = tmp_path / "tried"
    engines("apptainer", script=f"[ -e {tried} ] && exit 3\n: > {tried}\nexit 134\n")
    elsewhere = dask.config.set({"sonic.local": {"runtime": "pip", "image": "none"}})
    with elsewhere, pytest.raises(ServerStartError, match="ended with exit status 3"):
        LocalServer(light, runtime="apptainer", image=str(tmp_path)).start()
    assert "was ended by SIGABRT, and is started again" in caplog.text


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
